"""Federation: all clients' examples in contiguous arrays, and where each client's begin.

One client or a million cost the same objects: client i's examples are the rows offsets[i]:offsets[i+1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota import rng
from rota.arrays import Array
from rota.data.roster import Roster
from rota.errors import BadInput


@dataclass(frozen=True)
class Examples:
    """Examples that belong to nobody yet: what a data source reads and a partition deals out.

    `groups[j]` is the natural owner of example j (its writer, role or hospital), 0..G-1, where the data have one.
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
"""A partition maps examples to (owner of each example: 0..clients-1, or -1 for "left out"; number of clients)."""


@dataclass(frozen=True)
class Part:
    """One part (train or test) of a federation: rows offsets[i]:offsets[i+1] of x and y belong to client i."""

    x: Tensor
    y: Tensor
    offsets: Array

    def __repr__(self) -> str:
        """In one line, without the examples."""
        return f"Part({self.clients} clients, {len(self.y)} examples of shape {tuple(self.x.shape[1:])})"

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Array:
        """Number of examples of each client: int64 [clients]."""
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
    """N clients' training examples and the test examples: one shared test set, or one for each client.

    `classes` is 0 where the targets are not class labels.
    """

    name: str
    train: Part
    test: Part
    classes: int
    ids: Sequence[str] = ()
    """The clients' stable names, where the data have some."""

    def __repr__(self) -> str:
        """In one line, without the examples."""
        examples = f"{len(self.train.y)} + {len(self.test.y)} examples of shape {self.shape}"
        return (
            f"Federation({self.name!r}, {self.clients} clients, {examples}, {self.classes} classes)"
        )

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
        """Whether the test part is one set for all, rather than one for each client."""
        return self.test.clients != self.clients


def pack(examples: Examples, owner: Array, clients: int) -> Part:
    """Order examples by owner into one Part. Rows with owner -1 are left out; a client's rows keep their order."""
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
    seed: int = 0,
) -> Federation:
    """Deal the training examples out with `partition`; the test examples stay shared.

    With `matched_test` every client also gets its own test set, with its own mix of labels (see `match`).
    """
    owner, clients = partition(train, rng.generator(rng.key(seed, "partition", name)))
    part = pack(train, owner, clients)
    if not matched_test:
        return Federation(name, part, shared(test), classes)
    owner = match(
        part.label_counts(classes),
        test.labels,
        rng.generator(rng.key(seed, "test partition", name)),
    )
    return Federation(name, part, pack(test, owner, clients), classes)


def match(counts: Array, labels: Array, generator: np.random.Generator) -> Array:
    """Owners for test examples, such that each class is dealt out in proportion to the clients' training counts of it.

    It works behind any partition: a client that trains on 3 % of all fours is tested on 3 % of the test set's fours (by
    largest remainders). Test examples of classes that nobody trains on are left out (-1).
    """
    owner = np.full(len(labels), -1, np.int64)
    for label in range(counts.shape[1]):
        rows = generator.permutation(np.flatnonzero(labels == label))
        total = counts[:, label].sum()
        if total == 0 or len(rows) == 0:
            continue
        exact = counts[:, label] / total * len(rows)
        dealt = np.floor(exact).astype(np.int64)
        # ties between equal remainders are broken at random, or the first clients would get every spare example
        spare = np.lexsort((generator.random(len(exact)), dealt - exact))[: len(rows) - dealt.sum()]
        dealt[spare] += 1
        owner[rows] = np.repeat(np.arange(len(dealt)), dealt)
    return owner


def from_clients(
    train: Iterable[tuple[Any, Any] | None],
    test: tuple[Any, Any] | Iterable[tuple[Any, Any] | None],
    *,
    classes: int | None = None,
    name: str = "own",
) -> Federation:
    """A federation from your own data: a list of (x, y) pairs, tensors or arrays, one pair a client; None is a client without data.

    `test` is one (x, y) pair that all share, or a list with one pair a client. `classes` defaults to the largest
    integer label + 1; real-valued targets have none.
    """
    packed = _concat(_pairs(train, "train"), "train")
    packed_test = _concat([test] if isinstance(test, tuple) else _pairs(test, "test"), "test")
    if packed_test.clients not in (1, packed.clients):
        raise BadInput(
            f"test has {packed_test.clients} pairs and train {packed.clients}: give one that all share, or one for each client"
        )
    if packed_test.x.shape[1:] != packed.x.shape[1:]:
        raise BadInput(
            f"test examples have shape {tuple(packed_test.x.shape[1:])}, training examples {tuple(packed.x.shape[1:])}"
        )
    if classes is None:
        classes = (
            0 if packed.y.is_floating_point() else int(max(packed.y.max(), packed_test.y.max())) + 1
        )
    return Federation(name, packed, packed_test, classes)


def _pairs(given: Any, part: str) -> list[Any]:
    """One thing for each client, which should be a pair."""
    takes = "give a list with one (x, y) pair for each client" + (
        ", or one pair (a tuple) that all share" if part == "test" else ""
    )
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise BadInput(
            f"{part} is {'None' if given is None else f'a {type(given).__name__}'}: {takes}"
        )
    pairs = list(given)
    if not pairs:
        raise BadInput(f"{part} is empty: {takes}")
    if len(pairs) == 2 and not any(isinstance(pair, list | tuple | None) for pair in pairs):
        raise BadInput(f"{part} is one pair in the place of a list: {takes}")
    return pairs


def _concat(pairs: Sequence[Any], part: str) -> Part:
    """All clients' pairs one after the other. One without examples has no shape to agree on."""
    sizes: list[int] = []
    held: list[tuple[int, Tensor, Tensor]] = []
    for client, pair in enumerate(pairs):
        x, y = _tensors(
            pair, part if part == "test" and len(pairs) == 1 else f"{part} client {client}"
        )
        sizes.append(len(y))
        if not len(y):
            continue
        held.append(
            (
                client,
                x.float() if x.is_floating_point() else x,
                y.float() if y.is_floating_point() else y.long(),
            )
        )
        first, *like = held[0]
        for what, mine, theirs in zip(("examples", "targets"), (x, y), like, strict=True):
            if mine.shape[1:] != theirs.shape[1:]:
                shapes = (
                    f"shape {tuple(mine.shape[1:])}, client {first} of {tuple(theirs.shape[1:])}"
                )
                raise BadInput(f"{part} client {client} has {what} of {shapes}")
    if not held:
        raise BadInput(
            f"{part} has no examples: all of its {len(sizes)} pairs are empty, and one client at least must have some"
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Part(torch.cat([x for _, x, _ in held]), torch.cat([y for _, _, y in held]), offsets)


def _tensors(pair: Any, whose: str) -> tuple[Tensor, Tensor]:
    """A client's examples and targets, as many of each."""
    if pair is None:
        return torch.zeros(0), torch.zeros(0)
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        kind = (
            f"{len(pair)} things" if isinstance(pair, list | tuple) else f"a {type(pair).__name__}"
        )
        raise BadInput(f"{whose} is {kind}: give a pair (x, y), or None if it has no data")
    x, y = (
        _tensor(values, f"{whose}: {name}") for name, values in zip(("x", "y"), pair, strict=True)
    )
    if len(x) != len(y):
        raise BadInput(f"{whose} has {len(x)} examples but {len(y)} targets")
    return x, y


def _tensor(values: Any, what: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        if _texts(values):
            raise BadInput(
                f"{what} is of texts: give numbers (classes are numbered from 0)"
            ) from error
        raise BadInput(
            f"{what} is no array of numbers ({str(error).splitlines()[0]}): give one row an example, all of one shape"
        ) from error
    if not tensor.dim():
        raise BadInput(f"{what} is a single number: give one row an example")
    return tensor


def _texts(values: Any) -> bool:
    """Whether there is a text in an array, or in lists however deep."""
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "US" or (
            values.dtype.kind == "O" and any(isinstance(each, str) for each in values.flat)
        )
    return isinstance(values, str) or (
        isinstance(values, list | tuple) and any(map(_texts, values))
    )
