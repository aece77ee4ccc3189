"""Sampling by this round's own update norms: the oracle, and optimal client sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Question, Seen, State
from rota.sampling import draw
from rota.sampling.cohort import Cohort
from rota.sampling.feedback import matrix
from rota.sampling.waterfill import LARGEST, fill


@dataclass(frozen=True)
class Optimal(Cohort):
    """Optimal: the smallest variance that independent coins can have (K-Vib, Lemma 3).

    p = waterfill(share * norm, budget) of this round's updates. It is an oracle to compare others
    with: every client trains before the draw.
    """

    procedure: ClassVar[draw.Procedure] = "independent"
    needs: ClassVar[str] = "norms of all clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "every client trains"

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        return {"norm": np.full(shares.shape, np.nan)}

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(shares), "norm")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {"norm": matrix(state["norm"].shape, plan, seen.norm)}

    def rates(self, state: State, shares: Array) -> Array:
        return fill(np.nan_to_num(shares * state["norm"]), self.budget, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.independent(self.rates(state, shares), shares, generator)


@dataclass(frozen=True)
class Ocs(Optimal):
    """OCS: a uniform cohort trains, and its norms decide who uploads (Chen et al. 2020).

    Each client of the cohort reports its norm and uploads by an independent coin, with
    p = waterfill(share * norm, budget) inside the cohort. The weights are share / p, times N over
    the size of the cohort, so that the estimate is unbiased for full participation. (The paper
    weighs by examples within the cohort, as the estimator `fedavg` does.)
    """

    budget: float = 3
    cohort: int = 32

    needs: ClassVar[str] = "norms of some clients"
    costs: ClassVar[str] = "a cohort trains, and a part of it uploads"

    def init(self, shares: Array, rounds: int) -> State:
        state = super().init(shares, rounds)
        if self.cohort < self.budget:
            raise BadInput(
                f"sampler.cohort is {self.cohort}: it must be at least sampler.budget, "
                f"{self.budget:g}, because the budget is drawn from the cohort"
            )
        return state

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.fixed(self.cohort, shares, generator), "norm")

    def rates(self, state: State, shares: Array) -> Array:
        """Probabilities inside the cohort, 0 outside."""
        scores = np.nan_to_num(shares * state["norm"])
        return self._probabilities(scores, np.where(np.isnan(state["norm"]), 0.0, shares))

    def _probabilities(self, scores: Array, shares: Array) -> Array:
        return fill(scores, self.budget, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        clients = (shares > 0).sum(axis=1)
        chance = np.minimum(1.0, self.cohort / np.maximum(clients, 1))  # to be in the cohort
        plan = draw.independent(self.rates(state, shares), shares / chance[:, None], generator)
        return replace(plan, probability=plan.probability * chance[plan.model])


@dataclass(frozen=True)
class Aocs(Ocs):
    """AOCS: approximate OCS, which needs only sums over the cohort and no client's own norm.

    p = min(1, budget u / sum u) with u = share * norm; then up to `steps` times p <- min(1, C p)
    with C = (budget - n + I) / P, where I and P are the number and the sum of the p below 1, until
    C <= 1. A few steps reach OCS.
    """

    steps: int = 4

    needs: ClassVar[str] = "norms of some clients, as sums"

    def _probabilities(self, scores: Array, shares: Array) -> Array:
        out = np.zeros(shares.shape)
        for model, asked in enumerate(shares > 0):
            out[model, asked] = approximate(scores[model, asked], self.budget, self.steps)
        return out


def approximate(scores: Array, budget: float, steps: int) -> Array:
    """AOCS's probabilities (Algorithm 2); if all scores are 0, clients share the budget equally."""
    if len(scores) <= budget or not scores.any():
        return np.full(len(scores), min(1.0, budget / max(len(scores), 1)))
    parts = scores / scores.max()
    p = np.minimum(1.0, budget * parts / parts.sum())
    for _ in range(steps):
        below = p < 1
        rest, left = p[below].sum(), budget - np.count_nonzero(~below)
        if left <= rest or rest <= 0:
            break
        with np.errstate(over="ignore"):
            # left / rest overflows if the scores below 1 are negligible next to the largest
            p = np.minimum(1.0, left / rest * p if rest > left / LARGEST else left * (p / rest))
    return np.asarray(p)
