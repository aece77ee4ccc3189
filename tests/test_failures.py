"""Estimates stay unbiased when rows fail at random: by enumeration, and over many rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear

from rota import loop, rng
from rota.arrays import Array
from rota.engine import Score
from rota.estimate import ESTIMATORS, StaleVr, StaleVre, Unbiased
from rota.experiment import Experiment
from rota.plan import Chunk, Job, Model, Seen, Task
from rota.sampling import (
    SAMPLERS,
    Gvr,
    KVib,
    Lvr,
    Ocs,
    Optimal,
    Random,
    Uniform,
    Vre,
)
from rota.testing import replies
from rota.weights import Weights

SUCCEEDS, CLIENTS, NUMBERS = 0.7, 20, 3
ALWAYS = np.ones(CLIENTS)


class Sends:
    """Two models, whose clients send given updates, and fail at random.

    A client that fails when it is asked also fails to train if `same` is true. Otherwise these are
    two independent events.
    """

    def __init__(self, same: bool = False, chance: Array = SUCCEEDS * ALWAYS) -> None:
        self.same, self.chance, self.asks = same, chance, False

    def initial(self) -> list[Model]:
        return [Model(t, Weights(torch.zeros(NUMBERS), torch.zeros(0))) for t in (0, 1)]

    def sends(self, now: int, model: int) -> Array:
        """What clients would send: unlike each other, and in every round like the last one."""
        own = rng.generator(rng.key(3, "own", 0, model)).normal(size=(CLIENTS, NUMBERS))
        new = rng.generator(rng.key(3, "new", now, model)).normal(size=(CLIENTS, NUMBERS))
        return np.asarray(1 + own + 0.5 * new)

    def fails(self, job: Job, asked: bool) -> Array:
        kind = "any" if self.same else f"asked {asked}"
        draw = rng.generator(rng.key(3, kind, job.now)).random((2, CLIENTS))
        return np.asarray(draw >= self.chance)[job.plan.model, job.plan.client]

    def train(self, job: Job) -> Iterator[Chunk]:
        asked, self.asks = self.asks, False
        bad = self.fails(job, asked)
        for model in np.unique(job.plan.model).tolist():
            rows = np.flatnonzero(job.plan.model == model)
            for some in np.array_split(rows, 2):  # a reply of several chunks
                update = torch.from_numpy(self.sends(job.now, model)[job.plan.client[some]]).float()
                why = ["the test made it fail" if each else "" for each in bad[some].tolist()]
                yield replace(replies.chunk(some, model, update, reason=why), now=job.now)

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        seen = Seen.nothing(len(job.plan))
        seen.loss[:] = 1 + job.plan.client
        bad = self.fails(job, True)
        seen.loss[bad] = np.nan
        seen.reason = ["the test made it fail" if each else "" for each in bad.tolist()]
        return seen

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        return []


def experiment(sampler: Any, estimator: Any, **more: Any) -> Experiment:
    sizes = [int(n) for n in np.linspace(3, 30, CLIENTS)]
    tasks = [Task(linear, federation(sizes, seed=t), name=f"task {t}", lr=0.1) for t in (0, 1)]
    return Experiment(tasks, sampler, estimator, rounds=10**6, evaluate=10**6, **more)


def errors(what: Experiment, engine: Sends, rounds: int, skip: int = 0) -> tuple[Array, Array]:
    """Each round's estimate and what full participation would have given, [rounds, 2, NUMBERS]."""
    state, found, right = loop.begin(what, engine), [], []
    question = what.sampler.ask if hasattr(what.sampler, "ask") else None
    for now in range(1, rounds + 1):
        before = state.models
        engine.asks = question is not None and not isinstance(what.sampler, Lvr | Vre)
        state, _ = loop.play(what, engine, state)
        if now > skip:
            pairs = zip(before, state.models, strict=True)
            found.append([(old.params - new.params).numpy() for old, new in pairs])
            right.append([what.shares[s] @ engine.sends(now, s) for s in (0, 1)])
    return np.array(found, np.float64), np.array(right)


def off(what: Experiment, engine: Sends, rounds: int = 150) -> tuple[float, float]:
    """By how many standard errors the estimates are off; and the standard error itself."""
    found, right = errors(what, engine, rounds)
    away = ((found - right) / np.abs(right).mean(axis=0)).mean(axis=2)
    error = away.std(axis=0, ddof=1) / np.sqrt(rounds)
    return float(np.abs(away.mean(axis=0) / error).max()), float(error.max())


PAIRS = {
    **{name: (KVib(12), make()) for name, make in ESTIMATORS.items() if make.unbiased},
    "stale-vr": (Gvr(24, 2), StaleVr()),
    "stale-vre with mmfl-vre": (Vre(24, 2), StaleVre()),
    "uniform": (Uniform(12), Unbiased()),
    "coins": (Uniform(12, "independent"), Unbiased()),
    "multinomial": (Uniform(12, "multinomial"), Unbiased()),
    "full": (SAMPLERS["full"](), Unbiased()),
    "clustered-size": (SAMPLERS["clustered-size"](12), Unbiased()),
    "optimal": (Optimal(12), Unbiased()),
    "kvib-full": (SAMPLERS["kvib-full"](12), Unbiased()),
    "ocs": (Ocs(10, 16), Unbiased()),
    "mmfl-random": (Random(24, 2), Unbiased()),
    "mmfl-gvr": (Gvr(24, 2), Unbiased()),
    "mmfl-gvr with fedvarp": (Gvr(24, 2), ESTIMATORS["fedvarp"]()),
    "mmfl-lvr": (Lvr(24, 2), Unbiased()),
}


@pytest.mark.parametrize("same", [False, True], ids=["apart", "same"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_estimates_are_unbiased_when_rows_fail(pair: tuple[Any, Any], same: bool) -> None:
    surprise, error = off(experiment(*pair), Sends(same))
    assert surprise < 4.5
    assert 6 * error < 1 - SUCCEEDS, "the test would not notice a missing correction"
