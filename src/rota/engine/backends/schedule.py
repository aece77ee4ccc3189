"""The mini-batches of all rows and steps of a group at once, in torch or by kernels on a GPU.

`batches` in engine/schedule.py says what they are for one client.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota import rng
from rota.arrays import Array
from rota.engine.group import Group

WORDS = 1 << 26
"""The most random words that are sorted at once on a GPU."""


@dataclass(frozen=True)
class Schedule:
    """What the rows of a group do, step by step.

    `index` [steps, rows, width] are places among the family's examples. `weight`, of the same
    shape, is 1 / (examples in the mini-batch), or 0 for padding. `key` is each row's key.
    """

    index: Tensor
    weight: Tensor
    key: Tensor
    last: Tensor | None = None
    """Each row's number of steps, if it is on a GPU already."""


def schedule(group: Group, device: torch.device) -> Schedule:
    """The mini-batches of a group, as `batches` gives them to each of its clients."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return _on_gpu(group, device)
    key = row_keys(group.key, group.client, group.task, device)
    index, real = _places(group, key)
    first = torch.as_tensor(group.first, device=device)
    weight = real.double() / real.sum(-1, keepdim=True).clamp(min=1)
    return Schedule(index + first[:, None], weight, key)


def _places(group: Group, key: Tensor) -> tuple[Tensor, Tensor]:
    """Indices into each row's own examples, and which of them are no padding.

    Both are [steps, rows, width]; padding has index 0.
    """
    device, longest = key.device, int(group.examples.max())
    per_epoch, steps = group.per_epoch, group.steps
    count, bound = (torch.as_tensor(n, device=device) for n in (group.examples, group.batch))
    slots = torch.arange(int(per_epoch.max()), device=device)
    column, position = (torch.arange(n, device=device) for n in (group.width, longest))
    place = slots[:, None] * bound[:, None, None] + column  # [rows, slots, width]
    real = (place < count[:, None, None]) & (column < bound[:, None, None])
    place = place.clamp(max=longest - 1).flatten(1)
    passes = []
    for epoch in range(_epochs(steps, per_epoch)):
        # words beyond a row's own examples sort last, so they change no order
        words = rng.bits(rng.fold(key, epoch), longest)
        words = torch.where(position < count[:, None], words, torch.iinfo(torch.int64).max)
        order = torch.argsort(words, dim=1, stable=True)
        passes.append(torch.where(real, order.gather(1, place).view(real.shape), 0))
    t = torch.arange(int(steps.max()), device=device)[:, None]
    per = torch.as_tensor(np.maximum(per_epoch, 1), device=device)
    row = torch.arange(len(key), device=device)
    number = (t // per).clamp(max=len(passes) - 1)
    done = (t >= torch.as_tensor(steps, device=device))[..., None]
    index = torch.stack(passes)[number, row, t % per].masked_fill(done, 0)
    return index, real[row, t % per].masked_fill(done, False)


def _epochs(steps: Array, per_epoch: Array) -> int:
    """How many passes over its examples a row begins, at most."""
    return int((-(-steps // np.maximum(per_epoch, 1))).max())


def row_keys(key: int, clients: Array, tasks: Array, device: torch.device) -> Tensor:
    """The keys of rows in a round whose local training has this key; see local.row_key."""
    keys: Array = np.array([key], np.uint64).view(np.int64)
    for word in (clients, tasks):
        keys = rng.fold(keys, word)
    return torch.from_numpy(keys).to(device)


def _on_gpu(group: Group, device: torch.device) -> Schedule:
    """The same in a few launches."""
    from rota.engine import kernels

    rows, longest = len(group), int(group.examples.max())
    epochs = _epochs(group.steps, group.per_epoch)
    key = np.full(rows, np.array(group.key, np.uint64).view(np.int64))
    who = (key, group.client, group.task, group.examples, group.first)
    what = (group.steps, np.maximum(group.per_epoch, 1), group.batch)
    table = torch.from_numpy(np.stack([*who, *what])).to(device)
    shape = (int(group.steps.max()), rows, group.width)
    index = torch.empty(shape, dtype=torch.int64, device=device)
    weight = torch.empty(shape, dtype=torch.float64, device=device)
    keys = torch.empty(0)
    some = max(1, WORDS // (rows * longest))
    for first in range(0, epochs, some):
        keys, words = kernels.words(table, first, min(some, epochs - first), longest)
        order = torch.sort(words, dim=2, stable=True).indices
        kernels.indices(table, order, first, index, weight)
    return Schedule(index, weight, keys, table[5])


def nearly(n: int) -> int:
    """A little more than n, so that cohorts of any size have few numbers of rows."""
    step = max(2, 1 << max(0, n.bit_length() - 6))
    return -(-n // step) * step
