"""The probe: what a sampler asks before it draws, and what the whole round costs with it.

A client that is asked fetches the model. To say its loss it evaluates it (a third of a training pass); to say its norm it trains; to
show its update it trains and uploads. If it is drawn afterwards it does the rest alone: its update is the one it has, since its
randomness is addressed, so the engine may train it again, and the clock does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rota import rng
from rota.data.federation import Array
from rota.engine import Engine
from rota.plan import Plan, Question, Seen, State, admit
from rota.sampling import Asking, Sampler
from rota.weights import Weights

NUMBER = 8
"""Bytes of an answer that is a norm or a loss."""
BEFORE = {"loss": (1 / 3, 1), "norm": (1, 1), "update": (1, 2)}
AFTER = {"loss": (1, 1), "norm": (0, 1), "update": (0, 0)}
"""How much of a client's training, and how many of the model's two ways, it does to answer, and if it is drawn afterwards."""


class Cost(NamedTuple):
    """Virtual seconds of the round (its slowest client's), of all clients together, and bytes."""

    seconds: float
    client_seconds: float
    bytes_up: int
    bytes_down: int


class Asked(NamedTuple):
    """A sampler's question, and what the clients answered."""

    question: Question
    answers: Seen


def probe(
    sampler: Sampler, memory: State, shares: Array, engine: Engine, models: list[Weights], now: int, seed: int
) -> tuple[State, Asked | None]:
    """Ask what the sampler wants to know before it draws: its state with the answers in it."""
    if not isinstance(sampler, Asking):
        return memory, None
    question = sampler.ask(memory, shares, rng.generator(rng.key(seed, "ask", now)))
    answers = Seen.nothing(len(question.rows), updates=question.what == "update")
    if question.what == "loss":
        answers.loss, answers.examples = engine.losses(models, question.rows, now, question.examples)
        answers.reason = ["" if np.isfinite(loss) else "the loss is not finite" for loss in answers.loss]
        answers.loss[~answers.ok] = np.nan
    else:
        for chunk in engine.train(models, question.rows, now):
            answers.add(admit(chunk))
    answers.seconds = _seconds(engine, models, question.rows, answers.examples, *BEFORE[question.what])
    return sampler.hear(memory, question.rows, answers), Asked(question, answers)


def price(engine: Engine, models: list[Weights], plan: Plan, seen: Seen, asked: Asked | None) -> Cost:
    """What a round costs: its plan, and what was asked before."""
    nbytes = np.array([model.nbytes for model in models], np.int64)
    down, up = nbytes[plan.model], nbytes[plan.model] * seen.ok
    if asked is None:
        return _cost(seen.seconds, up, down)
    rows, what, answers = asked.question.rows, asked.question.what, asked.answers
    known = np.isin(_pairs(plan, models), _pairs(rows, models))
    seconds = np.where(known, _seconds(engine, models, plan, seen.examples, *AFTER[what]), seen.seconds)
    first = _cost(answers.seconds, (nbytes[rows.model] if what == "update" else NUMBER) * answers.ok, nbytes[rows.model])
    then = _cost(seconds, up * ~(known & (what == "update")), down * ~known)
    return Cost(
        first.seconds + then.seconds,
        first.client_seconds + then.client_seconds,
        first.bytes_up + then.bytes_up,
        first.bytes_down + then.bytes_down,
    )


def _cost(seconds: Array, up: Array, down: Array) -> Cost:
    return Cost(float(np.nanmax(seconds, initial=0.0)), float(np.nansum(seconds)), int(up.sum()), int(down.sum()))


def _pairs(plan: Plan, models: list[Weights]) -> Array:
    return plan.client * len(models) + plan.model


def _seconds(engine: Engine, models: list[Weights], plan: Plan, examples: Array, work: float, ways: int) -> Array:
    """Each row's seconds for a part of its training and of the model's two ways."""
    out = np.full(len(plan), np.nan)
    for s in np.unique(plan.model).tolist():
        rows = np.flatnonzero(plan.model == s)
        out[rows] = engine.seconds(s, plan.client[rows], work * examples[rows], ways / 2 * models[s].nbytes)
    return out
