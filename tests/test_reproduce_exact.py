"""Lemmas by enumeration: they hold, and planted mistakes are found."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from rota.sampling.waterfill import waterfill
from rota_lab.reproduce import Result, run
from rota_lab.reproduce.interval import FAILS

exact = importlib.import_module("rota_lab.reproduce.exact")  # the package has a function so named
FALSE = ("two shards", "the upper bound of eq. 4", "Lemma 2: the variance")
"""What the sources say and is not so."""


@pytest.fixture(scope="module")
def quick() -> Result:
    return run("exact", quick=True)


def failed(result: Result) -> list[str]:
    return [each.words for each in result.claims if each.verdict == FAILS]


def test_what_holds_and_what_does_not(quick: Result) -> None:
    assert len(quick.claims) == 18
    assert len(failed(quick)) == len(FALSE)
    for words in FALSE:
        assert any(each.startswith(words) for each in failed(quick)), words


def test_probabilities_that_are_not_the_best_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed with even ones, as a sampler that explores has them."""

    def mixed(scores: np.ndarray, budget: float, floor: float = 0.0) -> np.ndarray:
        return 0.95 * waterfill(scores, budget, floor) + 0.05 * budget / len(scores)

    monkeypatch.setattr(exact, "waterfill", mixed)
    words = failed(run("exact", quick=True))
    for lemma in ("Lemma 3's", "Lemma 18's", "Lemma 7's"):
        assert any(each.startswith(lemma) for each in words), lemma


def test_a_biased_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    coins = exact.coins

    def heavier(p: np.ndarray) -> object:
        for chance, weights in coins(p):
            yield chance, 1.001 * weights

    monkeypatch.setattr(exact, "coins", heavier)
    words = failed(run("exact", quick=True))
    for start in ("eq. 2", "eq. 4", "the mean of the estimated feedback"):
        assert any(each.startswith(start) for each in words), start


def test_every_cohort_is_counted() -> None:
    p = np.array([0.2, 0.9, 0.4])
    assert sum(chance for chance, _ in exact.coins(p)) == pytest.approx(1)
    assert sum(chance for chance, _ in exact.cohorts()) == pytest.approx(1)
    mean = sum(chance * weights for chance, weights in exact.coins(p))
    assert mean == pytest.approx(np.ones(3))
