"""Who trains on what in which step: the mini-batches of many rows at once, the same ones that `local.batches` gives each."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota import rng
from rota.arrays import Array
from rota.plan import Task

WORDS = 1 << 26
"""The most random words that are ordered at once on a GPU."""


@dataclass(frozen=True)
class Schedule:
    """What the rows of a chunk do, step by step: rows are ordered so that those with more steps come first.

    `index` [steps, rows, width] are places among the examples at hand, `weight` 1 / (examples in the batch) or 0 for padding, and
    `steps` [rows] how many steps each row has.
    """

    index: Tensor
    weight: Tensor
    steps: Array
    examples: Array
    key: Tensor
    last: Tensor | None = None
    """`steps` where the indices are, if that is a GPU."""


def schedule(
    task: Task,
    sizes: Array,
    first: Array,
    clients: Array,
    tasks: Array,
    now: int,
    seed: int,
    least: int,
    width: int,
    device: torch.device,
) -> Schedule:
    """The mini-batches of `local.batches` for many rows at once.

    Rows are ordered by their number of steps, most first. Row r trains task tasks[r] on the sizes[r]
    examples of clients[r], which begin at first[r] of those at hand.
    """
    size = sizes if task.batch is None else np.full(len(sizes), task.batch)
    per_epoch = batches_per_epoch(task, sizes, least)
    steps = local_steps(task, sizes, least)
    epochs = int((-(-steps // np.maximum(per_epoch, 1))).max())
    longest = int(sizes.max())
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        word = np.full(
            len(clients), np.array(rng.key(seed, "train", now), np.uint64).view(np.int64)
        )
        columns = (
            word,
            clients,
            tasks,
            sizes,
            first,
            steps,
            np.maximum(per_epoch, 1),
            size,
        )
        return _on_gpu(
            np.stack(columns), epochs, longest, width, examples_of(task, sizes, least), device
        )
    key = row_keys(seed, now, clients, tasks, device)
    count, bound = torch.as_tensor(sizes, device=device), torch.as_tensor(size, device=device)
    position = torch.arange(longest, device=device)
    pieces = []
    slots = int(per_epoch.max())
    column = torch.arange(width, device=device)
    place = (
        torch.arange(slots, device=device)[:, None] * bound[:, None, None] + column
    )  # [rows, slots, width]
    real = (place < count[:, None, None]) & (column < bound[:, None, None])
    for epoch in range(epochs):
        # words beyond a row's own examples sort last, so that the first `size` places are local.batches' order
        words = rng.bits(rng.fold(key, epoch), longest)
        order = torch.argsort(
            torch.where(position < count[:, None], words, torch.iinfo(torch.int64).max),
            dim=1,
            stable=True,
        )
        picked = order.gather(1, place.clamp(max=longest - 1).flatten(1)).view(place.shape)
        pieces.append(torch.where(real, picked, 0))
    start = torch.as_tensor(first, device=device)
    index, real = (
        _join(pieces, per_epoch, steps, device),
        _join([real] * epochs, per_epoch, steps, device),
    )
    number = real.sum(-1, keepdim=True)
    examples = number.sum(dim=(0, 2)).cpu().numpy()
    weight = real.double() / number.clamp(min=1)
    return Schedule(index + start[:, None], weight, steps, examples, key)


def row_keys(seed: int, now: int, clients: Array, tasks: Array, device: torch.device) -> Tensor:
    """local.row_key, for all rows at once."""
    key = rng.as_tensor([rng.key(seed, "train", now)], device)
    for word in (clients, tasks):
        key = rng.fold(key, torch.as_tensor(word, device=device))
    return key


def _on_gpu(
    columns: Array, epochs: int, longest: int, width: int, examples: Array, device: torch.device
) -> Schedule:
    """The same in a few launches. `columns` are the round's key, client, model, examples, first, steps, steps an epoch, batch size."""
    from rota.engine import kernels

    steps, rows = columns[5], columns.shape[1]
    table = torch.from_numpy(columns).to(device)
    index = torch.empty(int(steps.max()), rows, width, dtype=torch.int64, device=device)
    weight = torch.empty(index.shape, dtype=torch.float64, device=device)
    key = torch.empty(0)
    some = max(1, WORDS // (rows * longest))
    for first in range(0, epochs, some):
        key, words = kernels.words(table, first, min(some, epochs - first), longest)
        kernels.indices(table, torch.sort(words, dim=2, stable=True).indices, first, index, weight)
    return Schedule(index, weight, steps, examples, key, table[5])


def _join(epochs: list[Tensor], per_epoch: Array, steps: Array, device: torch.device) -> Tensor:
    """[rows, slots, width] of each epoch as [steps, rows, width]: step t of a row is batch t mod per_epoch of epoch t // per_epoch."""
    stacked = torch.stack(epochs)  # [epochs, rows, slots, width]
    t = torch.arange(int(steps.max()), device=device)[:, None]
    per = torch.as_tensor(np.maximum(per_epoch, 1), device=device)
    row = torch.arange(len(per_epoch), device=device)
    out = stacked[(t // per).clamp(max=len(epochs) - 1), row, t % per]
    done = t >= torch.as_tensor(steps, device=device)
    return torch.where(done[..., None], torch.zeros((), dtype=out.dtype, device=device), out)


def batches_per_epoch(task: Task, sizes: Array, least: int) -> Array:
    """How many mini-batches one pass over each client's examples has."""
    if task.batch is None:
        return np.asarray((sizes >= least).astype(np.int64))
    if task.batch < least:
        return np.zeros_like(sizes)
    return np.asarray(sizes // task.batch + (sizes % task.batch >= least))


def local_steps(task: Task, sizes: Array, least: int) -> Array:
    """How many local steps each client has."""
    per_epoch = batches_per_epoch(task, sizes, least)
    if task.steps is None:
        return np.asarray(per_epoch * task.epochs)
    return np.where(per_epoch > 0, task.steps, 0)


def examples_of(task: Task, sizes: Array, least: int) -> Array:
    """How many examples each client works on in all its local steps, one that comes up twice counted twice."""
    size = sizes if task.batch is None else np.full_like(sizes, task.batch)
    per_epoch, steps = batches_per_epoch(task, sizes, least), local_steps(task, sizes, least)
    whole, rest = np.divmod(steps, np.maximum(per_epoch, 1))
    return np.asarray(whole * np.minimum(sizes, per_epoch * size) + np.minimum(sizes, rest * size))


def grid(n: int, fine: int = 16) -> int:
    """The sizes that stacks are made for: every whole number to `fine`, a power of two, then `fine` / 2 of them to the next one.

    With 16 at most an eighth is padding, with 8 a quarter.
    """
    if n <= fine:
        return n
    step = 1 << (n.bit_length() - fine.bit_length() + 1)
    return -(-n // step) * step


def nearly(n: int) -> int:
    """A little more than n: for cohorts of any size there are then few numbers of rows."""
    step = max(2, 1 << max(0, n.bit_length() - 6))
    return -(-n // step) * step


def widths(task: Task, sizes: Array, fine: int = 16, least: int = 1) -> Array:
    """How wide each client's mini-batches are made in a stack: the batch size, or what holds all of a smaller client's examples.

    Widths come from a short list, because every width is a stack of its own: the grid where a step takes all examples, else the batch size
    and its halves, none of them below `least`.
    """
    if task.batch is None:
        return np.array([grid(int(n), fine) for n in sizes])
    out = np.full(len(sizes), task.batch)
    half = task.batch
    while half > 1 and -(-half // 2) >= least:
        half = -(-half // 2)
        out[sizes <= half] = half
    return out
