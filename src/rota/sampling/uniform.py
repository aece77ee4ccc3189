"""Samplers that learn nothing: uniform, in proportion to the clients' data, and everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, State
from rota.sampling import draw
from rota.sampling.cohort import Cohort
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Uniform(Cohort):
    """Uniform: all clients are equally likely, and `budget` of them train; FedAvg's sampler.

    `budget` is FedAvg's m = C * N. `procedure`: "fixed" draws exactly `budget` clients without
    replacement, "independent" tosses a coin for each client, "multinomial" draws with replacement,
    "sequential" draws without replacement, with the ordered estimator's weights, and "systematic"
    is as "fixed". With several models, each draws its own cohort among the clients that have data.
    """

    procedure: draw.Procedure = "fixed"

    def rates(self, state: State, shares: Array) -> Array:
        rates = self.budget * draw.uniform(shares)
        return np.minimum(1.0, rates) if self.procedure in draw.CHANCES else rates

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.by(self.procedure, self.rates(state, shares), shares, generator)


@dataclass(frozen=True)
class Proportional(Uniform):
    """Proportional: clients with more data are drawn more often, and the estimate stays unbiased.

    `procedure`: "multinomial" draws with replacement, q = share, so that all draws count the same
    (Li et al. 2020, scheme I); "independent" tosses coins with p = waterfill(share, budget), and
    "systematic" draws a fixed number by these p; "sequential" draws without replacement, with the
    ordered estimator's weights.
    """

    procedure: draw.Weighted = "multinomial"

    def rates(self, state: State, shares: Array) -> Array:
        if self.procedure in draw.CHANCES:
            return fill(shares, self.budget, shares)
        return self.budget * draw.restrict(shares, shares)


@dataclass(frozen=True)
class ProportionalMean(Cohort):
    """Proportional without replacement, and a plain mean: common in practice, and biased."""

    unbiased: ClassVar[bool] = False

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.mean(draw.sequential(shares, round(self.budget), shares, generator))


@dataclass(frozen=True)
class Full:
    """Full participation: every client trains every model that it has data for."""

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset()
    costs: ClassVar[str] = "every client trains"

    def init(self, shares: Array, rounds: int) -> State:
        return {}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.everybody(shares)
