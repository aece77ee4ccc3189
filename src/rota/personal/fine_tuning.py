"""FedAvg with fine-tuning: each client trains the shared model a little before it uses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from rota.arrays import Array
from rota.errors import BadInput
from rota.personal.home import Home
from rota.plan import Chunk, Job, Local, State, Task
from rota.weights import Weights


@dataclass(frozen=True)
class FineTuning:
    """Fine-tuning: a client trains the shared model on its own data before it uses it.

    It makes `epochs` passes over its examples, and otherwise works as in a round. Nothing is
    remembered: whenever the models are tested, all clients fine-tune the model of their group anew.
    The run does not pay for that, as it does not pay for tests.
    """

    epochs: int = 1

    layers: ClassVar[int] = 0

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.epochs < 1:
            raise BadInput(f"personal.epochs is {self.epochs}: it must be at least 1")

    def work(self, task: Task) -> list[Task]:
        return [replace(task, epochs=self.epochs, steps=None)]

    def init(self, tasks: list[Task], models: list[Weights], shares: Array) -> State:
        return {}

    def train(self, home: Home, job: Job) -> Iterator[Chunk]:
        return home.engine.train(job)

    def own(self, home: Home, job: Job) -> Iterator[tuple[Array, Weights]]:
        for chunk in home.alone(job, 0, Local()):
            start = home.fetched(job, chunk.rows)
            came = torch.from_numpy(chunk.ok)[:, None].to(start.params.device)
            ends = (start.params - chunk.update, chunk.buffers)
            pairs = zip(ends, start, strict=True)
            yield chunk.rows, Weights(*(torch.where(came, *pair) for pair in pairs))
