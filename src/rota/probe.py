"""The probe: what a sampler asks before it draws, and what the whole round costs with it.

A client that is asked fetches the model. To say its loss it evaluates it (a third of a training pass); to say its norm it trains; to
show its update it trains and uploads. If it is drawn afterwards it does the rest alone: its update is the one it has, since its
randomness is addressed, so the engine may train it again, and the clock does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.engine import Engine
from rota.errors import BadInput
from rota.estimate import Correcting, Estimator, Expecting, Recalling, Tensors
from rota.plan import Plan, Question, Seen, State, admit
from rota.sampling import Asking, Sampler
from rota.weights import Weights

NUMBER = 8
"""Bytes of a number in an answer: a norm or a loss."""


class Load(NamedTuple):
    """What travels one way: models, and controls, which have no buffers."""

    models: int = 0
    controls: int = 0

    def nbytes(self, model: Weights) -> int:
        return self.models * model.nbytes + self.controls * model.params.nbytes


class Work(NamedTuple):
    """What a row does: how much of its training, and what it fetches and sends."""

    training: float
    down: Load = Load()
    up: Load = Load()


class Cost(NamedTuple):
    """Virtual seconds of the round (its slowest client's, on the link and with all its models, one after the other), of all clients'
    computing together, and bytes.
    """

    seconds: float
    client_seconds: float
    bytes_up: int
    bytes_down: int


class Asked(NamedTuple):
    """A sampler's question, and what the clients answered."""

    question: Question
    answers: Seen


class Setting(NamedTuple):
    """What a round works with."""

    engine: Engine
    estimator: Estimator
    models: list[Weights]
    now: int
    seed: int
    pace: Array
    """Each model's learning rate, in parts of the largest."""

    def work(self, what: str | None) -> tuple[Work, Work]:
        """What a client does to answer, and if it is drawn afterwards; for None all of it is still to be done."""
        controls = self.estimator.controls if isinstance(self.estimator, Correcting) else 0
        load = Load(1, controls)
        whole = Work(1, load, load)
        return {
            None: (Work(0), whole),
            "loss": (Work(1 / 3, Load(1)), Work(1, Load(0, controls), load)),
            "norm": (Work(1, load), Work(0, Load(), load)),
            "update": (whole, Work(0)),
        }[what]


def probe(
    setting: Setting, sampler: Sampler, memory: State, shares: Array, recalled: Tensors
) -> tuple[State, Tensors, Asked | None]:
    """Ask what the sampler wants to know before it draws: its state with the answers in it, and the estimator's, which may learn from
    them too; and what was asked of clients, to be paid for.
    """
    if not isinstance(sampler, Asking):
        return memory, recalled, None
    engine, estimator, models, now, seed, pace = setting
    question = sampler.ask(memory, shares, rng.generator(rng.key(seed, "ask", now)))
    rows, what = question.rows, question.what
    answers = Seen.nothing(len(rows), updates=what == "update", pace=pace[rows.model])
    if what == "expected":
        if not isinstance(estimator, Expecting):
            raise BadInput(
                f"the sampler asks what the estimator expects, which a {type(estimator).__name__} cannot say: take stale-vre"
            )
        answers.norm, answers.reason = estimator.expected(recalled, rows), [""] * len(rows)
        return sampler.hear(memory, rows, answers), recalled, None
    if what == "loss":
        answers.loss, answers.examples = engine.losses(models, rows, now, question.examples)
        answers.reason = [
            "" if fine else "the loss is not finite" for fine in np.isfinite(answers.loss).tolist()
        ]
        answers.loss[~answers.ok] = np.nan
    else:
        correction = (
            estimator.correction(recalled, rows) if isinstance(estimator, Correcting) else None
        )
        for chunk in map(admit, engine.train(models, rows, now, correction)):
            norm = None
            if isinstance(estimator, Recalling):
                norm, recalled = estimator.residual(recalled, rows, chunk)
            answers.add(chunk, norm)
    answers.seconds = _seconds(setting, rows, answers.examples, setting.work(what)[0])
    return sampler.hear(memory, rows, answers), recalled, Asked(question, answers)


def price(setting: Setting, plan: Plan, seen: Seen, asked: Asked | None) -> Cost:
    """What a round costs: its plan, and what was asked before."""
    new = _bill(setting, plan, seen, setting.work(None)[1])
    if asked is None:
        return _cost(plan, *new)
    rows, what, answers = asked.question.rows, asked.question.what, asked.answers
    before, after = setting.work(what)
    seconds, computing, up, down = _bill(setting, rows, answers, before)
    numbers = (
        setting.estimator.numbers
        if isinstance(setting.estimator, Recalling) and what == "norm"
        else 1
    )
    first = _cost(
        rows,
        seconds,
        computing,
        up if any(before.up) else NUMBER * numbers * _answered(answers),
        down,
    )
    known = np.isin(_pairs(plan, setting.models), _pairs(rows, setting.models))
    then = _cost(
        plan,
        *(
            np.where(known, *both)
            for both in zip(_bill(setting, plan, seen, after), new, strict=True)
        ),
    )
    return Cost(
        first.seconds + then.seconds,
        first.client_seconds + then.client_seconds,
        first.bytes_up + then.bytes_up,
        first.bytes_down + then.bytes_down,
    )


def _bill(
    setting: Setting, plan: Plan, seen: Seen, work: Work
) -> tuple[Array, Array, Array, Array]:
    """Each row's seconds, those of its computing alone, and its bytes up (none where it could not train) and down."""
    up, down = (
        np.array([load.nbytes(model) for model in setting.models], np.int64)[plan.model]
        for load in (work.up, work.down)
    )
    plain = Work(1, Load(1), Load(1))
    seconds = (
        seen.seconds if work == plain else _seconds(setting, plan, seen.examples, work)
    )  # which may be measured
    computing = _seconds(setting, plan, seen.examples, Work(work.training))
    return seconds, computing, up * _answered(seen), down


def _answered(seen: Seen) -> Array:
    """Who sent something, even if it cannot be used."""
    return np.nan_to_num(seen.examples) > 0


def _cost(plan: Plan, seconds: Array, computing: Array, up: Array, down: Array) -> Cost:
    by_client = np.bincount(plan.client, np.nan_to_num(seconds))
    return Cost(
        float(by_client.max(initial=0.0)),
        float(np.nansum(computing)),
        int(up.sum()),
        int(down.sum()),
    )


def _pairs(plan: Plan, models: list[Weights]) -> Array:
    return plan.client * len(models) + plan.model


def _seconds(setting: Setting, plan: Plan, examples: Array, work: Work) -> Array:
    """Each row's seconds: NaN where it could not train."""
    out = np.full(len(plan), np.nan)
    for s in np.unique(plan.model).tolist():
        rows = np.flatnonzero(plan.model == s)
        nbytes = work.down.nbytes(setting.models[s]) + work.up.nbytes(setting.models[s])
        out[rows] = setting.engine.seconds(
            s, plan.client[rows], work.training * examples[rows], nbytes
        )
    return out
