"""Optimal probabilities by water-filling: K-Vib's Lemma 3 = eq. 5/27; with a floor Lemma 18."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput

LARGEST = float(np.finfo(np.float64).max)


def waterfill(scores: Array, budget: float, floor: float = 0.0) -> Array:
    """The p that minimises sum a_i^2 / p_i with floor <= p_i <= 1 and sum p = budget, exactly.

    It is p_i = clip(a_i / level, floor, 1), with the level that spends the budget. In ascending
    order this is, for some l1 <= l2,

        p_i = floor                                                        (i <= l1)
        p_i = (budget - (N - l2) - l1 floor) a_i / sum_{l1 < j <= l2} a_j   (l1 < i <= l2)
        p_i = 1                                                            (i > l2)

    A bisection over the sorted scores finds l1 and l2, because a higher level spends less. If the
    budget is more than the clients with a_i > 0 can take, those with a_i = 0 share the rest
    equally. With a budget of N or more, every p_i is 1.
    """
    a = np.asarray(scores, np.float64)
    n = len(a)
    if n and not (a.min() >= 0 and a.max() < np.inf):  # NaN fails too
        raise BadInput("waterfill takes scores that are finite and at least 0")
    if not budget > 0 or not 0 <= floor <= 1 or n * floor > budget * (1 + 1e-12):
        raise BadInput(
            f"waterfill cannot spend {budget:g} on {n} clients with at least {floor:g} each: "
            "raise the budget or lower the floor"
        )
    if budget >= n:
        return np.ones(n)
    zeros = n - int(np.count_nonzero(a))
    if budget - (n - zeros) >= zeros * floor:
        return np.where(a > 0, 1.0, (budget - (n - zeros)) / zeros)
    # sums of such scores overflow or lose digits: divide all terms before they are added
    extreme = a.max() > 2.0**900 or a.min(where=a > 0, initial=1.0) < 2.0**-900
    with np.errstate(all="ignore"):
        p: Array = a / (a.sum() / budget)
    if not extreme and floor <= p.min() and p.max() <= 1:  # no clips, so no sorting
        return p

    ascending = np.sort(a)

    def left(j: int, part: float = 1.0) -> float:
        """budget - sum of clip(a / level, floor, 1) at ascending[j] / part; small terms last."""
        if extreme:
            ratio = ascending / ascending[j]
            low, high = np.searchsorted(ratio, [floor / part, 1 / part])
            taken = part * ratio[low:high].sum()
        else:
            level = ascending.item(j) / part
            low, high = np.searchsorted(ascending, [floor * level, level])
            taken = (below[high] - below[low]) / level
        return float((budget - (n - high) - low * floor) - taken)

    with np.errstate(over="ignore", under="ignore"):
        below = np.append(0.0, np.cumsum(ascending))  # below[j]: sum of the j smallest
        # l2: from here on, a / level >= 1
        capped = bisect_left(range(n), True, zeros, key=lambda j: left(j) >= 0)
        # l1: up to here, a / level <= floor
        floored = zeros
        if floor:
            floored = bisect_left(range(capped), True, zeros, key=lambda j: left(j, floor) > 0)
        unit = ascending[capped - 1] if extreme else 1.0
        between = (ascending[floored:capped] / unit).sum()
        rest = budget - (n - capped) - floored * floor
        if between == 0 or rest <= 0:  # the floors and the ones use up the budget
            return np.where(a >= (ascending[capped] if capped < n else np.inf), 1.0, floor)
        p = a / unit / (between / rest)
    np.clip(p, floor, 1.0, out=p)
    return p


def fill(scores: Array, budget: float, shares: Array, floor: float = 0.0) -> Array:
    """`waterfill` for every model among the clients that have data for it; 0 for the others.

    The result is [models, clients]. `floor` is the least that a client gets, as a fraction of what
    it would get if all clients got the same.
    """
    out = np.zeros(shares.shape)
    for model, owners in enumerate(shares > 0):
        number = int(np.count_nonzero(owners))
        if not number:
            continue
        # a slice makes no copies where a million clients all take part
        some = slice(None) if number == len(owners) else owners
        least = floor * min(1.0, budget / number)
        out[model, some] = waterfill(scores[model, some], budget, least)
    return out
