"""The 40 cells of FedAvg's Table 1 (McMahan et al. 2017; S0): what each is, what it costs, how it is tuned, and in what order they run."""

from __future__ import annotations

from collections.abc import Callable
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
"""The source's rounds: a line for each C, a number for each of COLUMNS; None where it did not reach the target in its time."""

GRID = 6
"""Learning rates are 10^(k / GRID), k whole: the finer of the source's two resolutions."""
REACH = 6
"""How many rates there are to each side of a column's middle: 13 in all, the source's 11 to 13."""
LIMIT = 3
"""A cell is given up after so many times the source's rounds."""
SEEDS = 3
"""The most models of one rate."""


class Network(NamedTuple):
    """A network, the local epochs of a client, and the target accuracy."""

    title: str
    model: Callable[..., nn.Module]
    epochs: int
    target: float


NETWORKS = {
    "2nn": Network("2NN", models.two_nn, 1, 0.97),
    "cnn": Network("CNN", models.cnn, 5, 0.99),
}


class Column(NamedTuple):
    """Cells that differ only in C: they share an engine, and a learning rate found for one guides the others.

    The source does not say how it scales the pixels: they are from -1/2 to 1/2 here, and where they are `raw` from 0 to 1.
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
        scale = ", pixels 0 to 1" * raw
        return f"{NETWORKS[model].title}, {'IID' if split == 'iid' else split}, B = {batch or '∞'}, C = {self.fraction:g}{scale}"

    @property
    def cohort(self) -> int:
        return max(1, round(self.fraction * CLIENTS))

    @property
    def steps(self) -> int:
        """Local steps of one client in one round."""
        return NETWORKS[self.column.model].epochs * (
            -(-EXAMPLES // self.column.batch) if self.column.batch else 1
        )


CELLS = {
    cell.name: cell
    for model, lines in TABLE.items()
    for place, (split, batch) in enumerate(COLUMNS)
    for fraction, line in zip(FRACTIONS, lines, strict=True)
    for raw in ((False, True) if (split, batch, fraction) == ("iid", 10, 0.1) else (False,))
    for cell in [Cell(Column(model, split, batch, raw), fraction, line[place])]
}
"""The table's, and one of each network with pixels from 0 to 1, to see what that makes of it."""

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
"""The k of the learning rate around which a column's very first race is laid: a guess, which the races correct."""

STEP = {("2nn", 10): 2.5e-6, ("2nn", None): 2.5e-5, ("cnn", 10): 2e-5, ("cnn", None): 1e-3}
ROUND, LAUNCH, TEST = 7e-3, 8e-5, {"2nn": 2e-4, "cnn": 8e-3}
"""Seconds on one H200, roughly, to plan by: of a client's local step in a tall stack; of a round; of a step at least; of a test."""
CHEAP, DEAR = 1.0, 20.0
"""Seconds of one model's way to the target: below and above these a cell is tuned with more and with fewer rates and seeds."""


@dataclass(frozen=True)
class Tuning:
    """How a cell is tuned: the rates of its first race (as steps of the grid from the middle), whether races with untried neighbours of
    the best rate follow, and the seeds of each rate."""

    rates: tuple[int, ...]
    further: bool
    seeds: int


def tuning(cell: Cell, known: bool) -> Tuning:
    """What a cell can afford; `known` says that a neighbour in its column is done, around whose best rate the first race is laid."""
    cost, least = lane_seconds(cell), least_seconds(cell)
    seeds = SEEDS if max(cost, least) < SEEDS * CHEAP and not cell.column.raw else 1
    if cost < max(
        CHEAP, least / 4
    ):  # where the rounds themselves take long, more models hardly add to it
        return Tuning(tuple(range(-2, 3) if known else range(-4, 5)), True, seeds)
    if cost < DEAR:
        return Tuning((-1, 0, 1) if known else (-2, 0, 2), True, seeds)
    if not known:
        return Tuning((-2, 0, 2), False, 1)
    return Tuning((0, 2) if cell.fraction == 0.1 else (0,), False, 1)


def client_steps(cell: Cell) -> int:
    """Local steps of all clients in the source's number of rounds."""
    return (cell.paper or 0) * cell.cohort * cell.steps


def lane_seconds(cell: Cell) -> float:
    """What one more model in a race costs, roughly, on the source's way to the target."""
    model, _, batch, _ = cell.column
    return client_steps(cell) * STEP[model, batch] + (cell.paper or 0) * TEST[model]


def least_seconds(cell: Cell) -> float:
    """What the source's rounds take, roughly, however few models there are."""
    return (cell.paper or 0) * (ROUND + cell.steps * LAUNCH)


def cell_seconds(cell: Cell) -> float:
    """What a cell's first race costs, roughly, if it takes the source's rounds."""
    plan = tuning(cell, known=cell.fraction != first(cell.column))
    work = lane_seconds(cell) * len(plan.rates) * plan.seeds
    return max(least_seconds(cell), (cell.paper or 0) * ROUND + work)


def first(column: Column) -> float:
    """The C that is tuned first, from which the others of a column learn: 0.1, or 0 where that is much cheaper."""
    return 0.0 if lane_seconds(CELLS[f"{column.name}-C0.1"]) >= DEAR / 2 else 0.1


def order(cells: list[Cell]) -> list[Cell]:
    """The order they are run in: column by column, cheap columns first, what others learn from before them; then the dear cells."""
    cheap = [cell for cell in CELLS.values() if lane_seconds(cell) < DEAR]
    cost = {
        column: sum(cell_seconds(cell) for cell in cheap if cell.column == column)
        for column in MIDDLE
    }

    def place(cell: Cell) -> tuple[object, ...]:
        if lane_seconds(cell) >= DEAR:
            return True, lane_seconds(cell)
        return (
            False,
            cell.column.raw,
            cost[cell.column],
            cell.column.name,
            cell.fraction != first(cell.column),
            lane_seconds(cell),
        )

    return sorted(cells, key=place)


def estimate(only: str | None = None) -> list[str]:
    """How much work the cells are, as lines: in client steps and examples of one model on the source's way, and roughly in seconds."""
    lines = [
        f"{'cell':20}{'rounds':>8}{'client steps':>14}{'examples':>14}{'models':>8}{'s a model':>11}{'s in all':>10}"
    ]
    cells = chosen(only)
    for cell in cells:
        plan, steps = tuning(cell, known=cell.fraction != first(cell.column)), client_steps(cell)
        examples = steps * (cell.column.batch or EXAMPLES)
        lines.append(
            f"{cell.name:20}{cell.paper:8,}{steps:14,}{examples:14,}{len(plan.rates) * plan.seeds:8}"
            f"{lane_seconds(cell):11.1f}{cell_seconds(cell):10.1f}"
        )
    total = sum(cell_seconds(cell) for cell in cells)
    return [
        *lines,
        "",
        f"{total:,.0f} s in all, roughly, on one H200: first races of the models named, if each takes the source's rounds",
    ]


def chosen(words: str | None = None) -> list[Cell]:
    """The cells that the source reached, in order: all, or those that a list such as "2nn-iid,cnn-B10-C0.1" names.

    A word of the list names the cells that have all of its parts in their names.
    """
    wanted = (
        [set(word.strip().lower().split("-")) for word in words.split(",")]
        if words
        else [set[str]()]
    )
    parts = {cell.name: set(cell.name.lower().split("-")) for cell in CELLS.values() if cell.paper}
    known = set().union(*parts.values())
    for word in sorted(set().union(*wanted) - known):
        raise BadInput(
            f"--only names '{word}', which is in no cell's name: {did_you_mean(word, known)}"
        )
    return order(
        [CELLS[name] for name, mine in parts.items() if any(word <= mine for word in wanted)]
    )
