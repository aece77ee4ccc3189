"""A federation from one array of examples and one of targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data import partition as partitions
from rota.data.federation import Federation, Partition, federate
from rota.data.own import examples_of
from rota.data.owners import federate_owned, part
from rota.errors import BadInput


def from_arrays(
    x: Any,
    y: Any,
    *,
    test: tuple[Any, Any] | float = 0.2,
    partition: Partition | None = None,
    owner: Any = None,
    classes: int | None = None,
    matched_test: bool = False,
    name: str = "own",
    seed: int = 0,
) -> Federation:
    """Make a federation from examples `x` and targets `y`: arrays, tensors or pandas objects.

    `partition` deals the examples out to clients (rota.partition). Instead, `owner` may say whose
    each example is, with one name or number per example: each owner is a client. `test` is a pair
    of arrays that all clients share, or the share of the examples that are taken away for testing:
    at random, or of each owner, who is then tested on examples of its own. `matched_test` gives
    each client of a partition test examples with its own mix of labels.
    """
    if partition is None and owner is None:
        raise BadInput(
            "from_arrays needs to know whose the examples are: give a partition, such as "
            "rota.partition.iid(clients=20), or an owner for each example"
        )
    ids: list[str] = []
    groups = None
    if owner is not None:
        named = np.asarray(owner)
        if named.ndim != 1 or len(named) != len(x):
            raise BadInput(f"owner has shape {named.shape}: give one for each of {len(x)} examples")
        known, groups = np.unique(named, return_inverse=True)
        ids = [str(each) for each in known]
    train = examples_of(x, y, "the data", groups)
    if isinstance(test, tuple | list):
        tested = examples_of(_pair(test)[0], _pair(test)[1], "test")
        if groups is not None and partition is None:
            partition = partitions.natural()
    else:
        train, tested = part(train, _chosen(test, len(x), groups, rng.key(seed, "split", name)))
        if not len(tested.y):
            raise BadInput(f"test is {test}: it leaves no example for testing")
    if classes is None:
        labels = not train.y.is_floating_point()
        classes = int(max(train.y.max(), tested.y.max())) + 1 if labels else 0
    if tested.groups is not None:
        made = federate_owned(
            name, train, tested, partition, classes=classes, matched_test=matched_test, seed=seed
        )
    else:
        deal = partition or partitions.natural()
        made = federate(
            name, train, tested, deal, classes=classes, matched_test=matched_test, seed=seed
        )
    kept = ids if partition is None and len(ids) == made.clients else []
    return Federation(name, made.train, made.test, classes, kept)


def _pair(test: Any) -> Any:
    if len(test) != 2:
        raise BadInput(f"test has {len(test)} things: give one pair (x, y), or a share such as 0.2")
    return test


def _chosen(share: float, number: int, groups: Array | None, key: int) -> Array:
    """Which examples are for testing: a share of all, or of each owner's, rounded down."""
    if isinstance(share, bool) or not isinstance(share, float | int) or not 0 < share < 1:
        raise BadInput(f"test is {share!r:.40}: give a pair (x, y), or a share such as 0.2")
    whose = np.zeros(number, np.int64) if groups is None else groups
    sizes = np.bincount(whose)
    order = partitions.rank(whose, len(sizes), rng.generator(key))
    chosen: Array = order < (sizes * share).astype(np.int64)[whose]
    return chosen


def texts(values: list[str]) -> torch.Tensor:
    """Texts as rows of tokens: 0 fills short rows, and letters count from 1 in sorted order."""
    letters = {letter: n for n, letter in enumerate(sorted(set("".join(values))), start=1)}
    longest = max(map(len, values), default=0)
    rows = np.zeros((len(values), longest), np.int64)
    for row, value in zip(rows, values, strict=True):
        row[: len(value)] = [letters[letter] for letter in value]
    return torch.from_numpy(rows)
