"""FedAvg's rounds to a target accuracy on MNIST (McMahan et al. 2017, Table 1).

The table shows the effect of the clients per round, C, and the batch, B. Each cell is a race
between learning rates (race.py; fedavg_cells.py has the cells). A finished cell is not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rota import data
from rota.data.federation import Part
from rota.data.partition import PARTITIONS
from rota.engine import make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.plan import Task
from rota_lab.reproduce.fedavg_cells import (
    CELLS,
    CLIENTS,
    GRID,
    LIMIT,
    MIDDLE,
    NETWORKS,
    REACH,
    SEEDS,
    Cell,
    Column,
    Tuning,
    chosen,
    tuning,
)
from rota_lab.reproduce.fedavg_page import report, summary
from rota_lab.reproduce.parts import Found, results, run_parts, start
from rota_lab.reproduce.race import BEHIND, Cohorts, Lane, by_rate, mean_rounds, race, winner
from rota_lab.reproduce.result import Result

SEED = 0
QUICK = {name: Tuning((0,), False, 1) for name in ("2nn-iid-B10-C0.1", "2nn-iid-B10-raw-C0.1")}
PAUSE = 15.0
"""Seconds between two lines of progress."""


def fedavg_table1(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """FedAvg's rounds to 97 % (2NN) and 99 % (CNN) on MNIST, IID and not: McMahan's Table 1.

    Finished cells are kept in `out`, and are not run again. `minutes` limits the time; 0 runs
    nothing and returns what is finished.
    """
    files = [] if quick else results(out, "fedavg-table1")
    runner = start(files, CELLS, minutes, device, precision, say)
    wanted = [CELLS[name] for name in QUICK] if quick else chosen(only)

    def load(column: Column) -> Track:
        say(f"{column.name}: loading")
        return Track(column, runner.device, precision)

    def run(track: Track, cell: Cell) -> tuple[Found, str]:
        known = around(cell, runner.found)
        middle = MIDDLE[cell.column] if known is None else known
        plan = QUICK[cell.name] if quick else tuning(cell, known=known is not None)
        lanes = tune(track, cell, middle, plan, runner.deadline, say)
        numbers = outcome(cell, lanes, plan)
        return numbers, summary(numbers)

    run_parts(runner, wanted, lambda cell: cell.column, load, run)
    return report(runner.found, wanted if quick else chosen(), quick)


class Track:
    """A column's engine, with a task per learning rate and seed. All races of the column use it."""

    def __init__(self, column: Column, device: str, precision: str) -> None:
        network = NETWORKS[column.model]
        federation = data.mnist(PARTITIONS[column.split](CLIENTS), seed=SEED)
        if not column.raw:
            train, test = centred(federation.train), centred(federation.test)
            federation = replace(federation, train=train, test=test)
        self.grid = range(MIDDLE[column] - REACH, MIDDLE[column] + REACH + 1)
        plain = Task(network.model, federation, batch=column.batch, epochs=network.epochs)
        tasks = []
        for seed in range(SEEDS):
            for k in self.grid:
                name = f"{lr(k):.3g}, seed {seed}"
                tasks.append(replace(plain, lr=lr(k), name=name))
        self.experiment = Experiment(tasks, Cohorts((0,) * len(tasks)), FedAvg(), seed=SEED)
        self.engine = make("auto", Experiment(tasks, seed=SEED), device, precision)

    def lanes(self, rates: set[int], seeds: int) -> list[Lane]:
        """New lanes for these rates.

        A lane's task depends on its rate and seed alone, and so do its start, its cohorts and its
        mini-batches.
        """
        lanes = []
        for k in sorted(rates):
            for seed in range(seeds):
                lanes.append(Lane(k, seed, seed * len(self.grid) + k - self.grid[0]))
        return lanes


def centred(part: Part) -> Part:
    """Pixels from -1/2 to 1/2."""
    return replace(part, x=part.x - 0.5)


def lr(k: int) -> float:
    """The learning rate at place k of the grid."""
    return float(10 ** (k / GRID))


def tune(
    track: Track, cell: Cell, middle: int, plan: Tuning, deadline: float, say: Callable[[str], None]
) -> list[Lane]:
    """Race rates around the middle, then the best rate's neighbours, until both have been tried."""
    paper, target = cell.expected, NETWORKS[cell.column.model].target
    lanes: list[Lane] = []
    rates = {middle + step for step in plan.rates} & set(track.grid)
    while rates:
        new = track.lanes(rates, plan.seeds)
        best = mean_rounds(by_rate(lanes)[winner(lanes)]) if lanes else None
        race(
            track.experiment,
            track.engine,
            new,
            cell.cohort,
            target,
            LIMIT * paper,
            beat=math.inf if best is None else best,
            lag_from=math.inf if lanes else paper / 4,
            deadline=deadline,
            watch=news(cell, new, say),
        )
        lanes = [lane for lane in lanes if lane.rate not in rates] + new
        rates = further(lanes) & set(track.grid) if plan.further else set()
    return lanes


def further(lanes: list[Lane]) -> set[int]:
    """The neighbours of the best rate that have not had a fair try.

    If no rate has reached the target, only neighbours beyond all tried rates count.
    """
    best, tried = winner(lanes), {lane.rate for lane in lanes}
    if mean_rounds(by_rate(lanes)[best]) is None:
        return {best - 1, best + 1} - set(range(min(tried), max(tried) + 1))
    return {best - 1, best + 1} - {lane.rate for lane in lanes if lane.why != BEHIND}


def news(cell: Cell, lanes: list[Lane], say: Callable[[str], None]) -> Callable[[int], None]:
    """A function that reports progress now and then."""
    last = time.monotonic()

    def watch(now: int) -> None:
        nonlocal last
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            best = max(lanes, key=lambda lane: lane.best)
            running = sum(not lane.why for lane in lanes)
            words = f"{running} models, at best {best.best:.2%} (lr {lr(best.rate):.3g})"
            say(f"{cell.name}: round {now}, {words}")

    return watch


def around(cell: Cell, found: dict[str, Found]) -> int | None:
    """The best rate of the finished cell in this column with the nearest C; C = 0 comes last."""
    column = [other for other in CELLS.values() if other.column == cell.column]
    finished = [other for other in column if other.name in found]
    if not finished:
        return None

    def distance(other: Cell) -> tuple[bool, float]:
        return other.fraction == 0, abs(other.fraction - cell.fraction)

    return int(found[min(finished, key=distance).name]["best"])


def outcome(cell: Cell, lanes: list[Lane], plan: Tuning) -> Found:
    """A finished cell in numbers."""
    best = winner(lanes)
    winners = [lane for lane in lanes if lane.rate == best]
    table = []
    for lane in sorted(lanes, key=lambda lane: (lane.rate, lane.seed)):
        table.append(
            {
                "lr": lr(lane.rate),
                "seed": lane.seed,
                "rounds": lane.rounds,
                "accuracy": lane.best,
                "tested_to": lane.played,
                "why": lane.why,
            }
        )
    return {
        "paper": cell.paper,
        "best": best,
        "lr": lr(best),
        "rounds": [lane.rounds for lane in winners],
        "accuracy": max(lane.best for lane in winners),
        "further": plan.further,
        "lanes": table,
    }
