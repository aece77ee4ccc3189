"""How alike clients are, and groups of clients that are all alike.

A client's vector says which examples of the server's validation set its local model gets right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from rota.arrays import Array

Measure = Literal["overlap", "jaccard", "agreement"]
Similar = Callable[[Array, Array], Array]
"""Numbers of clients, twice -> how alike each of the first is to each of the second."""
BLOCK = 1024
"""Clients are placed in blocks of this size."""
CANDIDATES = 32
"""The most gaps, and the most quantiles, that are tried as thresholds."""
WEAK, REASONABLE = 0.25, 0.5
"""Mean silhouettes: up to the first there is no substantial structure; up to the second it is weak
and could be artificial (Kaufman and Rousseeuw 1990)."""


def similarity(a: Array, b: Array, measure: Measure) -> Array:
    """How alike each vector of `a` is to each of `b`: 0/1 vectors, [n, examples] and [m, examples].

    - "overlap": the share of the examples that both get right (Selective FedAvg)
    - "jaccard": of the examples that one of them gets right, the share that both do; 0 for none
    - "agreement": the share of the examples that both get right or both get wrong
    """
    both = a.astype(np.float32) @ b.astype(np.float32).T
    both = both.astype(np.float64)  # whole numbers, so this is exact
    examples = a.shape[1]
    if measure == "overlap":
        return np.asarray(both / examples)
    either = a.sum(axis=1, dtype=np.int64)[:, None] + b.sum(axis=1, dtype=np.int64) - both
    if measure == "jaccard":
        return np.asarray(np.divide(both, either, out=np.zeros_like(both), where=either > 0))
    return np.asarray(1 - (either - both) / examples)


def place(
    similar: Similar,
    of: Array,
    threshold: float,
    best: bool = False,
    most: int | None = None,
) -> Array:
    """Put every client that has no group (-1) into one, in the order of their numbers.

    A client joins the first group all of whose clients are at least `threshold` like it; with
    `best`, the group whose least similar client is most like it. If there is none, it begins a new
    group. With `most`, it is compared with that many clients of each group only, those that came
    first, so that the work grows with clients times groups, and not with pairs of clients.
    """
    of = of.copy()
    groups = int(of.max(initial=-1)) + 1
    members = [np.flatnonzero(of == g)[:most].tolist() for g in range(groups)]
    new = np.flatnonzero(of < 0)
    for start in range(0, len(new), BLOCK):
        block = new[start : start + BLOCK]
        least = np.full((len(block), groups + len(block)), np.inf)
        for g in range(groups):
            if members[g]:
                least[:, g] = similar(block, np.array(members[g])).min(axis=1)
            else:
                least[:, g] = -np.inf
        inner = similar(block, block)
        for row, client in enumerate(block.tolist()):
            able = np.flatnonzero(least[row, :groups] >= threshold)
            if not len(able):
                able = np.array([groups])
                members.append([])
                groups += 1
            g = int(able[np.argmax(least[row, able])] if best else able[0])
            of[client] = g
            if most is None or len(members[g]) < most:
                members[g].append(client)
                np.minimum(least[:, g], inner[:, row], out=least[:, g])
    return of


def find_threshold(first: Array, second: Array, measure: Measure, best: bool = False) -> float:
    """The threshold whose groups are told apart best on examples that did not form them.

    `first` and `second` are the same clients' vectors on two halves of the validation set. Groups
    form on the first half. They are judged on the second one by the mean silhouette of the Jaccard
    distance: how much nearer clients are to their own group than to the next one. It must be above
    0.25. Where that is only because some clients are far from all others, it must be above 0.5: a
    client whose local model is weaker than the others is not of another kind. If no threshold gives
    such groups, it is the least similarity, so that all are in one group.
    """
    known = similarity(first, first, measure)
    distance = 1 - similarity(second, second, "jaccard")
    pairs = np.sort(known[np.triu_indices(len(known), 1)])
    if not len(pairs):
        return 0.0
    tried, scores = _candidates(pairs), []
    for threshold in tried:
        of = place(lambda a, b: known[np.ix_(a, b)], np.full(len(first), -1), threshold, best)
        score = silhouette(distance, of)
        told = score > REASONABLE or silhouette(distance, of, least=2) > WEAK
        scores.append(score if told else 0.0)
    if not max(scores):
        return float(pairs[0])
    equal = np.flatnonzero(np.isclose(scores, max(scores)))
    return tried[int(equal[len(equal) // 2])]


def _candidates(pairs: Array) -> list[float]:
    """Thresholds in the middle of the widest gaps between similarities, and at their quantiles."""
    values = np.unique(pairs)
    widest = np.argsort(-np.diff(values), kind="stable")[:CANDIDATES]
    gaps = (values[widest] + values[widest + 1]) / 2
    quantiles = np.quantile(pairs, np.linspace(0, 1, CANDIDATES)[1:-1], method="nearest")
    found: list[float] = np.unique(np.concatenate([gaps, quantiles])).tolist()
    return found


def silhouette(distance: Array, of: Array, least: int = 1) -> float:
    """The mean silhouette of groups (Rousseeuw 1987); 0 for one group, and for clients alone.

    Groups of fewer than `least` clients are nobody's next group.
    """
    names, of = np.unique(of, return_inverse=True)
    if len(names) < 2:
        return 0.0
    order = np.argsort(of, kind="stable")
    sizes = np.bincount(of)
    starts = np.cumsum(sizes) - sizes
    sums = np.add.reduceat(distance[:, order], starts, axis=1)
    rows = np.arange(len(of))
    alone = sizes[of] == 1
    own = sums[rows, of] / np.maximum(sizes[of] - 1, 1)
    means = sums / sizes
    means[rows, of] = np.inf
    means[:, sizes < least] = np.inf
    other = means.min(axis=1)
    larger = np.maximum(own, other)
    some = ~alone & (larger > 0) & np.isfinite(other)
    return float(np.divide(other - own, larger, out=np.zeros(len(of)), where=some).mean())


def numbered(of: Array) -> Array:
    """The same groups, numbered in the order of their first clients."""
    _, first, inverse = np.unique(of, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[inverse])
