"""FedAvg's rounds to a target accuracy on MNIST (McMahan et al. 2017, Table 1; S0): the effect of the clients a round, C, and the batch, B.

Each cell is a race between learning rates (race.py; fedavg_cells.py has the cells). A finished cell is kept, and is not run again.
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
    """FedAvg's rounds to 97 % (2NN) and 99 % (CNN) of MNIST, for five C and two B, IID and not: McMahan's Table 1.

    With `out` every finished cell is kept there, and not run again. `minutes` stops the work; 0 does none, and gives what is there
    already.
    """
    files = [] if quick else results(out, "fedavg-table1")
    runner = start(files, CELLS, minutes, device, precision, say)
    wanted = [CELLS[name] for name in QUICK] if quick else chosen(only)

    def load(column: Column) -> Track:
        say(f"{column.name}: loading")
        return Track(column, runner.device, precision)

    def run(track: Track, cell: Cell) -> tuple[Found, str]:
        middle = around(cell, runner.found)
        plan = QUICK[cell.name] if quick else tuning(cell, known=middle is not None)
        lanes = tune(
            track,
            cell,
            MIDDLE[cell.column] if middle is None else middle,
            plan,
            runner.deadline,
            say,
        )
        numbers = outcome(cell, lanes, plan)
        return numbers, summary(numbers)

    run_parts(runner, wanted, lambda cell: cell.column, load, run)
    return report(runner.found, wanted if quick else chosen(), quick)


class Track:
    """A column's engine, with a task for every rate of its grid and every seed: races of all its cells run on it."""

    def __init__(self, column: Column, device: str, precision: str) -> None:
        network = NETWORKS[column.model]
        federation = data.mnist(PARTITIONS[column.split](CLIENTS), seed=SEED)
        if not column.raw:
            federation = replace(
                federation, train=centred(federation.train), test=centred(federation.test)
            )
        self.grid = range(MIDDLE[column] - REACH, MIDDLE[column] + REACH + 1)
        tasks = [
            Task(
                network.model,
                federation,
                lr=lr(k),
                batch=column.batch,
                epochs=network.epochs,
                name=f"{lr(k):.3g}, seed {seed}",
            )
            for seed in range(SEEDS)
            for k in self.grid
        ]
        self.experiment = Experiment(tasks, Cohorts((0,) * len(tasks)), FedAvg(), seed=SEED)
        self.engine = make("auto", Experiment(tasks, seed=SEED), device, precision)

    def lanes(self, rates: set[int], seeds: int) -> list[Lane]:
        """New lanes of these rates. A lane's number, so its start, its cohorts and its mini-batches, depends on its rate and seed alone."""
        return [
            Lane(k, seed, seed * len(self.grid) + k - self.grid[0])
            for k in sorted(rates)
            for seed in range(seeds)
        ]


def centred(part: Part) -> Part:
    """Pixels from -1/2 to 1/2."""
    return replace(part, x=part.x - 0.5)


def lr(k: int) -> float:
    """The learning rate at place k of the grid."""
    return float(10 ** (k / GRID))


def tune(
    track: Track, cell: Cell, middle: int, plan: Tuning, deadline: float, say: Callable[[str], None]
) -> list[Lane]:
    """Race rates around the middle, then neighbours of the best one, until both of its own have been tried."""
    paper, target = cell.paper or 0, NETWORKS[cell.column.model].target
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
    """The best rate's neighbours that have not had a fair try; where no rate has reached the target, only those beyond all tried."""
    best, tried = winner(lanes), {lane.rate for lane in lanes}
    if mean_rounds(by_rate(lanes)[best]) is None:
        return {best + step for step, edge in ((-1, min(tried)), (1, max(tried))) if best == edge}
    return {best - 1, best + 1} - {lane.rate for lane in lanes if lane.why != BEHIND}


def news(cell: Cell, lanes: list[Lane], say: Callable[[str], None]) -> Callable[[int], None]:
    """A line of progress now and then."""
    last = time.monotonic()

    def watch(now: int) -> None:
        nonlocal last
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            best, running = (
                max(lanes, key=lambda lane: lane.best),
                sum(not lane.why for lane in lanes),
            )
            say(
                f"{cell.name}: round {now}, {running} models, at best {best.best:.2%} (lr {lr(best.rate):.3g})"
            )

    return watch


def around(cell: Cell, found: dict[str, Found]) -> int | None:
    """The best rate of the cell in its column with the nearest C that is done, C = 0 last."""
    done = [
        other for other in CELLS.values() if other.column == cell.column and other.name in found
    ]
    if not done:
        return None
    nearest = min(
        done, key=lambda other: (other.fraction == 0, abs(other.fraction - cell.fraction))
    )
    return int(found[nearest.name]["best"])


def outcome(cell: Cell, lanes: list[Lane], plan: Tuning) -> Found:
    """A finished cell in numbers."""
    best = winner(lanes)
    return {
        "paper": cell.paper,
        "best": best,
        "lr": lr(best),
        "rounds": [lane.rounds for lane in lanes if lane.rate == best],
        "accuracy": max(lane.best for lane in lanes if lane.rate == best),
        "further": plan.further,
        "lanes": [
            {
                "lr": lr(lane.rate),
                "seed": lane.seed,
                "rounds": lane.rounds,
                "accuracy": lane.best,
                "tested_to": lane.played,
                "why": lane.why,
            }
            for lane in sorted(lanes, key=lambda lane: (lane.rate, lane.seed))
        ],
    }
