"""Means over seeds, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rota.errors import BadInput


class Interval(NamedTuple):
    """A mean over seeds and its 95 % confidence interval (Student's t); infinite for one seed."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


def interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of independent values, one per seed."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = _quantile(len(values) - 1) * error
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to the three decimals that printed tables have.

    The published pages were made with such a table: more decimals would change their last digits.
    """
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise BadInput(
            "confidence intervals need scipy, which is not installed: write the page with "
            "--minutes 0 where it is; finished parts are kept"
        ) from error
    return round(float(stdtrit(freedom, 0.975)), 3)
