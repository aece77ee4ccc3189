"""The clients' training examples on a device, every data set once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.data.federation import Part
from rota.plan import Task

FILLED = 0.4
"""The share of a GPU's free memory that examples may fill."""

Pair = tuple[Tensor, Tensor]
"""Inputs and targets."""


def on_device(part: Part, device: torch.device) -> Pair:
    """A part's examples on the device, or where they are if they would fill it.

    In that case the examples of a few rows are sent when these rows train.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if part.x.nbytes + part.y.nbytes > FILLED * free:
            return part.x, part.y
    return part.x.to(device), part.y.to(device)


def upload(tasks: list[Task], device: torch.device) -> list[Pair]:
    """Each task's training examples on the device; tasks with the same data share them."""
    held = {id(task.data): task for task in tasks}
    pairs = {key: on_device(task.federation.train, device) for key, task in held.items()}
    return [pairs[id(task.data)] for task in tasks]


@dataclass(frozen=True)
class Examples:
    """The examples of some tasks in one array.

    Owner i has the examples offsets[i]:offsets[i+1], and client c of task t is owner first[t] + c.
    """

    x: Tensor
    y: Tensor
    offsets: Array
    first: Array

    def owners(self, tasks: Array, clients: Array) -> Array:
        return np.asarray(self.first[tasks] + clients)

    def sizes(self, owners: Array) -> Array:
        """How many examples each owner has."""
        return np.asarray(self.offsets[owners + 1] - self.offsets[owners])

    def of(self, task: int, clients: int) -> Pair:
        """One task's examples, as views."""
        begin, end = self.offsets[self.first[task] + np.array([0, clients])].tolist()
        if (begin, end) == (0, len(self.x)):
            return self.x, self.y
        return self.x[begin:end], self.y[begin:end]


def join(tasks: list[Task], some: list[int], pairs: list[Pair]) -> Examples:
    """The examples of some of the tasks in one array; `pairs` are those of each task."""
    leaders = {id(tasks[t].data): t for t in reversed(some)}
    places = {data: place for place, data in enumerate(leaders)}
    parts = [tasks[t].federation.train for t in leaders.values()]
    first = np.array([places.get(id(task.data), 0) * parts[0].clients for task in tasks])
    if len(parts) == 1:
        return Examples(*pairs[some[0]], parts[0].offsets, first)
    x, y = (torch.cat([pairs[t][side] for t in leaders.values()]) for side in range(2))
    begins = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + begin for part, begin in zip(parts, begins, strict=False)]
    return Examples(x, y, np.concatenate([[0], *offsets]), first)
