"""What clients learn for themselves: personal models and heads beside the shared model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from rota.personal.ditto import Ditto
from rota.personal.fedper import FedPer
from rota.personal.fedrep import FedRep
from rota.personal.fine_tuning import FineTuning
from rota.personal.nothing import Nothing
from rota.plan import Chunk, Job, State, Task
from rota.weights import Weights

if TYPE_CHECKING:
    from rota.personal.home import Home
    from rota.policies import Opening

__all__ = [
    "PERSONALS",
    "Ditto",
    "FedPer",
    "FedRep",
    "FineTuning",
    "Nothing",
    "Personal",
    "begin_personal",
]


class Personal(Protocol):
    """What a client trains and keeps beside its part in the round. A value: `home` has the state.

    `layers` is how many of the last layers stay at home. They are no part of what is shared.
    """

    @property
    def layers(self) -> int: ...

    def work(self, task: Task) -> list[Task]:
        """What clients train for themselves, as further tasks of the engine."""

    def init(self, tasks: list[Task], models: list[Weights], shares: Any) -> State:
        """What each client keeps before the first round."""

    def train(self, home: Home, job: Job) -> Iterator[Chunk]:
        """Train the rows of a round's job; what clients keep goes to `home`."""

    def own(self, home: Home, job: Job) -> Iterator[tuple[Any, Weights]]:
        """The models that clients use, for the rows of a job: (rows, their weights)."""


PERSONALS: dict[str, type] = {
    "none": Nothing,
    "fine-tuning": FineTuning,
    "ditto": Ditto,
    "fedper": FedPer,
    "fedrep": FedRep,
}


def begin_personal(personal: Personal, at: Opening) -> State:
    """The state before the first round. It belongs to tasks and clients, whatever the groups."""
    return personal.init(at.experiment.tasks, [model.weights for model in at.models], at.shares)
