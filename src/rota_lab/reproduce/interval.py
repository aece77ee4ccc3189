"""Means over seeds with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t: the 97.5 % quantile, for so many degrees of freedom."""


class Interval(NamedTuple):
    """A mean over seeds, and its 95 % confidence interval (Student's t); infinite for a single seed."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


def interval(values: Sequence[float]) -> Interval:
    """Over independent seeds."""
    mean, more = float(np.mean(values)), len(values) - 1
    half = T95[more] * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if more else math.inf
    return Interval(mean, mean - half, mean + half)
