"""What FedAvg's Table 1 claims, judged over its cells: rounds, speed-ups, batches and splits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rota_lab.reproduce.fedavg_cells import CELLS, GRID, SEEDS, Column
from rota_lab.reproduce.interval import (
    CANNOT_TELL,
    FAILS,
    HOLDS,
    Claim,
    Statement,
    geometric,
    judged,
)
from rota_lab.reproduce.parts import Found

LOW, HIGH = 0.7, 1.3
"""Our numbers / the source's should lie between these, on average over the cells of a split."""
SPLITS = {"iid": "IID", "shards": "shards"}


def reached(found: Found) -> bool:
    """Whether all seeds of the best rate reached the target."""
    return None not in found["rounds"]


def rounds(found: Found) -> float:
    """The mean number of rounds to the target."""
    return float(np.mean(found["rounds"]))


def ratio(found: Found) -> float:
    """Our rounds / the source's."""
    return rounds(found) / float(found["paper"])


def speedup(found: dict[str, Found], name: str) -> float | None:
    """How many times fewer rounds a cell needs than the one of its column with one client."""
    each, one = found.get(name), found.get(f"{CELLS[name].column.name}-C0")
    if each is None or one is None or not (reached(each) and reached(one)):
        return None
    return rounds(one) / rounds(each)


def judgements(found: dict[str, Found], wanted: list[str]) -> list[Claim]:
    """The source's claims. Averages are over cells, each by the mean of its seeds."""
    done = [name for name in wanted if name in found]
    there = {name: found[name] for name in done if reached(found[name])}
    missed, left = len(done) - len(there), len(wanted) - len(done)
    words = f"{len(there)} reached, {missed} not reached, {left} not run"
    all_reached = Claim(
        f"all {len(wanted)} cells that the source reached are reached: {words}",
        FAILS if missed else CANNOT_TELL if left else HOLDS,
    )
    statements = []
    for split, title in SPLITS.items():
        mine = {name: each for name, each in there.items() if CELLS[name].column.split == split}
        ours, gains = [ratio(each) for each in mine.values()], _gains(mine)
        statements += _near(f"{title}: our rounds", ours)
        statements += _near(f"{title}: our speed-ups", [gain / their for gain, their in gains])
        words = f"{title}: more clients per round take fewer rounds than one, by a factor"
        statements.append(_factor(words, [gain for gain, _ in gains]))
    words = "shards take more rounds than IID, by a factor"
    statements.append(_factor(words, _other(there, lambda column: column._replace(split="iid"))))
    words = "B = ∞ takes more rounds than B = 10, by a factor"
    statements.append(_factor(words, _other(there, lambda column: column._replace(batch=10))))
    return [all_reached, *judged([each for each in statements if len(each.values) > 1])]


def _near(what: str, ratios: list[float]) -> list[Statement]:
    """That ratios to the source's numbers are between the bars, on average."""
    above, below = [each - LOW for each in ratios], [HIGH - each for each in ratios]
    return [
        Statement(f"{what} / the source's are above {LOW:g}", above, each="cell"),
        Statement(f"{what} / the source's are below {HIGH:g}", below, each="cell"),
    ]


def _factor(words: str, factors: list[float]) -> Statement:
    return Statement(words, [math.log(each) for each in factors], each="cell", log=True)


def _gains(there: dict[str, Found]) -> list[tuple[float, float]]:
    """Our speed-up and the source's, by cell."""
    out = []
    for name in there:
        one, gain = f"{CELLS[name].column.name}-C0", speedup(there, name)
        if name != one and gain is not None:
            out.append((gain, float(there[one]["paper"]) / float(there[name]["paper"])))
    return out


def _other(there: dict[str, Found], change: Callable[[Column], Column]) -> list[float]:
    """A cell's rounds / those of the same cell in another column."""
    out = []
    for name, each in there.items():
        cell = CELLS[name]
        column = change(cell.column)
        other = there.get(f"{column.name}-C{cell.fraction:g}")
        if column != cell.column and other is not None:
            out.append(rounds(each) / rounds(other))
    return out


def tried(found: Found) -> tuple[bool, bool]:
    """Whether the neighbours of the best rate on the grid were tried: below and above."""
    rates = {round(GRID * math.log10(lane["lr"])) for lane in found["lanes"]}
    return found["best"] - 1 in rates, found["best"] + 1 in rates


def bracket(found: Found) -> str:
    """The sides of the best rate on which its neighbour was tried, in words."""
    below, above = tried(found)
    if below and above:
        return "on both sides"
    return "below only" if below else "above only" if above else "no"


def how_tuned(found: dict[str, Found]) -> str:
    """How many cells have all seeds, and how many a best rate between two others."""
    both = sum(all(tried(each)) for each in found.values())
    full = sum(len(each["rounds"]) >= SEEDS for each in found.values())
    return (
        f"Of {len(found)} finished cells {full} have {SEEDS} seeds, and the others fewer; the best "
        f"rate of {both} lies between two that were tried."
    )


def by_split(found: dict[str, Found]) -> list[str]:
    """Our rounds / the source's in words, IID and shards apart."""
    lines = []
    for split, title in SPLITS.items():
        mine = []
        for name, each in found.items():
            column = CELLS[name].column
            if column.split == split and not column.raw and each["paper"] and reached(each):
                mine.append(ratio(each))
        if len(mine) > 1:
            middle = geometric(mine)
            lines.append(
                f"- {title}: {np.median(mine):.2f} of the source's rounds in the median over "
                f"{len(mine)} cells, and {middle} in the geometric mean"
            )
    return lines
