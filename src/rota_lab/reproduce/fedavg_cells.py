"""The 40 cells of FedAvg's Table 1 (McMahan et al. 2017).

What each cell is, what it costs, how it is tuned, and the order in which they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from rota import models
from rota.errors import BadInput, did_you_mean

CLIENTS, EXAMPLES = 100, 600
FRACTIONS = (0.0, 0.1, 0.2, 0.5, 1.0)
COLUMNS = (("iid", None), ("iid", 10), ("shards", None), ("shards", 10))
TABLE: dict[str, tuple[tuple[int | None, ...], ...]] = {
    "2nn": (
        (1455, 316, 4278, 3275),
        (1474, 87, 1796, 664),
        (1658, 77, 1528, 619),
        (None, 75, None, 443),
        (None, 70, None, 380),
    ),
    "cnn": (
        (387, 50, 1181, 956),
        (339, 18, 1100, 206),
        (337, 18, 978, 200),
        (164, 18, 1067, 261),
        (246, 16, None, 97),
    ),
}
"""The source's rounds: a line per C and a number per column; None where it missed the target."""

GRID = 6
"""Learning rates are 10^(k / GRID) for whole k: the finer of the source's two resolutions."""
REACH = 6
"""The number of rates to each side of a column's middle: 13 in all (the source: 11 to 13)."""
LIMIT = 3
"""A cell is given up after LIMIT times the source's rounds."""
SEEDS = 3
"""The most models per rate."""


class Network(NamedTuple):
    """A network, the local epochs of a client, and the accuracy to reach."""

    title: str
    model: Callable[..., nn.Module]
    epochs: int
    target: float


NETWORKS = {
    "2nn": Network("2NN", models.two_nn, 1, 0.97),
    "cnn": Network("CNN", models.cnn, 5, 0.99),
}


class Column(NamedTuple):
    """Cells that differ only in C.

    They share an engine, and the best learning rate of one cell guides the others. The source does
    not say how it scales the pixels: here they are from -1/2 to 1/2, and from 0 to 1 where `raw`.
    """

    model: str
    split: str
    batch: int | None
    raw: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}-{self.split}-B{self.batch or 'inf'}{'-raw' * self.raw}"


@dataclass(frozen=True)
class Cell:
    """One number of the table."""

    column: Column
    fraction: float
    paper: int | None

    @property
    def name(self) -> str:
        return f"{self.column.name}-C{self.fraction:g}"

    @property
    def title(self) -> str:
        model, split, batch, raw = self.column
        words = [
            NETWORKS[model].title,
            "IID" if split == "iid" else split,
            f"B = {batch or '∞'}",
            f"C = {self.fraction:g}",
        ]
        return ", ".join(words + ["pixels 0 to 1"] * raw)

    @property
    def cohort(self) -> int:
        return max(1, round(self.fraction * CLIENTS))

    @property
    def expected(self) -> int:
        """The source's rounds; where it missed the target, the most of the column's other cells."""
        column = COLUMNS.index(self.column[1:3])
        known = [line[column] or 0 for line in TABLE[self.column.model]]
        return self.paper or max(known)

    @property
    def steps(self) -> int:
        """Local steps of one client in one round."""
        batches = math.ceil(EXAMPLES / (self.column.batch or EXAMPLES))
        return NETWORKS[self.column.model].epochs * batches


def _cells() -> Iterator[Cell]:
    for model, lines in TABLE.items():
        for place, (split, batch) in enumerate(COLUMNS):
            for fraction, line in zip(FRACTIONS, lines, strict=True):
                yield Cell(Column(model, split, batch), fraction, line[place])
                if (split, batch, fraction) == ("iid", 10, 0.1):
                    yield Cell(Column(model, split, batch, raw=True), fraction, line[place])


CELLS = {cell.name: cell for cell in _cells()}
"""The table's cells, and one more per network, whose pixels are from 0 to 1, for comparison."""
DASHES = [cell for cell in CELLS.values() if cell.paper is None]
"""The cells of which the source says that they did not reach the target in the allowed time."""

MIDDLE = {
    Column("2nn", "iid", None): -2,
    Column("2nn", "iid", 10): -4,
    Column("2nn", "iid", 10, raw=True): -3,
    Column("2nn", "shards", None): -3,
    Column("2nn", "shards", 10): -6,
    Column("cnn", "iid", None): -4,
    Column("cnn", "iid", 10): -4,
    Column("cnn", "iid", 10, raw=True): -4,
    Column("cnn", "shards", None): -5,
    Column("cnn", "shards", 10): -6,
}
"""The k of the learning rate in the middle of a column's first race: a guess to be corrected."""

STEP = {("2nn", 10): 2.5e-6, ("2nn", None): 2.5e-5, ("cnn", 10): 2e-5, ("cnn", None): 1e-3}
ROUND, LAUNCH, TEST = 7e-3, 8e-5, {"2nn": 2e-4, "cnn": 8e-3}
"""Rough seconds on one H200: STEP of a client's local step in a tall stack, ROUND of a round,
LAUNCH of a step at least, TEST of a test."""
CHEAP, DEAR = 1.0, 20.0
"""Seconds of one model's way to the target. Cells below CHEAP are tuned with more rates and seeds,
cells above DEAR with fewer."""


@dataclass(frozen=True)
class Tuning:
    """How a cell is tuned."""

    rates: tuple[int, ...]
    """The rates of the first race, as steps of the grid from the middle."""
    further: bool
    """Whether races with untried neighbours of the best rate follow."""
    seeds: int
    """The seeds of each rate."""


def tuning(cell: Cell, known: bool) -> Tuning:
    """What a cell can afford.

    `known` says that a neighbour in the column is finished: the first race is laid around the
    neighbour's best rate.
    """
    cost, least = lane_seconds(cell), least_seconds(cell)
    seeds = SEEDS if max(cost, least) < SEEDS * CHEAP and not cell.column.raw else 1
    # more models cost little where the rounds themselves take long
    if cost < max(CHEAP, least / 4):
        return Tuning(tuple(range(-2, 3) if known else range(-4, 5)), True, seeds)
    if cost < DEAR:
        return Tuning((-1, 0, 1) if known else (-2, 0, 2), True, seeds)
    if not known:
        return Tuning((-2, 0, 2), False, 1)
    return Tuning((0, 2) if cell.fraction == 0.1 else (0,), False, 1)


def client_steps(cell: Cell) -> int:
    """Local steps of all clients in the source's rounds."""
    return cell.expected * cell.cohort * cell.steps


def lane_seconds(cell: Cell) -> float:
    """The rough cost of one more model in a race, if it takes the source's rounds."""
    model, _, batch, _ = cell.column
    return client_steps(cell) * STEP[model, batch] + cell.expected * TEST[model]


def least_seconds(cell: Cell) -> float:
    """The rough cost of the source's rounds, however few models there are."""
    return cell.expected * (ROUND + cell.steps * LAUNCH)


def cell_seconds(cell: Cell) -> float:
    """The rough cost of a cell's first race, if it takes the source's rounds."""
    plan = tuning(cell, known=cell.fraction != first(cell.column))
    lanes = lane_seconds(cell) * len(plan.rates) * plan.seeds
    return max(least_seconds(cell), cell.expected * ROUND + lanes)


def first(column: Column) -> float:
    """The C of a column that is tuned first and guides the others: 0.1, or 0 if much cheaper."""
    return 0.0 if lane_seconds(CELLS[f"{column.name}-C0.1"]) >= DEAR / 2 else 0.1


def order(cells: list[Cell]) -> list[Cell]:
    """The cells in the order in which they run.

    Cheap cells come first, column by column, the cheapest column first. In each column, the cell
    that guides the others comes first. The dear cells come last.
    """
    cheap = [cell for cell in CELLS.values() if lane_seconds(cell) < DEAR]
    cost = dict.fromkeys(MIDDLE, 0.0)
    for cell in cheap:
        cost[cell.column] += cell_seconds(cell)

    def place(cell: Cell) -> tuple[object, ...]:
        column, seconds = cell.column, lane_seconds(cell)
        if seconds >= DEAR:
            return True, seconds
        guided = cell.fraction != first(column)
        return False, column.raw, cost[column], column.name, guided, seconds

    return sorted(cells, key=place)


def estimate(only: str | None = None) -> list[str]:
    """How much work the cells are, as lines.

    Client steps and examples are those of one model on the source's way to the target; the seconds
    are rough.
    """
    head = f"{'cell':20}{'rounds':>8}{'client steps':>14}{'examples':>14}{'models':>8}"
    lines = [f"{head}{'s a model':>11}{'s in all':>10}"]
    cells = chosen(only)
    for cell in cells:
        plan, steps = tuning(cell, known=cell.fraction != first(cell.column)), client_steps(cell)
        examples, models = steps * (cell.column.batch or EXAMPLES), len(plan.rates) * plan.seeds
        line = f"{cell.name:20}{cell.expected:8,}{steps:14,}{examples:14,}{models:8}"
        lines.append(f"{line}{lane_seconds(cell):11.1f}{cell_seconds(cell):10.1f}")
    total = sum(cell_seconds(cell) for cell in cells)
    what = "first races of these models, if each takes the source's rounds"
    return [*lines, "", f"roughly {total:,.0f} s in all on one H200: {what}"]


def chosen(words: str | None = None) -> list[Cell]:
    """Cells that the source reached, in the order in which they run.

    `words` is a list such as "2nn-iid-B10,cnn-B10-C0.1": each word chooses the cells that have all
    of the word's parts in their names. Without a list all cells are chosen. A cell that the source
    did not reach is chosen only by its whole name.
    """
    given = [word.strip().lower() for word in words.split(",")] if words else [""]
    wanted = [set(word.split("-")) - {""} for word in given]
    parts = {cell.name: set(cell.name.lower().split("-")) for cell in CELLS.values()}
    known = set().union(*parts.values())
    for word in sorted(set().union(*wanted) - known):
        raise BadInput(
            f"--only names '{word}', which is in no cell's name: {did_you_mean(word, known)}"
        )
    some = []
    for cell in CELLS.values():
        named = any(word <= parts[cell.name] for word in wanted) and cell.paper is not None
        if named or cell.name.lower() in given:
            some.append(cell)
    return order(some)
