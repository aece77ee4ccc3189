"""Means over seeds with confidence intervals, and verdicts on claims.

All claims of a page are judged together. A claim is a number per seed that is above 0 where the
claim holds: a difference of two methods with the same seed, or a distance from a bar. Student's
t-test gives its two-sided p-value, and Holm's correction the chance of any wrong verdict on the
page. The 95 % interval beside a verdict is the claim's own, without the correction. Where the page
cannot tell, it says how many seeds would. Quantities that are positive and skewed are compared by
logarithms of their ratios (`Statement.log`), so that no interval reaches below 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput

LEVEL, POWER = 0.05, 0.8
MOST = 10_000
"""A number of seeds above which nobody would run them."""
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
    numbers are of, if not of seeds. With `log` the numbers are logarithms of ratios, and they are
    written as factors.
    """

    words: str
    values: Sequence[float]
    unit: str = ""
    scale: float = 1.0
    each: str = "seed"
    log: bool = False


class Claim(NamedTuple):
    """A sentence and its verdict: holds, fails or cannot tell."""

    words: str
    verdict: str


def interval(values: Sequence[float] | Array) -> Interval:
    """The interval of the mean of independent values, one per seed."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = _quantile(len(values) - 1) * error
    return Interval(mean, mean - half, mean + half)


def fitted(x: Array, y: Array) -> tuple[Interval, Interval]:
    """The line through points by least squares: its value at x = 0, and its slope.

    There are at least three points, and they differ in x.
    """
    off, number = x - x.mean(), len(x)
    spread = float(off @ off)
    slope = float(off @ y) / spread
    start = float(y.mean()) - slope * float(x.mean())
    noise = float(np.sum((y - start - slope * x) ** 2)) / (number - 2)
    quantile = _quantile(number - 2)
    at_zero = quantile * math.sqrt(noise * (1 / number + float(x.mean()) ** 2 / spread))
    steep = quantile * math.sqrt(noise / spread)
    return (
        Interval(start, start - at_zero, start + at_zero),
        Interval(slope, slope - steep, slope + steep),
    )


def log_ratios(larger: Sequence[float], smaller: Sequence[float]) -> list[float]:
    """log(larger / smaller) per seed, for statements that one positive quantity exceeds another."""
    return [math.log(one / other) for one, other in zip(larger, smaller, strict=True)]


def geometric(values: Sequence[float]) -> Interval:
    """The geometric mean of positive values and its interval, which cannot reach below 0."""
    return Interval(*(math.exp(min(end, 700.0)) for end in interval(np.log(values).tolist())))


def judged(statements: Sequence[Statement]) -> list[Claim]:
    """The verdicts on the claims of a page, each with its mean and its 95 % interval."""
    adjusted = holm([p_value(each.values) for each in statements])
    level = LEVEL / max(len(statements), 1)
    out = []
    for each, p in zip(statements, adjusted, strict=True):
        verdict = CANNOT_TELL
        if p < LEVEL:
            verdict = HOLDS if np.mean(each.values) > 0 else FAILS
        words = f"{each.words}: {_measured(each)}"
        if verdict == CANNOT_TELL and (needed := seeds_to_tell(each.values, level)):
            number = f"about {needed:,}" if needed <= MOST else f"more than {MOST:,}"
            words += f"; {number} {each.each}s would tell"
        out.append(Claim(words, verdict))
    return out


def seeds_to_tell(values: Sequence[float], level: float = LEVEL) -> int | None:
    """How many values would tell with a chance of POWER, if their mean and spread are these.

    `level` is that of a two-sided test; a page with n claims has LEVEL / n, Holm's strictest. None
    if the values say nothing about their spread, or if their mean is 0.
    """
    if len(values) < 2 or not np.mean(values):
        return None
    size = float(np.std(values, ddof=1) / abs(np.mean(values)))
    ndtri = _special("ndtri")
    needed = ((ndtri(1 - level / 2) + ndtri(POWER)) * size) ** 2
    if needed > MOST:
        return math.ceil(needed)
    number = max(len(values) + 1, math.ceil(needed))
    while _ends(number, level) * size > math.sqrt(number):  # few seeds: t is wider than normal
        number += 1
    return number


def detectable(values: Sequence[float], level: float = LEVEL) -> float:
    """The mean that as many values with this spread would tell from 0 with a chance of POWER."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return _ends(len(values), level) * error


def _ends(number: int, level: float) -> float:
    """How many standard errors a mean must be from 0 to be told so often."""
    quantile = _special("stdtrit")
    return float(quantile(number - 1, 1 - level / 2) + quantile(number - 1, POWER))


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
    if claim.log:
        middle, low, high = (math.exp(min(end, 700.0)) for end in between)
        if len(values) < 2:
            return f"{middle:.3g} times, {seeds}"
        return f"{middle:.3g} times (95 %: {low:.3g} to {high:.3g}, {seeds})"
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
