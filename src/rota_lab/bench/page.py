"""`python -m rota_lab.bench.page FOLDER [FILE]`: the results that are kept in a folder, as a page of tables (FOLDER/README.md).

FILE is a page with a place for the summary of them: what lies between its two marks is written anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rota_lab.bench import short

TITLE = """# Results

Written by `python -m rota_lab.bench.page benchmarks/results README.md` from the files here, which `rota bench WORK --out FILE` wrote
([how to read them](../README.md)).
A ratio is a system's time over rota-batched's in the same run. Where a system was tried in several ways (precisions, threads), each is a
line of its own with the accuracy that its model had in the end; the fastest counts, and is first. Shares of the floor over 100 % come from
convolutions that need fewer products than their definition.
"""

BEGIN, END = (
    "<!-- speed: python -m rota_lab.bench.page benchmarks/results README.md -->\n",
    "<!-- end of speed -->\n",
)
NAMES = {
    "pfl": "pfl",
    "flower": "Flower",
    "fedjax": "FedJAX",
    "jax-scan": "a JAX scan",
    "torch-loop": "a torch loop",
}


def summary(folder: Path) -> str:
    """The peers' times over rota's as a table: a line for every work that was compared, on a GPU for every precision."""
    lines = [
        f"| work | machine | ms a round | {' | '.join(NAMES.values())} |",
        f"|---|---|---:|{'---:|' * len(NAMES)}",
    ]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        rows = {row["system"]: row for row in found["results"] if "seconds_per_round" in row}
        if not rows.keys() & NAMES.keys():
            continue
        gpu = rows["rota-batched"]["device"] == "cuda"
        for how, way in rows["rota-batched"]["ways"].items():
            seconds = way["seconds_per_round"]
            ratios = [
                f"{rows[name]['seconds_per_round'] / seconds:.1f} ×" if name in rows else ""
                for name in NAMES
            ]
            work = f"{found['work']}, {how.rsplit(', ')[-1]}" if gpu else found["work"]
            lines.append(
                f"| {work} | {_where(found)} | {short(seconds * 1e3)} | {' | '.join(ratios)} |"
            )
    return "\n".join(lines) + "\n"


def _where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    if any(row["device"] == "cuda" for row in found["results"]):
        return str(machine["gpu"])
    return f"{machine['cores']} cores of {machine['processor']}"


def page(folder: Path) -> str:
    """All results of a folder."""
    parts = [TITLE]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        versions = found["versions"]
        parts.append(f"## {found['work']}, {_where(found)}\n")
        parts.append("\n".join(_growth(found) if found["work"] == "growth" else _work(found)))
        unfinished = "" if found.get("finished", True) else " The run was stopped before its end."
        parts.append(
            f"\n[{path.name}]({path.name}), {found['date']}, torch {versions['torch']}, Python {versions['python']}.{unfinished}\n"
        )
    return "\n".join(parts)


def _work(found: dict[str, Any]) -> list[str]:
    ours = next(
        (row["seconds_per_round"] for row in found["results"] if row["system"] == "rota-batched"),
        None,
    )
    lines = [
        "| system | how | ms a round | ratio | µs a client step | share of the floor | accuracy |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["results"]:
        if "skipped" in row:
            lines.append(f"| {row['system']} | skipped: {row['skipped']} | | | | | |")
            continue
        ways = row["ways"]
        for how in sorted(ways, key=lambda how: ways[how]["seconds_per_round"]):
            way, best = ways[how], how == row["how"]
            seconds, step = (
                way["seconds_per_round"],
                way["seconds_per_round"] / row["client_steps_per_round"] * 1e6,
            )
            floor = f"{row['floor_seconds'] / seconds:.1%}" if row["floor_seconds"] else "–"
            ratio = f"{seconds / ours:.2f}" if ours else "–"
            accuracy = "diverged" if way["accuracy"] is None else f"{way['accuracy']:.2%}"
            name = row["system"] if best else ""
            lines.append(
                f"| {name} | {how} | {short(seconds * 1e3)} | {ratio} | {short(step)} | {floor} | {accuracy} |"
            )
    return [*lines, "", f"Data: {found['results'][0]['data']}."]


def _growth(found: dict[str, Any]) -> list[str]:
    lines = [
        "| network | models | clients | cohort | ms a round | of it the server's | sampler |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in found["results"]:
        server = f"{row['server_seconds_per_round'] * 1e3:.3g}"
        numbers = f"{row['clients']:,} | {row['cohort']:,} | {short(row['seconds_per_round'] * 1e3)} | {server}"
        lines.append(f"| {row['model']} | {row['models']} | {numbers} | {row['sampler']} |")
    return lines


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    (folder / "README.md").write_text(page(folder))
    for name in sys.argv[2:]:
        before, _, rest = Path(name).read_text().partition(BEGIN)
        Path(name).write_text(before + BEGIN + summary(folder) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
