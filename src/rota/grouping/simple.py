"""The two extremes: all clients of a task in one group, and every client alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota.arrays import Array
from rota.grouping.occasion import Groups, Occasion
from rota.plan import State


@dataclass(frozen=True)
class One:
    """One group: all clients of a task share one model, as in FedAvg."""

    def init(self, shares: Array) -> State:
        return {}

    def regroup(self, state: State, at: Occasion) -> tuple[Groups | None, State]:
        return None, state


@dataclass(frozen=True)
class Local:
    """Every client alone: each trains a model on its own data, and nothing is shared.

    Choose a sampler and a budget that let every client train: with `full` each one does in every
    round.
    """

    def init(self, shares: Array) -> State:
        return {}

    def regroup(self, state: State, at: Occasion) -> tuple[Groups | None, State]:
        if at.now > 1:
            return None, state
        has = at.shares > 0
        return Groups(np.where(has, np.cumsum(has, axis=1) - 1, -1)), state
