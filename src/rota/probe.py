"""The probe: what a sampler asks before it draws, and what a round costs with it.

A client that is asked fetches the model. To report a loss it evaluates the model, which costs a
third of a training pass. To report the norm of its update it trains, and to show the update it also
sends it. If it is drawn afterwards, it does only the rest. Its update is the one that it already
has, because its randomness is addressed: an engine may train it again, but the clock does not count
that.

If only k of the n clients that are asked about a model answer, an unbiased sampler draws among them
alone, and their weights are multiplied by n / k: they stand for those that did not answer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rota import rng
from rota.admission import admit
from rota.arrays import Array
from rota.channel import Channel
from rota.engine import Engine
from rota.errors import BadInput
from rota.estimate import Correcting, Estimator, Expecting, Fitting, Recalling, Tensors
from rota.plan import Duty, Job, Local, Model, Plan, Question, Seen, State, duty
from rota.policies import Watching, sees, speaks
from rota.sampling import Asking, Sampler
from rota.submodel.parts import Held


class Cost(NamedTuple):
    """What a round costs.

    `seconds` is the time of the slowest client, computing and transfer, with all its models one
    after the other. `client_seconds` is the computing time of all clients together.
    """

    seconds: float
    client_seconds: float
    bytes_up: int
    bytes_down: int


class Asked(NamedTuple):
    """A sampler's question and the clients' answers.

    `factor` is how many clients each one that answered stands for, per model; None where all
    answered, and for biased samplers, whose weights sum to 1 whoever answers.
    """

    question: Question
    answers: Seen
    factor: Array | None = None

    def drawn(self, plan: Plan) -> Plan:
        """The plan without clients that did not answer; those that did stand for them."""
        if self.factor is None:
            return plan
        models, rows, ok = len(self.factor), self.question.rows, self.answers.ok
        drawn, pairs = _pairs(plan, models), _pairs(rows, models)
        times = np.where(np.isin(drawn, pairs), self.factor[plan.model], 1.0)
        known = np.flatnonzero(~np.isin(drawn, pairs[~ok]))
        return replace(plan, weight=plan.weight * times).of(known)


@dataclass(frozen=True)
class Setting:
    """What a round works with. `pace` is each model's learning rate relative to the largest."""

    engine: Engine
    estimator: Estimator
    models: list[Model]
    now: int
    seed: int
    pace: Array
    held: Held | None = None
    """Which parts of models clients hold; None: whole models."""
    channel: Channel | None = None

    def job(self, plan: Plan, recalled: Tensors, asked: Asked | None) -> Job:
        """The training of the plan's rows; clients that were asked have done a part of it."""
        plan = self._divided(asked.drawn(plan) if asked else plan)
        what = asked.question.what if asked else None
        work = self._duty(plan, None)
        if asked and what:
            many = len(self.models)
            known = np.isin(_pairs(plan, many), _pairs(asked.question.rows, many))
            rest = self._duty(plan, what)
            columns = ("training", "down", "up", "numbers")
            pairs = ((getattr(rest, name), getattr(work, name)) for name in columns)
            work = Duty(*(np.where(known, *pair) for pair in pairs))
        return self._job(plan, work, self._local(recalled, plan), self.channel)

    def question(self, rows: Plan, what: str, recalled: Tensors) -> Job:
        """What clients do to answer a question."""
        rows, both = self._divided(rows), (1, self._controls)
        if what == "loss":
            return self._job(rows, duty(self.models, rows, 1 / 3, (1, 0), (0, 0), numbers=1))
        if what == "norm":
            numbers = self.estimator.numbers if speaks(self.estimator, Recalling) else 1
            work = duty(self.models, rows, 1, both, (0, 0), numbers)
            return self._job(rows, work, self._local(recalled, rows))
        work = duty(self.models, rows, 1, both, both, channel=self.channel)
        return self._job(rows, work, self._local(recalled, rows), self.channel)

    def _divided(self, plan: Plan) -> Plan:
        return plan if self.held is None else self.held.divide(plan)

    def _job(
        self, plan: Plan, work: Duty, local: Local | None = None, channel: Channel | None = None
    ) -> Job:
        job = Job(self.now, self.models, plan, work, local or Local(), channel=channel)
        return job if self.held is None else replace(job, units=self.held.units, how=self.held.how)

    def _duty(self, plan: Plan, asked: str | None) -> Duty:
        """What is left to do for rows that were asked this before."""
        controls = self._controls
        training, down, up = {
            None: (1, (1, controls), (1, controls)),
            "loss": (1, (0, controls), (1, controls)),
            "norm": (0, (0, 0), (1, controls)),
            "update": (0, (0, 0), (0, 0)),
        }[asked]
        return duty(self.models, plan, training, down, up, channel=self.channel)

    @property
    def _controls(self) -> int:
        return self.estimator.controls if speaks(self.estimator, Correcting) else 0

    def _local(self, recalled: Tensors, plan: Plan) -> Local:
        if not speaks(self.estimator, Correcting):
            return Local()
        weights = [model.weights for model in self.models]
        return self.estimator.local(recalled, weights, plan)


def probe(
    setting: Setting, sampler: Sampler, memory: State, shares: Array, recalled: Tensors
) -> tuple[State, Tensors, Asked | None]:
    """Ask what the sampler wants to know before it draws.

    Returns the sampler's state with the answers in it, the estimator's state, which may learn from
    the answers too, and what was asked of clients, which the run pays for.
    """
    if not speaks(sampler, Asking):
        return memory, recalled, None
    estimator, first = setting.estimator, recalled
    question = sampler.ask(memory, shares, rng.generator(rng.key(setting.seed, "ask", setting.now)))
    rows, what = question.rows, question.what
    answers = Seen.nothing(len(rows), pace=setting.pace[rows.model])
    if what == "expected":
        if not speaks(estimator, Expecting):
            raise BadInput(
                f"the sampler asks which norms the estimator expects, and "
                f"{type(estimator).__name__} cannot tell: use the estimator stale-vre"
            )
        answers.norm, answers.reason = estimator.expected(recalled, rows), [""] * len(rows)
        return sampler.hear(memory, rows, answers.only(sees(sampler))), recalled, None
    job = setting.question(rows, what, recalled)
    if what == "loss":
        with rng.addressed(rng.key(setting.seed, "losses", setting.now)):
            answers = setting.engine.losses(job, question.examples)
        answers.pace = setting.pace[rows.model]
    else:
        watcher: Watching | None = sampler if speaks(sampler, Watching) else None
        watched = watcher.watch(memory, job) if watcher else None
        for reply in setting.engine.train(job):
            chunk = admit(reply, job, answers)
            if chunk is None:
                continue
            norm = None
            if speaks(estimator, Recalling):
                norm, recalled = estimator.residual(recalled, rows, chunk)
            answers.add(chunk, norm)
            if watcher:
                watcher.see(watched, job, chunk)
        if watcher:
            memory = watcher.learn(memory, watched)
    factor = _factor(rows, answers, len(setting.models)) if _unbiased(sampler) else None
    if factor is not None and speaks(estimator, Fitting):
        recalled = estimator.stand_in(first, recalled, factor)
    heard = sampler.hear(memory, rows, answers.only(sees(sampler)))
    return heard, recalled, Asked(question, answers, factor)


def _unbiased(sampler: object) -> bool:
    return bool(getattr(sampler, "unbiased", False))


def _pairs(plan: Plan, models: int) -> Array:
    return plan.client * models + plan.model


def _factor(rows: Plan, answers: Seen, models: int) -> Array | None:
    """How many clients each one that answered stands for, per model; None: all answered."""
    ok = answers.ok
    if ok.all():
        return None
    asked, came = (np.bincount(rows.model[some], minlength=models) for some in (ok | True, ok))
    return np.asarray(asked / np.maximum(came, 1))


def whole_times(plan: Plan, seen: Seen, asked: Asked | None, models: int) -> Seen:
    """What the server saw, with the seconds of rows that had trained when they were asked."""
    if asked is None or asked.question.what == "loss" or not len(asked.question.rows):
        return seen
    mine, theirs = _pairs(plan, models), _pairs(asked.question.rows, models)
    order = np.argsort(theirs)
    place = order[np.searchsorted(theirs, mine, sorter=order).clip(max=len(theirs) - 1)]
    before = np.where(theirs[place] == mine, asked.answers.seconds[place], 0.0)
    seconds = seen.seconds + np.nan_to_num(before)
    return replace(seen, costs=replace(seen.costs, seconds=seconds))


def price(plan: Plan, seen: Seen, asked: Asked | None) -> Cost:
    """The sum of what rows report: the plan's, and those that were asked before."""
    then = cost(plan, seen)
    if asked is None:
        return then
    first = cost(asked.question.rows, asked.answers)
    return Cost(*map(operator.add, first, then))


def cost(plan: Plan, seen: Seen) -> Cost:
    """The sum of what rows report."""
    seconds, computing = (
        np.where(np.isnan(each), 0.0, each) for each in (seen.seconds, seen.costs.computing)
    )
    return Cost(
        float(np.bincount(plan.client, seconds).max(initial=0.0)),
        float(computing.sum()),
        int(seen.costs.up.sum()),
        int(seen.costs.down.sum()),
    )
