"""Clients whose replies are given: policies play rounds with them without any training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.plan import Chunk, Costs, Job, Model, Plan, Seen, State, whole
from rota.policies import EVERYTHING, Observing, Watching, sees
from rota.sampling import Asking
from rota.weights import Weights


@dataclass(frozen=True)
class Clients:
    """What every pair (model, client) replies, in all rounds.

    `update` is [models, clients, parameters]. The other columns are [models, clients]; `norm` is
    that of the updates unless it is given.
    """

    update: Array
    loss: Array
    examples: Array
    seconds: Array
    norm: Array
    failed: Array

    @classmethod
    def of(
        cls,
        update: Array,
        loss: Array | None = None,
        examples: Array | None = None,
        seconds: Array | None = None,
        norm: Array | None = None,
        failed: Array | None = None,
    ) -> Clients:
        """Clients with these updates, and ones or zeros for the columns that are not given."""
        shape = update.shape[:2]
        return cls(
            update,
            np.ones(shape) if loss is None else loss,
            np.full(shape, 5.0) if examples is None else examples,
            np.ones(shape) if seconds is None else seconds,
            np.linalg.norm(update, axis=2) if norm is None else norm,
            np.zeros(shape, bool) if failed is None else failed,
        )

    def chunks(self, plan: Plan) -> Iterator[Chunk]:
        """The replies of a plan's rows, one chunk per model."""
        for model in np.unique(plan.model).tolist():
            rows = np.flatnonzero(plan.model == model)
            at = (model, plan.client[rows])
            yield chunk(
                rows,
                model,
                torch.from_numpy(self.update[at]),
                loss=self.loss[at],
                examples=self.examples[at],
                seconds=self.seconds[at],
                reason=["the test made it fail" if bad else "" for bad in self.failed[at]],
            )

    def job(self, plan: Plan) -> Job:
        """A job that trains the rows of the plan whole."""
        models = []
        for s, update in enumerate(self.update):
            models.append(Model(s, Weights(torch.zeros(update.shape[1]), torch.zeros(0))))
        return whole(models, plan, 1)

    def seen(self, plan: Plan, columns: Collection[str] = EVERYTHING) -> Seen:
        """What the server learns of a plan's rows; only these columns are shown."""
        seen = Seen.nothing(len(plan))
        for part in self.chunks(plan):
            seen.add(part, self.norm[part.model, plan.client[part.rows]])
        return seen.only(columns)


def chunk(
    rows: Array,
    model: int,
    update: torch.Tensor,
    buffers: torch.Tensor | None = None,
    loss: Array | None = None,
    examples: Array | None = None,
    seconds: Array | None = None,
    reason: list[str] | None = None,
) -> Chunk:
    """A reply of some rows of one model, with ones for what is not given."""
    number = len(rows)
    ones, bytes_ = np.ones(number), np.full(number, update[:1].nbytes)
    time = ones if seconds is None else seconds
    return Chunk(
        rows=np.asarray(rows),
        model=model,
        now=1,
        lr=0.1,
        update=update,
        buffers=update.new_zeros(number, 0) if buffers is None else buffers,
        loss=ones if loss is None else loss,
        steps=np.ones(number, np.int64),
        examples=ones if examples is None else examples,
        costs=Costs(time, time, bytes_, bytes_),
        reason=reason or [""] * number,
    )


def show(sampler: Any, state: State, plan: Plan, clients: Clients) -> State:
    """The state after the updates of a plan's rows have passed, if the sampler watches them."""
    if not isinstance(sampler, Watching):
        return state
    job = clients.job(plan)
    watched = sampler.watch(state, job)
    for part in clients.chunks(plan):
        sampler.see(watched, job, part)
        part.update.fill_(np.nan)  # an engine may use its memory again
    return sampler.learn(state, watched)


def ask(
    sampler: Any,
    state: State,
    shares: Array,
    generator: np.random.Generator,
    clients: Clients,
    columns: Collection[str] | None = None,
) -> State:
    """The state with the answers to the sampler's question, if it asks one.

    `columns` are what it is shown, instead of what it declares in `sees`.
    """
    if not isinstance(sampler, Asking):
        return state
    question = sampler.ask(state, shares, generator)
    if question.what == "update":
        state = show(sampler, state, question.rows, clients)
    shown = sees(sampler) if columns is None else columns
    return sampler.hear(state, question.rows, clients.seen(question.rows, shown))


def observe(
    sampler: Any,
    state: State,
    shares: Array,
    plan: Plan,
    clients: Clients,
    columns: Collection[str] | None = None,
) -> State:
    """The state after the plan's rows have replied."""
    state = show(sampler, state, plan, clients)
    if not isinstance(sampler, Observing):
        return state
    shown = sees(sampler) if columns is None else columns
    return sampler.observe(state, shares, plan, clients.seen(plan, shown))


def play(
    sampler: Any,
    state: State,
    shares: Array,
    key: int,
    clients: Clients,
    columns: Collection[str] | None = None,
) -> tuple[Plan, State]:
    """One round: the plan, and the state after it. `key` is the round's randomness."""
    generator = rng.generator(rng.key(key, "test"))
    state = ask(sampler, state, shares, generator, clients, columns)
    plan = sampler.draw(state, shares, generator)
    return plan, observe(sampler, state, shares, plan, clients, columns)
