"""Means over seeds with confidence intervals, and verdicts on claims.

All claims of a page are judged together. A claim is a number per seed that is above 0 where the
claim holds: a difference of two methods with the same seed, or a distance from a bar. Student's
t-test gives its two-sided p-value, and Holm's correction the chance of any wrong verdict on the
page. The 95 % interval beside a verdict is the claim's own, without the correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rota.errors import BadInput

LEVEL = 0.05
HOLDS, FAILS, CANNOT_TELL = "holds", "fails", "cannot tell"


class Interval(NamedTuple):
    """A mean over seeds and its 95 % confidence interval (Student's t); infinite for one seed."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


class Statement(NamedTuple):
    """A claim to be judged: a sentence, and per seed a number that is above 0 where it holds.

    `unit` says how to write the numbers, and `scale` is the size of one unit. `each` is what the
    numbers are of, if not of seeds.
    """

    words: str
    values: Sequence[float]
    unit: str = ""
    scale: float = 1.0
    each: str = "seed"


class Claim(NamedTuple):
    """A sentence and its verdict: holds, fails or cannot tell."""

    words: str
    verdict: str


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of independent values, one per seed."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = _quantile(len(values) - 1) * error
    return Interval(mean, mean - half, mean + half)


def judged(statements: Sequence[Statement]) -> list[Claim]:
    """The verdicts on the claims of a page, each with its mean and its 95 % interval."""
    adjusted = holm([p_value(each.values) for each in statements])
    out = []
    for each, p in zip(statements, adjusted, strict=True):
        verdict = CANNOT_TELL
        if p < LEVEL:
            verdict = HOLDS if np.mean(each.values) > 0 else FAILS
        out.append(Claim(f"{each.words}: {_measured(each)}", verdict))
    return out


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: rejecting those below a level errs at most with that chance."""
    order = np.argsort(values, kind="stable")
    factors = len(values) - np.arange(len(values))
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.asarray(values)[order] * factors))
    return [float(p) for p in adjusted]


def p_value(values: Sequence[float]) -> float:
    """Two-sided, for a mean of 0, by Student's t; 1 for a single seed."""
    if len(values) < 2:
        return 1.0
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    if spread <= 1e-12 * abs(mean):  # rounding is no spread
        return 0.0 if mean else 1.0
    return 2 * _tail(len(values) - 1, -abs(mean) / (spread / math.sqrt(len(values))))


def _measured(claim: Statement) -> str:
    values = [value / claim.scale for value in claim.values]
    between = interval(values)
    seeds = f"{len(values)} {claim.each}{'s' if len(values) > 1 else ''}"
    if len(values) < 2:
        return f"{between.mean:+.2f}{claim.unit}, {seeds}"
    ends = f"95 %: {between.low:+.2f} to {between.high:+.2f}"
    return f"{between.mean:+.2f}{claim.unit} ({ends}, {seeds})"


def _quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to the three decimals that printed tables have.

    The published pages were made with such a table: more decimals would change their last digits.
    """
    return round(float(_special("stdtrit")(freedom, 0.975)), 3)


def _tail(freedom: int, t: float) -> float:
    """The chance that Student's t is below this."""
    return float(_special("stdtr")(freedom, t))


def _special(name: str) -> Callable[..., float]:
    try:
        import scipy.special
    except ImportError as error:
        raise BadInput(
            "confidence intervals need scipy, which is not installed: write the page with "
            "--minutes 0 where it is; finished parts are kept"
        ) from error
    return getattr(scipy.special, name)  # type: ignore[no-any-return]
