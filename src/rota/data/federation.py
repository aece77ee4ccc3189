"""Federation: all clients' examples in contiguous arrays, and where each client's begin.

One client or a million cost the same objects: client i has the rows offsets[i]:offsets[i+1].
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
from rota.errors import BadInput, first_line


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
"""A function of examples that returns the owner of each one and the number of clients.

Owners are in 0..clients-1; -1 leaves an example out.
"""


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
    """Order examples by owner into one Part; a client's rows keep their order.

    Rows with owner -1 are left out.
    """
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

    With `matched_test` each client gets a test set of its own, with its own mix of labels
    (`match`).
    """
    owner, clients = partition(train, rng.generator(rng.key(seed, "partition", name)))
    part = pack(train, owner, clients)
    if not matched_test:
        return Federation(name, part, shared(test), classes)
    generator = rng.generator(rng.key(seed, "test partition", name))
    owner = match(part.label_counts(classes), test.labels, generator)
    return Federation(name, part, pack(test, owner, clients), classes)


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


def from_clients(
    train: Iterable[tuple[Any, Any] | None],
    test: tuple[Any, Any] | Iterable[tuple[Any, Any] | None],
    *,
    classes: int | None = None,
    name: str = "own",
    ids: Sequence[str] = (),
) -> Federation:
    """Make a federation from your own data: a list with one (x, y) pair per client.

    A pair holds tensors or arrays; None is a client without data. `test` is one (x, y) pair that
    all clients share, or a list with one pair per client. `classes` defaults to the largest integer
    label + 1; real-valued targets have none. `ids` are the clients' names, if they have some.
    """
    packed = _concat(_pairs(train, "train"), "train")
    packed_test = _concat([test] if isinstance(test, tuple) else _pairs(test, "test"), "test")
    if packed_test.clients not in (1, packed.clients):
        raise BadInput(
            f"test has {packed_test.clients} pairs and train {packed.clients}: give one that all "
            "share, or one per client"
        )
    for what, mine, theirs in (
        ("examples", packed_test.x, packed.x),
        ("targets", packed_test.y, packed.y),
    ):
        if _form(mine) != _form(theirs):
            raise BadInput(f"test {what} are {_form(mine)}, but training {what} {_form(theirs)}")
    # whole numbers of two widths are the same tokens
    widest = torch.promote_types(packed.x.dtype, packed_test.x.dtype)
    packed = Part(packed.x.to(widest), packed.y, packed.offsets)
    packed_test = Part(packed_test.x.to(widest), packed_test.y, packed_test.offsets)
    if classes is None:
        labels = not packed.y.is_floating_point()
        classes = int(max(packed.y.max(), packed_test.y.max())) + 1 if labels else 0
    return Federation(name, packed, packed_test, classes, ids)


def _pairs(given: Any, part: str) -> list[Any]:
    """One value per client, which should be a pair."""
    takes = "give a list with one (x, y) pair per client"
    if part == "test":
        takes += ", or one pair (a tuple) that all share"
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        what = "None" if given is None else f"a {type(given).__name__}"
        raise BadInput(f"{part} is {what}: {takes}")
    pairs = list(given)
    if not pairs:
        raise BadInput(f"{part} is empty: {takes}")
    if len(pairs) == 2 and not any(isinstance(pair, list | tuple | None) for pair in pairs):
        raise BadInput(f"{part} is one pair instead of a list: {takes}")
    return pairs


def _concat(pairs: Sequence[Any], part: str) -> Part:
    """All clients' pairs, one after the other. An empty pair has no shape to agree on."""
    sizes: list[int] = []
    held: list[tuple[Tensor, Tensor]] = []
    first = 0
    for client, pair in enumerate(pairs):
        alone = part == "test" and len(pairs) == 1
        x, y = _tensors(pair, part if alone else f"{part} client {client}")
        sizes.append(len(y))
        if not len(y):
            continue
        x = x.float() if x.is_floating_point() else x.long() if x.dtype in _WIDE else x
        y = y.float() if y.is_floating_point() else y.long()
        if not held:
            first = client
        held.append((x, y))
        like_x, like_y = held[0]
        if x.shape[1:] != like_x.shape[1:]:
            raise BadInput(
                f"{part} client {client} has examples of shape {tuple(x.shape[1:])}, but those of "
                f"client {first} have shape {tuple(like_x.shape[1:])}"
            )
        if _form(y) != _form(like_y):
            raise BadInput(
                f"{part} client {client} has targets that are {_form(y)}, but those of client "
                f"{first} are {_form(like_y)}"
            )
    if not held:
        raise BadInput(
            f"{part} has no examples: all of its {len(sizes)} pairs are empty, and at least one "
            "client must have some"
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Part(torch.cat([x for x, _ in held]), torch.cat([y for _, y in held]), offsets)


_WIDE = (torch.uint16, torch.uint32, torch.uint64)
"""Types that torch computes little with."""


def _form(values: Tensor) -> str:
    """The kind and shape of the rows, in words."""
    if values.is_complex():
        kind = "complex numbers"
    else:
        kind = "real numbers" if values.is_floating_point() else "whole numbers"
    return f"{kind} of shape {tuple(values.shape[1:])}"


def _tensors(pair: Any, whose: str) -> tuple[Tensor, Tensor]:
    """A client's examples and targets, the same number of each."""
    if pair is None:
        return torch.zeros(0), torch.zeros(0)
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        many = isinstance(pair, list | tuple)
        kind = f"{len(pair)} things" if many else f"a {type(pair).__name__}"
        raise BadInput(f"{whose} is {kind}: give a pair (x, y), or None if it has no data")
    x, y = _tensor(pair[0], f"{whose}: x"), _tensor(pair[1], f"{whose}: y")
    if len(x) != len(y):
        raise BadInput(f"{whose} has {len(x)} examples but {len(y)} targets")
    return x, y


def _tensor(values: Any, what: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if _texts(values):
            raise BadInput(f"{what} holds texts: give numbers (classes count from 0)") from error
        raise BadInput(
            f"{what} is no array of numbers ({first_line(error)}): give one row per example, all "
            "of one shape"
        ) from error
    if not tensor.dim():
        raise BadInput(f"{what} is a single number: give one row per example")
    return tensor


def _texts(values: Any) -> bool:
    """Whether there is a text in an array, or in lists however deep."""
    if isinstance(values, np.ndarray):
        objects = values.dtype.kind == "O" and any(isinstance(each, str) for each in values.flat)
        return values.dtype.kind in "US" or objects
    if isinstance(values, list | tuple):
        return any(map(_texts, values))
    return isinstance(values, str)
