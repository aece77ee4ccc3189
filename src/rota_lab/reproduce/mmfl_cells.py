"""Multi-model FL's table in numbers: the finished runs, relative to full participation, and how they are written."""

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
"""The finished runs by setting and method, and by seed."""


def seeds(found: Cells, setting: str, *methods: str) -> list[int]:
    """Those of which all these methods' runs are finished, and full participation's."""
    return sorted(
        set.intersection(
            *(set(found.get(f"{setting}-{method}", {})) for method in ("full", *methods))
        )
    )


def finished(found: Cells, setting: str, method: str, *beside: str) -> list[Found]:
    """A method's runs with the seeds that full participation has too, and those beside it."""
    return [found[f"{setting}-{method}"][seed] for seed in seeds(found, setting, method, *beside)]


def relative(found: Cells, setting: str, method: str, *beside: str) -> list[float]:
    """Accuracy over that of full participation with the same seed, seed by seed."""
    both = (
        finished(found, setting, *order, *beside) for order in ((method, "full"), ("full", method))
    )
    return [mine["accuracy"] / full["accuracy"] for mine, full in zip(*both, strict=True)]


def lead(found: Cells, setting: str, method: str, other: str) -> list[float]:
    """How far a method's relative accuracy is above another's, seed by seed."""
    mine, theirs = relative(found, setting, method, other), relative(found, setting, other, method)
    return [a - b for a, b in zip(mine, theirs, strict=True)]


def chance(ahead: list[float]) -> str:
    """A word on a lead whose interval has 0 in it."""
    return "" if interval(ahead).low > 0 else ", which may be chance"


def difference(values: list[float]) -> str:
    """The mean, with its 95 % interval."""
    if len(values) < 2:
        return f"{np.mean(values):.3f}"
    between = interval(values)
    return f"{between.mean:.3f} (95 %: {between.low:.3f} to {between.high:.3f})"


def side(values: list[float]) -> str:
    """Where a method is whose differences from another are these."""
    between = interval(values)
    return "above" if between.low > 0 else "below" if between.high < 0 else "not told apart from"


def made_on(found: Cells) -> list[str]:
    """The machines of the runs, in a sentence each."""
    machines = {
        f"{run['machine']}, products in {run['precision']}"
        for runs in found.values()
        for run in runs.values()
    }
    return [f"The runs were made on {words}." for words in sorted(machines)]


def grid(
    head: tuple[str, ...], rows: list[list[str]], numbers: tuple[int, ...] | None = None
) -> list[str]:
    """A table in Markdown; `numbers` are the columns that are set to the right: all but the first, unless given."""
    right = range(1, len(head)) if numbers is None else numbers
    return [
        _line(head),
        "|" + "|".join("---:" if k in right else "---" for k in range(len(head))) + "|",
        *map(_line, rows),
    ]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def three_digits(value: float) -> str:
    """A number from 0 on with three significant digits (all those before the point), and commas between thousands."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(value))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f}"
