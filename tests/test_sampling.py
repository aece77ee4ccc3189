"""One suite for all samplers: what they draw is a plan, and what they claim of it holds."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota import rng
from rota.errors import BadInput
from rota.plan import Plan, Seen
from rota.sampling import SAMPLERS, Full, Sampler, Uniform, draw

MEMBERS: dict[str, Sampler] = {
    "uniform-fixed": Uniform(3),
    "uniform-independent": Uniform(3, "independent"),
    "uniform-multinomial": Uniform(3, "multinomial"),
    "full": Full(),
}
SHARES = np.array([[0.3, 0.2, 0.1, 0.25, 0.1, 0.05], [0.5, 0.0, 0.2, 0.0, 0.25, 0.05]])


def test_every_sampler_is_in_the_suite() -> None:
    assert {type(member) for member in MEMBERS.values()} == set(SAMPLERS.values())


@pytest.mark.parametrize("sampler", MEMBERS.values(), ids=MEMBERS)
class TestEverySampler:
    def test_the_same_key_draws_the_same_plan(self, sampler: Sampler) -> None:
        one, two = (sampler.draw(sampler.init(SHARES), SHARES, rng.generator(5)) for _ in range(2))
        for name in ("client", "model", "probability", "weight"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))

    def test_rows_are_unique_pairs_with_data(self, sampler: Sampler) -> None:
        for key in range(50):
            plan = sampler.draw(sampler.init(SHARES), SHARES, rng.generator(key))
            assert len({*zip(plan.client, plan.model, strict=True)}) == len(plan)
            assert (SHARES[plan.model, plan.client] > 0).all()
            assert ((plan.probability > 0) & (plan.probability <= 1)).all()

    def test_the_weighted_sum_is_unbiased_and_inclusion_is_as_said(self, sampler: Sampler) -> None:
        """Monte Carlo: the mean weight of every pair is its share, and a pair is drawn as often as said, within 5 standard errors."""
        rounds = 4000
        weights = np.zeros((rounds, *SHARES.shape))
        claimed = np.zeros(SHARES.shape)
        for key in range(rounds):
            plan = sampler.draw(sampler.init(SHARES), SHARES, rng.generator(rng.key(1, key)))
            weights[key, plan.model, plan.client] = plan.weight
            claimed[plan.model, plan.client] = plan.probability
        error = weights.std(axis=0) / np.sqrt(rounds)
        assert (np.abs(weights.mean(axis=0) - SHARES) <= 5 * error + 1e-12).all()
        drawn = (weights > 0).mean(axis=0)
        assert (np.abs(drawn - claimed) <= 5 * np.sqrt(claimed * (1 - claimed) / rounds) + 1e-12).all()

    def test_observing_returns_a_state(self, sampler: Sampler) -> None:
        state = sampler.init(SHARES)
        plan = sampler.draw(state, SHARES, rng.generator(0))
        assert sampler.observe(state, plan, Seen.nothing(len(plan))).keys() == state.keys()


def variance(plans: list[tuple[float, Plan]], updates: np.ndarray, shares: np.ndarray) -> float:
    target = shares @ updates
    return sum(chance * float(((plan.weight @ updates[plan.client] - target) ** 2).sum()) for chance, plan in plans)


def test_fixed_size_variance_by_enumeration() -> None:
    """(N-K)/(K(N-1)) * (N sum share^2 |g|^2 - |D|^2), against all K-subsets."""
    shares, updates = SHARES[0], np.random.default_rng(0).normal(size=(6, 3))
    n, k = 6, 3

    class Chosen:
        """A generator that draws a given subset."""

        def __init__(self, subset: tuple[int, ...]) -> None:
            self.subset = np.array(subset)

        def choice(self, *_: object, **__: object) -> np.ndarray:
            return self.subset

    plans = [(1 / comb(n, k), draw.fixed(k, shares[None], Chosen(subset))) for subset in combinations(range(n), k)]  # type: ignore[arg-type]
    squares = (shares**2 * (updates**2).sum(axis=1)).sum()
    formula = (n - k) / (k * (n - 1)) * (n * squares - float(((shares @ updates) ** 2).sum()))
    assert variance(plans, updates, shares) == pytest.approx(formula)


def test_independent_variance() -> None:
    """sum (1/p - 1) share^2 |g|^2, by Monte Carlo."""
    shares, updates = SHARES[0], np.random.default_rng(0).normal(size=(6, 3))
    p = np.array([0.9, 0.5, 0.2, 0.7, 0.3, 0.4])
    plans = [(1 / 20_000, draw.independent(p[None], shares[None], rng.generator(rng.key(2, i)))) for i in range(20_000)]
    formula = ((1 / p - 1) * shares**2 * (updates**2).sum(axis=1)).sum()
    assert variance(plans, updates, shares) == pytest.approx(formula, rel=0.05)


@given(st.integers(1, 40), st.floats(0.5, 60))
def test_a_budget_must_fit_the_clients(clients: int, budget: float) -> None:
    shares = np.full((1, clients), 1 / clients)
    if 1 <= budget <= clients:
        Uniform(budget).init(shares)
    else:
        with pytest.raises(BadInput, match=r"sampler\.budget"):
            Uniform(budget).init(shares)


def test_certain_clients_are_always_in_and_impossible_ones_never() -> None:
    for key in range(200):
        plan = draw.independent(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]]), rng.generator(key))
        assert plan.client.tolist() == [0]
