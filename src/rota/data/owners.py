"""Data whose examples have natural owners, such as writers, roles or hospitals.

Each owner's examples are split into training and test examples, and a client is tested on its
owners' test examples.
"""

from __future__ import annotations

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate, pack


def split(groups: Array, generator: np.random.Generator) -> Array:
    """Choose the test examples: a random fifth of each group, rounded down.

    So a group's only example is used for training.
    """
    sizes = np.bincount(groups)
    chosen: Array = partitions.rank(groups, len(sizes), generator) < (sizes // 5)[groups]
    return chosen


def part(examples: Examples, test: Array) -> tuple[Examples, Examples]:
    """Split into training and test examples; both keep their order."""
    return _rows(examples, np.flatnonzero(~test)), _rows(examples, np.flatnonzero(test))


def _rows(examples: Examples, rows: Array) -> Examples:
    chosen = torch.from_numpy(rows)
    groups = None if examples.groups is None else examples.groups[rows]
    return Examples(examples.x[chosen], examples.y[chosen], groups)


def federate_owned(
    name: str,
    train: Examples,
    test: Examples,
    partition: Partition | None,
    *,
    classes: int,
    matched_test: bool = False,
    seed: int = 0,
) -> Federation:
    """`federate` for train and test examples of the same owners; by default owners are clients.

    If the partition keeps owners whole, as `natural` does, each client is tested on its own owners'
    test examples. If it deals an owner's examples out to several clients, the test examples are
    shared, or matched to the clients' labels.
    """
    partition = partition or partitions.natural()
    if train.groups is None or test.groups is None:
        raise ValueError("federate_owned needs groups on both parts")
    owner, clients = partition(train, rng.generator(rng.key(seed, "partition", name)))
    of_group = np.full(max(train.groups.max(), test.groups.max(initial=0)) + 1, -1, np.int64)
    of_group[train.groups] = owner
    if not np.array_equal(of_group[train.groups], owner):
        return federate(
            name, train, test, partition, classes=classes, matched_test=matched_test, seed=seed
        )
    tested = pack(test, of_group[test.groups], clients)
    return Federation(name, pack(train, owner, clients), tested, classes)
