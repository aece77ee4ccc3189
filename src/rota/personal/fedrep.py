"""FedRep (Collins et al. 2021): a shared body, and heads that clients train first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.estimate.memory import Place
from rota.personal.fedper import check_layers, head, head_bytes, heads, with_heads
from rota.personal.home import Home
from rota.personal.layers import Only, Part, places
from rota.plan import Chunk, Job, Local, State, Task
from rota.weights import Weights


@dataclass(frozen=True)
class FedRep:
    """FedRep: each client keeps the last layers for itself, and trains them before the body.

    A drawn client fetches the body, and trains its head for `epochs` passes over its examples with
    the body fixed. Then it trains the body with the head fixed, as long as the task says, and sends
    the body's update. The head is the last `layers` layers, as in `fedper`. `memory` is where the
    heads are kept: on the device, in main memory ("cpu"), or in a file ("disk").
    """

    layers: int = 1
    epochs: int = 1
    memory: Place = "device"

    def check(self) -> None:
        """Refuse options that make no sense."""
        check_layers(self.layers)
        if self.epochs < 1:
            raise BadInput(f"personal.epochs is {self.epochs}: it must be at least 1")

    def work(self, task: Task) -> list[Task]:
        first = replace(task, model=Only(task, self.layers, "head"), epochs=self.epochs, steps=None)
        return [first, replace(task, model=Only(task, self.layers, "body"))]

    def init(self, tasks: list[Task], models: list[Weights], shares: Array) -> State:
        state = heads(tasks, models, shares, self.layers, self.memory)
        parts: tuple[Part, ...] = ("head", "body")
        for t, task in enumerate(tasks):
            for part in parts:
                for side, found in places(task, self.layers, part)._asdict().items():
                    state[f"{part}.{t}.{side}"] = found.to(models[t].params.device)
        return state

    def train(self, home: Home, job: Job) -> Iterator[Chunk]:
        new: dict[int, Tensor] = {}
        first = Local(
            start=lambda rows: _part(home, job, rows, "head", with_heads(home, job, rows))
        )
        for chunk in home.alone(job, 0, first):
            trained = home.read(job, chunk.rows) - chunk.update
            fine = home.keep(job, chunk, trained)
            new |= zip(chunk.rows[fine].tolist(), trained[fine], strict=True)

        def start(rows: Array) -> Weights:
            begin = with_heads(home, job, rows)
            for place, row in enumerate(rows.tolist()):
                if row in new:
                    begin.params[place, head(home, job, rows)] = new[row]
            return _part(home, job, rows, "body", begin)

        for chunk in home.engine.train(self._body(home, job, start)):
            yield home.paid(_whole(home, job, chunk))

    def _body(self, home: Home, job: Job, start: Callable[[Array], Weights]) -> Job:
        """The job in which the body trains."""

        def cut(vector: Callable[[Array], Tensor] | None) -> Callable[[Array], Tensor] | None:
            if vector is None:
                return None
            return lambda rows: vector(rows)[:, _places(home, job, rows, "body").params]

        local = Local(start, cut(job.local.anchor), cut(job.local.shift))
        work = home.stays(job, head_bytes(home, job))
        return replace(job, models=home.further(job, 1), duty=work, local=local)

    def own(self, home: Home, job: Job) -> Iterator[tuple[Array, Weights]]:
        rows = np.arange(len(job.plan))
        yield rows, with_heads(home, job, rows)


def _places(home: Home, job: Job, rows: Array, part: Part) -> Weights:
    name = f"{part}.{job.task[rows[0]]}"
    return Weights(home.state[f"{name}.params"], home.state[f"{name}.buffers"])


def _part(home: Home, job: Job, rows: Array, part: Part, models: Weights) -> Weights:
    """Whole models as those of the network of which only a part trains."""
    both = torch.cat(models, dim=1)
    return Weights(*(both[:, places] for places in _places(home, job, rows, part)))


def _whole(home: Home, job: Job, chunk: Chunk) -> Chunk:
    """What came back of bodies as updates of whole models, whose heads did not change."""
    model, mine = job.models[chunk.model], _places(home, job, chunk.rows, "body")
    params, buffers = map(len, model.weights)
    update = chunk.update.new_zeros(len(chunk.rows), params)
    update[:, mine.params] = chunk.update
    both = chunk.buffers.new_zeros(len(chunk.rows), params + buffers)
    both[:, mine.buffers] = chunk.buffers
    return replace(chunk, update=update, buffers=both[:, params:])
