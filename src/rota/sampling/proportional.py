"""Sampling in proportion to the clients' data.

S1 calls such sampling biased. Only the plain mean (`ProportionalMean`) is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Seen, State
from rota.sampling import draw
from rota.sampling.uniform import Uniform
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Proportional(Uniform):
    """Proportional: clients with more data are drawn more often, and the estimate stays unbiased.

    `procedure`: "multinomial" draws with replacement, q = share, so that all draws count the same
    (Li et al. 2020, scheme I); "independent" tosses coins with p = waterfill(share, budget);
    "sequential" draws without replacement, with the ordered estimator's weights.
    """

    procedure: draw.Weighted = "multinomial"

    def rates(self, state: State, shares: Array) -> Array:
        if self.procedure == "independent":
            return fill(shares, self.budget, shares)
        return self.budget * draw.restrict(shares, shares)


@dataclass(frozen=True)
class ProportionalMean:
    """Proportional without replacement, and a plain mean: common in practice, and biased."""

    budget: float = 10

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset()
    costs: ClassVar[str] = "nothing"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        return {}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.mean(draw.sequential(shares, round(self.budget), shares, generator))

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state
