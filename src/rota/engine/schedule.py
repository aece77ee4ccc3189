"""Which examples a client trains on in which step.

Every pass over a client's examples has a new order, which its row's key and the number of the pass
determine. It is cut into mini-batches of the task's batch size. The last one may be smaller; one
below `least` is left out. `batches` says so for one client. For speed, back ends do it for many
rows at once: backends/schedule.py, kernels/small.py on a GPU, and native/rota.c.
tests/test_local_work.py compares them all.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rota import rng
from rota.arrays import Array
from rota.plan import Task


def batches(task: Task, examples: int, key: Tensor, least: int = 1) -> list[Tensor]:
    """One client's mini-batches: indices of its examples, step by step.

    A client without any mini-batch of at least `least` examples has no steps. The row's `key` is a
    scalar tensor on the device where the indices will be.
    """
    size = np.array([examples])
    each = int(batch_sizes(task, size)[0])
    steps = int(local_steps(task, size, least)[0])
    found: list[Tensor] = []
    epoch = 0
    while len(found) < steps:
        pieces = rng.permutation(rng.fold(key, epoch), examples).split(each)
        found += [piece for piece in pieces if len(piece) >= least]
        epoch += 1
    return found[:steps]


def batch_sizes(task: Task, sizes: Array) -> Array:
    """The most examples of each client in one mini-batch."""
    return np.asarray(sizes) if task.batch is None else np.full(len(sizes), task.batch)


def batches_per_epoch(task: Task, sizes: Array, least: int) -> Array:
    """How many mini-batches one pass over each client's examples has."""
    if task.batch is None:
        return np.asarray((sizes >= least).astype(np.int64))
    if task.batch < least:
        return np.zeros_like(sizes)
    return np.asarray(sizes // task.batch + (sizes % task.batch >= least))


def local_steps(task: Task, sizes: Array, least: int) -> Array:
    """How many local steps each client takes."""
    per_epoch = batches_per_epoch(task, sizes, least)
    if task.steps is None:
        return np.asarray(per_epoch * task.epochs)
    return np.where(per_epoch > 0, task.steps, 0)


def examples_of(task: Task, sizes: Array, least: int) -> Array:
    """How many examples each client processes in all its steps, repetitions included."""
    batch, per_epoch = batch_sizes(task, sizes), batches_per_epoch(task, sizes, least)
    whole, rest = np.divmod(local_steps(task, sizes, least), np.maximum(per_epoch, 1))
    return np.asarray(
        whole * np.minimum(sizes, per_epoch * batch) + np.minimum(sizes, rest * batch)
    )


def grid(n: int, fine: int = 16) -> int:
    """Round n up to a size that stacks are made for.

    The sizes are all whole numbers up to `fine`, which is a power of two, and then `fine` / 2 of
    them up to each next power of two. At most an eighth is padding with 16, and a quarter with 8.
    """
    if n <= fine:
        return n
    step = 1 << (n.bit_length() - fine.bit_length() + 1)
    return -(-n // step) * step


def widths(task: Task, sizes: Array, fine: int = 16, least: int = 1) -> Array:
    """How wide each client's mini-batches are made in a group.

    Every width is a group of its own, so they come from a short list. Where a step takes all
    examples of a client, it is the grid. Elsewhere it is the batch size and its halves, down to
    `least`: the smallest that holds all examples of the client.
    """
    if task.batch is None:
        return np.array([grid(int(n), fine) for n in sizes])
    out = np.full(len(sizes), task.batch)
    half = task.batch
    while half > 1 and -(-half // 2) >= least:
        half = -(-half // 2)
        out[sizes <= half] = half
    return out
