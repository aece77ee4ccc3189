"""The oracle: the optimal probabilities, from this round's own update norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Question, Seen, State
from rota.sampling import draw
from rota.sampling.feedback import matrix
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Optimal:
    """Optimal: the smallest variance that independent coins can have (S1 Lemma 3).

    p = waterfill(share * norm, budget) of this round's updates. It is an oracle to compare others
    with: every client trains before the draw.
    """

    budget: float = 10

    procedure: ClassVar[draw.Procedure] = "independent"
    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "norms of all clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "every client trains"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        return {"norm": np.full(shares.shape, np.nan)}

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(shares), "norm")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {"norm": matrix(state["norm"].shape, plan, seen.norm)}

    def rates(self, state: State, shares: Array) -> Array:
        return fill(np.nan_to_num(shares * state["norm"]), self.budget, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.independent(self.rates(state, shares), shares, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state
