"""What goes into a back end and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rota.arrays import Array
from rota.engine.machine import cores
from rota.weights import Weights


@dataclass(frozen=True)
class Workers:
    """What all back ends of an engine share."""

    number: int
    threads: ThreadPoolExecutor
    pool: Any
    """The memory of CUDA graphs."""
    spare: list[Array] = field(default_factory=list)
    """The memory of earlier results that nobody holds any more, in bytes (on a CPU)."""

    @classmethod
    def on(cls, device: torch.device) -> Workers:
        """On a CPU a thread per core; on a GPU one, because its work runs one after the other."""
        cuda = device.type == "cuda"
        number = 1 if cuda else cores()
        threads = ThreadPoolExecutor(number, initializer=_begin, initargs=(device,))
        return cls(number, threads, torch.cuda.graph_pool_handle() if cuda else None)


def _begin(device: torch.device) -> None:
    """What a thread does first; a thread begins on the first GPU, whatever the others are on."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


@contextmanager
def one_thread(busy: bool) -> Iterator[None]:
    """One thread for torch's operators if the cores are busy: others would wait for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if busy else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Group:
    """Rows of one family that train together, those with most steps first.

    Everything is an array over the rows, except `width`, `key` and `start`. Row r trains task
    task[r] on the examples[r] examples of client[r], which begin at first[r] of the family's
    examples. It takes steps[r] steps, per_epoch[r] in each pass over its examples, on mini-batches
    of batch[r] examples that are padded to `width`. It begins at line[r] of `start`.
    """

    width: int
    key: int
    """The key of the round's local training."""
    start: Weights
    row: Array
    """The row's number in the plan."""
    client: Array
    task: Array
    first: Array
    examples: Array
    batch: Array
    per_epoch: Array
    steps: Array
    processed: Array
    """How many examples it processes in all steps."""
    rate: Array
    """Its learning rate."""
    line: Array
    anchor: Tensor | None
    shift: Tensor | None

    def __len__(self) -> int:
        return len(self.row)

    def of(self, places: Array) -> Group:
        """Some of the rows, in the given order."""
        rest: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("width", "key", "start") and value is not None:
                rest[each.name] = value[places]
        return replace(self, **rest)


@dataclass(frozen=True)
class Result:
    """The results of rows: row r of the tensors and arrays belongs to row[r] of the plan.

    `update` is start - end, `loss` the mean over the steps. A row with a reason failed.
    """

    row: Array
    update: Tensor
    buffers: Tensor
    loss: Array
    steps: Array
    processed: Array
    reason: list[str]
    norm: Array | None = None
    """The updates' norms, where they are known."""
