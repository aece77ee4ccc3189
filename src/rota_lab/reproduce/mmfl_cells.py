"""Multi-model FL's table in numbers: finished runs relative to full participation, as texts."""

from __future__ import annotations

import math

import numpy as np

from rota_lab.reproduce.interval import interval
from rota_lab.reproduce.parts import Found

TITLES = {
    "full": "Full participation",
    "random": "Random",
    "gvr": "MMFL-GVR",
    "lvr": "MMFL-LVR",
    "gvr-star": "MMFL-GVR*",
    "stale-vr": "StaleVR",
    "stale-vre": "StaleVRE",
    "kvib": "MMFL-KVib",
    "fedvarp": "FedVARP",
    "mifa": "MIFA",
    "scaffold": "SCAFFOLD",
    "fedstale": "FedStale",
    "round-robin": "Round robin, clients'",
    "round-robin-server": "Round robin, server's",
    "fedfair": "FedFairMMFL",
}
PAPER = {
    "3": {
        "fedvarp": 0.712,
        "mifa": 0.868,
        "scaffold": 0.794,
        "random": 0.778,
        "full": 1.0,
        "gvr": 0.893,
        "lvr": 0.912,
        "gvr-star": 0.960,
    },
    "5": {
        "fedvarp": 0.690,
        "mifa": 0.835,
        "scaffold": 0.650,
        "random": 0.749,
        "full": 1.0,
        "gvr": 0.842,
        "lvr": 0.849,
        "gvr-star": 0.869,
    },
}

Cells = dict[str, dict[int, Found]]
"""The finished runs: "SETTING-METHOD" -> seed -> numbers."""


def seeds(found: Cells, setting: str, *methods: str) -> list[int]:
    """The seeds that these methods and full participation have finished."""
    common = set(found.get(f"{setting}-full", {}))
    for method in methods:
        common &= found.get(f"{setting}-{method}", {}).keys()
    return sorted(common)


def finished(found: Cells, setting: str, method: str, *others: str) -> list[Found]:
    """A method's runs with the seeds that full participation and `others` have finished, too."""
    return [found[f"{setting}-{method}"][seed] for seed in seeds(found, setting, method, *others)]


def relative(found: Cells, setting: str, method: str, *others: str) -> list[float]:
    """A method's accuracy / full participation's with the same seed, seed by seed."""
    mine = finished(found, setting, method, *others)
    full = finished(found, setting, "full", method, *others)
    return [run["accuracy"] / best["accuracy"] for run, best in zip(mine, full, strict=True)]


def lead(found: Cells, setting: str, method: str, other: str) -> list[float]:
    """A method's relative accuracy minus another's, seed by seed."""
    mine, theirs = relative(found, setting, method, other), relative(found, setting, other, method)
    return [a - b for a, b in zip(mine, theirs, strict=True)]


def difference(values: list[float]) -> str:
    """The mean, with its 95 % interval."""
    if len(values) < 2:
        return f"{np.mean(values):.3f}"
    between = interval(values)
    return f"{between.mean:.3f} (95 %: {between.low:.3f} to {between.high:.3f})"


def side(values: list[float]) -> str:
    """Where a method stands, given its differences from another."""
    between = interval(values)
    if between.low > 0:
        return "above"
    return "below" if between.high < 0 else "not distinguishable from"


def made_on(found: Cells) -> list[str]:
    """A sentence on each machine that runs were made on."""
    machines = set()
    for runs in found.values():
        for run in runs.values():
            machines.add(f"{run['machine']}, products in {run['precision']}")
    return [f"The runs were made on {words}." for words in sorted(machines)]


def grid(
    head: tuple[str, ...], rows: list[list[str]], numbers: tuple[int, ...] | None = None
) -> list[str]:
    """A table in Markdown. `numbers` are right-aligned columns, by default all but the first."""
    right = range(1, len(head)) if numbers is None else numbers
    rules = ["---:" if k in right else "---" for k in range(len(head))]
    return [_line(head), f"|{'|'.join(rules)}|", *map(_line, rows)]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def three_digits(value: float) -> str:
    """A number of at least 0 with three significant digits, and commas between thousands."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(value))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f}"
