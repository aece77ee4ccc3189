"""Ditto (Li et al. 2021): a personal model beside the shared one, and not far from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from rota.arrays import Array
from rota.errors import BadInput
from rota.estimate.memory import Place
from rota.personal.home import Home, filled
from rota.plan import Chunk, Job, Local, State, Task
from rota.weights import Weights


@dataclass(frozen=True)
class Ditto:
    """Ditto: a drawn client also trains a personal model, which is pulled to the shared one.

    Its personal model v_i minimises F_i(v_i) + strength / 2 ||v_i - w||^2 (Li et al. 2021, eq. 2;
    their lambda), where w is the shared model that it fetched. It begins where the run began, and
    makes `epochs` passes over the client's examples (by default the local work of a round). So a
    drawn client trains twice. The shared model is trained as without it. `memory` is where the
    personal models are kept: on the device, in main memory ("cpu"), or in a file ("disk").
    """

    strength: float = 1.0
    epochs: int | None = None
    memory: Place = "device"

    layers: ClassVar[int] = 0

    def check(self) -> None:
        """Refuse options that make no sense."""
        if not self.strength >= 0:
            raise BadInput(f"personal.strength is {self.strength:g}: it must be at least 0")
        if self.epochs is not None and self.epochs < 1:
            raise BadInput(f"personal.epochs is {self.epochs}: it must be at least 1")

    def work(self, task: Task) -> list[Task]:
        own = replace(task, prox=self.strength)
        return [own if self.epochs is None else replace(own, epochs=self.epochs, steps=None)]

    def init(self, tasks: list[Task], models: list[Weights], shares: Array) -> State:
        return filled([torch.cat(model) for model in models], shares, self.memory)

    def train(self, home: Home, job: Job) -> Iterator[Chunk]:
        local = Local(
            start=lambda rows: self._read(home, job, rows),
            anchor=lambda rows: home.fetched(job, rows).params,
        )
        for chunk in home.alone(job, 0, local):
            params = self._read(home, job, chunk.rows).params - chunk.update
            home.keep(job, chunk, torch.cat([params, chunk.buffers], dim=1))
        yield from map(home.paid, home.engine.train(job))

    def own(self, home: Home, job: Job) -> Iterator[tuple[Array, Weights]]:
        rows = np.arange(len(job.plan))
        yield rows, self._read(home, job, rows)

    def _read(self, home: Home, job: Job, rows: Array) -> Weights:
        """The personal models of the rows' clients."""
        params = len(job.models[int(job.plan.model[rows[0]])].params)
        kept = home.read(job, rows)
        return Weights(kept[:, :params], kept[:, params:])
