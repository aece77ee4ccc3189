"""Optimal probabilities by water-filling (S1 Lemma 3 = eq. 5/27; with a floor Lemma 18, eq. 21-25)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput

LARGEST = float(np.finfo(np.float64).max)


def waterfill(scores: Array, budget: float, floor: float = 0.0) -> Array:
    """The p that minimises sum a_i^2 / p_i subject to floor <= p_i <= 1 and sum p = budget, exactly.

    It is p_i = clip(a_i / level, floor, 1) with the level that spends the budget. In ascending order that is, for some l1 <= l2,

        p_i = floor (i <= l1),   (budget - (N - l2) - l1 floor) a_i / sum_{l1 < j <= l2} a_j,   1 (i > l2),

    and both are found by bisection over the sorted scores: the higher the level, the less it spends. If the
    budget reaches beyond the clients with a_i > 0, those with a_i = 0 share the rest equally; a budget of N or more is all ones.
    """
    a = np.asarray(scores, np.float64)
    n = len(a)
    if n and not (a.min() >= 0 and a.max() < np.inf):  # NaN fails too
        raise BadInput("waterfill takes scores that are finite and at least 0")
    if not budget > 0 or not 0 <= floor <= 1 or n * floor > budget * (1 + 1e-12):
        raise BadInput(
            f"waterfill cannot spend {budget:g} on {n} clients of at least {floor:g} each: raise the budget or lower the floor"
        )
    if budget >= n:
        return np.ones(n)
    zeros = n - int(np.count_nonzero(a))
    if budget - (n - zeros) >= zeros * floor:
        return np.where(a > 0, 1.0, (budget - (n - zeros)) / zeros)
    if a.max() > LARGEST / n:
        a = a * 2.0**-64  # their sum must not overflow
    with np.errstate(all="ignore"):
        p: Array = a / (a.sum() / budget)
    if floor <= p.min() and p.max() <= 1:  # nobody is clipped, so that no order is needed
        return p

    ascending = np.sort(a)
    below = np.zeros(n + 1)  # below[j]: sum of the j smallest
    np.cumsum(ascending, out=below[1:])

    def left(level: float) -> float:
        """budget - sum of clip(a / level, floor, 1), the small terms last: beside whole ones they could be lost."""
        low, high = np.searchsorted(ascending, [floor * level, level])
        return float((budget - (n - high) - low * floor) - (below[high] - below[low]) / level)

    with np.errstate(over="ignore"):
        capped = _first(
            lambda j: left(ascending[j]) >= 0, zeros, n
        )  # l2: from here on a / level >= 1
        floored = (
            _first(lambda j: left(ascending[j] / floor) > 0, zeros, capped) if floor else zeros
        )  # l1: up to here <= floor
        between = ascending[floored:capped].sum()
        if between == 0:  # the floors and the ones use up the budget
            return np.where(a >= (ascending[capped] if capped < n else np.inf), 1.0, floor)
        p = a / (between / (budget - (n - capped) - floored * floor))
    np.clip(p, floor, 1.0, out=p)
    return p


def _first(holds: Callable[[int], bool], start: int, end: int) -> int:
    """The first of start..end-1 for which a condition holds that holds for all after it; `end` where it holds for none."""
    while start < end:
        middle = (start + end) // 2
        start, end = (start, middle) if holds(middle) else (middle + 1, end)
    return start


def fill(scores: Array, budget: float, shares: Array, floor: float = 0.0) -> Array:
    """`waterfill` for every model among the clients that have data for it: [models, clients], 0 for the others.

    `floor` is the least that a client gets, as a part of what it would get if all got the same.
    """
    out = np.zeros(shares.shape)
    for model, owners in enumerate(shares > 0):
        number = int(np.count_nonzero(owners))
        if number:
            some = (
                slice(None) if number == len(owners) else owners
            )  # no copies where a million clients all take part
            out[model, some] = waterfill(
                scores[model, some], budget, floor * min(1.0, budget / number)
            )
    return out
