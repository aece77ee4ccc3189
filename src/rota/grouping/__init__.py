"""With whom a client learns: groupings give the clients of a task to several models."""

from __future__ import annotations

from typing import Protocol

from rota.arrays import Array
from rota.grouping.cfl import Cfl
from rota.grouping.ifca import Ifca
from rota.grouping.occasion import Groups, Occasion
from rota.grouping.pacfl import Pacfl
from rota.grouping.selective import Selective
from rota.grouping.simple import Local, One
from rota.plan import State

__all__ = [
    "GROUPINGS",
    "Cfl",
    "Grouping",
    "Groups",
    "Ifca",
    "Local",
    "Occasion",
    "One",
    "Pacfl",
    "Selective",
]


class Grouping(Protocol):
    """Decides which clients share a model. A value: what it learns is in the state."""

    def init(self, shares: Array) -> State:
        """The state before the first round; `shares` is d[t, i], client i's share of task t."""

    def regroup(self, state: State, at: Occasion) -> tuple[Groups | None, State]:
        """The groups of round `at.now`, or None if they stay as they are; and the new state."""


GROUPINGS: dict[str, type] = {
    "one": One,
    "selective": Selective,
    "local": Local,
    "ifca": Ifca,
    "cfl": Cfl,
    "pacfl": Pacfl,
}
