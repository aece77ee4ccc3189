"""Vrb (Borsos, Krause, Levy 2018): K-Vib's predecessor, which draws with replacement."""

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
    """Vrb: learns from the norms of drawn clients, and draws with replacement (Borsos et al. 2018).

    q = (1 - theta) sqrt(omega + gamma) / sum + theta / N, with `budget` draws per round, and
    omega_i += pi_i^2 / q_i for each draw. `theta` defaults to (N / T)^(1/3), where T is the run's
    number of rounds, or to 0.3 where N > T (S1 App. F). `gamma` defaults to G^2 N / theta if
    `bound` gives G, a bound on pi, and otherwise to the sum of omega / (t budget) after t rounds.
    """

    budget: float = 10
    theta: float | None = None
    gamma: float | None = None
    bound: float | None = None

    procedure: ClassVar[draw.Procedure] = "multinomial"
    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "norms of the drawn clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "one number per client on the server"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        clients = (shares > 0).sum(axis=1)
        usual = np.where(clients > rounds, 0.3, np.cbrt(clients / rounds))
        return leader.begin(shares, 1, usual, self.theta, self.gamma, self.bound)

    def rates(self, state: State, shares: Array) -> Array:
        leading = draw.restrict(np.sqrt(leader.sums(state)), shares)
        return self.budget * draw.mix(leading, state["theta"], 1.0, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.by(self.procedure, self.rates(state, shares), shares, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back, rates = feedback(shares, plan, seen.norm), self.rates(state, shares)
        q = rates[back.model, back.client] / self.budget
        estimate = times(plan, back, rates, shares) * back.score**2 / q
        return leader.learn(state, back, estimate, self.budget)
