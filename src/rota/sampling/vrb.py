"""Vrb (Borsos, Krause, Levy 2018): K-Vib's forerunner, which draws with replacement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Seen, State
from rota.sampling import draw, leader
from rota.sampling.feedback import feedback, times


@dataclass(frozen=True)
class Vrb:
    """Vrb: learns from the drawn clients' update norms, and draws with replacement (Borsos et al. 2018).

    q = (1 - theta) sqrt(omega + gamma) / sum + theta / N, `budget` draws a round, and omega_i += pi_i^2 / q_i for each draw.
    Unless given, `theta` is (N / T)^(1/3), T the run's rounds, or 0.3 where N > T (S1 App. F), and `gamma` is G^2 N / theta with a
    `bound` G on pi, or sum of omega / (t budget) after t rounds.
    """

    budget: float = 10
    theta: float | None = None
    gamma: float | None = None
    bound: float | None = None

    procedure: ClassVar[draw.Procedure] = "multinomial"
    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "norms of the drawn"
    costs: ClassVar[str] = "a number a client on the server"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        clients = (shares > 0).sum(axis=1)
        usual = np.where(clients > rounds, 0.3, np.cbrt(clients / rounds))
        return leader.begin(shares, 1, usual, self.theta, self.gamma, self.bound)

    def rates(self, state: State, shares: Array) -> Array:
        return self.budget * draw.mix(
            draw.restrict(np.sqrt(leader.sums(state)), shares), state["theta"], 1.0, shares
        )

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.by(self.procedure, self.rates(state, shares), shares, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back, rates = feedback(shares, plan, seen.norm), self.rates(state, shares)
        q = rates[back.model, back.client] / self.budget
        return leader.learn(
            state, back, times(plan, back, rates, shares) * back.score**2 / q, self.budget
        )
