"""Which model: samplers that spend one budget over all pairs (model, client), within what each client can do (S0, multi-model FL)."""

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
    """What the samplers over pairs share. `budget` (S0's m) is the expected number of draws in a round, over all models and clients.

    `processors` is how many models a client can train in a round: one number, one for each client, or "mixed" (S0's quarter of 1, half of
    half its models, quarter of all). By default each processor draws by itself, and two of a client's may draw one model; with
    `distinct` they draw different ones. `uploads` bounds the updates that a client sends in a round, on average: one number, or one
    for each client.
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
            if (
                caps.dtype.kind not in "iuf"
                or caps.shape not in ((), owned.shape)
                or not (caps > 0).all()
            ):
                raise BadInput(
                    f"sampler.uploads must be above 0, one number or one for each of the {len(owned)} clients"
                )
            most = np.minimum(most, caps)
        able = float((np.minimum(most, owned) if self.distinct else most * (owned > 0)).sum())
        if not 0 < self.budget <= able * (1 + 1e-9):
            help = f"give above 0, up to {able:g}" + (
                "" if self.uploads is None else ", or set sampler.uploads higher"
            )
            raise BadInput(
                f"sampler.budget is {self.budget:g} draws a round, but clients can do {able:g}: {help}"
            )
        return {"processors": processors, "most": most}

    def best(self, scores: Array, state: State, shares: Array, mix: float = 0.0) -> Array:
        """The rates of least variance for these scores (S0 eq. 5), with a part `mix` of even ones, which keeps all pairs' above 0."""
        rates = self._best(scores, state, shares)
        if mix == 0:
            return rates
        processors, most = state["processors"], state["most"]
        even = assign.even(processors, self.budget, shares)
        if (
            self.distinct or self.uploads is not None
        ):  # even as far as the bounds allow: a client's own models are alike
            even = assign.by_processor(
                even,
                np.minimum(most, (shares > 0).sum(axis=0)) if self.distinct else most,
                self.budget,
                shares,
            )
        return np.asarray((1 - mix) * rates + mix * even)

    def _best(self, scores: Array, state: State, shares: Array) -> Array:
        return (assign.distinct if self.distinct else assign.by_processor)(
            scores, state["most"], self.budget, shares
        )

    def rates(self, state: State, shares: Array) -> Array:
        """How often each pair is drawn, on average; the sum is the budget."""
        raise NotImplementedError

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        rates = self.rates(state, shares)
        return (assign.draw_distinct if self.distinct else assign.draw_processors)(
            rates, state["processors"], shares, generator
        )

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state


def check_mix(mix: float) -> None:
    """The part of a budget that is spread evenly."""
    if not 0 < mix <= 1:
        raise BadInput(f"sampler.mix is {mix:g}: it must be above 0 and at most 1")


def norms(seen: Seen, per_rate: bool = True) -> Array:
    """The norms |update| / learning rate, in parts of the largest rate; NaN for rows that failed."""
    return np.asarray(np.minimum(seen.norm, HUGE) / (seen.pace if per_rate else 1.0))


@dataclass(frozen=True)
class Gvr(Assigning):
    """MMFL-GVR: the probabilities of least variance, from the norms of this round's updates of all clients on all models (S0 eq. 5).

    scores = share * |update| / learning rate: without the division (`per_rate` = false) models with a high learning rate would take
    the budget. With the estimator fedvarp it is MMFL-GVR*, with stale-vr StaleVR: the norms are then those of the differences. With one
    model it is `optimal`, number for number.
    """

    per_rate: bool = True

    needs: ClassVar[str] = "norms of all"
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
    """MMFL-LVR: MMFL-GVR with the loss of the current model on the client's data in the place of the norm, so that only the drawn train.

    scores = share * loss, or the loss alone (`by_share` = false, as S0's published code has it). `mix` of the budget is spread evenly: a
    client whose loss is 0 may still have an update.
    """

    by_share: bool = True
    mix: float = 0.01

    needs: ClassVar[str] = "losses of all"
    costs: ClassVar[str] = "every client evaluates every model"

    def init(self, shares: Array, rounds: int) -> State:
        check_mix(self.mix)
        return {**super().init(shares, rounds), "loss": np.full(shares.shape, np.nan)}

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(shares), "loss")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {**state, "loss": matrix(state["loss"].shape, plan, np.clip(seen.loss, 0.0, HUGE))}

    def rates(self, state: State, shares: Array) -> Array:
        return self.best(
            np.nan_to_num(state["loss"]) * (shares if self.by_share else shares > 0),
            state,
            shares,
            self.mix,
        )


@dataclass(frozen=True)
class Vre(Assigning):
    """StaleVRE's sampler: MMFL-GVR with the norms that the estimator stale-vre expects, so that only the drawn train.

    A pair that nothing is known of counts as the mean of those that are known. `mix` of the budget is spread evenly: what is expected to be
    0 may not be.
    """

    mix: float = 0.1

    needs: ClassVar[str] = "what the estimator expects"
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
        scores = shares * np.where(np.isnan(norm), known.mean() if known.any() else 1.0, norm)
        return self.best(scores, state, shares, self.mix)


@dataclass(frozen=True)
class KVibPairs(Assigning):
    """MMFL-KVib: K-Vib (S1) over pairs (model, client). It learns from the drawn alone, so that no client does anything for it.

    K-Vib follows the regularised leader of sum_t sum pi_t^2 / p, whose terms are now pairs, pi_t(s, i) = share |update| / learning rate,
    and whose p lie in S0's polytope (a processor draws at most one model) in place of S1's (a client is drawn at most once). The
    leader's problem, min over p of sum (omega + gamma) / p, is the one that eq. 5 solves, with scores sqrt(omega + gamma). omega
    estimates the sum of pi^2 without bias: for the drawn omega += pi^2 / the chance that any of the client's processors draws the model.
    Eq. 9's mixture with even draws stays in the polytope, which is convex, and bounds that. theta is (pairs / (T budget))^(1/3) unless
    given, gamma sum of omega / (t budget) after t rounds, as in KVib, which this is number for number where there is one model.
    """

    theta: float | None = None
    gamma: float | None = None
    per_rate: bool = True

    needs: ClassVar[str] = "norms of the drawn"
    costs: ClassVar[str] = "a number a pair on the server"

    def init(self, shares: Array, rounds: int) -> State:
        clients = super().init(shares, rounds)
        usual = np.minimum(
            1.0, np.cbrt(np.array([np.count_nonzero(shares)]) / (rounds * self.budget))
        )
        return {
            **clients,
            **leader.begin(shares.reshape(1, -1), self.budget, usual, self.theta, self.gamma, None),
        }

    def rates(self, state: State, shares: Array) -> Array:
        scores = np.sqrt(leader.sums(state)).reshape(shares.shape) * (shares > 0)
        return self.best(scores, state, shares, float(state["theta"][0]))

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, norms(seen, self.per_rate))
        pairs = back._replace(
            model=np.zeros_like(back.model), client=back.model * shares.shape[1] + back.client
        )
        return leader.learn(state, pairs, back.score**2 / plan.probability[back.row], self.budget)
