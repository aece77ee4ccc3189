"""Addressed randomness: a stream is named by its purpose, never by what was drawn before it.

A stream's address is (seed, purpose, round, client, task ...). `key` folds an address into 64 bits.
A key gives

- `generator(key)`: a numpy Generator (Philox, counter-based) for the server, which draws cohorts
  and splits data with it
- `bits(keys, n)`: counter-based random words as tensors, on any device, for many keys at once, for
  the clients' mini-batch orders and dropout masks. Word j depends only on the key and on j, so a
  client's randomness does not depend on the rest of the cohort, the engine, the chunks or the
  device.

`bits` is SplitMix64 (Steele, Lea, Flood 2014): the finaliser applied to key + j * golden ratio.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array

Words = TypeVar("Words", Tensor, Array)
"""64-bit words as int64 tensors, or as int64 arrays, which are faster if they are short."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * MIX1) & MASK
    word = ((word ^ (word >> 27)) * MIX2) & MASK
    return word ^ (word >> 31)


def key(seed: int, *address: int | str) -> int:
    """Fold a seed and an address into one 64-bit key. Order matters; texts are hashed."""
    folded = _mix((int(seed) + GOLDEN) & MASK)  # numpy's whole numbers would overflow
    for part in address:
        word = (
            int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
            if isinstance(part, str)
            else int(part)
        )
        folded = _mix((folded + GOLDEN * ((word & MASK) + 1)) & MASK)
    return folded


def generator(stream: int) -> np.random.Generator:
    """A numpy generator for one key."""
    return np.random.Generator(np.random.Philox(key=stream))


@contextmanager
def addressed(stream: int) -> Iterator[None]:
    """Give torch's own generator on the CPU a key, for modules that draw from it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream)
        yield


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift(words: Words, by: int) -> Words:
    """Logical right shift of int64 words (the usual one keeps the sign)."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def as_tensor(keys: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Keys as an int64 tensor (the same 64 bits, read as signed)."""
    return torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=device)


def _mix_words(words: Words) -> Words:
    """`_mix` on int64 words, whose products wrap around."""
    words = (words ^ _shift(words, 30)) * _signed(MIX1)
    words = (words ^ _shift(words, 27)) * _signed(MIX2)
    return words ^ _shift(words, 31)


def fold(keys: Words, word: int | Words) -> Words:
    """`key` with one more word, for many keys: fold(as_tensor([key(s, a)]), w) is key(s, a, w)."""
    if isinstance(word, int):
        return _mix_words(keys + _signed((GOLDEN * ((word & MASK) + 1)) & MASK))
    return _mix_words(keys + (word + 1) * _signed(GOLDEN))


def bits(keys: Tensor, n: int) -> Tensor:
    """Random words 0..n-1 of every key: int64 of shape [*keys.shape, n]."""
    return _mix_words(
        keys.unsqueeze(-1) + torch.arange(1, n + 1, device=keys.device) * _signed(GOLDEN)
    )


def uniform(keys: Tensor, n: int) -> Tensor:
    """Uniform float32 numbers in [0, 1) with 24 random bits: shape [*keys.shape, n]."""
    return _shift(bits(keys, n), 40).to(torch.float32) * 2.0**-24


def permutation(keys: Tensor, n: int) -> Tensor:
    """A random order of 0..n-1 for every key: shape [*keys.shape, n]."""
    return torch.argsort(bits(keys, n), dim=-1, stable=True)
