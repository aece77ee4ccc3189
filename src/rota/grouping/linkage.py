"""Agglomerative clustering by average or single linkage, in numpy."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rota.arrays import Array
from rota.grouping.similar import numbered


def merges(distance: Array, linkage: Literal["average", "single"]) -> list[tuple[float, int, int]]:
    """All merges, nearest first: their height, and one point of each of the two clusters.

    A chain of nearest neighbours (Murtagh 1983) makes n - 1 merges in time n^2. Both linkages are
    reducible, so these are the merges that the plain algorithm makes, in another order.
    """
    apart = np.array(distance, np.float64)
    np.fill_diagonal(apart, np.inf)
    size = np.ones(len(apart))
    found: list[tuple[float, int, int]] = []
    chain: list[int] = []
    while len(found) < len(apart) - 1:
        if not chain:
            chain.append(int(np.argmax(size > 0)))
        last = chain[-1]
        near = int(apart[last].argmin())
        if len(chain) > 1 and apart[last, chain[-2]] <= apart[last, near]:
            near = chain[-2]  # of equally near ones the one before, so that the chain ends
        if len(chain) < 2 or near != chain[-2]:
            chain.append(near)
            continue
        del chain[-2:]
        found.append((float(apart[last, near]), last, near))
        if linkage == "single":
            row = np.minimum(apart[last], apart[near])
        else:
            row = np.average(apart[[last, near]], axis=0, weights=size[[last, near]])
        row[[last, near]] = np.inf
        apart[near], apart[:, near] = row, row
        apart[last], apart[:, last] = np.inf, np.inf
        size[near] += size[last]
        size[last] = 0
    return sorted(found, key=lambda merge: merge[0])


def clusters(
    distance: Array,
    linkage: Literal["average", "single"],
    most: float = np.inf,
    number: int = 1,
) -> Array:
    """The cluster of each point: merges up to a height of `most`, down to `number` clusters.

    Clusters are numbered in the order of their first points.
    """
    of = np.arange(len(distance))
    for height, one, other in merges(distance, linkage)[: max(len(distance) - number, 0)]:
        if height <= most:
            of[of == of[one]] = of[other]
    return numbered(of)
