"""K-Vib: follow the regularised leader over scores, and toss one coin per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Question, Seen, State
from rota.sampling import draw, leader
from rota.sampling.bandits import Bandit
from rota.sampling.feedback import feedback, matrix
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class KVib(Bandit):
    """K-Vib: learns from the update norms of drawn clients, and stays unbiased (Algorithm 2).

    With pi_t(i) = share_i |g_i|, the server keeps omega_i, an unbiased estimate of the sum of
    pi_t(i)^2 so far, and draws with

        p  = waterfill(sqrt(omega + gamma), budget)            Lemma 7, the minimiser of eq. 8
        p~ = (1 - theta) p + theta budget / N                  eq. 9
        omega_i += pi_t(i)^2 / p~_i    for the drawn

    `theta` defaults to (N / (T budget))^(1/3), where T is the run's number of rounds (Theorem 8).
    `gamma` is how much scores must differ before p does. It defaults to G^2 N / (theta budget)
    (Theorem 8) if `bound` gives G, a bound on pi. Without `bound` it defaults to the sum of
    omega / (t budget) after t rounds: omega's own estimate of the mean pi^2 replaces G^2, and theta
    is left out, so the scale of the updates need not be known. `linear` leaves the square root out,
    as K-Vib's published code does.
    """

    theta: float | None = None
    gamma: float | None = None
    bound: float | None = None
    linear: bool = False

    procedure: draw.Weighted = "independent"

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        usual = np.minimum(1.0, np.cbrt((shares > 0).sum(axis=1) / (rounds * self.budget)))
        return leader.begin(shares, self.budget, usual, self.theta, self.gamma, self.bound)

    def rates(self, state: State, shares: Array) -> Array:
        """p~ (eq. 9)."""
        return self.mixed(self._scores(state), state["theta"], shares)

    def _scores(self, state: State) -> Array:
        """sqrt(omega + gamma) (Lemma 7)."""
        scores = leader.sums(state)
        return scores if self.linear else np.sqrt(scores)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, seen.norm)
        coins = self.procedure in draw.CHANCES
        square = back.score**2 / plan.probability[back.row] if coins else back.square
        return leader.learn(state, back, square, self.budget)


@dataclass(frozen=True)
class KVibFull(KVib):
    """K-Vib with full feedback: the server knows every client's norm after each round.

    omega_i += pi_t(i)^2 for all clients, and p = waterfill(sqrt(omega + gamma), budget) from the
    rounds before (eq. 8). Nothing is estimated and nothing is mixed in. This is the best that
    K-Vib could do, because all clients train in every round.
    """

    needs: ClassVar[str] = "norms of all clients"
    costs: ClassVar[str] = "every client trains"

    def init(self, shares: Array, rounds: int) -> State:
        if self.theta is not None and self.bound is None:
            raise BadInput(
                "sampler.theta only scales sampler.bound in kvib-full, and sampler.bound is not "
                "given: leave sampler.theta out, or give sampler.bound"
            )
        return {**super().init(shares, rounds), "norm": np.full(shares.shape, np.nan)}

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(shares), "norm")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {**state, "norm": matrix(state["norm"].shape, plan, seen.norm)}

    def rates(self, state: State, shares: Array) -> Array:
        return fill(self._scores(state), self.budget, shares)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        everybody = draw.everybody(shares)
        back = feedback(shares, everybody, state["norm"][everybody.model, everybody.client])
        return leader.learn(state, back, back.square, self.budget)
