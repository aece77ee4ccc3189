"""Synchronous and local-update SGD by several workers, on the lecture's logistic problem.

The lecture's bound is for full-batch steps. With mini-batches the gap ends at a noise floor, which
falls with the number of workers, since the server averages their gradients. With several local
steps per round fewer rounds are needed, but workers with different data drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.channel import Channel, Whole
from rota.data.federation import Federation, Part
from rota.engine import make
from rota.estimate import Unbiased
from rota.experiment import Experiment
from rota.loop import begin, play
from rota.plan import Task
from rota.sampling import Full
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.interval import FAILS, HOLDS, Claim, Statement, judged, log_ratios
from rota_lab.reproduce.parts import append, read
from rota_lab.reproduce.result import Row, over_seeds

if TYPE_CHECKING:
    from rota_lab.reproduce.gd_bound import Problem

WORKERS, LOCAL = (1, 4, 16), (1, 4, 16)
"""How many workers there are, and how many local steps they make per round."""
BATCH, NEAR = 2, 0.05
"""A worker's mini-batch, and the part of the first gap that counts as near."""
WHOLE = Whole()
EVERY = 5
"""The rounds between two tests."""
LAST = 0.25
"""The part of the rounds at the end over which a floor is the mean gap."""


class Run(NamedTuple):
    """F(x_t) - F* after each tested round, and these rounds."""

    rounds: list[int]
    gap: Array

    @property
    def floor(self) -> float:
        """The mean gap at the end."""
        return float(np.mean(self.gap[-max(1, round(LAST * len(self.gap))) :]))

    def near(self) -> float:
        """The rounds until the gap is NEAR of the first one, on the line between two tests."""
        below = np.flatnonzero(self.gap <= NEAR * self.gap[0])
        if not len(below):
            return math.inf
        k = int(below[0])
        high, low = math.log(self.gap[k - 1]), math.log(self.gap[k])
        part = (high - math.log(NEAR * self.gap[0])) / (high - low)
        return self.rounds[k - 1] + part * (self.rounds[k] - self.rounds[k - 1])


def train(
    problem: Problem,
    model: Callable[[int], torch.nn.Module],
    rounds: int,
    seeds: int,
    workers: int,
    local: int = 1,
    batch: int | None = BATCH,
    alike: bool = True,
    channel: Channel = WHOLE,
) -> list[Run]:
    """Rounds of `workers` that make `local` steps of lr 1/L each; one path per seed.

    Their data are dealt at random if they are `alike`, and else sorted by label. Their updates go
    through `channel`. The seeds are models of one experiment, so the engine trains them together.
    """
    tasks = [
        Task(
            model(seed),
            dealt(problem, seed, workers, alike),
            lr=1 / problem.smooth,
            batch=batch,
            steps=local,
            loss=problem.loss,
            score=problem.loss,
            name=f"start {seed}",
        )
        for seed in range(seeds)
    ]
    experiment = Experiment(
        tasks, Full(), Unbiased(), rounds=rounds, evaluate=rounds + 1, channel=channel
    )
    engine = make("batched", experiment, "cpu")
    state = begin(experiment, engine)
    tests, gaps = [0], [[score.loss for score in engine.evaluate(state.models)]]
    for now in range(1, rounds + 1):
        state, _ = play(experiment, engine, state)
        if now % EVERY == 0:
            tests.append(now)
            gaps.append([score.loss for score in engine.evaluate(state.models)])
    return [Run(tests, np.array(gap) - problem.best) for gap in zip(*gaps, strict=True)]


def dealt(problem: Problem, seed: int, workers: int, alike: bool) -> Federation:
    """The examples in equal pieces, dealt at random or sorted by label."""
    order = np.argsort(problem.y, kind="stable")
    if alike:
        generator = rng.generator(rng.key(seed, "gd-bound", "deal"))
        order = generator.permutation(len(problem.y))
    x, y = torch.from_numpy(problem.x[order]), torch.from_numpy(problem.y[order])
    cuts = np.linspace(0, len(y), workers + 1).round().astype(np.int64)
    return Federation(problem.name, Part(x, y, cuts), Part(x, y, cuts[[0, -1]]), classes=0)


Runs = list[Run]
"""The runs of one kind, by seed."""


class Distributed(NamedTuple):
    """What the page says about distributed SGD."""

    rows: list[Row]
    charts: list[Chart]
    claims: list[Claim]


def distributed(
    problem: Problem,
    model: Callable[[int], torch.nn.Module],
    rounds: int,
    seeds: int,
    file: Path | None = None,
    more: Sequence[Statement] = (),
) -> Distributed:
    """All runs: workers, local steps, and local steps of workers with different data.

    Finished ones are kept in `file`, and are not run again. `more` are judged together with them.
    """

    def runs(workers: int, local: int = 1, batch: int | None = BATCH, alike: bool = True) -> Runs:
        name = f"{workers}-{local}-{batch or 'all'}-{'alike' if alike else 'sorted'}"
        how = partial(train, problem, model, rounds, seeds, workers, local, batch, alike)
        return kept(file, name, how)

    sync = {workers: runs(workers) for workers in WORKERS}
    locals_ = {1: sync[4]} | {local: runs(4, local) for local in LOCAL[1:]}
    apart = {local: runs(4, local, None, alike=False) for local in LOCAL}
    rows = []
    for workers, paths in sync.items():
        rows.append(_floor(f"{_many(workers, 'workers')}, mini-batches of {BATCH}", paths))
    for local, paths in locals_.items():
        near, steps = [path.near() for path in paths], _many(local, "local steps")
        if max(near) < math.inf:
            words = f"4 workers, {steps}: rounds until the gap is {NEAR:g} of the first"
            rows.append(over_seeds(f"{problem.name}, {words}", None, near))
        rows.append(_floor(f"4 workers, {steps}, mini-batches of {BATCH}", paths))
    for local, paths in apart.items():
        rows.append(
            _floor(f"4 workers sorted by label, {_many(local, 'local steps')}, full batches", paths)
        )
    charts = [
        _chart("workers", "Synchronous SGD", sync, "workers"),
        _chart("local", "4 workers, mini-batches", locals_, "local steps"),
        _chart("drift", "4 workers sorted by label, full batches", apart, "local steps"),
    ]
    return Distributed(rows, charts, _claims(problem, rounds, sync, locals_, apart, more))


def kept(file: Path | None, name: str, make: Callable[[], Runs]) -> Runs:
    """The runs of this name in a file, or new ones, which are then kept there."""
    found = read(file).get(name) if file else None
    if found is None:
        made = make()
        tests, gaps = made[0].rounds, [run.gap.tolist() for run in made]
        found = {"part": name, "rounds": tests, "gaps": gaps}
        if file:
            append(file, found)
    return [Run(found["rounds"], np.array(gap)) for gap in found["gaps"]]


def _floor(words: str, paths: list[Run]) -> Row:
    return over_seeds(
        f"logistic, {words}: gap over the last rounds", None, [path.floor for path in paths]
    )


def _claims(
    problem: Problem,
    rounds: int,
    sync: dict[int, list[Run]],
    locals_: dict[int, list[Run]],
    apart: dict[int, list[Run]],
    more: Sequence[Statement],
) -> list[Claim]:
    """The verdicts, by paired seeds."""
    shrink = (1 - problem.convex / problem.smooth) ** rounds
    statements = []
    for workers, paths in sync.items():
        floors = [[path.floor for path in some] for some in (paths, apart[1])]
        words = f"mini-batches of {_many(workers, 'workers')} end above full batches, by a factor"
        statements.append(Statement(words, log_ratios(*floors), log=True))
    for few, many in pairwise(WORKERS):
        floors = [[path.floor for path in sync[m]] for m in (few, many)]
        words = f"{many} workers have a lower noise floor than {few} with mini-batches, by a factor"
        statements.append(Statement(words, log_ratios(*floors), log=True))
    for few, many in pairwise(LOCAL):
        near = [[path.near() for path in locals_[k]] for k in (few, many)]
        if max(map(max, near)) < math.inf:
            words = f"{many} local steps take fewer rounds to a near gap than {few}, by a factor"
            statements.append(Statement(words, log_ratios(*near), log=True))
    for local in LOCAL[1:]:
        over = [path.floor / (shrink**local * path.gap[0]) for path in apart[local]]
        words = f"{local} local steps of workers with different data end above the bound of {local}"
        logs = np.log(over).tolist()
        statements.append(Statement(f"{words} steps together, by a factor", logs, log=True))
    single = [path.floor <= path.gap[0] * shrink + 1e-14 for path in apart[1]]
    words = "one full-batch step per round of 4 workers sorted by label ends under the bound "
    words += f"({sum(single)} of {len(single)} starts)"
    return [*judged([*statements, *more]), Claim(words, HOLDS if all(single) else FAILS)]


def _many(number: int, unit: str) -> str:
    return f"{number} {unit if number > 1 else unit.removesuffix('s')}"


def _chart(name: str, title: str, runs: dict[int, list[Run]], unit: str) -> Chart:
    lines = []
    for colour, (number, paths) in enumerate(runs.items()):
        logs = np.log10([np.maximum(path.gap, 1e-14) for path in paths])
        band = (logs.min(0).tolist(), logs.max(0).tolist()) if len(paths) > 1 else None
        lines.append(
            Line(_many(number, unit), paths[0].rounds, logs.mean(0).tolist(), colour, 0, band)
        )
    return Chart(name, f"logistic: {title}", "round", "log10 (F(x_t) - F*)", lines)
