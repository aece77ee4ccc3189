"""Who trains: samplers. A new one is one file with a frozen dataclass, and one line in SAMPLERS."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rota.data.federation import Array
from rota.plan import Plan, Seen, State
from rota.sampling.uniform import Full, Uniform

__all__ = ["SAMPLERS", "Full", "Sampler", "Uniform"]


class Sampler(Protocol):
    """Decides which pairs (model, client) train. A value: all that it learns is in the state it takes and returns.

    `shares` is d[s, i], client i's share of model s's data.
    """

    def init(self, shares: Array) -> State:
        """The state before the first round; raises BadInput where the sampler cannot serve these clients."""

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        """This round's plan."""

    def observe(self, state: State, plan: Plan, seen: Seen) -> State:
        """The state after the round, from what the server saw of each row."""


SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform, "full": Full}
