"""The labels of a network's indices, and which of them are tied.

A label is a number that stands for "this index is present in a sub-model". Every axis of every
tensor has one label per index. Indices that must be present together have labels that are tied:
the terms of an addition, a convolution's input channels and the input slices of its weights, a
normalisation's channels and its statistics. A sub-model may then drop any class of tied labels.

Two labels are special. KEPT marks an index that no sub-model drops. ANY marks an index of a tensor
that has the same value everywhere along the axis, such as torch.zeros or a broadcast axis of size
1: it fits every other label.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array

KEPT, ANY = 0, -1


class Axes(list[Array]):
    """The labels of a tensor: one array per axis."""


Split = Literal["outer", "inner"]
SPLITS: tuple[Split, ...] = ("outer", "inner")
"""What a unit is where a view splits an axis of labels in two: one index of the outer axis, such as
an attention head, or one of the inner axis, such as one dimension of every head."""


class Labels:
    """All labels, and which of them are tied: a union-find whose root 0 is KEPT."""

    def __init__(self, split: Split = "outer") -> None:
        self.split = split
        self.above: Array = np.zeros(1, np.int64)
        self.made: Array = np.zeros(1, np.int64)
        """When an operator first made numbers with this label; 0: none did."""
        self.blocks: dict[tuple[bytes, int], Array] = {}
        """Axes that the network divides into equal blocks, which must stay equal."""
        self.clock = 0

    def fresh(self, shape: tuple[int, ...]) -> Axes:
        """New labels for a parameter; an axis of size 1 is broadcast, or has nothing to drop."""
        axes = Axes()
        for size in shape:
            start = len(self.above)
            self.above = np.append(self.above, np.arange(start, start + size))
            self.made = np.append(self.made, np.zeros(size, np.int64))
            axes.append(np.arange(start, start + size) if size > 1 else np.full(size, ANY))
        return axes

    def root(self, labels: Array) -> Array:
        """The representative of each label's class; KEPT and ANY are their own."""
        roots = np.where(labels > 0, labels, KEPT)
        while True:
            above = self.above[roots]
            if (above == roots).all():
                break
            roots = above
        named = labels > 0
        self.above[labels[named]] = roots[named]
        return np.where(labels < 0, ANY, roots)

    def tie(self, a: Array, b: Array) -> Array:
        """Tie the labels of two axes, index by index; returns the labels of both."""
        if a.shape != b.shape or (a != b).any():
            p, q = np.broadcast_arrays(self.root(a), self.root(b))
            for low, high in zip(*_pairs(p, q), strict=True):
                self._join(low, high)
        return np.where(a >= 0, a, b)

    def keep(self, *axes: Array) -> None:
        """Never drop these indices."""
        for labels in axes:
            self.above[self.root(labels[labels > 0])] = KEPT

    def even(self, labels: Array, blocks: int) -> None:
        """Note that the network divides an axis into blocks of one size."""
        if (labels > 0).any():
            self.blocks.setdefault((labels.tobytes(), blocks), labels)

    def make(self, labels: Array) -> Array:
        """Note which operator made the indices: a product with weights, or an embedding."""
        self.clock += 1
        new = labels[labels > 0]
        self.made[new] = np.where(self.made[new] > 0, self.made[new], self.clock)
        return labels

    def _join(self, a: int, b: int) -> None:
        while self.above[a] != a:
            a = int(self.above[a])
        while self.above[b] != b:
            b = int(self.above[b])
        self.above[max(a, b)] = min(a, b)


def written(labels: Labels, part: Tensor, axes: Axes, view: Tensor, old: Axes) -> Axes:
    """The labels of a view of a memory, after another view of it, `part`, was written."""
    memory = torch.empty(part.untyped_storage().nbytes() // part.element_size(), dtype=torch.int64)
    new = Axes(old)
    for i, axis in enumerate(axes):
        if len(axis) == 1 or (axis < 0).any():
            continue
        memory.fill_(-1)
        indices = torch.arange(len(axis)).view(-1, *[1] * (part.dim() - i - 1))
        memory.as_strided(part.shape, part.stride(), part.storage_offset()).copy_(indices)
        seen = memory.as_strided(view.shape, view.stride(), view.storage_offset())
        if (seen < 0).all():
            return old
        for j in range(view.dim()):
            here = _along(seen, j)
            if here is not None:
                new[j] = labels.tie(new[j], np.where(here >= 0, axis[here], ANY))
                break
        else:
            labels.keep(axis)
        for j in range(view.dim()):  # an axis that is written in parts is no longer uniform
            others = [k for k in range(view.dim()) if k != j]
            if not (seen >= 0).amax(others).all():
                new[j] = np.maximum(new[j], KEPT)
    return new


def _along(seen: Tensor, axis: int) -> Array | None:
    """The one index that is seen at each place of an axis, -1 for none. None if there are more."""
    others = [k for k in range(seen.dim()) if k != axis]
    top = seen.amax(others)
    low = torch.where(seen < 0, seen.max(), seen).amin(others)
    fits = (top < 0) | (low == top)
    return top.numpy() if bool(fits.all()) and len(top.unique()) > 1 else None


def _pairs(p: Array, q: Array) -> tuple[list[int], list[int]]:
    """The different roots that stand at the same index of two arrays, where both have one."""
    apart = (p != q) & (p >= 0) & (q >= 0)
    return p[apart].tolist(), q[apart].tolist()
