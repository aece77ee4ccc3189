"""Confidence intervals of means over seeds, against scipy's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy import stats

from rota.errors import BadInput
from rota_lab.reproduce.interval import (
    CANNOT_TELL,
    FAILS,
    HOLDS,
    Statement,
    detectable,
    geometric,
    interval,
    judged,
    log_ratios,
    seeds_to_tell,
)


@pytest.mark.parametrize("seeds", range(2, 201))
def test_intervals_are_students(seeds: int) -> None:
    values = np.random.default_rng(seeds).lognormal(size=seeds).tolist()
    error = float(stats.sem(values))
    low, high = stats.t.interval(0.95, seeds - 1, np.mean(values), error)
    got = interval(values)
    assert got.mean == pytest.approx(np.mean(values))
    assert got.low == pytest.approx(low, abs=5.01e-4 * error)
    assert got.high == pytest.approx(high, abs=5.01e-4 * error)


def test_equal_values_have_no_spread() -> None:
    assert interval([0.25] * 12) == (0.25, 0.25, 0.25)


def test_one_seed_says_nothing_about_the_spread() -> None:
    assert interval([2.0]) == (2.0, -np.inf, np.inf)


def test_without_scipy_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    assert interval([2.0]).mean == 2.0
    with pytest.raises(BadInput, match="confidence intervals need scipy, which is not installed"):
        interval([1.0, 2.0])


def standard_errors(seeds: int, level: float) -> float:
    """How many of them a mean must be from 0 to be told with a chance of 80 %."""
    student = stats.t(seeds - 1)
    return float(student.ppf(1 - level / 2) + student.ppf(0.8))


@pytest.mark.parametrize(("seeds", "level"), [(5, 0.05), (5, 0.05 / 12), (20, 0.05)])
def test_what_so_many_seeds_can_tell(seeds: int, level: float) -> None:
    """A mean of that size is told about four times in five, by the test itself."""
    generator = np.random.default_rng(0)
    noise = generator.normal(size=seeds)
    noise /= noise.std(ddof=1)
    least = detectable(noise.tolist(), level)
    assert least == pytest.approx(standard_errors(seeds, level) / np.sqrt(seeds))
    draws = generator.normal(least, 1, (4000, seeds))
    told = np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue < level)
    assert told == pytest.approx(0.8, abs=0.07)


def test_three_verdicts_and_how_many_seeds_would_tell() -> None:
    noise = np.random.default_rng(0).normal(size=8)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    some = [Statement("large", (5 + noise).tolist()), Statement("less", (noise - 5).tolist())]
    claims = judged([*some, Statement("small", (0.5 + noise).tolist())])
    assert [each.verdict for each in claims] == [HOLDS, FAILS, CANNOT_TELL]
    needed = min(n for n in range(9, 100) if standard_errors(n, 0.05 / 3) <= 0.5 * np.sqrt(n))
    assert f"; about {needed} seeds would tell" in claims[2].words
    assert "would tell" not in claims[0].words + claims[1].words
    assert judged([Statement("alone", [1.0])])[0].words == "alone: +1.00, 1 seed"


def test_that_many_seeds_tell_four_times_in_five() -> None:
    generator, mean = np.random.default_rng(0), 0.4
    few = generator.normal(size=10)
    few = mean + (few - few.mean()) / few.std(ddof=1)
    needed = seeds_to_tell(few.tolist())
    assert needed is not None
    draws = generator.normal(mean, 1, (4000, needed))
    told = np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05)
    assert told == pytest.approx(0.8, abs=0.03)
    assert seeds_to_tell([1.0]) is None
    assert seeds_to_tell([1.0, -1.0]) is None


def test_skewed_quantities_are_compared_by_ratios() -> None:
    """The interval of a ratio is that of its logarithm, and is above 0."""
    larger, smaller = [2.0, 200.0, 2e4], [1.0, 50.0, 1e4]
    (claim,) = judged([Statement("more", log_ratios(larger, smaller), log=True)])
    between = interval(np.log([2.0, 4.0, 2.0]).tolist())
    words = f"{np.exp(between.mean):.3g} times (95 %: {np.exp(between.low):.3g}"
    assert claim.words.startswith(f"more: {words} to {np.exp(between.high):.3g}, 3 seeds)")
    assert interval(larger).low < 0 < geometric(larger).low
    assert geometric([1.0, 100.0]).mean == pytest.approx(10)
