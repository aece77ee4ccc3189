"""FedPer (Arivazhagan et al. 2019): a shared body, and a head of each client's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.estimate.memory import Place
from rota.personal.home import Home, filled
from rota.personal.layers import places
from rota.plan import Chunk, Job, State, Task
from rota.weights import Weights


@dataclass(frozen=True)
class FedPer:
    """FedPer: each client keeps the last layers for itself; only the body is shared.

    A drawn client fetches the body, puts its own head on it, and trains both together. It sends the
    body's update and keeps its head. The head is the last `layers` layers of the model that have
    parameters, in the order in which the module lists them. A client's head begins as the model's
    does. `memory` is where the heads are kept: on the device, in main memory ("cpu"), or in a file
    ("disk").
    """

    layers: int = 1
    memory: Place = "device"

    def check(self) -> None:
        """Refuse options that make no sense."""
        check_layers(self.layers)

    def work(self, task: Task) -> list[Task]:
        return []

    def init(self, tasks: list[Task], models: list[Weights], shares: Array) -> State:
        return heads(tasks, models, shares, self.layers, self.memory)

    def train(self, home: Home, job: Job) -> Iterator[Chunk]:
        local = replace(job.local, start=lambda rows: with_heads(home, job, rows))
        size = head_bytes(home, job)
        for chunk in home.engine.train(replace(job, local=local, duty=home.stays(job, size))):
            mine = head(home, job, chunk.rows)
            home.keep(job, chunk, home.read(job, chunk.rows) - chunk.update[:, mine])
            update = chunk.update.clone()
            update[:, mine] = 0
            yield replace(chunk, update=update)

    def own(self, home: Home, job: Job) -> Iterator[tuple[Array, Weights]]:
        rows = np.arange(len(job.plan))
        yield rows, with_heads(home, job, rows)


def check_layers(layers: int) -> None:
    """Refuse a head without layers."""
    if layers < 1:
        raise BadInput(f"personal.layers is {layers}: it must be at least 1")


def heads(
    tasks: list[Task], models: list[Weights], shares: Array, layers: int, place: Place
) -> State:
    """The clients' heads, as the models have them; and which parameters of task t they are."""
    found = {
        f"head.{t}": places(task, layers, "head").params.to(models[t].params.device)
        for t, task in enumerate(tasks)
    }
    first = [model.params[found[f"head.{t}"]] for t, model in enumerate(models)]
    return filled(first, shares, place) | found


def head(home: Home, job: Job, rows: Array) -> Tensor:
    """Which parameters are the head's, for rows of one network."""
    mine: Tensor = home.state[f"head.{job.task[rows[0]]}"]
    return mine


def with_heads(home: Home, job: Job, rows: Array) -> Weights:
    """The models that rows fetch, with the heads of their clients."""
    start = home.fetched(job, rows)
    start.params[:, head(home, job, rows)] = home.read(job, rows)
    return start


def head_bytes(home: Home, job: Job) -> Array:
    """The bytes of each row's head."""
    sizes = [
        len(home.state[f"head.{model.task}"]) * model.params.element_size() for model in job.models
    ]
    return np.array(sizes, np.int64)[job.plan.model]
