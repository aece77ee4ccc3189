"""Confidence intervals of means over seeds, against scipy's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy import stats

from rota.errors import BadInput
from rota_lab.reproduce.interval import interval


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
