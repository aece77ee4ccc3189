"""No personal models: clients use the model of their group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rota.arrays import Array
from rota.plan import Chunk, Job, State, Task
from rota.weights import Weights

if TYPE_CHECKING:
    from rota.personal.home import Home


@dataclass(frozen=True)
class Nothing:
    """Nothing personal: clients use the model of their group."""

    layers: ClassVar[int] = 0

    def work(self, task: Task) -> list[Task]:
        return []

    def init(self, tasks: list[Task], models: list[Weights], shares: Array) -> State:
        return {}

    def train(self, home: Home, job: Job) -> Iterator[Chunk]:
        return home.engine.train(job)

    def own(self, home: Home, job: Job) -> Iterator[tuple[Array, Weights]]:
        return iter(())
