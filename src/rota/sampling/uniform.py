"""Uniform sampling and full participation: the samplers that learn nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rota.data.federation import Array
from rota.plan import Plan, Seen, State
from rota.sampling import draw


@dataclass(frozen=True)
class Uniform:
    """Every client equally likely, `budget` of them a round (S0's m = C * N): FedAvg's sampler.

    `procedure`: "fixed" draws exactly `budget` clients without replacement, "independent" each by its own coin, "multinomial"
    with replacement. Several models: each draws its own cohort among the clients that have data for it.
    """

    budget: float = 10
    procedure: Literal["fixed", "independent", "multinomial"] = "fixed"

    def init(self, shares: Array) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        return {}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:  # noqa: ARG002
        if self.procedure == "fixed":
            return draw.fixed(round(self.budget), shares, generator)
        owns = shares > 0
        uniform = owns / owns.sum(axis=1, keepdims=True)
        if self.procedure == "independent":
            return draw.independent(np.minimum(1.0, self.budget * uniform), shares, generator)
        return draw.multinomial(uniform, round(self.budget), shares, generator)

    def observe(self, state: State, plan: Plan, seen: Seen) -> State:  # noqa: ARG002
        return state


@dataclass(frozen=True)
class Full:
    """Everybody trains every model they have data for: what the unbiased samplers estimate."""

    def init(self, shares: Array) -> State:  # noqa: ARG002
        return {}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:  # noqa: ARG002
        return draw.independent((shares > 0).astype(np.float64), shares, generator)

    def observe(self, state: State, plan: Plan, seen: Seen) -> State:  # noqa: ARG002
        return state
