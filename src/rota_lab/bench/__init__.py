"""Speed against peers on the same work, in one run: `rota bench WORK`.

Every system trains the same clients in the same rounds, from the same weights, on the same arrays,
in a process of its own. The systems run one after the other, twice (A B C A B C), because machines
are noisy. A system's time is the median over the measured rounds of both passes.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rota
from rota.engine import where
from rota.engine.machine import cores
from rota.errors import BadInput, did_you_mean
from rota.files import write
from rota_lab.bench import groups, growth, layers, parts
from rota_lab.bench.environment import Skip
from rota_lab.bench.floors import Floors, Rates, lowest, measure_rates
from rota_lab.bench.systems import OWN, PEERS, System, Way, find, run, ways
from rota_lab.bench.works import WORKS, Size, Work, prepare
from rota_lab.machine import processor

__all__ = [
    "ALONE",
    "PEERS",
    "WORKS",
    "Timings",
    "bench",
    "chosen",
    "names",
    "save",
    "short",
    "table",
]

PASSES = 2
MARGIN = 1.5
"""A way that took more than MARGIN times as long as the fastest way is not tried again."""
ALONE = {
    "growth": "Seconds per round as clients (to 10,000,000), models and processes grow",
    "groups": "Seconds to group clients (to 100,000) as Selective FedAvg does",
    "parts": "Seconds per round in which a fifth of the clients hold parts of some width",
    "layers": "Seconds per round of every network and usual layers, on both of rota's engines",
    "fleet": "Seconds per round of real processes, and of Flower's own FedAvg on the same work",
}
"""Works that are no training on the same arrays."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Timings:
    """The rows of a benchmark, and what they were measured on."""

    work: str
    rows: list[Row]
    size: Size | None = None
    rates: Rates | None = None
    floors: Floors | None = None
    finished: bool = True


@dataclass
class Tally:
    """The results of a system's runs, by way: seconds of the measured rounds, and final scores."""

    seconds: dict[Way, list[float]] = field(default_factory=dict)
    accuracy: dict[Way, list[float]] = field(default_factory=dict)
    loss: dict[Way, list[float]] = field(default_factory=dict)
    version: str = ""
    skipped: str = ""

    @property
    def medians(self) -> dict[Way, float]:
        return {way: float(np.median(seconds)) for way, seconds in self.seconds.items()}

    @property
    def best(self) -> Way:
        return min(self.medians, key=self.medians.__getitem__)

    def contenders(self) -> list[Way]:
        """The ways that may still turn out to be the fastest."""
        limit = MARGIN * self.medians[self.best]
        return [way for way, seconds in self.medians.items() if seconds <= limit]


def names() -> dict[str, str]:
    """The works, with a sentence on each."""
    return {**{work.name: work.summary for work in WORKS.values()}, **ALONE}


def chosen(words: str) -> list[System]:
    """The peers in a comma-separated list, or "all", or "none"."""
    if words in ("all", "none"):
        return list(PEERS.values()) if words == "all" else []
    for word in words.split(","):
        if word not in PEERS:
            raise BadInput(f"unknown peer '{word}': {did_you_mean(word, ['all', 'none', *PEERS])}")
    return [PEERS[word] for word in words.split(",")]


def bench(
    name: str,
    *,
    device: str = "auto",
    peers: list[System],
    rounds: int | None = None,
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None],
) -> Timings:
    """Measure one work. `rounds` is the number of measured rounds per pass.

    What is known is written to `out` after every run of a system. `quick` leaves out the second
    pass and rota's reference engine, which takes most of the time where many clients train on a
    GPU.
    """
    if name not in names():
        raise BadInput(f"unknown work '{name}': {did_you_mean(name, names())}")
    if rounds is not None and rounds < 1:
        raise BadInput(f"--rounds is {rounds}: it must be at least 1")
    device = where(device)
    if name == "growth":
        result = Timings(name, growth.measure(device, rounds or 20, say))
    elif name == "groups":
        result = Timings(name, groups.measure(rounds or 5, say))
    elif name == "parts":
        result = Timings(name, parts.measure(device, rounds or 10, say))
    elif name == "layers":
        result = Timings(name, layers.measure(device, rounds or 5, say))
    elif name == "fleet":
        from rota_lab.bench import fleet  # needs Flower

        rows: list[Row] = []
        for rows in fleet.measure(rounds or 10, say):
            if out:
                save(Timings(name, rows, finished=False), out)
        result = Timings(name, rows)
    else:
        systems = [*(OWN[1:] if quick else OWN), *peers]
        passes = 1 if quick else PASSES
        result = _compare(WORKS[name], device, systems, rounds, passes, out, say)
    if out:
        save(result, out)
    return result


def _compare(
    work: Work,
    device: str,
    systems: list[System],
    rounds: int | None,
    passes: int,
    out: Path | None,
    say: Callable[[str], None],
) -> Timings:
    tallies = {system.name: _ready(system, device) for system in systems}
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as place:
        folder = Path(place)
        say(f"{work.name}: preparing")
        size = prepare(work, folder, rounds or work.rounds[device == "cuda"], device)
        for turn in range(passes):
            for system in systems:
                tally = tallies[system.name]
                if tally.skipped:
                    continue
                for way in ways(system, device, work.model) if turn == 0 else tally.contenders():
                    say(f"{work.name}: {system.name}, {way.how} ({turn + 1}/{passes})")
                    _add(tally, system, way, folder, device)
                    if out:
                        rows = _rows(work, size, None, device, tallies)
                        save(Timings(work.name, rows, size, finished=False), out)
    say(f"{work.name}: probing the machine")  # only now, when no system needs its memory
    rates = measure_rates(device)
    least = lowest(size, rates)
    return Timings(work.name, _rows(work, size, least, device, tallies), size, rates, least)


def _ready(system: System, device: str) -> Tally:
    """Make sure that a system can run, before any clock does."""
    try:
        find(system, device)
    except Skip as reason:
        return Tally(skipped=str(reason))
    return Tally()


def _add(tally: Tally, system: System, way: Way, folder: Path, device: str) -> None:
    """Add one run. A system is skipped only if none of its ways works."""
    try:
        found = run(system, way, folder, device)
    except Skip as reason:
        if not tally.seconds:
            tally.skipped = str(reason)
        return
    tally.skipped = ""
    tally.seconds.setdefault(way, []).extend(found["seconds"])
    tally.accuracy.setdefault(way, []).append(found["accuracy"])
    tally.loss.setdefault(way, []).append(found["loss"])
    tally.version = found["version"]


def _rows(
    work: Work, size: Size, least: Floors | None, device: str, tallies: dict[str, Tally]
) -> list[Row]:
    """A row for every system that has run or cannot run."""
    rows = []
    ours = None
    for name, tally in tallies.items():
        if tally.seconds or tally.skipped:
            row = _row(work, size, least, device, name, tally)
            rows.append(row)
            if name == "rota-batched":
                ours = row["seconds_per_round"]
    for row in rows:
        seconds = row["seconds_per_round"]
        row["ratio"] = seconds / ours if ours and seconds else None
    return rows


def _row(work: Work, size: Size, least: Floors | None, device: str, name: str, tally: Tally) -> Row:
    row: Row = {
        "work": work.name,
        "system": name,
        "device": device,
        "seconds_per_round": None,
        "accuracy": None,
        "data": size.data,
        "client_steps_per_round": float(np.median(size.steps)),
    }
    if tally.skipped:
        return {**row, "skipped": tally.skipped}
    seconds = np.array(tally.seconds[tally.best])
    steps = np.resize(size.steps, len(seconds))  # the passes have the same cohorts
    row["seconds_per_round"] = float(np.median(seconds))
    row["accuracy"] = _mean(tally.accuracy[tally.best])
    ways = {}
    for way, median in tally.medians.items():
        ways[way.how] = {
            "seconds_per_round": median,
            "accuracy": _mean(tally.accuracy[way]),
            "loss": _mean(tally.loss[way]),
        }
    return {
        **row,
        "loss": _mean(tally.loss[tally.best]),
        "microseconds_per_client_step": float(np.median(seconds / steps)) * 1e6,
        "floor_seconds": least.seconds if least else None,
        "share_of_floor": least.seconds / row["seconds_per_round"] if least else None,
        "rounds": len(seconds),
        "how": tally.best.how,
        "ways": ways,
        "version": tally.version,
    }


def _mean(values: list[float]) -> float | None:
    """The mean, or None if a model diverged: JSON has no NaN."""
    mean = float(np.mean(values))
    return mean if np.isfinite(mean) else None


def short(value: float) -> str:
    """A number with four digits, or with all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def table(result: Timings) -> list[str]:
    """The result for people: one line per system, and the floors below them."""
    if result.size is None or result.rates is None or result.floors is None:
        tables = {
            "parts": _parts_table,
            "groups": _groups_table,
            "growth": _growth_table,
            "layers": _layers_table,
            "fleet": _fleet_table,
        }
        return tables[result.work](result)
    size, rates, least = result.size, result.rates, result.floors
    head = f"{'system':16}{'ms/round':>10}{'ratio':>8}{'us/step':>9}{'floor':>7}{'accuracy':>10}"
    lines = [f"{head}  how"]
    for row in result.rows:
        if "skipped" in row:
            lines.append(f"{row['system']:16}skipped: {row['skipped']}")
            continue
        milliseconds = short(row["seconds_per_round"] * 1e3)
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else "-"
        step = short(row["microseconds_per_client_step"])
        line = f"{row['system']:16}{milliseconds:>10}{ratio:>8}{step:>9}"
        lines.append(f"{line}{row['share_of_floor']:7.1%}{row['accuracy']:10.2%}  {row['how']}")
    steps, gigaflops = np.median(size.steps), np.median(size.flops) / 1e9
    per_round = f"{steps:,.0f} client steps, {size.params:,} parameters"
    products = f"{rates.flops / 1e9:.4g} GFLOP/s of {rates.precision} matrix products"
    traffic = f"weights read and written once per step, at {rates.bytes / 1e9:.4g} GB/s of copies"
    lines += [
        "",
        f"data: {size.data}, {size.clients:,} clients; a round: {per_round}",
        f"arithmetic floor {least.arithmetic * 1e3:.4g} ms: {gigaflops:.4g} GFLOP at {products}",
        f"memory floor {least.memory * 1e3:.4g} ms: {traffic}",
        "ratio: a system's seconds / rota-batched's; floor: the share of the higher floor that is "
        "reached (over 100 % where convolutions need fewer products than their definition)",
    ]
    return lines


def _growth_table(result: Timings) -> list[str]:
    head = f"{'model':10}{'models':>7}{'clients':>11}{'cohort':>8}{'ms/round':>10}"
    lines = [f"{head}{'server ms':>11}{'share':>8}{'peak GB':>9}  sampler"]
    spread = [row for row in result.rows if "processes" in row]
    for row in result.rows:
        if row in spread:
            continue
        seconds, server = short(row["seconds_per_round"] * 1e3), row["server_seconds_per_round"]
        sizes = f"{row['models']:7}{row['clients']:11,}{row['cohort']:8,}"
        peak = f"{row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in row else ""
        times = f"{seconds:>10}{server * 1e3:11.4g}{row['server_share']:8.1%}{peak:>9}"
        lines.append(f"{row['model']:10}{sizes}{times}  {row['sampler']}")
    lines += ["", "server: deciding who trains what, and learning from what came back", ""]
    head = f"{'model':10}{'cohort':>8}{'processes':>11}{'ms/round':>10}{'speed-up':>10}"
    lines.append(f"{head}{'predicted':>11}{'speed-up':>10}  same bytes")
    for row in spread:
        cells = [
            "" if value is None else short(value * times)
            for value, times in (
                (row["seconds_per_round"], 1e3),
                (row["speedup"], 1),
                (row["predicted_seconds"], 1e3),
                (row["predicted_speedup"], 1),
            )
        ]
        measured, gain, predicted, more = cells
        same = {True: "yes", False: "no", None: ""}[row["same_bytes"]]
        sizes = f"{row['model']:10}{row['cohort']:8,}{row['processes']:11}"
        lines.append(f"{sizes}{measured:>10}{gain:>10}{predicted:>11}{more:>10}  {same}")
    return [*lines, "", "predicted: benchmarks/README.md says what it assumes"]


def _groups_table(result: Timings) -> list[str]:
    lines = [f"{'clients':>9}{'examples':>10}{'groups':>8}{'seconds':>10}{'right':>8}"]
    for row in result.rows:
        sizes = f"{row['clients']:9,}{row['examples']:10,}{row['groups']:8}"
        lines.append(f"{sizes}{row['seconds_per_round']:10.3g}{row['accuracy']:8.1%}")
    return [*lines, "", "right: clients in a group of their kind"]


def _parts_table(result: Timings) -> list[str]:
    lines = [f"{'model':10}{'clients':>8}{'parts':>7}{'width':>7}{'ms/round':>10}{'ratio':>8}"]
    for row in result.rows:
        sizes = f"{row['model']:10}{row['clients']:8,}{row['share']:7.0%}{row['width']:7.2f}"
        milliseconds = short(row["seconds_per_round"] * 1e3)
        lines.append(f"{sizes}{milliseconds:>10}{row['ratio']:8.3f}")
    return [*lines, "", "ratio: the round's time / that of a round without parts"]


def _layers_table(result: Timings) -> list[str]:
    lines = [f"{'network or layer':20}{'ms/round':>10}{'plain ms':>10}{'ratio':>8}  how"]
    for row in result.rows:
        ours, plain = (short(row[each] * 1e3) for each in ("seconds_per_round", "plain_seconds"))
        lines.append(f"{row['model']:20}{ours:>10}{plain:>10}{row['ratio']:8.2f}  {row['how']}")
    return [*lines, "", "ratio: the plain engine's time, in its faster way, / the batched engine's"]


def _fleet_table(result: Timings) -> list[str]:
    lines = [
        f"{'system':20}{'nodes':>6}{'clients':>8}{'s/round':>9}{'slowest':>9}{'server MB':>11}"
    ]
    for row in result.rows:
        sizes = f"{row['system']:20}{row['nodes']:6}{row['clients']:8}"
        times = f"{row['seconds_per_round']:9.3g}{row['slowest_round']:9.3g}"
        grown = row["server_bytes"]
        lines.append(f"{sizes}{times}{'' if grown is None else f'{grown / 1e6:11.1f}'}")
    return [
        *lines,
        "",
        "server MB: by how much the server's memory grew during the rounds, at most",
    ]


def save(result: Timings, path: Path) -> None:
    """Write the result with the machine, the date and the versions, as JSON."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    page = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": {
            "name": platform.node(),
            "system": platform.platform(),
            "processor": processor(),
            "cores": cores(),
            "gpu": gpu,
        },
        "versions": {
            "rota": rota.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "work": result.work,
        "rates": asdict(result.rates) if result.rates else None,
        "floors": asdict(result.floors) if result.floors else None,
        "finished": result.finished,
        "results": result.rows,
    }
    write(path, json.dumps(page, indent=1) + "\n")
