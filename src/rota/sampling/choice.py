"""Power-of-Choice (Cho et al. 2020), biased by design: candidates with the highest loss train."""

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


@dataclass(frozen=True)
class RpowD(Cohort):
    """rpow-d: of some candidates, those with the highest last known loss train (Cho et al. 2020).

    `candidates` clients are drawn in proportion to their data, without replacement, and `budget` of
    them train. The loss of a client that was never drawn counts as infinite. The estimate is the
    plain mean of the clients that train. With as many candidates as the budget, this is
    `proportional-mean`.
    """

    candidates: int = 20

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "losses of the drawn clients"
    sees: ClassVar[frozenset[str]] = frozenset({"loss"})
    costs: ClassVar[str] = "one number per client on the server"

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        if self.candidates < self.budget:
            raise BadInput(
                f"sampler.candidates is {self.candidates}: it must be at least sampler.budget, "
                f"{self.budget:g}"
            )
        return {"loss": np.full(shares.shape, np.inf)}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return self._highest(state, draw.sequential(shares, self.candidates, shares, generator))

    def _highest(self, state: State, candidates: Plan) -> Plan:
        """The `budget` candidates of each model with the highest loss; of equal ones, the first."""
        order = np.lexsort((-state["loss"][candidates.model, candidates.client], candidates.model))
        model = candidates.model[order]
        rank = np.arange(len(order)) - np.searchsorted(model, model)
        return draw.mean(candidates.of(order[rank < round(self.budget)]))

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        loss = state["loss"].copy()
        loss[plan.model[seen.ok], plan.client[seen.ok]] = seen.loss[seen.ok]
        return {"loss": loss}


@dataclass(frozen=True)
class PowD(RpowD):
    """pow-d: candidates report the model's loss on all their examples, and the highest train."""

    needs: ClassVar[str] = "losses of some clients"
    costs: ClassVar[str] = "the candidates evaluate the model"

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.sequential(shares, self.candidates, shares, generator), "loss")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {"loss": matrix(state["loss"].shape, plan, seen.loss)}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return self._highest(state, draw.everybody(np.where(np.isnan(state["loss"]), 0.0, shares)))


@dataclass(frozen=True)
class CpowD(PowD):
    """cpow-d: pow-d with losses on a few random `examples`, for less work (Cho et al. 2020)."""

    examples: int = 10

    costs: ClassVar[str] = "the candidates evaluate the model on a few examples"

    def init(self, shares: Array, rounds: int) -> State:
        if self.examples < 1:
            raise BadInput(f"sampler.examples is {self.examples}: it must be at least 1")
        return super().init(shares, rounds)

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return replace(super().ask(state, shares, generator), examples=self.examples)
