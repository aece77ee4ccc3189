"""DivFL (Balakrishnan et al. 2022), biased by design: clients that represent all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Question, Seen, State
from rota.sampling import draw, memory


@dataclass(frozen=True)
class DivFl(memory.Comparing):
    """DivFL: the clients whose last updates represent all clients best (Balakrishnan et al. 2022).

    The set S of `budget` clients minimises sum_k min_{i in S} |u_k - u_i| over the last known
    updates u, greedily. A client whose update is not known yet is asked for it before the draw; in
    the first round these are all clients. The chosen clients count by their data, as in the
    official code.
    """

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "updates of all clients once, then of the drawn clients"
    costs: ClassVar[str] = (
        "every client trains once; one update per client and all distances on the server"
    )

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(np.where(state["known"], 0.0, shares)), "update")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return state

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plans = []
        for s, row in enumerate(shares):
            able = np.flatnonzero((row > 0) & state["known"][s])
            distance = memory.distances(state[f"gram.{s}"][np.ix_(able, able)])
            chosen = able[facilities(distance, round(self.budget))]
            model, unknown = np.full(len(chosen), s), np.full(len(chosen), np.nan)
            plans.append(Plan(chosen, model, unknown, row[chosen] / row[chosen].sum()))
        return draw.concatenate(plans)


def facilities(distance: Array, number: int) -> Array:
    """The rows with the smallest sum of distances to the nearest chosen row, chosen greedily."""
    chosen: list[int] = []
    nearest = np.full(len(distance), np.inf)
    for _ in range(min(number, len(distance))):
        left = np.minimum(nearest, distance).sum(axis=1)
        left[chosen] = np.inf
        chosen.append(int(left.argmin()))
        nearest = np.minimum(nearest, distance[chosen[-1]])
    return np.array(chosen, np.int64)
