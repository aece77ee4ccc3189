"""DivFL (Balakrishnan et al. 2022): clients whose updates together stand for everybody's. Biased by design."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Question, Seen, State
from rota.sampling import draw, memory


@dataclass(frozen=True)
class DivFl:
    """DivFL: the `budget` clients whose last updates are nearest to everybody's, chosen greedily (Balakrishnan et al. 2022).

    Greedy minimisation of sum_k min_{i in S} |u_k - u_i| over the last known updates u. Whoever's update is not known yet (in the
    first round: everybody's) is asked for it before the draw. The chosen count by their data, as in the official code.
    """

    budget: float = 10

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "updates of all, then of the drawn"
    updates: ClassVar[bool] = True
    costs: ClassVar[str] = (
        "every client trains once; an update a client and all distances on the server"
    )

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        return memory.begin(shares)

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(np.where(state["known"], 0.0, shares)), "update")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return memory.remember(state, plan, seen)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plans = []
        for s, row in enumerate(shares):
            able = np.flatnonzero((row > 0) & state["known"][s])
            chosen = able[
                facilities(
                    memory.distances(state[f"gram.{s}"][np.ix_(able, able)]), round(self.budget)
                )
            ]
            weight = row[chosen] / row[chosen].sum()
            plans.append(
                Plan(chosen, np.full(len(chosen), s), np.full(len(chosen), np.nan), weight)
            )
        return draw.concatenate(plans)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return memory.remember(state, plan, seen)


def facilities(distance: Array, number: int) -> Array:
    """Greedily, one after the other, the rows that leave the smallest sum of distances to the nearest one chosen."""
    chosen: list[int] = []
    nearest = np.full(len(distance), np.inf)
    for _ in range(min(number, len(distance))):
        left = np.minimum(nearest, distance).sum(axis=1)
        left[chosen] = np.inf
        chosen.append(int(left.argmin()))
        nearest = np.minimum(nearest, distance[chosen[-1]])
    return np.array(chosen, np.int64)
