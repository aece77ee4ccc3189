"""Which model: samplers that spend one budget over all pairs (model, client) (MMFL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Question, Seen, State
from rota.sampling import assign, draw, leader
from rota.sampling.assign import Processors, count
from rota.sampling.feedback import HUGE, feedback, matrix


@dataclass(frozen=True)
class Assigning:
    """What the samplers over pairs share.

    `budget` (MMFL's m) is the expected number of draws per round, over all models and clients.
    `processors` is the number of models that a client can train in a round: one number, one per
    client, or "mixed" (in MMFL a quarter of the clients can train 1 model, half of them half of
    their models, and a quarter all). By default each processor draws a model by itself, so two
    processors of a client may draw the same model; with `distinct` they draw different models.
    `uploads` bounds the mean number of updates that a client sends per round: one number, or one
    per client.
    """

    budget: float = 12
    processors: Processors = 1
    distinct: bool = False
    uploads: float | tuple[float, ...] | None = None

    unbiased: ClassVar[bool] = True

    def init(self, shares: Array, rounds: int) -> State:
        processors, owned = count(self.processors, shares), (shares > 0).sum(axis=0)
        most = processors.astype(np.float64)
        if self.uploads is not None:
            caps = np.asarray(self.uploads)
            shaped = caps.dtype.kind in "iuf" and caps.shape in ((), owned.shape)
            if not shaped or not (caps > 0).all():
                raise BadInput(
                    "sampler.uploads must be above 0: give one number, or one for each of the "
                    f"{len(owned)} clients"
                )
            most = np.minimum(most, caps)
        able = float((np.minimum(most, owned) if self.distinct else most * (owned > 0)).sum())
        if not 0 < self.budget <= able * (1 + 1e-9):
            raise BadInput(
                f"sampler.budget is {self.budget:g} draws per round, but clients can do {able:g}: "
                f"give a number above 0, up to {able:g}"
                + ("" if self.uploads is None else ", or set sampler.uploads higher")
            )
        return {"processors": processors, "most": most}

    def best(self, scores: Array, state: State, shares: Array, mix: float = 0.0) -> Array:
        """The rates of least variance (eq. 5); a part `mix` of the budget is spread evenly."""
        processors, most = state["processors"], state["most"]
        best = assign.distinct if self.distinct else assign.by_processor
        rates = best(scores, most, self.budget, shares)
        if mix == 0:
            return rates
        even = assign.even(processors, self.budget, shares)
        if self.distinct or self.uploads is not None:
            # as even as the bounds allow: a client's models still have equal rates
            if self.distinct:
                most = np.minimum(most, (shares > 0).sum(axis=0))
            even = assign.by_processor(even, most, self.budget, shares)
        return np.asarray((1 - mix) * rates + mix * even)

    def rates(self, state: State, shares: Array) -> Array:
        """The expected number of draws of each pair; the sum is the budget."""
        raise NotImplementedError

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        rates = self.rates(state, shares)
        drawn = assign.draw_distinct if self.distinct else assign.draw_processors
        return drawn(rates, state["processors"], shares, generator)


def check_mix(mix: float) -> None:
    """Refuse a part of the budget, to be spread evenly, that is not above 0 and at most 1."""
    if not 0 < mix <= 1:
        raise BadInput(f"sampler.mix is {mix:g}: it must be above 0 and at most 1")


def norms(seen: Seen, per_rate: bool = True) -> Array:
    """|update| / learning rate, in units of the largest rate; NaN for rows that failed."""
    return np.asarray(np.minimum(seen.norm, HUGE) / (seen.pace if per_rate else 1.0))


@dataclass(frozen=True)
class Gvr(Assigning):
    """MMFL-GVR: the rates of least variance, from this round's norms of all pairs (MMFL, eq. 5).

    scores = share * |update| / learning rate. Without the division (`per_rate` = false), models
    with a high learning rate would take the budget. With the estimator fedvarp this is MMFL-GVR*,
    and with stale-vr it is StaleVR; the norms are then those of the differences. With one model it
    equals `optimal`, number for number.
    """

    per_rate: bool = True

    needs: ClassVar[str] = "norms of all clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "every client trains every model"

    def init(self, shares: Array, rounds: int) -> State:
        return {**super().init(shares, rounds), "norm": np.full(shares.shape, np.nan)}

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(shares), "norm")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {**state, "norm": matrix(state["norm"].shape, plan, norms(seen, self.per_rate))}

    def rates(self, state: State, shares: Array) -> Array:
        return self.best(np.nan_to_num(shares * state["norm"]), state, shares)


@dataclass(frozen=True)
class Lvr(Assigning):
    """MMFL-LVR: MMFL-GVR with losses instead of norms, so that only drawn clients train.

    scores = share * loss of the current model on the client's data, or the loss alone (`by_share` =
    false, as in MMFL's published code). A part `mix` of the budget is spread evenly, because a
    client whose loss is 0 may still have an update.
    """

    by_share: bool = True
    mix: float = 0.01

    needs: ClassVar[str] = "losses of all clients"
    sees: ClassVar[frozenset[str]] = frozenset({"loss"})
    costs: ClassVar[str] = "every client evaluates every model"

    def init(self, shares: Array, rounds: int) -> State:
        check_mix(self.mix)
        return {**super().init(shares, rounds), "loss": np.full(shares.shape, np.nan)}

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(shares), "loss")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {**state, "loss": matrix(state["loss"].shape, plan, np.clip(seen.loss, 0.0, HUGE))}

    def rates(self, state: State, shares: Array) -> Array:
        weight = shares if self.by_share else shares > 0
        return self.best(np.nan_to_num(state["loss"]) * weight, state, shares, self.mix)


@dataclass(frozen=True)
class Vre(Assigning):
    """StaleVRE's sampler: MMFL-GVR with the norms that the estimator stale-vre expects.

    So only drawn clients train. A pair of which nothing is known counts as the mean of the known
    pairs. A part `mix` of the budget is spread evenly, because a norm that is expected to be 0 may
    be larger.
    """

    mix: float = 0.1

    needs: ClassVar[str] = "norms that the estimator expects"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "nothing"

    def init(self, shares: Array, rounds: int) -> State:
        check_mix(self.mix)
        return {**super().init(shares, rounds), "norm": np.full(shares.shape, np.nan)}

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(shares), "expected")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {**state, "norm": matrix(state["norm"].shape, plan, norms(seen))}

    def rates(self, state: State, shares: Array) -> Array:
        norm = state["norm"]
        known = norm[~np.isnan(norm)]
        guess = known.mean() if known.any() else 1.0
        scores = shares * np.where(np.isnan(norm), guess, norm)
        return self.best(scores, state, shares, self.mix)


@dataclass(frozen=True)
class KVibPairs(Assigning):
    """MMFL-KVib: K-Vib over pairs (model, client), which learns from drawn clients alone.

    K-Vib follows the regularised leader of sum_t sum pi_t^2 / p. Here the terms are pairs, with
    pi_t(s, i) = share |update| / learning rate, and the p lie in MMFL's polytope (a processor draws
    at most one model) instead of K-Vib's (a client is drawn at most once). The leader's problem,
    the minimum over p of sum (omega + gamma) / p, is the one that eq. 5 solves, with the scores
    sqrt(omega + gamma). omega estimates the sum of pi^2 without bias: each drawn pair adds
    pi^2 / the chance that any of the client's processors draws the model. Eq. 9's mixture with even
    draws stays in the polytope, which is convex, and keeps that chance away from 0. theta defaults
    to (pairs / (T budget))^(1/3), and gamma to the sum of omega / (t budget) after t rounds, as in
    KVib. With one model this equals KVib, number for number.
    """

    theta: float | None = None
    gamma: float | None = None
    per_rate: bool = True

    needs: ClassVar[str] = "norms of the drawn clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "one number per pair on the server"

    def init(self, shares: Array, rounds: int) -> State:
        clients = super().init(shares, rounds)
        pairs = np.array([np.count_nonzero(shares)])
        usual = np.minimum(1.0, np.cbrt(pairs / (rounds * self.budget)))
        row = shares.reshape(1, -1)
        return clients | leader.begin(row, self.budget, usual, self.theta, self.gamma, None)

    def rates(self, state: State, shares: Array) -> Array:
        scores = np.sqrt(leader.sums(state)).reshape(shares.shape) * (shares > 0)
        return self.best(scores, state, shares, float(state["theta"][0]))

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, norms(seen, self.per_rate))
        pair = back.model * shares.shape[1] + back.client
        pairs = back._replace(model=np.zeros_like(back.model), client=pair)
        return leader.learn(state, pairs, back.score**2 / plan.probability[back.row], self.budget)
