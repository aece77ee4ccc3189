"""How long Selective FedAvg's server takes to group clients by their vectors.

The vectors are made up: clients of a few kinds, each of which knows its own part of the validation
set, with errors. Measured is all that the server does after the local models are tried: it finds
the threshold, and puts every client into a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.grouping import Selective

SIZES = ((100, 5_000), (1_000, 5_000), (10_000, 5_000), (100_000, 5_000))
"""Clients, and validation examples."""
KINDS, ERRORS = 7, 0.1
BLOCK = 1_000


def measure(rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Group crowds of growing size; the time is the median over some repetitions."""
    rows = []
    for clients, examples in SIZES:
        say(f"groups: {clients:,} clients, {examples:,} examples")
        state, kind = crowd(clients, examples)
        seconds = []
        for _ in range(rounds if clients <= 1_000 else 1):
            began = time.perf_counter()
            of = Selective().groups(state, 0, np.full(clients, -1))
            seconds.append(time.perf_counter() - began)
        rows.append(
            {
                "work": "groups",
                "system": "rota",
                "device": "cpu",
                "seconds_per_round": float(np.median(seconds)),
                "accuracy": right(of, kind),
                "clients": clients,
                "examples": examples,
                "groups": int(of.max()) + 1,
            }
        )
    return rows


def crowd(clients: int, examples: int) -> tuple[dict[str, Array], Array]:
    """A grouping's state in which all vectors are known, and each client's kind."""
    generator = rng.generator(rng.key(0, "bench groups", clients))
    kind = generator.integers(KINDS, size=clients)
    known = np.arange(examples) % KINDS
    packed = []
    for start in range(0, clients, BLOCK):
        some = kind[start : start + BLOCK, None]
        wrong = generator.random((len(some), examples), dtype=np.float32) < ERRORS
        packed.append(np.packbits((known == some) ^ wrong, axis=1))
    return {
        "known": np.ones((1, clients), bool),
        "threshold": np.full(1, np.nan),
        "right.0": np.concatenate(packed),
        "examples.0": np.array(examples),
    }, kind


def right(of: Array, kind: Array) -> float:
    """The share of clients that are in a group whose most frequent kind is theirs."""
    table = np.zeros((int(of.max()) + 1, KINDS), np.int64)
    np.add.at(table, (of, kind), 1)
    return float(table.max(axis=1).sum() / len(of))
