"""Federation: all clients' examples in contiguous arrays, and where each client's begin.

One client or a million cost the same objects: client i has the rows offsets[i]:offsets[i+1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rota import rng
from rota.arrays import Array
from rota.data.roster import Roster
from rota.errors import BadInput
from rota.notebook import show


@dataclass(frozen=True)
class Examples:
    """Examples that belong to no client yet. Sources read them, and partitions deal them out.

    `groups[j]` in 0..G-1 is the natural owner of example j (its writer, role or hospital), where
    the data have owners.
    """

    x: Tensor
    y: Tensor
    groups: Array | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def labels(self) -> Array:
        return self.y.numpy()


Partition = Callable[[Examples, np.random.Generator], tuple[Array, int]]
"""A function of examples -> the owner of each (-1: left out), and the number of clients."""


@dataclass(frozen=True)
class Part:
    """The train or the test part: rows offsets[i]:offsets[i+1] of x and y belong to client i."""

    x: Tensor
    y: Tensor
    offsets: Array

    def __repr__(self) -> str:
        """One line, without the examples."""
        examples = f"{len(self.y)} examples of shape {tuple(self.x.shape[1:])}"
        return f"Part({self.clients} clients, {examples})"

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Array:
        """The number of examples per client: int64 [clients]."""
        return np.diff(self.offsets)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """One client's examples (views, no copy)."""
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        return self.x[rows], self.y[rows]

    def owner(self, row: int) -> int:
        """The client that owns a row."""
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def label_counts(self, classes: int) -> Array:
        """How many examples of each class each client has: int64 [clients, classes]."""
        owners = np.repeat(np.arange(self.clients), self.sizes)
        counts = np.bincount(owners * classes + self.y.numpy(), minlength=self.clients * classes)
        return counts.reshape(self.clients, classes)


@dataclass(frozen=True)
class Federation:
    """N clients' training examples, and test examples: one shared test set, or one per client.

    `classes` is 0 where the targets are not class labels.
    """

    name: str
    train: Part
    test: Part
    classes: int
    ids: Sequence[str] = ()
    """The clients' stable names, where the data have some."""
    validation: Examples | None = None
    """The server's own labelled examples, which no client has and no test uses."""
    _repr_html_ = show.federation

    def __repr__(self) -> str:
        """One line, without the examples."""
        examples = f"{len(self.train.y)} + {len(self.test.y)} examples of shape {self.shape}"
        words = f"{self.clients} clients, {examples}, {self.classes} classes"
        return f"Federation({self.name!r}, {words})"

    @cached_property
    def roster(self) -> Roster:
        """What the server knows of these data."""
        return Roster(self.name, self.train.sizes, self.shape, self.classes, self.ids)

    @property
    def clients(self) -> int:
        return self.train.clients

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train.x.shape[1:])

    @property
    def shared_test(self) -> bool:
        """Whether the test part is one set for all, rather than one per client."""
        return self.test.clients != self.clients


def pack(examples: Examples, owner: Array, clients: int) -> Part:
    """Order examples by owner into one Part, each client's in their order; -1 is left out."""
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    offsets = np.zeros(clients + 1, np.int64)
    np.cumsum(np.bincount(owner[order], minlength=clients), out=offsets[1:])
    rows = torch.from_numpy(order)
    return Part(examples.x[rows], examples.y[rows], offsets)


def shared(examples: Examples) -> Part:
    """One test set for all clients."""
    return Part(examples.x, examples.y, np.array([0, len(examples)], np.int64))


def federate(
    name: str,
    train: Examples,
    test: Examples,
    partition: Partition,
    *,
    classes: int,
    matched_test: bool = False,
    validation: int = 0,
    seed: int = 0,
) -> Federation:
    """Deal the training examples out with `partition`; the test examples stay shared.

    With `matched_test` each client gets a test set of its own, with its own mix of labels
    (`match`). The server keeps `validation` random training examples for itself.
    """
    kept = None
    if validation:
        kept, train = hold_out(name, train, validation, seed)
    owner, clients = partition(train, rng.generator(rng.key(seed, "partition", name)))
    part = pack(train, owner, clients)
    if not matched_test:
        return Federation(name, part, shared(test), classes, validation=kept)
    generator = rng.generator(rng.key(seed, "test partition", name))
    owner = match(part.label_counts(classes), test.labels, generator)
    return Federation(name, part, pack(test, owner, clients), classes, validation=kept)


def hold_out(name: str, examples: Examples, number: int, seed: int) -> tuple[Examples, Examples]:
    """A number of random examples for the server, and the others, in their order."""
    if not 0 < number < len(examples):
        raise BadInput(
            f"validation is {number}, but '{name}' has {len(examples)} training examples: give "
            "fewer than that, so that the clients have some"
        )
    generator = rng.generator(rng.key(seed, "validation", name))
    mine = np.zeros(len(examples), bool)
    mine[generator.permutation(len(examples))[:number]] = True

    def some(chosen: Array) -> Examples:
        rows = torch.from_numpy(np.flatnonzero(chosen))
        groups = None if examples.groups is None else examples.groups[chosen]
        return Examples(examples.x[rows], examples.y[rows], groups)

    return some(mine), some(~mine)


def match(counts: Array, labels: Array, generator: np.random.Generator) -> Array:
    """Deal out test examples of each class in proportion to the clients' training counts of it.

    This works after any partition: a client that trains on 3 % of all fours is tested on 3 % of the
    test set's fours (by largest remainders). Test examples of classes that no client trains on are
    left out (-1).
    """
    owner = np.full(len(labels), -1, np.int64)
    for label in range(counts.shape[1]):
        rows = generator.permutation(np.flatnonzero(labels == label))
        total = counts[:, label].sum()
        if total == 0 or len(rows) == 0:
            continue
        exact = counts[:, label] / total * len(rows)
        dealt = np.floor(exact).astype(np.int64)
        # Ties between remainders are broken at random, or the first clients got every spare
        # example.
        spare = np.lexsort((generator.random(len(exact)), dealt - exact))[: len(rows) - dealt.sum()]
        dealt[spare] += 1
        owner[rows] = np.repeat(np.arange(len(dealt)), dealt)
    return owner
