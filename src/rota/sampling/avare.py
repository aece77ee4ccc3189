"""Avare (El Hanchi, Stephens 2020): sample by the last known norms, above a falling floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen, State
from rota.sampling import draw
from rota.sampling.feedback import feedback
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Avare:
    """Avare: draws by the last known norms, above a falling floor (El Hanchi, Stephens 2020).

    In round t, q minimises sum a_i^2 / q_i subject to sum q = 1 and
    q_i >= (least + (1 - least) / t^decay) / N (S1 Lemma 18), where a_i is share * norm of the
    client's last update. So the first round is uniform. Draws are with replacement. This is our
    reading: S1 App. F has p_min = 1/(5N), C = 1/(1/N - p_min) and delta = 1, and the floor
    p_min + 1/(C t^delta); no code is public. A client without a known norm counts as much as the
    client with the largest a_i.
    """

    budget: float = 10
    least: float = 0.2
    decay: float = 1.0

    procedure: ClassVar[draw.Procedure] = "multinomial"
    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "norms of the drawn clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "one number per client on the server"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        if not 0 < self.least <= 1:
            raise BadInput(f"sampler.least is {self.least:g}: it must be above 0 and at most 1")
        if not self.decay >= 0:
            raise BadInput(f"sampler.decay is {self.decay:g}: it must be at least 0")
        return {"norm": np.full(shares.shape, np.nan), "round": np.ones(1)}

    def rates(self, state: State, shares: Array) -> Array:
        scores = shares * state["norm"]
        known = ~np.isnan(scores)
        largest = np.max(scores, axis=1, keepdims=True, where=known, initial=0.0)
        floor = self.least + (1 - self.least) / state["round"].item() ** self.decay
        guess = np.where(largest > 0, largest, 1.0)
        return self.budget * fill(np.where(known, scores, guess), 1.0, shares, floor)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.by(self.procedure, self.rates(state, shares), shares, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, seen.norm)
        norm = state["norm"].copy()
        norm[back.model, back.client] = seen.norm[back.row]
        return {"norm": norm, "round": state["round"] + 1}
