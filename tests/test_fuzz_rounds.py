"""Rounds with random policies and spoilt replies: nothing raises, and nothing becomes infinite."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from torch import nn

from rota import loop
from rota.engine import make
from rota.errors import BadInput
from rota.experiment import Experiment, State
from rota.plan import Chunk, Job, Seen, Task
from rota.policies import KINDS
from rota.running.check import check

ROUNDS = 6
NAN, INF = float("nan"), float("inf")
ALONE = {"personal"}
"""Kinds whose training never leaves the machine, so that no reply of theirs can be spoilt."""


def two_layers(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, classes))


def spoilt(chunk: Chunk, dice: random.Random) -> list[Chunk]:
    """A reply with something wrong in one or all of its rows; none, or two."""
    update, buffers, costs = chunk.update.clone(), chunk.buffers.clone(), chunk.costs
    row, odd = dice.randrange(len(chunk.rows)), dice.choice([0, -1, 2, NAN, INF, 1e300])
    match dice.randrange(12):
        case 0:
            update[row, 0] = dice.choice([NAN, INF])
        case 1:
            update[row] = dice.choice([3e38, 1e30, -1e19, 0.0])
        case 2:
            update[row] *= dice.choice([1e6, 1e12, 1e17])
        case 3:
            buffers[row] = dice.choice([3e38, NAN, -INF, 0.0])
        case 4:
            name = dice.choice(["loss", "steps", "examples"])
            return [replace(chunk, **{name: np.full(len(chunk.rows), float(odd))})]
        case 5:
            name = dice.choice([each.name for each in fields(costs)])
            new = np.full(len(chunk.rows), float(odd))
            return [replace(chunk, costs=replace(costs, **{name: new}))]
        case 6:
            return [replace(chunk, reason=["gone"] * len(chunk.rows))]
        case 7:
            return []
        case 8:
            return [chunk, chunk]
        case 9:
            return [replace(chunk, rows=chunk.rows + dice.choice([1, -1, 100]))]
        case 10:
            return [replace(chunk, update=update.double())]
        case _:
            return [replace(chunk, update=update[:, 1:])]
    return [replace(chunk, update=update, buffers=buffers)]


class Spoiling:
    """An engine of which a third of the replies are spoilt, and some losses missing."""

    def __init__(self, engine: Any, dice: random.Random) -> None:
        self.engine, self.dice = engine, dice

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, job: Job) -> Iterator[Chunk]:
        for chunk in self.engine.train(job):
            yield from spoilt(chunk, self.dice) if self.dice.random() < 0.35 else [chunk]

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        seen: Seen = self.engine.losses(job, examples)
        for row in range(len(job.plan)):
            if self.dice.random() < 0.15:
                seen.loss[row], seen.reason[row] = NAN, "gone"
        return seen


def some(values: Sequence[Any], dice: random.Random) -> Any:
    return values[dice.randrange(len(values))]


def policies(dice: random.Random) -> dict[str, Any]:
    """A member of some kinds, with a small budget where it has one."""
    found: dict[str, Any] = {"sampler": KINDS["sampler"].members["uniform"](2)}
    for name, kind in KINDS.items():
        often = 0.8 if name in ("sampler", "estimator") else 0.4
        if kind.single or name in ALONE or dice.random() > often:
            continue
        member = kind.members[some([each for each in kind.members if each != "trace"], dice)]
        small = {"budget": dice.randint(1, 4), "candidates": dice.randint(4, 6)}
        known = {each.name for each in fields(member)}
        found[name] = member(**{key: small[key] for key in small.keys() & known})
    if dice.random() < 0.3:
        found["availability"] = KINDS["availability"].members["availability"](
            some([0.3, 0.8], dice), memory=some([0.0, 0.5], dice), known=dice.random() < 0.5
        )
    if dice.random() < 0.2:
        found["admission"] = KINDS["admission"].members["admission"](20.0)
    return found


def sound(state: State) -> None:
    """Nothing in a state has overflowed: models, shares, clocks, moments and memories."""
    assert np.isfinite(state.shares).all()
    assert np.isfinite([state.seconds, state.bytes_up, state.bytes_down]).all()
    for model in state.models:
        assert torch.isfinite(model.params).all()
        assert torch.isfinite(model.buffers).all()
    for kind in ("server", "estimator"):
        for name, value in state.policies[kind].items():
            if name.partition(".")[0] in ("norm", "memory_norm"):  # NaN: nothing is remembered
                continue
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert torch.isfinite(value).all(), f"{kind}: {name}"


def one(seed: int) -> str:
    """Play some rounds of a random experiment."""
    dice = random.Random(seed)
    sizes = [dice.choice([2, 3, 5, 12, 9]) for _ in range(dice.choice([5, 7]))]
    given = {"batch": dice.choice([3, 5, None]), "steps": dice.choice([None, 2])}
    models = [dice.choice([two_layers, network, linear]) for _ in range(dice.choice([1, 1, 2]))]
    tasks = [
        Task(model, federation(sizes, seed=t, own_test=dice.random() < 0.3), name=f"t{t}", **given)
        for t, model in enumerate(models)
    ]
    try:
        chosen = policies(dice)
    except BadInput:
        return "refused"
    try:
        what = Experiment(tasks, rounds=ROUNDS, seed=seed, policies=chosen)
        check(what)
        engine: Any = Spoiling(make(dice.choice(["sequential", "batched"]), what, "cpu"), dice)
        state = loop.begin(what, engine)
    except BadInput:
        return "refused"
    try:
        for _ in range(ROUNDS):
            state, _ = loop.play(what, engine, state)
            sound(state)
    except BaseException as error:
        error.add_note(repr(chosen))
        raise
    return "played"


def fuzz(seconds: float, least: int) -> Counter[str]:
    """Random experiments until the time is over, but at least some."""
    seed = int(os.environ.get("ROTA_FUZZ", random.randrange(2**32)))
    print(f"seed {seed}: to repeat it, set ROTA_FUZZ={seed}")
    counted, end, number = Counter[str](), time.monotonic() + seconds, 0
    while number < least or time.monotonic() < end:
        try:
            counted[one(seed + number)] += 1
        except BaseException as error:
            error.add_note(f"the experiment of ROTA_FUZZ={seed + number}")
            raise
        number += 1
    print(number, "experiments:", dict(counted))
    return counted


def test_spoilt_replies_in_random_company() -> None:
    assert fuzz(0, 12)["played"]


@pytest.mark.faults
def test_spoilt_replies_in_random_company_for_two_minutes() -> None:
    assert fuzz(120, 60)["played"] > 10
