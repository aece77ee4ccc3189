"""Pairs (model, client): rates of least variance, draws by them, and the samplers that use them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import federation, linear
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rota
from rota import recipe, rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen
from rota.recipe import registry
from rota.sampling import (
    SAMPLERS,
    FedFair,
    Gvr,
    KVib,
    KVibPairs,
    Lvr,
    Optimal,
    Random,
    RoundRobin,
    RoundRobinServer,
    Vre,
    assign,
    leader,
)
from rota.sampling.waterfill import fill, waterfill
from rota.testing import replies

SHARES = np.array(
    [
        [0.3, 0.2, 0.1, 0.25, 0.1, 0.05],
        [0.5, 0.0, 0.2, 0.0, 0.25, 0.05],
        [0.0, 0.4, 0.1, 0.2, 0.0, 0.3],
    ]
)


class Case(NamedTuple):
    """Scores over pairs, and what clients can do."""

    scores: Array
    shares: Array
    processors: Array
    most: Array
    budget: float
    distinct: bool

    @property
    def able(self) -> Array:
        """The most that each client can draw."""
        owned = (self.shares > 0).sum(axis=0)
        return np.minimum(self.most, owned) if self.distinct else self.most * (owned > 0)

    @property
    def rates(self) -> Array:
        return (assign.distinct if self.distinct else assign.by_processor)(
            self.scores, self.most, self.budget, self.shares
        )

    def variance(self, rates: Array) -> float:
        """sum a^2 (1 / rate - 1 / B), with B = 1 where a model is drawn once.

        This is the variance of the estimates, if the scores are share * norm.
        """
        some = self.scores > 0
        processors = np.ones(len(self.able)) if self.distinct else self.processors
        return float(
            (self.scores**2 * (1 / np.where(some, rates, 1.0) - 1 / processors))[some].sum()
        )


@st.composite
def cases(
    draw: st.DrawFn, spread: float = 60.0, zeros: bool = True, clients: int = 6, models: int = 4
) -> Case:
    """Zeros, ties, missing models, clients without any, caps, and budgets up to a bit too much."""
    shape = (draw(st.integers(1, models)), draw(st.integers(1, clients)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    owns = generator.random(shape) < draw(st.sampled_from([0.5, 0.9, 1.0]))
    assume(owns.any())
    score = np.exp(spread * generator.uniform(-1, 1, shape))
    ties = generator.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    nothing = generator.random(shape) < draw(
        st.sampled_from([0.0, 0.3, 1.0]) if zeros else st.just(0.0)
    )
    processors = generator.integers(1, 4, shape[1])
    caps = generator.uniform(0.05, 3.5, shape[1]) if draw(st.booleans()) else np.inf
    case = Case(
        owns * np.where(ties, 1.0, score) * ~nothing,
        owns * generator.uniform(0.1, 1, shape),
        processors,
        np.minimum(processors, caps),
        1.0,
        draw(st.booleans()),
    )
    return case._replace(
        budget=draw(st.floats(0.01, 1.0) | st.sampled_from([1.0, 1.1])) * float(case.able.sum())
    )


def check_feasible(case: Case, rates: Array) -> None:
    """The budget is spent, no client exceeds its limit, and pairs without data get nothing."""
    assert rates.sum() == pytest.approx(min(case.budget, case.able.sum()), rel=1e-9)
    assert (rates >= 0).all()
    assert not rates[case.shares == 0].any()
    assert (rates.sum(axis=0) <= case.able * (1 + 1e-12)).all()
    assert not case.distinct or (rates <= 1).all()


# --- the best rates, against oracles


def level_of(spent: Any, budget: Array, low: Array, high: Array) -> Array:
    """The logarithm of the level that spends a budget, by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        more = spent(middle) > budget
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    return high


def bisected(case: Case) -> Array:
    """The rates by plain bisection, processor by processor or pair by pair.

    The scores must be positive wherever there is data.
    """
    owns = case.shares > 0
    with np.errstate(divide="ignore"):
        log = np.where(owns, np.log(case.scores), -np.inf)
    ends = (np.full(owns.shape[1], -200.0), np.full(owns.shape[1], 200.0))
    if case.distinct:
        own = level_of(
            lambda level: np.exp(np.minimum(0, log - level)).sum(axis=0), case.able, *ends
        )

        def rates(level: Array) -> Array:
            return np.exp(np.minimum(0, log - np.maximum(level, own)))

    else:
        total = np.log(np.maximum(case.scores.sum(axis=0), 1e-300)) - np.log(
            case.processors
        )  # of one processor
        limit = np.log(
            case.able / case.processors, where=case.able > 0, out=np.full(len(total), -np.inf)
        )
        split = case.scores / np.maximum(case.scores.sum(axis=0), 1e-300)

        def rates(level: Array) -> Array:
            return case.processors * np.exp(np.minimum(limit, total - level)) * split

    level = level_of(
        lambda level: rates(level).sum(), np.array(case.budget), np.array(-200.0), np.array(200.0)
    )
    return rates(level)


@settings(deadline=None, max_examples=300)
@given(cases())
def test_the_budget_is_spent_within_the_bounds(case: Case) -> None:
    check_feasible(case, case.rates)


@settings(deadline=None, max_examples=150)
@given(cases(spread=20.0, zeros=False))
def test_rates_against_bisection(case: Case) -> None:
    assert case.rates == pytest.approx(bisected(case), rel=1e-6, abs=1e-12)


@settings(deadline=None, max_examples=300)
@given(cases(spread=300.0))
def test_rates_are_in_proportion_wherever_they_are_free_to_be(case: Case) -> None:
    """What must hold of the optimum, without an oracle, for all that scores can be."""
    rates = case.rates
    check_feasible(case, rates)
    some = (case.scores > 0) & (rates > 1e-200)
    level = np.log(case.scores, where=some, out=np.zeros_like(rates)) - np.log(
        rates, where=some, out=np.zeros_like(rates)
    )
    clients = np.flatnonzero(some.any(axis=0))
    bound = rates.sum(axis=0) >= case.able * (1 - 1e-9)
    free = some & (rates < 1 - 1e-9) if case.distinct else some
    common = level[free & ~bound]
    if len(common):
        assert np.ptp(common) <= 1e-7
        lowest = common.mean() - 1e-7
        assert (level[free & bound] >= lowest).all(), (
            "a client at its bound would take no less at the common level"
        )
    for i in clients:
        mine = level[free[:, i], i]
        assert len(mine) == 0 or np.ptp(mine) <= 1e-7, "a client's models are in proportion"


@settings(deadline=None, max_examples=60)
@given(cases(spread=1.5, zeros=False, clients=4, models=3))
def test_rates_against_a_solver(case: Case) -> None:
    """No feasible point that SLSQP finds has less variance.

    The variables are MMFL's: one column for each processor; or, if distinct, pairs.
    """
    from scipy.optimize import LinearConstraint, minimize

    assume(case.budget <= 0.99 * case.able.sum())
    copies = np.ones(len(case.most), int) if case.distinct else case.processors
    owner = np.repeat(np.arange(len(copies)), copies)
    scores = (case.scores / copies)[:, owner]
    model, column = np.nonzero(scores)
    a, client = scores[model, column], owner[column]
    x = np.zeros(len(a))
    rules = [LinearConstraint(np.ones((1, len(a))), case.budget, case.budget)]
    for i in np.unique(client):
        rules.append(LinearConstraint((client == i)[None].astype(float), -np.inf, case.able[i]))
        x[client == i] = case.budget / case.able.sum() * case.able[i] / (client == i).sum()
    for c in np.unique(column) if not case.distinct else []:
        rules.append(LinearConstraint((column == c)[None].astype(float), -np.inf, 1.0))
    scale = a.sum() ** 2 / case.budget
    found = minimize(
        lambda p: float((a**2 / p).sum()) / scale,
        x,
        jac=lambda p: -(a**2) / p**2 / scale,
        bounds=[(1e-6, 1)] * len(a),
        constraints=rules,
        method="SLSQP",
        options={"maxiter": 300, "ftol": 1e-12},
    )
    assume(found.success and abs(found.x.sum() - case.budget) < 1e-7)
    p = (case.rates / copies)[model, client]
    assert (a**2 / p).sum() / scale == pytest.approx(found.fun, rel=1e-4)
    assert (a**2 / p).sum() / scale <= found.fun * (1 + 1e-6)


@settings(deadline=None, max_examples=200)
@given(cases(spread=5.0))
def test_drawing_a_model_once_is_never_worse_than_by_processors(case: Case) -> None:
    once = case._replace(distinct=True)
    once = once._replace(budget=min(case.budget, float(once.able.sum())))
    several = once._replace(distinct=False)
    assert (
        once.variance(once.rates)
        <= several.variance(several.rates) * (1 + 1e-9) + 1e-9 * (once.scores**2).sum()
    )


@settings(deadline=None, max_examples=200)
@given(cases())
def test_one_processor_each_is_the_same_either_way(case: Case) -> None:
    one = case._replace(
        processors=np.ones_like(case.processors), most=np.minimum(case.most, 1.0), distinct=False
    )
    one = one._replace(budget=min(case.budget, float(one.able.sum())))
    assert one._replace(distinct=True).rates == pytest.approx(one.rates, rel=1e-9, abs=1e-15)


@settings(deadline=None, max_examples=200)
@given(cases(models=1))
def test_one_model_is_water_filling(case: Case) -> None:
    one = case._replace(most=np.ones(len(case.most)))
    own = case.shares[0] > 0
    for distinct in (False, True):
        np.testing.assert_array_equal(
            one._replace(distinct=distinct).rates[0, own],
            waterfill(case.scores[0, own], case.budget),
        )


def test_rates_by_hand() -> None:
    """MMFL's own numbers: M = (3, 6, 12) and m = 2 give k = 2; and then with B processors."""
    scores = np.array([[1.0, 2.0, 12.0], [2.0, 4.0, 0.0]])
    shares = np.array([[0.2, 0.3, 0.5], [0.5, 0.5, 0.0]])
    rates = assign.by_processor(scores, np.ones(3), 2.0, shares)
    assert rates == pytest.approx(np.array([[1 / 9, 2 / 9, 1], [2 / 9, 4 / 9, 0]]))
    rates = assign.by_processor(scores, np.array([1.0, 1.0, 2.0]), 2.0, shares)
    assert rates == pytest.approx(np.array([[2 / 21, 4 / 21, 24 / 21], [4 / 21, 8 / 21, 0]])), (
        "two processors: more than once"
    )
    rates = assign.distinct(scores, np.array([1.0, 1.0, 2.0]), 2.0, shares)
    assert rates == pytest.approx(np.array([[1 / 9, 2 / 9, 1], [2 / 9, 4 / 9, 0]])), (
        "but once at most"
    )
    rates = assign.by_processor(scores, np.array([1.0, 1.0, 0.5]), 2.0, shares)
    assert rates == pytest.approx(np.array([[1 / 6, 1 / 3, 0.5], [1 / 3, 2 / 3, 0]])), (
        "an upload in every second round"
    )


@pytest.mark.parametrize("scale", [1e-312, 1e-200, 1e200])
def test_rates_do_not_depend_on_the_scale(scale: float) -> None:
    scores, most, shares = (
        np.array([[4.0, 2.0, 8.0], [1.0, 2.0, 4.0]]),
        np.array([2.0, 1.0, 1.5]),
        np.full((2, 3), 1 / 3),
    )
    for rates in (assign.by_processor, assign.distinct):
        np.testing.assert_allclose(
            rates(scale * scores, most, 2.0, shares), rates(scores, most, 2.0, shares), rtol=1e-9
        )


def test_the_capped_and_the_small() -> None:
    """Small scores next to large ones are neither lost nor too large.

    What remains goes to scores of 0, in proportion to what they can take.
    """
    two = np.array([2.0, 2.0])
    assert assign.capped(np.array([1.0, 1e17]), two, 2.0) == pytest.approx([2e-17, 2], rel=1e-12)
    assert assign.capped(np.array([1.0, 1e17]), two, 3.0) == pytest.approx([1, 2], rel=1e-12)
    assert assign.capped(np.array([1.0, 3.0]), two, 60.0).tolist() == [2, 2], (
        "nobody is left for the rest"
    )
    assert assign.capped(np.array([1e-150, 1e150]), np.array([1.0, 0.5]), 1.2) == pytest.approx(
        [0.7, 0.5], rel=1e-12
    )
    assert assign.capped(np.array([0.0, 1, 0]), np.array([0.5, 2, 1.5]), 3.0) == pytest.approx(
        [0.25, 2, 0.75]
    )
    assert assign.capped(np.array([0.0, 1, 0]), np.array([0.5, 2, 1.5]), 9.0) == pytest.approx(
        [0.5, 2, 1.5]
    )
    assert assign.capped(np.zeros(0), np.zeros(0), 1.0).shape == (0,)
    fractions = np.array([0.1, 0.2, 0.3, 1.0])
    assert assign.capped(np.array([1e20, 1e20, 1e20, 1]), fractions, 0.6) == pytest.approx(
        [0.1, 0.2, 0.3, 0], abs=1e-15
    )


# --- the draws, by all their outcomes


class Scripted:
    """A generator whose numbers are given: one array for each call."""

    def __init__(self, *values: Array) -> None:
        self.values = list(values)

    def random(self, size: int) -> Array:
        assert len(self.values[0]) == size
        return self.values.pop(0)

    def choice(self, owners: Array, size: int, replace: bool) -> Array:
        assert (len(self.values[0]), replace) == (size, False)
        return owners[self.values.pop(0)]


class Moments(NamedTuple):
    """For each pair: the weight's mean and mean square, the chance, and the mean of `other`."""

    weight: Array
    square: Array
    chance: Array
    other: Array


def intervals(ends: Array) -> tuple[Array, Array]:
    """The intervals in which a uniform number hits the same: lengths and middles.

    Both are [clients, models + 1].
    """
    cuts = np.sort(
        np.vstack([np.zeros((1, ends.shape[1])), ends % 1, np.ones((1, ends.shape[1]))]), axis=0
    )
    return np.diff(cuts, axis=0).T, ((cuts[1:] + cuts[:-1]) / 2).T


def starts(rates: Array, processors: Array, distinct: bool) -> Iterator[tuple[Array, Array]]:
    """All outcomes of each client by itself: its chance, and the uniform numbers that lead to it.

    A client's draw depends only on its own numbers, so all clients run through their outcomes in
    parallel.
    """
    count = np.ones_like(processors) if distinct else processors
    clients, most = np.arange(len(count)), int(count.max())
    length, middle = intervals(np.cumsum(rates / count, axis=0))
    for pick in itertools.product(range(length.shape[1]), repeat=most):
        chance = np.ones(len(count))
        for b in range(most):  # a processor that a client has not makes no difference
            chance *= np.where(b < count, length[:, pick[b]], 1 / length.shape[1])
        yield chance, np.concatenate([middle[i, list(pick[: count[i]])] for i in clients])


def enumerate_draws(
    rates: Array, processors: Array, distinct: bool, shares: Array, draw: Any, other: Any = None
) -> Moments:
    """The moments of `draw`(generator) -> Plan, exactly; no client draws more than it may."""
    out = Moments(*np.zeros((4, *shares.shape)))
    total, most = 0.0, np.ceil(rates.sum(axis=0) - 1e-9)
    for chance, start in starts(rates, processors, distinct):
        plan = draw(Scripted(start))
        at = (plan.model, plan.client)
        certain = chance[plan.client]
        out.weight[at] += certain * plan.weight
        out.square[at] += certain * plan.weight**2
        out.chance[at] += certain
        out.other[at] += certain * (other(plan) if other else 0.0)
        total += chance
        times = plan.weight * rates[at] / shares[at]
        drawn = np.bincount(plan.client[certain > 1e-12], times[certain > 1e-12], len(processors))
        assert times == pytest.approx(np.rint(times))
        assert not distinct or times == pytest.approx(1)
        assert (drawn <= (most if distinct else processors) + 1e-9).all()
        expected = (
            rates[at]
            if distinct
            else 1 - (1 - rates[at] / processors[plan.client]) ** processors[plan.client]
        )
        assert plan.probability == pytest.approx(expected)
    assert total == pytest.approx(1)
    return out


def check_draws(rates: Array, processors: Array, distinct: bool, shares: Array, draw: Any) -> None:
    """Unbiased, with the chances and the variance that they should have, by enumeration."""
    found = enumerate_draws(rates, processors, distinct, shares, draw)
    some, count = rates > 0, np.ones(len(processors)) if distinct else processors
    assert found.weight[some] == pytest.approx(shares[some], rel=1e-9)
    assert not found.weight[~some].any()
    assert found.chance == pytest.approx(1 - (1 - rates / count) ** count, rel=1e-9)
    variance = shares**2 * (1 / np.where(some, rates, 1) - 1 / count)
    assert (found.square - found.weight**2)[some] == pytest.approx(
        variance[some], rel=1e-9, abs=1e-12
    )


@settings(deadline=None, max_examples=100)
@given(cases(spread=2.0, clients=5, models=3))
def test_draws_are_unbiased_by_enumeration(case: Case) -> None:
    rates = case.rates
    rates[rates < 1e-6] = 0  # which no interval is wide enough to show
    one = assign.draw_distinct if case.distinct else assign.draw_processors
    check_draws(
        rates,
        case.processors,
        case.distinct,
        case.shares,
        lambda script: one(rates, case.processors, case.shares, script),
    )


def test_whole_plans_are_unbiased_by_enumeration() -> None:
    """All clients together, with every combination of their outcomes."""
    processors, shares = np.array([2, 1, 1]), SHARES[:2, :3]
    for distinct in (False, True):
        rates = Case(
            np.array([[1.0, 2, 1], [3, 0, 2]]),
            shares,
            processors,
            processors.astype(float),
            2.5,
            distinct,
        ).rates
        draw = assign.draw_distinct if distinct else assign.draw_processors
        columns = np.arange(3) if distinct else np.repeat(np.arange(3), processors)
        length, middle = intervals(
            np.cumsum(rates / (1 if distinct else processors), axis=0)[:, columns]
        )
        weight, total = np.zeros(shares.shape), 0.0
        for pick in itertools.product(range(3), repeat=len(columns)):
            chance = float(length[np.arange(len(columns)), pick].prod())
            plan = draw(rates, processors, shares, Scripted(middle[np.arange(len(columns)), pick]))  # type: ignore[arg-type]
            assert len({*zip(plan.client, plan.model, strict=True)}) == len(plan)
            weight[plan.model, plan.client] += chance * plan.weight
            total += chance
        assert total == pytest.approx(1)
        assert weight == pytest.approx(shares)


def test_the_ends_of_the_unit_interval() -> None:
    """A certain pair is drawn at 0 and just below 1, an impossible one never.

    Rates whose sum is rounded up do not lead to a further model.
    """
    for start in (0.0, 0.5, 1 - 2**-53):
        at = np.array([start])
        assert assign.systematic(np.array([[0.0], [1.0], [0.0]]), 1, at).tolist() == [
            [False],
            [True],
            [False],
        ]
        over = np.array([[0.4], [0.6 + 2**-52], [0.0]])
        assert over.sum() > 1
        assert assign.systematic(over, 1, at).sum() <= 1
        plan = assign.draw_processors(over, np.array([1]), np.full((3, 1), 0.5), Scripted(at))  # type: ignore[arg-type]
        assert len(plan) == 1
    two = np.array([[1.0], [0.5], [0.5]])
    assert assign.systematic(two, np.array([2]), np.array([0.4])).tolist() == [
        [True],
        [True],
        [False],
    ]
    assert assign.systematic(two, np.array([2]), np.array([0.6])).tolist() == [
        [True],
        [False],
        [True],
    ]


@pytest.mark.parametrize("processors", [(1, 1, 1), (2, 1, 3)])
def test_random_is_unbiased_by_enumeration(processors: tuple[int, ...]) -> None:
    """All subsets of processors, and all models for each."""
    shares = SHARES[:, :3]
    sampler = Random(2, processors)
    state, owned = sampler.init(shares, 10), (shares > 0).sum(axis=0)
    owner = np.repeat(np.arange(3), processors)
    weight = np.zeros((3, 3))
    subsets = list(itertools.combinations(range(len(owner)), 2))
    for subset in subsets:
        client = owner[list(subset)]
        for place in itertools.product(*(range(owned[i]) for i in client)):
            chance = 1 / len(subsets) / owned[client].prod()
            middle = (np.array(place) + 0.5) / owned[client]
            plan = sampler.draw(state, shares, Scripted(np.array(subset), middle))  # type: ignore[arg-type]
            weight[plan.model, plan.client] += chance * plan.weight
    assert weight == pytest.approx(shares)


def test_s0s_mix_of_processors() -> None:
    assert np.unique(assign.mixed(np.ones((3, 120))), return_counts=True)[1].tolist() == [
        30,
        60,
        30,
    ]
    assert np.unique(assign.mixed(np.ones((5, 8)), seed=1)).tolist() == [1, 3, 5]
    lacking = assign.mixed(SHARES)
    assert (lacking <= (SHARES > 0).sum(axis=0)).all()
    assert (lacking >= 1).all()
    np.testing.assert_array_equal(Gvr(3, "mixed").init(SHARES, 9)["processors"], lacking)
    others = [
        assign.mixed(np.random.default_rng(split).dirichlet(np.ones(120), 3)).tolist()
        for split in range(4)
    ]
    assert len({tuple(each) for each in others}) == 4  # another split, other clients


# --- the samplers


def told(plan: Plan, norm: Array, loss: Array | None = None, pace: Array | float = 1.0) -> Seen:
    clients = replies.Clients.of(np.zeros((*norm.shape, 1)), loss, norm=norm)
    seen = clients.seen(plan)
    seen.pace = pace if isinstance(pace, float) else pace[plan.model]
    return seen


def asked(
    sampler: Any,
    norm: Array,
    loss: Array | None = None,
    pace: Array | float = 1.0,
    shares: Array = SHARES,
) -> Any:
    state = sampler.init(shares, 50)
    rows = sampler.ask(state, shares, rng.generator(0)).rows
    return sampler.hear(state, rows, told(rows, norm, loss, pace))


NORM = np.random.default_rng(4).lognormal(0, 1, SHARES.shape)


def test_scores() -> None:
    """share * norm / learning rate; share * loss, or loss; expected norms, or their mean."""
    pace, most = np.array([1.0, 0.1, 0.5]), np.full(6, 2.0)
    for distinct, best in ((False, assign.by_processor), (True, assign.distinct)):
        options: dict[str, Any] = {"budget": 4, "processors": 2, "distinct": distinct}
        per_rate = best(SHARES * NORM / pace[:, None], most, 4, SHARES)
        assert Gvr(**options).rates(
            asked(Gvr(**options), NORM, pace=pace), SHARES
        ) == pytest.approx(per_rate)
        plain = Gvr(**options, per_rate=False)
        assert plain.rates(asked(plain, NORM, pace=pace), SHARES) == pytest.approx(
            best(SHARES * NORM, most, 4, SHARES)
        )
        even = assign.even(np.full(6, 2), 4, SHARES)
        for by_share, weight in ((True, SHARES), (False, SHARES > 0)):
            by_loss = Lvr(**options, by_share=by_share, mix=0.2)
            expected = 0.8 * best(weight * NORM, most, 4, SHARES) + 0.2 * even
            assert by_loss.rates(asked(by_loss, NORM, loss=NORM), SHARES) == pytest.approx(expected)
        half = np.where(np.arange(6) < 3, NORM, np.nan)
        filled = np.where(
            np.arange(6) < 3,
            NORM / pace[:, None],
            (NORM / pace[:, None])[:, :3][SHARES[:, :3] > 0].mean(),
        )
        vre = Vre(**options, mix=0.3)
        expected = 0.7 * best(SHARES * filled, most, 4, SHARES) + 0.3 * even
        assert vre.rates(asked(vre, half, pace=pace), SHARES) == pytest.approx(expected)
    nothing = Vre(4)
    assert nothing.rates(asked(nothing, 0 * NORM), SHARES).sum() == pytest.approx(4)
    assert nothing.rates(asked(nothing, np.nan * NORM), SHARES).sum() == pytest.approx(4)


def test_a_client_that_failed_the_probe_is_not_drawn_if_others_have_an_update() -> None:
    sampler = SAMPLERS["mmfl-gvr"](budget=2)  # type: ignore[call-arg]
    shares = np.full((2, 4), 0.25)
    everybody = rota.sampling.draw.everybody(shares)
    answers = Seen.nothing(8)
    answers.norm[:] = [1, np.nan, 2, 3, 1, 1, np.nan, 2]
    rates = sampler.rates(sampler.hear(sampler.init(shares, 5), everybody, answers), shares)  # type: ignore[attr-defined]
    assert rates[0, 1] == rates[1, 2] == 0
    assert (rates > 0).sum() == 6
    assert rates.sum() == pytest.approx(2)


def test_even_rates_keep_the_bounds() -> None:
    """Where all losses are 0, no client exceeds its uploads, and distinct rates are at most 1."""
    uploads = (0.3, 5.0, 0.5, 1.0, 2.0, 0.7)
    for distinct in (False, True):
        sampler = Lvr(4, (1, 3, 2, 2, 1, 3), distinct, uploads, mix=1.0)
        state = asked(sampler, NORM, loss=0 * NORM)
        rates = sampler.rates(state, SHARES)
        check_feasible(
            Case(
                NORM,
                SHARES,
                state["processors"],
                np.minimum(state["processors"], uploads),
                4,
                distinct,
            ),
            rates,
        )
        assert (rates[SHARES > 0] > 0).all()
        for i in range(6):
            assert np.ptp(rates[SHARES[:, i] > 0, i]) == pytest.approx(0)
    assert sampler.rates(state, SHARES)[:, 1].max() <= 1


def test_enormous_norms_are_the_first_to_be_drawn() -> None:
    norm = NORM.copy()
    norm[0, 2] = norm[1, 4] = np.inf
    for distinct in (False, True):
        sampler = Gvr(2, 1, distinct)
        rates = sampler.rates(asked(sampler, norm, pace=np.array([1, 1e-9, 1])), SHARES)
        assert rates[[0, 1], [2, 4]] == pytest.approx(1)


def test_kvib_over_pairs_learns_without_bias() -> None:
    """E[omega's growth] = pi^2 for every pair, by enumeration of the draws.

    gamma is omega's sum / (rounds * budget).
    """
    pace = np.array([1.0, 0.5, 0.2])
    for distinct, processors in (
        (False, (2, 1, 3, 1, 2, 1)),
        (True, (2, 1, 3, 1, 2, 1)),
        (False, 1),
    ):
        sampler = KVibPairs(5, processors, distinct, theta=0.3)
        state = sampler.init(SHARES, 50)
        for key in range(3):
            plan = sampler.draw(state, SHARES, rng.generator(key))
            state = sampler.observe(state, SHARES, plan, told(plan, NORM, pace=pace))
        rates = sampler.rates(state, SHARES)
        check_feasible(Case(NORM, SHARES, state["processors"], state["most"], 5, distinct), rates)
        assert rates[SHARES > 0].min() > 0.01

        def growth(plan: Plan, sampler: KVibPairs = sampler, state: Any = state) -> Array:
            after = sampler.observe(state, SHARES, plan, told(plan, NORM, pace=pace))
            return (after["omega"] - state["omega"]).reshape(SHARES.shape)[plan.model, plan.client]

        def drawn(script: Any, sampler: KVibPairs = sampler, state: Any = state) -> Plan:
            return sampler.draw(state, SHARES, script)

        found = enumerate_draws(rates, state["processors"], distinct, SHARES, drawn, growth)
        assert found.other == pytest.approx((SHARES * NORM / pace[:, None]) ** 2)
    assert KVibPairs(5).init(SHARES, 50)["theta"] == pytest.approx(
        (np.count_nonzero(SHARES) / 250) ** (1 / 3)
    )
    first = KVibPairs(5)
    plan = first.draw(first.init(SHARES, 9), SHARES, rng.generator(0))
    learnt = first.observe(first.init(SHARES, 9), SHARES, plan, told(plan, NORM))
    assert leader.sums(learnt) - learnt["omega"] == pytest.approx(learnt["omega"].sum() / 5)


@pytest.mark.parametrize("distinct", [False, True])
def test_kvib_over_pairs_learns_whom_to_draw(distinct: bool) -> None:
    """sum_t sum pi^2 / rate comes near to the best there is, where even draws do not."""
    generator = np.random.default_rng(0)
    shares = generator.dirichlet(np.ones(40), 3)
    base = generator.lognormal(0, 1.5, shares.shape)
    sampler = KVibPairs(12, "mixed", distinct)
    state, paid = sampler.init(shares, 400), []
    even = sampler.rates({**state, "theta": np.ones(1)}, shares)
    best = sampler.best(shares * base, state, shares)
    for _ in range(400):
        norm = base * np.exp(0.1 * generator.normal(size=base.shape))
        paid.append(((shares * base) ** 2 / sampler.rates(state, shares)).sum())
        plan = sampler.draw(state, shares, generator)
        state = sampler.observe(state, shares, plan, told(plan, norm))
    optimum, without = (((shares * base) ** 2 / rates).sum() for rates in (best, even))
    assert without > 5 * optimum
    assert np.mean(paid) < 0.4 * without
    assert paid[-1] < 1.8 * optimum


@pytest.mark.parametrize("availability", [1.0, 0.7])
@pytest.mark.parametrize(
    ("pairs", "plain"), [(Gvr(3), Optimal(3)), (KVibPairs(2.5), KVib(2.5))], ids=["gvr", "kvib"]
)
def test_with_one_model_they_are_the_samplers_of_clients(
    pairs: Any, plain: Any, availability: float
) -> None:
    """Number for number: every record, and every bit of the weights.

    Only the state of the samplers over pairs is larger, by the processors.
    """
    runs = []
    for sampler in (pairs, plain):
        task = rota.Task(linear, federation([5, 12, 20, 31, 8, 17]), lr=0.2)
        runs.append(
            rota.run(
                [task],
                sampler,
                rounds=12,
                engine="sequential",
                availability=rota.Availability(chance=availability),
            )
        )
    for one, two in zip(runs[0].records, runs[1].records, strict=True):
        assert {**one, "server_bytes": 0} == {**two, "server_bytes": 0}
    assert runs[0].records[-1]["server_bytes"] - runs[1].records[-1]["server_bytes"] == 6 * 16
    assert torch.equal(runs[0].state.models[0].params, runs[1].state.models[0].params)
    assert len({tuple(line["cohort"]["blobs"]) for line in runs[0].records}) > 3


def test_all_of_them_run() -> None:
    """Two models (two clients lack one of them), with the estimator that each sampler needs."""
    tasks = [
        rota.Task(linear, federation(sizes), lr=lr)
        for sizes, lr in (([5, 12, 20, 31, 8, 17], 0.2), ([9, 0, 20, 0, 8, 17], 0.05))
    ]
    for name in (
        "mmfl-random",
        "mmfl-gvr",
        "mmfl-lvr",
        "mmfl-vre",
        "mmfl-kvib",
        "round-robin",
        "round-robin-server",
        "fedfair",
    ):
        estimator = rota.estimate.StaleVre() if name == "mmfl-vre" else None
        sampler = SAMPLERS[name](budget=4)  # type: ignore[call-arg]
        found = rota.run(tasks, sampler, estimator=estimator, rounds=12, engine="sequential")
        assert found.records[-1]["loss"] < 0.8 * found.records[0]["loss"]


def test_round_robin_turns() -> None:
    """Blocks of clients begin with model j and move on by one model in every round.

    A client without data for the model of its turn does not train.
    """
    shares = np.full((3, 7), 1 / 7)
    shares[1, 0] = 0
    sampler, first = RoundRobin(7), [0, 0, 0, 1, 1, 2, 2]
    state = sampler.init(shares, 10)
    for turn in range(4):
        plan = sampler.draw(state, shares, rng.generator(turn))
        model = (np.array(first) + turn) % 3
        assert plan.client.tolist() == [i for i in range(7) if model[i] != 1 or i != 0]
        assert plan.model.tolist() == model[plan.client].tolist()
        assert plan.weight == pytest.approx(1 / np.bincount(plan.model)[plan.model])
        state = sampler.observe(state, shares, plan, told(plan, np.ones((3, 7))))
    few = RoundRobin(3).draw(state, shares * (np.arange(7) > 2), rng.generator(0))
    assert len(few) == 3, "of those that can be reached"
    assert few.probability == pytest.approx(3 / 4)


def test_round_robin_by_the_server() -> None:
    """One model in turn, its clients asked and drawn by their norms; unbiased for that model."""
    sampler = RoundRobinServer(2)
    state = sampler.init(SHARES, 10)
    for turn in range(4):
        s = turn % 3
        rows = sampler.ask(state, SHARES, rng.generator(0)).rows
        assert rows.model.tolist() == [s] * np.count_nonzero(SHARES[s])
        state = sampler.hear(state, rows, told(rows, NORM))
        plan = sampler.draw(state, SHARES, rng.generator(turn))
        p = fill(SHARES * NORM, 2, SHARES)
        assert set(plan.model) <= {s}
        assert plan.probability == pytest.approx(p[s, plan.client])
        assert plan.weight == pytest.approx((SHARES / np.where(p > 0, p, 1))[s, plan.client])
        state = sampler.observe(state, SHARES, plan, told(plan, NORM))


def test_fedfair_by_hand() -> None:
    """P ~ loss^(alpha - 1) among a client's models: (1, 2, 4)^2 / 21."""
    state = {"loss": np.array([1.0, 2.0, 4.0])}
    chances = FedFair(3).chances(state, SHARES)
    assert chances[:, 2] == pytest.approx([1 / 21, 4 / 21, 16 / 21])
    assert chances[:, 0] == pytest.approx([1 / 5, 4 / 5, 0])
    assert chances[:, 1] == pytest.approx([1 / 17, 0, 16 / 17])
    assert FedFair(3, alpha=1).chances(state, SHARES)[:, 2] == pytest.approx(1 / 3)
    assert FedFair(3, alpha=2).chances(state, SHARES)[:, 2] == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert FedFair(3).chances({"loss": np.full(3, np.nan)}, SHARES)[:, 2] == pytest.approx(1 / 3), (
        "nothing known"
    )
    assert FedFair(3).chances({"loss": np.array([1.0, 2.0, np.nan])}, SHARES)[
        :, 2
    ] == pytest.approx([1 / 9, 4 / 9, 4 / 9])
    assert FedFair(3).chances({"loss": np.zeros(3)}, SHARES)[:, 2] == pytest.approx(1 / 3)
    assert FedFair(3, alpha=99).chances({"loss": np.array([0.0, 1e-9, 1e9])}, SHARES)[
        :, 0
    ] == pytest.approx([0, 1, 0])
    assert not FedFair(3).chances(state, SHARES * 0).any()


def test_fedfair_draws_and_learns() -> None:
    """A uniform cohort, and for each client the model that its number falls on.

    The weights go by the shares, and so do the models' losses.
    """
    sampler, state = FedFair(3), {"loss": np.array([1.0, 2.0, 4.0])}
    plan = sampler.draw(state, SHARES, Scripted(np.array([0, 2, 5]), np.array([0.1, 0.5, 0.999])))  # type: ignore[arg-type]
    assert [*zip(plan.client.tolist(), plan.model.tolist(), strict=True)] == [
        (0, 0),
        (2, 2),
        (5, 2),
    ]
    assert plan.probability == pytest.approx([0.5 / 5, 0.5 * 16 / 21, 0.5 * 16 / 21])
    assert plan.weight == pytest.approx([1, 0.1 / 0.4, 0.3 / 0.4])
    seen = told(plan, NORM)
    seen.loss[:] = 3.0, 1.0, 2.0
    assert sampler.observe(state, SHARES, plan, seen)["loss"] == pytest.approx([3, 2, 0.25 + 1.5])
    seen.loss[1] = np.nan
    assert sampler.observe(state, SHARES, plan, seen)["loss"] == pytest.approx([3, 2, 2]), (
        "one that failed says nothing"
    )
    chances, drawn = sampler.chances(state, SHARES), np.zeros(SHARES.shape)
    for key in range(4000):
        each = sampler.draw(state, SHARES, rng.generator(key))
        assert len(each) == 3
        drawn[each.model, each.client] += 1 / 4000
    assert drawn == pytest.approx(chances / 2, abs=5 * 0.5 / math.sqrt(4000))


# --- mistakes


def too_many(budget: str, able: int) -> str:
    can = f"sampler.budget is {budget} draws per round, but clients can do {able}"
    return f"{can}: give a number above 0, up to {able}"


def not_within(budget: str, what: str) -> str:
    return (
        f"sampler.budget is {budget} {what} per round, but there are 6: give a number from 1 to 6"
    )


PROCESSORS = (
    "sampler.processors takes whole numbers from 1: give one, or one for each of the 6 clients, "
    "or 'mixed'"
)
UPLOADS = "sampler.uploads must be above 0: give one number, or one for each of the 6 clients"
PART = "it must be above 0 and at most 1"
ALPHA = "it must be at least 1, which treats all models alike"
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("mmfl-gvr", {"budget": 7}, too_many("7", 6)),
    ("mmfl-gvr", {"budget": 0}, too_many("0", 6)),
    ("mmfl-kvib", {"budget": 0}, too_many("0", 6)),
    ("mmfl-lvr", {"budget": math.nan}, too_many("nan", 6)),
    ("mmfl-gvr", {"budget": 15, "processors": 3, "distinct": True}, too_many("15", 14)),
    (
        "mmfl-vre",
        {"budget": 4, "uploads": 0.5},
        f"{too_many('4', 3)}, or set sampler.uploads higher",
    ),
    ("mmfl-random", {"budget": 7}, not_within("7", "processors")),
    ("mmfl-random", {"budget": 0.5}, not_within("0.5", "processors")),
    ("round-robin", {"budget": 7}, not_within("7", "clients")),
    ("round-robin-server", {"budget": 0}, not_within("0", "clients")),
    ("fedfair", {"budget": 9}, not_within("9", "clients")),
    ("mmfl-lvr", {"budget": 2, "mix": 0.0}, f"sampler.mix is 0: {PART}"),
    ("mmfl-vre", {"budget": 2, "mix": 1.5}, f"sampler.mix is 1.5: {PART}"),
    ("mmfl-kvib", {"budget": 2, "theta": 1.5}, f"sampler.theta is 1.5: {PART}"),
    ("mmfl-kvib", {"budget": 2, "gamma": 0.0}, "sampler.gamma is 0: it must be above 0"),
    ("fedfair", {"budget": 2, "alpha": 0.5}, f"sampler.alpha is 0.5: {ALPHA}"),
    ("fedfair", {"budget": 2, "alpha": math.nan}, f"sampler.alpha is nan: {ALPHA}"),
]
for wrong in (0, -1, 1.5, (1, 2), (1, 1, 1, 1, 1, 0), (1.5,) * 6, "mixt", True):
    MISTAKES.append(("mmfl-gvr", {"budget": 2, "processors": wrong}, PROCESSORS))
    MISTAKES.append(("mmfl-random", {"budget": 2, "processors": wrong}, PROCESSORS))
for wrong in (0, -1.0, math.nan, (1.0, 1.0), (1.0,) * 5 + (0.0,), "many"):
    MISTAKES.append(("mmfl-lvr", {"budget": 2, "uploads": wrong}, UPLOADS))


@pytest.mark.parametrize(("name", "options", "sentence"), MISTAKES)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as mistake:
        SAMPLERS[name](**options).init(SHARES, 10)
    assert str(mistake.value) == sentence


def test_all_that_is_possible_may_be_asked_for() -> None:
    """Also where it is a sum of fractions that is rounded down."""
    assert np.full(6, 0.09).sum() < 0.54
    for distinct in (False, True):
        sampler = Gvr(0.54, 1, distinct, uploads=0.09)
        assert sampler.rates(asked(sampler, NORM), SHARES).sum(axis=0) == pytest.approx(0.09)


def test_processors_in_a_recipe() -> None:
    text = recipe.override(recipe.read("mmfl-digits"), "sampler.processors=[1, 2, 3]")
    assert tuple(recipe.resolve(text)["sampler"]["processors"]) == (1, 2, 3)
    assert registry.fill("sampler", "samplers", Gvr, {"uploads": [1, 2.5]})["uploads"] == (1.0, 2.5)
    for wrong in ("mixt", "1.5", "[1.5]"):
        takes = r"'sampler\.processors' is .*, but it takes a whole number, a list or 'mixed'"
        with pytest.raises(BadInput, match=takes):
            recipe.resolve(
                recipe.override(recipe.read("mmfl-digits"), f"sampler.processors={wrong}")
            )
