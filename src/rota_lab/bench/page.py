"""`python -m rota_lab.bench.page FOLDER [FILE]`: a folder's results as a page (FOLDER/README.md).

FILE is a page with a place for a summary: the text between its two marks is replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rota_lab.bench import short

TITLE = """# Results

`python -m rota_lab.bench.page benchmarks/results README.md` wrote this page from the files here,
which `rota bench WORK --out FILE` wrote ([how to read them](../README.md)). A ratio is a system's
time / rota-batched's in the same run. A system that was tried in several ways (precisions, threads)
has a line for each way, with the final accuracy of its model; the fastest way counts and comes
first. Shares of the floor over 100 % come from convolutions that need fewer products than their
definition.
"""

BEGIN = "<!-- speed: python -m rota_lab.bench.page benchmarks/results README.md -->\n"
END = "<!-- end of speed -->\n"
NAMES = {
    "pfl": "pfl",
    "flower": "Flower",
    "fedjax": "FedJAX",
    "jax-scan": "a JAX scan",
    "drjax": "DrJAX",
    "torch-loop": "a torch loop",
}


def summary(folder: Path) -> str:
    """The peers' times / rota's: a line per work that was compared, on a GPU one per precision."""
    lines = [
        f"| work | machine | ms per round | {' | '.join(NAMES.values())} |",
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
            work = f"{found['work']}, {how.rsplit(', ')[-1]}" if gpu else found["work"]
            cells = [work, _where(found), short(seconds * 1e3)]
            for name in NAMES:
                theirs = rows[name]["seconds_per_round"] if name in rows else None
                cells.append("" if theirs is None else f"{theirs / seconds:.1f} ×")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    if any(row["device"] == "cuda" for row in found["results"]):
        return str(machine["gpu"])
    return f"{machine['cores']} cores of {machine['processor']}"


def page(folder: Path) -> str:
    """All results in a folder."""
    parts = [TITLE]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        versions = found["versions"]
        parts.append(f"## {found['work']}, {_where(found)}\n")
        kinds = {
            "growth": _growth,
            "groups": _groups,
            "parts": _parts,
            "layers": _layers,
            "fleet": _fleet,
        }
        lines = kinds.get(found["work"], _work)
        parts.append("\n".join(lines(found)))
        unfinished = "" if found.get("finished", True) else " The run was stopped before its end."
        link = f"[{path.name}]({path.name}), {found['date']}"
        software = f"torch {versions['torch']}, Python {versions['python']}"
        parts.append(f"\n{link},\n{software}.{unfinished}\n")
    return "\n".join(parts)


def _work(found: dict[str, Any]) -> list[str]:
    systems = {row["system"]: row for row in found["results"]}
    ours = systems.get("rota-batched", {}).get("seconds_per_round")
    heads = ["system", "how", "ms per round", "ratio", "µs per client step", "share of the floor"]
    lines = [f"| {' | '.join(heads)} | accuracy |", "|---|---|---:|---:|---:|---:|---:|"]
    for row in found["results"]:
        if "skipped" in row:
            lines.append(f"| {row['system']} | skipped: {row['skipped']} | | | | | |")
            continue
        ways = row["ways"]
        for how in sorted(ways, key=lambda how: ways[how]["seconds_per_round"]):
            seconds, accuracy = ways[how]["seconds_per_round"], ways[how]["accuracy"]
            cells = [
                row["system"] if how == row["how"] else "",
                how,
                short(seconds * 1e3),
                f"{seconds / ours:.2f}" if ours else "–",
                short(seconds / row["client_steps_per_round"] * 1e6),
                f"{row['floor_seconds'] / seconds:.1%}" if row["floor_seconds"] else "–",
                "diverged" if accuracy is None else f"{accuracy:.2%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"Data: {found['results'][0]['data']}."]


def _growth(found: dict[str, Any]) -> list[str]:
    lines = [
        "| network | models | clients | cohort | ms per round | the server's ms | GB | sampler |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in found["results"]:
        if "processes" in row:
            continue
        cells = [
            row["model"],
            str(row["models"]),
            f"{row['clients']:,}",
            f"{row['cohort']:,}",
            short(row["seconds_per_round"] * 1e3),
            f"{row['server_seconds_per_round'] * 1e3:.3g}",
            f"{row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in row else "",
            row["sampler"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *_processes([row for row in found["results"] if "processes" in row])]


def _processes(rows: list[dict[str, Any]]) -> list[str]:
    """Rounds in several processes, and the model's prediction; nothing if there are none."""
    if not rows:
        return []
    lines = [
        "",
        "| network | cohort | processes | ms per round | speed-up | predicted ms | predicted"
        " speed-up | the same bytes |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        numbers = [
            (row["seconds_per_round"], 1e3),
            (row["speedup"], 1.0),
            (row["predicted_seconds"], 1e3),
            (row["predicted_speedup"], 1.0),
        ]
        told = ["" if value is None else short(value * times) for value, times in numbers]
        same = {True: "yes", False: "no", None: ""}[row["same_bytes"]]
        cells = [row["model"], str(row["cohort"]), str(row["processes"]), *told, same]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _groups(found: dict[str, Any]) -> list[str]:
    lines = ["| clients | examples | groups | seconds | right |", "|---:|---:|---:|---:|---:|"]
    for row in found["results"]:
        sizes = f"{row['clients']:,} | {row['examples']:,} | {row['groups']}"
        lines.append(f"| {sizes} | {row['seconds_per_round']:.3g} | {row['accuracy']:.1%} |")
    return [*lines, "", "Right are clients in a group of their kind."]


def _parts(found: dict[str, Any]) -> list[str]:
    lines = [
        "| network | clients | with parts | width | ms per round | ratio to none |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["results"]:
        cells = [
            row["model"],
            f"{row['clients']:,}",
            f"{row['share']:.0%}",
            f"{row['width']:g}",
            short(row["seconds_per_round"] * 1e3),
            f"{row['ratio']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _layers(found: dict[str, Any]) -> list[str]:
    lines = [
        "| network or layer | ms per round | the plain engine's ms | ratio | trained by |",
        "|---|---:|---:|---:|---|",
    ]
    for row in found["results"]:
        ours, plain = (short(row[each] * 1e3) for each in ("seconds_per_round", "plain_seconds"))
        cells = [row["model"], ours, f"{plain} ({row['plain']})", f"{row['ratio']:.2f}", row["how"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _fleet(found: dict[str, Any]) -> list[str]:
    lines = [
        "| system | nodes | clients | s per round | slowest | ratio to rota | server's MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["results"]:
        grown, ratio = row["server_bytes"], row["ratio"]
        cells = [
            row["system"],
            str(row["nodes"]),
            str(row["clients"]),
            f"{row['seconds_per_round']:.3g}",
            f"{row['slowest_round']:.3g}",
            f"{ratio:.2f}" if ratio else "–",
            f"{grown / 1e6:.1f}" if grown is not None else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"Flower {found['results'][0]['version']}."]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    (folder / "README.md").write_text(page(folder))
    for name in sys.argv[2:]:
        before, _, rest = Path(name).read_text().partition(BEGIN)
        Path(name).write_text(before + BEGIN + summary(folder) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
