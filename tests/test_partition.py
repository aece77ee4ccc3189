"""One suite over all partitions, then what defines each, and the matched test split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota import rng
from rota.arrays import Array
from rota.data.federation import Examples, Partition, federate, match
from rota.data.partition import (
    PARTITIONS,
    POOLS,
    dirichlet,
    high_low,
    iid,
    natural,
    shards,
    three_way,
    unbalanced,
)
from rota.errors import BadInput


def make(labels: Array, groups: Array | None = None) -> Examples:
    y = torch.from_numpy(np.asarray(labels, np.int64))
    return Examples(torch.arange(len(y), dtype=torch.float32), y, groups)


def generator(seed: int = 0) -> np.random.Generator:
    return rng.generator(rng.key(seed, "test"))


# ten classes of unequal sizes, 120 natural clients of about 100 examples
CLASSES = generator().choice(10, 12_000, p=np.array([8, 9, 10, 11, 12, 8, 9, 10, 11, 12]) / 100)
DATA = make(CLASSES, generator(1).integers(0, 120, 12_000))

CASES: dict[str, list[Partition]] = {
    "iid": [iid(), iid(7), iid(12_000)],
    "shards": [shards(), shards(7, 3), shards(6_000, 2)],
    "dirichlet": [
        dirichlet(),
        dirichlet(50, alpha=0.01, least=20),
        dirichlet(12_000),
        dirichlet(1),
    ],
    "three-way": [three_way(), three_way(0.35, clients=3), three_way(1.0)],
    "high-low": [high_low(), high_low(20, high=1.0, labels=1.0), high_low(40, high=0.0)],
    "unbalanced": [unbalanced(1), unbalanced(2, clients=50), unbalanced(3)],
    "natural": [natural(), natural(limit=20)],
}
ALL = [
    pytest.param(partition, name, id=f"{name}-{i}")
    for name, cases in CASES.items()
    for i, partition in enumerate(cases)
]


def sizes_of(owner: Array, clients: int) -> Array:
    return np.bincount(owner[owner >= 0], minlength=clients)


def test_every_partition_is_tested() -> None:
    assert set(CASES) == set(PARTITIONS)


@pytest.mark.parametrize(("partition", "name"), ALL)
def test_any_partition(partition: Partition, name: str) -> None:
    owner, clients = partition(DATA, generator())
    assert owner.shape == (len(DATA),)
    assert owner.dtype == np.int64
    assert owner.min() >= -1
    assert owner.max() == clients - 1
    assert sizes_of(owner, clients).min() >= 1
    if name in ("iid", "shards", "dirichlet"):
        assert owner.min() == 0, "these leave nothing out"
    again, _ = partition(DATA, generator())
    np.testing.assert_array_equal(owner, again)
    other, _ = partition(DATA, generator(5))
    if clients > 1:  # only natural clients do not depend on the seed
        assert np.array_equal(owner, other) == (name == "natural")


@pytest.mark.parametrize(("partition", "name"), ALL)
def test_any_partition_packs(partition: Partition, name: str) -> None:
    """No example is dealt twice or was left out, and labels stay with their examples."""
    fed = federate(name, DATA, DATA, partition, classes=10)
    rows = fed.train.x.long()
    assert len(rows.unique()) == len(rows)
    assert torch.equal(DATA.y[rows], fed.train.y)
    assert fed.train.sizes.sum() == len(rows)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: iid(0), "clients"),
        (lambda: iid(2.5), "clients"),  # type: ignore[arg-type]
        (lambda: shards(10, 0), "per_client"),
        (lambda: dirichlet(alpha=0), "alpha"),
        (lambda: dirichlet(alpha=float("nan")), "alpha"),
        (lambda: dirichlet(least=0), "least"),
        (lambda: three_way(30), r"balanced .* 0\.3"),
        (lambda: three_way(clients=10), "multiple of 3"),
        (lambda: high_low(high=-0.1), "high"),
        (lambda: high_low(low_size=(15, 9)), "low_size"),
        (lambda: unbalanced(4), "version"),
        (lambda: natural(limit=0), "limit"),
    ],
)
def test_bad_options(build: Callable[[], Partition], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        build()


SMALL = make(np.arange(30) % 10)
REAL = Examples(torch.zeros(300, 1), torch.zeros(300))


@pytest.mark.parametrize(
    ("partition", "examples", "words"),
    [
        (iid(31), SMALL, "needs 31 examples and there are 30; lower clients"),
        (shards(20, 2), SMALL, "needs 40 examples"),
        (dirichlet(10, least=4), SMALL, "needs 40 examples"),
        (three_way(clients=60), SMALL, "lower clients"),
        (three_way(), make(np.zeros(90)), "labels 0-3, 4-6 and 7-9"),
        (high_low(), SMALL, "ran out at client"),
        (high_low(2, missing=1.0), SMALL, "without data"),
        (natural(), SMALL, "no natural clients; use iid"),
        (unbalanced(), SMALL, "give unbalanced its clients"),
        *(
            (PARTITIONS[name](), REAL, "not class labels")
            for name in ("shards", "dirichlet", "three-way", "high-low")
        ),
    ],
)
def test_data_that_do_not_fit(partition: Partition, examples: Examples, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        partition(examples, generator())


def test_iid_needs_no_labels() -> None:
    owner, _ = iid(10)(REAL, generator())
    assert sizes_of(owner, 10).tolist() == [30] * 10


@given(examples=st.integers(1, 500), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_iid_is_even(examples: int, share: float, seed: int) -> None:
    clients = 1 + int(share * (examples - 1))
    owner, _ = iid(clients)(make(np.zeros(examples)), generator(seed))
    sizes = sizes_of(owner, clients)
    assert sizes.sum() == examples
    assert np.ptp(sizes) <= 1


def test_iid_mixes_labels() -> None:
    fed = federate("even", make(np.repeat(np.arange(10), 1000)), SMALL, iid(10), classes=10)
    counts = fed.train.label_counts(10)
    assert abs(counts - 100).max() < 5 * np.sqrt(100 * 0.9)


@given(
    clients=st.integers(1, 40),
    per_client=st.integers(1, 5),
    extra=st.integers(0, 150),
    seed=st.integers(0, 99),
)
def test_shards(clients: int, per_client: int, extra: int, seed: int) -> None:
    """A client owns per_client runs of the sorted labels; shards differ by at most one example."""
    total = clients * per_client
    labels = generator(seed).integers(0, 10, total + extra)
    owner, _ = shards(clients, per_client)(make(labels), generator(seed))
    small = len(labels) // total
    sizes = sizes_of(owner, clients)
    assert sizes.min() >= per_client * small
    assert sizes.max() <= per_client * (small + (len(labels) % total > 0))
    in_order = owner[np.argsort(labels, kind="stable")]
    runs = np.flatnonzero(np.diff(in_order, prepend=-1))
    assert np.bincount(in_order[runs]).max() <= per_client


def test_shards_of_mnist() -> None:
    """FedAvg's paper deals 200 shards of 300, 2 per client.

    If the classes are multiples of 300, each client has 600 examples of at most 2 digits.
    """
    fed = federate("shards", make(np.tile(np.arange(10), 6000)), SMALL, shards(), classes=10)
    assert (fed.train.sizes == 600).all()
    digits = (fed.train.label_counts(10) > 0).sum(axis=1)
    assert set(digits) == {1, 2}


def skew(alpha: float) -> float:
    """The mean over clients of the largest label's share."""
    fed = federate("skew", DATA, SMALL, dirichlet(40, alpha), classes=10)
    counts = fed.train.label_counts(10)
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())


def test_dirichlet_skew_falls_with_alpha() -> None:
    skews = [skew(alpha) for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.8
    assert skews[-1] < 0.16  # the largest class is 12 % of the data


def test_dirichlet_follows_its_proportions() -> None:
    """The shares of a class have Dir(alpha)'s moments.

    They are the mean 1/N and the variance (1/N)(1 - 1/N) / (N alpha + 1).
    """
    clients, alpha = 10, 0.7
    data = make(np.zeros(10_000))
    partition = dirichlet(clients, alpha)
    owners = [partition(data, generator(seed))[0] for seed in range(400)]
    draws = np.stack([sizes_of(owner, clients) for owner in owners]) / 10_000
    variance = 0.1 * 0.9 / (clients * alpha + 1)
    assert abs(draws.mean(axis=0) - 0.1).max() < 4 * np.sqrt(variance / 400)
    assert draws.var() == pytest.approx(variance, rel=0.15)


def test_dirichlet_favours_no_client_in_small_classes() -> None:
    owner, _ = dirichlet(10, alpha=1.0)(make(np.arange(2000)), generator())
    assert abs(sizes_of(owner, 10) - 200).max() < 5 * np.sqrt(180)


@given(
    clients=st.integers(1, 60),
    least=st.integers(1, 8),
    spare=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_dirichlet_gives_everyone_the_least(
    clients: int, least: int, spare: int, seed: int
) -> None:
    data = make(generator(seed).integers(0, 3, clients * least + spare))
    owner, _ = dirichlet(clients, alpha=0.05, least=least)(data, generator(seed))
    assert sizes_of(owner, clients).min() >= least


def test_dirichlet_fills_from_the_largest_alone() -> None:
    """Filling levels the largest clients down, and those below that level lose nothing."""
    before = sizes_of(dirichlet(200, alpha=0.05, least=1)(DATA, generator(3))[0], 200)
    after = sizes_of(dirichlet(200, alpha=0.05, least=10)(DATA, generator(3))[0], 200)
    level = after.max()
    untouched = (before >= 10) & (before < level - 1)
    assert (before < 10).any()
    np.testing.assert_array_equal(after[untouched], before[untouched])
    assert (after[before < 10] == 10).all()
    assert (after[before > level] >= level - 1).all()


def test_three_way_labels() -> None:
    """At 0 % balanced, a client sees its third's labels, and the smallest pool sets the sizes."""
    fed = federate("s2", DATA, SMALL, three_way(0.0), classes=10)
    counts = fed.train.label_counts(10)
    for clients, others in ((slice(3), (4, 10)), (slice(3, 6), (0, 4)), (slice(3, 6), (7, 10))):
        assert not counts[clients, slice(*others)].any()
    assert not counts[6:, :7].any()
    pools = np.bincount(CLASSES)
    smallest = min(pools[:4].sum(), pools[4:7].sum(), pools[7:].sum())
    assert (fed.train.sizes == smallest // 3).all()


@given(balanced=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_three_way_mix(balanced: float, seed: int) -> None:
    owner, clients = three_way(balanced)(DATA, generator(seed))
    sizes = sizes_of(owner, clients)
    assert np.ptp(sizes) == 0
    pools = np.array([36, 31, 33]) / 100
    # 1 - N of a third's examples are from its pool, and so is the pool's share of the N random ones
    own = [
        np.isin(CLASSES[owner // 3 == third], labels).mean() for third, labels in enumerate(POOLS)
    ]
    assert abs(np.array(own) - (1 - balanced + balanced * pools)).max() < 0.04
    # the clients of a third have the same mix
    own = [np.isin(CLASSES[owner == client], POOLS[client // 3]).mean() for client in range(9)]
    assert max(np.ptp(own[:3]), np.ptp(own[3:6]), np.ptp(own[6:])) < 0.12
    # as large as can be: m <= pool / (1 - N + 3 N pool / n), in expectation
    smallest = min(np.isin(CLASSES, labels).sum() for labels in POOLS)
    largest = smallest / (1 - balanced + 3 * balanced * smallest / len(DATA))
    assert 3 * sizes[0] == pytest.approx(largest, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_high_low(seed: int) -> None:
    """MMFL: the last 12 of 120 clients hold .526 of the data; each client has 3 of 10 labels."""
    data = make(np.repeat(np.arange(10), 6000))
    fed = federate("mmfl", data, SMALL, high_low(), classes=10, seed=seed)
    sizes = fed.train.sizes
    assert 9 <= sizes[:108].min() <= sizes[:108].max() <= 15
    assert 90 <= sizes[108:].min() <= sizes[108:].max() <= 150
    assert sizes[108:].sum() / sizes.sum() == pytest.approx(0.526, abs=0.045)
    counts = fed.train.label_counts(10)
    assert ((counts > 0).sum(axis=1) == 3).all()
    for row in counts:
        assert np.ptp(row[row > 0]) <= 1
    # a random part of the data, not the first examples of each class
    assert (fed.train.x % 6000).mean() == pytest.approx(3000, abs=150)
    # the classes with the most examples left are chosen, so all classes shrink alike
    assert np.ptp(counts.sum(axis=0)) <= 50


def test_high_low_sizes_reach_both_ends() -> None:
    owner, _ = high_low(800, high=0.5, low_size=(1, 2), high_size=(3, 5))(DATA, generator())
    assert set(sizes_of(owner, 800)[:400]) == {1, 2}
    assert set(sizes_of(owner, 800)[400:]) == {3, 4, 5}


def test_high_low_uses_other_labels_when_one_runs_out() -> None:
    data = make(np.array([0] * 9 + [1]))
    owner, _ = high_low(1, high=1.0, high_size=(10, 10), labels=1.0)(data, generator())
    assert (owner == 0).all()


def test_high_low_missing() -> None:
    owner, clients = high_low(600, high=0.0, missing=0.25)(DATA, generator())
    sizes = sizes_of(owner, clients)
    assert (sizes == 0).mean() == pytest.approx(0.25, abs=0.08)
    assert sizes[sizes > 0].min() >= 9


@pytest.mark.parametrize(
    ("version", "whole", "small", "share"),
    [(1, 0.1, 2.5, 0.82), (2, 0.2, 2.8, 0.90), (3, 0.5, 2.1, 0.98)],
)
@pytest.mark.parametrize("clients", [None, 120])
def test_unbalanced(
    version: int, whole: float, small: float, share: float, clients: int | None
) -> None:
    """K-Vib's FEMNIST: 10/20/50 % of the clients hold 82/90/98 % of the data, the others little."""
    base, _ = (natural() if clients is None else iid(clients))(DATA, generator())
    owner, count = unbalanced(version, clients)(DATA, generator())
    assert count == 120
    np.testing.assert_array_equal(owner[owner >= 0], base[owner >= 0])
    sizes = sizes_of(owner, count)
    large = sizes > 3
    np.testing.assert_array_equal(sizes[large], sizes_of(base, count)[large])
    assert set(sizes[~large]) == {2, 3}
    assert sizes[~large].mean() == pytest.approx(small, abs=0.2)
    assert large.sum() == whole * count
    assert sizes[large].sum() / sizes.sum() == pytest.approx(share, abs=0.015)


def test_natural() -> None:
    owner, clients = natural()(make(np.zeros(5), np.array([4, 0, 4, 2, 0])), generator())
    assert (owner.tolist(), clients) == ([2, 0, 2, 1, 0], 3)
    owner, clients = natural(limit=2)(make(np.zeros(5), np.array([4, 0, 4, 2, 0])), generator())
    assert (owner.tolist(), clients) == ([-1, 0, -1, 1, 0], 2)


@given(seed=st.integers(0, 999), clients=st.integers(1, 12), classes=st.integers(1, 5))
def test_match_deals_in_proportion(seed: int, clients: int, classes: int) -> None:
    """Each test example of a class that is trained on has one owner.

    A client's count is within 1 of its exact share.
    """
    draw = generator(seed)
    counts = draw.integers(0, 40, (clients, classes)) * (draw.random((clients, classes)) < 0.5)
    labels = draw.integers(0, classes, 100)
    owner = match(counts, labels, draw)
    total = counts.sum(axis=0)
    np.testing.assert_array_equal(owner >= 0, total[labels] > 0)
    for label in np.flatnonzero(total):
        dealt = np.bincount(owner[labels == label], minlength=clients)
        exact = counts[:, label] / total[label] * (labels == label).sum()
        assert abs(dealt - exact).max() < 1
        assert (dealt[counts[:, label] == 0] == 0).all()


def test_matched_test_split_follows_training() -> None:
    test = make(np.tile(np.arange(10), 1000))
    deal = dirichlet(20, alpha=0.3)
    fed = federate("matched", DATA, test, deal, classes=10, matched_test=True)
    assert not fed.shared_test
    trained, tested = fed.train.label_counts(10), fed.test.label_counts(10)
    assert (tested.sum(axis=0) == 1000).all()
    assert abs(trained / trained.sum(axis=0) * 1000 - tested).max() < 1
