"""What samplers make of a round: the scores pi = share * |update| of the clients that came back (S1 Alg. 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rota.arrays import Array
from rota.plan import Plan

HUGE = 1e200
"""What a norm or a loss counts as that is larger, or overflows: sums of scores must not."""


class Feedback(NamedTuple):
    """The pairs that came back, each once, and their scores; `row` is their place in the plan."""

    row: Array
    model: Array
    client: Array
    score: Array


def feedback(shares: Array, plan: Plan, norm: Array) -> Feedback:
    """The scores of the rows that did not fail (NaN), and whose norm can be squared: that of an enormous update may overflow."""
    with np.errstate(over="ignore"):
        score = shares[plan.model, plan.client] * norm
        row = np.flatnonzero(np.isfinite(score**2))
    return Feedback(row, plan.model[row], plan.client[row], score[row])


def times(plan: Plan, back: Feedback, rates: Array, shares: Array) -> Array:
    """How often each pair that came back was drawn, with replacement: its weight is times * share / (draws * chance)."""
    at, total = (back.model, back.client), rates.sum(axis=1)
    expected = (
        rates[at] * (np.rint(total) / np.maximum(total, 1))[back.model]
    )  # a budget of 2.6 is three draws
    return np.asarray(np.rint(plan.weight[back.row] * expected / shares[at]))


def matrix(shape: tuple[int, ...], plan: Plan, values: Array) -> Array:
    """One value a plan row as a matrix [models, clients], NaN where there is none."""
    out = np.full(shape, np.nan)
    out[plan.model, plan.client] = values
    return out


def first_scale(
    scale: Array, model: Array, values: Array, statistic: Callable[[Array], float] = np.mean
) -> Array:
    """A scale for each model, fixed by the first values that are not all 0; NaN until then."""
    out = scale.copy()
    for s in np.unique(model[values > 0]):
        if np.isnan(out[s]):
            out[s] = statistic(values[model == s])
    return out
