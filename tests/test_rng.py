"""Addressed randomness: the same address gives the same numbers, other addresses unrelated ones."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rota import rng

seeds = st.integers(0, 2**64 - 1)
words = st.integers(0, 2**63 - 1)


@given(seeds, st.lists(words, max_size=4))
def test_key_is_a_function_of_the_address(seed: int, address: list[int]) -> None:
    assert rng.key(seed, *address) == rng.key(seed, *address)
    assert 0 <= rng.key(seed, *address) < 2**64


@given(seeds, words, words)
def test_order_and_depth_of_an_address_matter(seed: int, a: int, b: int) -> None:
    assert len({rng.key(seed, a, b), rng.key(seed, a), rng.key(seed), rng.key(seed, "a", b)}) == 4
    if a != b:
        assert rng.key(seed, a, b) != rng.key(seed, b, a)


@given(seeds, words)
def test_fold_continues_key_on_tensors(seed: int, word: int) -> None:
    keys = rng.as_tensor([rng.key(seed, "x"), rng.key(seed, "y")])
    assert torch.equal(
        rng.fold(keys, word), rng.as_tensor([rng.key(seed, "x", word), rng.key(seed, "y", word)])
    )


def test_known_words() -> None:
    """SplitMix64's published first outputs for seed 1234567 (Vigna's reference implementation)."""
    first = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [int(word) % 2**64 for word in rng.bits(torch.tensor(1234567), 5)] == first


def test_word_j_depends_on_key_and_j_alone() -> None:
    keys = rng.as_tensor([rng.key(0, i) for i in range(5)])
    together = rng.bits(keys, 100)
    assert torch.equal(together[3, :40], rng.bits(keys[3], 40))


def test_uniform_is_uniform_within_and_across_keys() -> None:
    keys = rng.as_tensor([rng.key(7, "client", i) for i in range(4000)])
    draws = rng.uniform(keys, 8).numpy()
    assert draws.min() >= 0
    assert draws.max() < 1
    for sample in (draws.ravel(), draws[:, 0], draws[:, -1]):
        assert stats.kstest(sample, "uniform").pvalue > 1e-3
    assert (
        abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.06
    )  # neighbouring clients are unrelated
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.06


def test_permutations_are_equally_likely() -> None:
    keys = rng.as_tensor([rng.key(3, i) for i in range(12_000)])
    orders = rng.permutation(keys, 3)
    assert torch.equal(orders.sort(dim=-1).values, torch.arange(3).expand(len(keys), 3))
    counts = np.unique(orders.numpy(), axis=0, return_counts=True)[1]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_generators_of_different_keys_differ() -> None:
    assert rng.generator(rng.key(0, "a")).random() == rng.generator(rng.key(0, "a")).random()
    assert rng.generator(rng.key(0, "a")).random() != rng.generator(rng.key(0, "b")).random()
