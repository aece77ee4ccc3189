"""What samplers learn from a round: the scores pi = share * |update| (K-Vib, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rota.arrays import Array
from rota.plan import Plan

HUGE = 1e200
"""A norm or loss above this counts as this, so that sums of scores do not overflow."""


class Feedback(NamedTuple):
    """The pairs that succeeded, each once, and their scores; `row` is their place in the plan.

    `square` estimates pi^2 without bias, by any procedure: weight / share * score^2, which is
    pi^2 / p for coins, and times * pi^2 / (K q) for K draws by q.
    """

    row: Array
    model: Array
    client: Array
    score: Array
    square: Array


def feedback(shares: Array, plan: Plan, norm: Array) -> Feedback:
    """The scores of the rows whose norm is known (failed rows have none) and can be squared."""
    with np.errstate(over="ignore"):
        share = shares[plan.model, plan.client]
        score = share * norm
        row = np.flatnonzero(np.isfinite(score**2))
        square = (plan.weight / share * score**2)[row]
    return Feedback(row, plan.model[row], plan.client[row], score[row], square)


def matrix(shape: tuple[int, ...], plan: Plan, values: Array) -> Array:
    """One value per plan row as a matrix [models, clients]; NaN where there is no row."""
    out = np.full(shape, np.nan)
    out[plan.model, plan.client] = values
    return out


def first_scale(
    scale: Array, model: Array, values: Array, statistic: Callable[[Array], float] = np.mean
) -> Array:
    """A scale for each model, set by its first values that are not all 0; NaN until then."""
    out = scale.copy()
    for s in np.unique(model[values > 0]):
        if np.isnan(out[s]):
            out[s] = statistic(values[model == s])
    return out
