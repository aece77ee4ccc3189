"""Numbers as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import stdtrit

SPACE = "\u00a0"
"""Keeps a number and its unit on one line."""
NONE = "–"

Format = Callable[[float], str]
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SECONDS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def percent(value: float) -> str:
    return f"{100 * value:.1f}{SPACE}%"


def number(value: float) -> str:
    """A score that is not a share."""
    return f"{value:,.4g}"


def score(share: bool) -> Format:
    """The format of accuracies, or of scores that are not shares."""
    return percent if share else number


def count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:,.1f}"


def size(value: float) -> str:
    """12.3 MB, in steps of a thousand."""
    step, unit = scale(value, BYTES)
    digits = 0 if unit == "B" or value / step >= 100 else 1
    return f"{value / step:.{digits}f}{SPACE}{unit}"


def duration(value: float) -> str:
    """4 min 10 s: the two largest units."""
    if value < 0.9995:
        return f"{value * 1000:.0f}{SPACE}ms"
    if value < 59.95:
        return f"{value:.1f}{SPACE}s"
    whole = round(value)
    for (step, unit), (small, small_unit) in pairwise(SECONDS):
        if whole >= step:
            rest = round(whole % step / small)
            if rest * small == step:
                whole, rest = whole + round(small), 0
            more = f"{SPACE}{rest}{SPACE}{small_unit}" if rest else ""
            return f"{whole // step:.0f}{SPACE}{unit}{more}"
    raise AssertionError(value)


def scale(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The unit in which a number reads best."""
    return next(((step, unit) for step, unit in units if largest >= step), units[-1])


def half_width(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values)))


def mean(values: Sequence[float | None], form: Format) -> str:
    """The mean of the known values.

    If there are three or more and they differ, half the 95 % interval follows in the same unit. Two
    that differ are shown themselves: their interval would say nothing.
    """
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    if len(known) == 2 and form(known[0]) != form(known[1]):
        return f"{form(known[0])}, {form(known[1])}"
    middle, half = float(np.mean(known)), half_width(known)
    if form is number:
        return form(middle) + (f"{SPACE}±{SPACE}{half:.2g}" if half else "")
    step, unit = scale(middle, UNITS[form])
    if not half or round(half / step, 1) == 0:
        return form(middle)
    return f"{middle / step:,.1f}{SPACE}±{SPACE}{half / step:,.1f}{SPACE}{unit}".strip()


def paired(first: Mapping[Any, float], second: Mapping[Any, float], share: bool) -> str:
    """The differences `second` - `first` of scores by seed; empty without a common seed.

    Three or more are shown as their mean and its 95 % interval. Shares are in points of 1 %.
    """
    times, digits, unit = (100, 1, f"{SPACE}points") if share else (1, 4, "")
    off = [times * (second[seed] - first[seed]) for seed in first if seed in second]
    half = half_width(off) if len(off) > 2 else None
    if half is None:
        return ", ".join(f"{each:+.{digits}f}" for each in off) + (unit if off else "")
    middle = float(np.mean(off))
    low, high = middle - half, middle + half
    return f"{middle:+.{digits}f}{unit} ({low:+.{digits}f} to {high:+.{digits}f})"


UNITS: dict[Format, Sequence[tuple[float, str]]] = {
    percent: ((0.01, "%"),),
    count: ((1.0, ""),),
    size: BYTES,
    duration: SECONDS,
}
