"""Partitions: which client owns which training example.

A partition is a function (examples, generator) -> (owner of each example or -1, number of clients).
The functions here return one, which draws from the generator alone. Every client gets at least one
example, unless `high_low` is asked for clients without data.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rota.arrays import Array
from rota.data.federation import Examples, Partition
from rota.data.memory import check_room
from rota.errors import BadInput

__all__ = [
    "PARTITIONS",
    "dirichlet",
    "high_low",
    "iid",
    "natural",
    "shards",
    "three_way",
    "unbalanced",
]

MOST = 2**40
"""The largest count that is taken: far more than fits anywhere, and safe to multiply."""


def iid(clients: int = 100) -> Partition:
    """Shuffle and deal evenly, so that each client's data look like all data.

    McMahan et al. 2017 deal MNIST to 100 clients, 600 images each.
    """
    _check("iid", clients=clients)

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        _enough("iid", examples, clients, "clients")
        return _evenly(len(examples), clients)[generator.permutation(len(examples))], clients

    return deal


def shards(clients: int = 100, per_client: int = 2) -> Partition:
    """Sort by label, cut into clients * per_client shards, and deal per_client of them to each.

    McMahan et al. 2017 cut MNIST into 200 shards of 300. So a client sees few labels. If the
    shards do not divide the examples, their sizes differ by one.
    """
    _check("shards", clients=clients, per_client=per_client)
    total = clients * per_client

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        _enough("shards", examples, total, "clients or per_client")
        owner = np.empty(len(examples), np.int64)
        hand = generator.permutation(total) // per_client
        by_label = np.argsort(_labels("shards", examples), kind="stable")
        owner[by_label] = hand[_evenly(len(examples), total)]
        return owner, clients

    return deal


def dirichlet(clients: int = 100, alpha: float = 0.5, least: int = 1) -> Partition:
    """Deal each class in proportions ~ Dirichlet(alpha): a small alpha is skewed, a large one even.

    The clients' shares of class c are q_c ~ Dir(alpha, ..., alpha), and its shuffled examples are
    cut at the cumulated shares (Hsu et al. 2019). Then clients with fewer than `least` examples are
    filled up to it, each time with a random example of the client that is largest by then.
    """
    _check("dirichlet", clients=clients, least=least)
    if not 0 < alpha < np.inf:
        raise BadInput(f"dirichlet: alpha is {alpha}, but it must be a positive number")

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        _enough("dirichlet", examples, clients * least, "clients or least")
        labels = _labels("dirichlet", examples)
        owner = np.empty(len(labels), np.int64)
        for label in range(labels.max() + 1):
            rows = generator.permutation(np.flatnonzero(labels == label))
            cuts = np.cumsum(generator.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)
            # a random offset makes the expected counts exact: client 0 would get the first example
            places = np.arange(len(rows)) + generator.random()
            owner[rows] = np.searchsorted(cuts, places, side="right")
        return _fill(owner, clients, least, generator), clients

    return deal


POOLS = ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))


def three_way(balanced: float = 0.0, clients: int = 9) -> Partition:
    """Three partitions, each partly random, the rest labels 0-3, 4-6 or 7-9 (Selective FedAvg).

    `balanced` is the random part of each: Selective FedAvg's N as a fraction. The random parts are
    disjoint. The partitions are equal, and as large as the smallest label pool permits; the other
    examples are left out. A third of the clients shares each partition equally: of nine, 0-2, 3-5
    and 6-8.
    """
    _check("three-way", clients=clients)
    _fraction("three-way", "balanced", balanced)
    if clients % 3:
        raise BadInput(
            f"three-way: clients is {clients}, but it must be a multiple of 3, so that each third "
            "shares a partition"
        )

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        if examples.y.ndim != 1 or examples.y.is_floating_point():
            raise BadInput(
                "three-way: the targets are not class labels, and it deals by labels 0 to 9; use "
                "iid or natural"
            )
        order = generator.permutation(len(examples))
        member = np.stack([np.isin(examples.labels[order], pool) for pool in POOLS])
        # Size m needs 3 * (its random part) examples off the top of the shuffled deck, and the rest
        # of each partition from its pool behind them. Both needs grow with m, so the largest m that
        # works is the last one.
        behind = member.sum(1)[:, None] - np.pad(np.cumsum(member, axis=1), ((0, 0), (1, 0)))
        sizes = np.arange(len(order) // 3 + 1)
        drawn = np.floor(sizes * balanced).astype(np.int64)
        fits = (behind[:, 3 * drawn] >= sizes - drawn).all(axis=0)
        size = int(np.flatnonzero(fits)[-1])
        size -= size % (clients // 3)
        if size == 0:
            raise BadInput(
                f"three-way: the examples of labels 0-3, 4-6 and 7-9 are too few for {clients} "
                "clients; lower clients"
            )
        owner = np.full(len(order), -1, np.int64)
        top = int(drawn[size])
        for third, pool in enumerate(member):
            rest = 3 * top + np.flatnonzero(pool[3 * top :])[: size - top]
            rows = np.concatenate([order[third * top : (third + 1) * top], order[rest]])
            shared = _evenly(size, clients // 3)
            owner[generator.permutation(rows)] = third * (clients // 3) + shared
        return owner, clients

    return deal


def high_low(
    clients: int = 120,
    high: float = 0.1,
    low_size: tuple[int, int] = (9, 15),
    high_size: tuple[int, int] = (90, 150),
    labels: float = 0.3,
    missing: float = 0.0,
) -> Partition:
    """Few high-data and many low-data clients, each with 30 % of the labels (MMFL).

    The last `high` of the clients hold high_size examples each, the others low_size (uniform, both
    ends included). They are the same clients for every model, and with the defaults .1 of them hold
    .526 of the data. The clients are dealt to in turn. Each gets int(labels * classes) labels (at
    least one), those with most examples left (ties at random), and its examples are dealt
    cyclically over them, none twice. Each client has no data for this model with probability
    `missing`; MMFL's "10 % lack one of S models" is missing = .1 / S for each.
    """
    _check("high-low", clients=clients)
    for name, value in (("high", high), ("labels", labels), ("missing", missing)):
        _fraction("high-low", name, value)
    if labels == 0:
        raise BadInput(
            "high-low: labels is 0, but it must be above 0: a client has at least one label"
        )
    for name, (low, top) in (("low_size", low_size), ("high_size", high_size)):
        if not 1 <= low <= top <= MOST:
            raise BadInput(
                f"high-low: {name} is ({low}, {top}), but it must be two whole numbers, the "
                f"smaller first, from 1 to {MOST:,}"
            )
    check_room(200.0 * clients, f"high-low: {clients:,} clients", "lower clients")

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        label = _labels("high-low", examples)
        left = np.bincount(label)
        own = max(1, int(labels * len(left) + 1e-9))
        many = round(high * clients)
        low, top = np.where(np.arange(clients)[:, None] < clients - many, low_size, high_size).T
        sizes = generator.integers(low, top, endpoint=True)
        sizes[generator.random(clients) < missing] = 0
        if not sizes.any():
            raise BadInput(
                f"high-low: missing = {missing} left all {clients} clients without data; lower it "
                "or raise clients"
            )
        # each class is a shuffled deck, and left[c] counts the cards still in it
        decks = [generator.permutation(np.flatnonzero(label == c)) for c in range(len(left))]
        owner = np.full(len(label), -1, np.int64)
        for client, size in enumerate(sizes):
            chosen = np.lexsort((generator.random(len(left)), -left))[:own]
            # Turn t of label c happens if c has more than t examples left. Reading turn by turn
            # skips labels that ran out.
            most = min(size, left[chosen].max())
            turns = np.flatnonzero(np.arange(most)[:, None] < left[chosen])[:size]
            if len(turns) < size:
                raise BadInput(
                    f"high-low: the {len(label)} examples ran out at client {client} of {clients}; "
                    "lower clients, low_size or high_size"
                )
            for c, count in zip(chosen, np.bincount(turns % own, minlength=own), strict=True):
                owner[decks[c][left[c] - count : left[c]]] = client
                left[c] -= count
        return owner, clients

    return deal


UNBALANCED = {1: (0.1, 2.5), 2: (0.2, 2.8), 3: (0.5, 2.1)}


def unbalanced(version: int = 1, clients: int | None = None) -> Partition:
    """Most clients cut to 2 or 3 examples: K-Vib's FEMNIST v1, v2 and v3.

    A random .1, .2 or .5 of the natural clients (or of `clients` iid ones, if given) keep all
    examples. Each other client keeps 2 or 3 random ones, 2.5, 2.8 or 2.1 on average. If clients
    hold about 101 examples, as the writers of FEMNIST digits do, these 10/20/50 % then hold K-Vib's
    82/90/98 % of the data.
    """
    if version not in UNBALANCED:
        raise BadInput(f"unbalanced: version is {version}, but it must be 1, 2 or 3")
    whole, small = UNBALANCED[version]
    base = natural() if clients is None else iid(clients)

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        owner, count = base(examples, generator)
        keep = 2 + (generator.random(count) < small - 2)
        keep[generator.permutation(count)[: max(1, round(whole * count))]] = len(examples)
        return np.where(rank(owner, count, generator) < keep[owner], owner, -1), count

    return deal


def natural(limit: int | None = None) -> Partition:
    """One client per writer, role or hospital in the data: the first `limit` of them, or all."""
    if limit is not None:
        _check("natural", limit=limit)

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        if examples.groups is None:
            raise BadInput(
                "these data have no natural clients; use iid, shards or dirichlet instead of "
                "natural, and give unbalanced its clients"
            )
        known, owner = np.unique(examples.groups, return_inverse=True)
        count = len(known) if limit is None else min(limit, len(known))
        return np.where(owner < count, owner, -1), count

    return deal


def _evenly(examples: int, owners: int) -> Array:
    """An owner per example, in order; the owners' counts differ by at most one."""
    return np.arange(examples, dtype=np.int64) * owners // examples


def rank(owner: Array, clients: int, generator: np.random.Generator) -> Array:
    """Each example's place in a random order of its owner's examples, counted from 0."""
    order = np.lexsort((generator.random(len(owner)), owner))
    sizes = np.bincount(owner, minlength=clients)
    place = np.empty(len(owner), np.int64)
    place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place


def _fill(owner: Array, clients: int, least: int, generator: np.random.Generator) -> Array:
    """Fill every client up to `least` examples, each from the client that is largest by then."""
    sizes = np.bincount(owner, minlength=clients)
    wanted = np.maximum(least - sizes, 0)
    low, top = least, int(sizes.max()) + 1
    while top - low > 1:
        middle = (low + top) // 2
        if np.maximum(sizes - middle, 0).sum() >= wanted.sum():
            low = middle
        else:
            top = middle
    given = np.maximum(sizes - low, 0)
    given[generator.permutation(np.flatnonzero(given))[: given.sum() - wanted.sum()]] -= 1
    moved = generator.permutation(np.flatnonzero(rank(owner, clients, generator) < given[owner]))
    owner[moved] = np.repeat(np.arange(clients), wanted)
    return owner


def _labels(name: str, examples: Examples) -> Array:
    """The labels as 0..C-1, where C is the number of classes that occur."""
    if examples.y.ndim != 1 or examples.y.is_floating_point():
        raise BadInput(
            f"{name}: the targets are not class labels, and it deals by label; use iid or natural"
        )
    return np.unique(examples.labels, return_inverse=True)[1]


def _check(partition: str, **counts: object) -> None:
    for name, count in counts.items():
        if not isinstance(count, int | np.integer) or not 1 <= count <= MOST:
            raise BadInput(
                f"{partition}: {name} is {count!r}, but it must be a whole number from 1 on"
            )


def _fraction(partition: str, name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise BadInput(
            f"{partition}: {name} is {value}, but it must be a fraction from 0 to 1 (30 % is 0.3)"
        )


def _enough(partition: str, examples: Examples, needed: int, lower: str) -> None:
    if len(examples) < needed:
        raise BadInput(
            f"{partition}: it needs {needed} examples and there are {len(examples)}; lower {lower}"
        )


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "shards": shards,
    "dirichlet": dirichlet,
    "three-way": three_way,
    "high-low": high_low,
    "unbalanced": unbalanced,
    "natural": natural,
}
