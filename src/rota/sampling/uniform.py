"""Uniform sampling and full participation: the samplers that learn nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Seen, State
from rota.sampling import draw


@dataclass(frozen=True)
class Uniform:
    """Uniform: all clients are equally likely, and `budget` of them train; FedAvg's sampler.

    `budget` is S0's m = C * N. `procedure`: "fixed" draws exactly `budget` clients without
    replacement, "independent" tosses a coin for each client, "multinomial" draws with replacement,
    and "sequential" draws without replacement, with the ordered estimator's weights. With several
    models, each draws its own cohort among the clients that have data for it.
    """

    budget: float = 10
    procedure: draw.Procedure = "fixed"

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset()
    costs: ClassVar[str] = "nothing"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        return {}

    def rates(self, state: State, shares: Array) -> Array:
        rates = self.budget * draw.uniform(shares)
        return np.minimum(1.0, rates) if self.procedure == "independent" else rates

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.by(self.procedure, self.rates(state, shares), shares, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state


@dataclass(frozen=True)
class Full:
    """Full participation: every client trains every model that it has data for.

    This is what the unbiased samplers estimate.
    """

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset()
    costs: ClassVar[str] = "every client trains"

    def init(self, shares: Array, rounds: int) -> State:
        return {}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.everybody(shares)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state
