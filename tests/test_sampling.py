"""One suite for all samplers: what they draw is a plan, and what they claim of it holds."""

from __future__ import annotations

import itertools
import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_assign import Case, check_draws, check_feasible

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen, State
from rota.recipe import registry
from rota.sampling import (
    SAMPLERS,
    Asking,
    Avare,
    Full,
    Gvr,
    KVib,
    KVibFull,
    Mabs,
    Ocs,
    Osmd,
    OsmdAdaptive,
    Random,
    Sampler,
    Succession,
    Uniform,
    Vrb,
    clustered,
    divfl,
    draw,
    leader,
    memory,
)
from rota.sampling.draw import Procedure
from rota.sampling.mmfl import Assigning
from rota.sampling.ocs import approximate
from rota.sampling.osmd import lift
from rota.sampling.waterfill import fill, waterfill
from rota.testing import replies, samplers

SHARES = np.array([[0.3, 0.2, 0.1, 0.25, 0.1, 0.05], [0.5, 0.0, 0.2, 0.0, 0.25, 0.05]])
UPDATES = (
    np.random.default_rng(0).normal(size=(2, 6, 3))
    * np.array([1.0, 0.2, 5.0, 0.7, 2.0, 9.0])[:, None]
    + 0.3
)
LOSSES = np.random.default_rng(1).random((2, 6))
CLIENTS = replies.Clients.of(UPDATES, LOSSES)
BUDGET = 3
PROCEDURES = [{"procedure": name} for name in ("independent", "sequential", "systematic")]
MORE: dict[str, list[dict[str, Any]]] = {
    "uniform": [
        {"procedure": "independent"},
        {"procedure": "multinomial"},
        {"procedure": "sequential"},
        {"procedure": "systematic"},
    ],
    "proportional": PROCEDURES,
    "kvib": [
        {"linear": True},
        {"budget": 2.6},
        {"theta": 0.3, "gamma": 0.02},
        {"bound": 0.1},
        {"procedure": "multinomial"},
        {"procedure": "systematic", "budget": 2.6},
    ],
    "vrb": [{"theta": 0.1, "gamma": 1.0}, {"budget": 2.6}, *PROCEDURES],
    "mabs": PROCEDURES,
    "avare": [{"decay": 0.0}, *PROCEDURES],
    "osmd": PROCEDURES,
    "succession": [{"procedure": "multinomial"}, {"procedure": "independent"}, {"budget": 2.6}],
    "ocs": [{"cohort": 4}],
    "aocs": [{"cohort": 5}],
    "rpow-d": [{"candidates": 4}],
    "pow-d": [{"candidates": 4}],
    "mmfl-random": [{"processors": (2, 1, 3, 1, 2, 1), "budget": 5}],
    "mmfl-gvr": [
        {"processors": (2, 1, 3, 1, 2, 1), "budget": 4.4},
        {"distinct": True, "processors": 2},
        {"uploads": 0.6},
    ],
    "mmfl-lvr": [{"processors": "mixed"}, {"distinct": True, "processors": (2, 1, 2, 1, 2, 1)}],
    "mmfl-vre": [{"distinct": True, "uploads": 0.9}],
    "mmfl-kvib": [
        {"processors": (2, 1, 3, 1, 2, 1), "uploads": 1.2},
        {"distinct": True, "processors": 2},
    ],
    "fedfair": [{"alpha": 1.0}],
}
"""Options, in addition to the defaults, with which a sampler runs through the suite."""


def members() -> dict[str, Sampler]:
    out: dict[str, Sampler] = {}
    for name, kind in SAMPLERS.items():
        size = {"budget": BUDGET} if "budget" in registry.options("samplers", kind) else {}
        for more in ({}, *MORE.get(name, [])):
            out["-".join([name, *map(str, more.values())])] = kind(**(size | more))
    return out


MEMBERS = members()
every_sampler = pytest.mark.parametrize("sampler", MEMBERS.values(), ids=MEMBERS)


def asked(sampler: Sampler, state: State, shares: Array, generator: np.random.Generator) -> State:
    return replies.ask(sampler, state, shares, generator, CLIENTS)


def step(sampler: Sampler, state: State, shares: Array, key: int) -> tuple[Plan, State]:
    return replies.play(sampler, state, shares, key, CLIENTS)


def experienced(sampler: Sampler, rounds: int = 4) -> State:
    """The state after some rounds, in which adaptive samplers have learned."""
    state = sampler.init(SHARES, 50)
    for key in range(rounds):
        _, state = step(sampler, state, SHARES, key)
    return state


# --- what a sampler claims: each check raises AssertionError where it does not hold


def check_pairs(sampler: Any, shares: Array = SHARES) -> None:
    """The rates over pairs spend the budget within the clients' limits; the draws are exact."""
    state = asked(sampler, experienced(sampler), shares, rng.generator(0))
    rates = sampler.rates(state, shares)
    check_feasible(
        Case(rates, shares, state["processors"], state["most"], sampler.budget, sampler.distinct),
        rates,
    )
    if (shares > 0).any():
        check_draws(
            rates,
            state["processors"],
            sampler.distinct,
            shares,
            lambda script: sampler.draw(state, shares, script),
        )


def check(sampler: Any, shares: Array = SHARES, draws: int = 3000) -> None:
    """All claims of a sampler that says it is unbiased."""
    samplers.check_unbiased(sampler, shares, draws)
    if samplers.measurable(sampler, shares):
        check_exactly(sampler)
    if isinstance(sampler, Assigning):
        check_pairs(sampler)


# --- the same, exactly: all outcomes of a procedure


class Scripted:
    """A generator with given numbers, which lead a procedure's code through all outcomes."""

    def __init__(self, values: Array) -> None:
        self.values = values

    def random(self, shape: Any = None) -> Array:
        return self.values[-1] if shape is None else self.values.reshape(shape)

    def standard_exponential(self, size: int) -> Array:
        assert len(self.values) == size
        return self.values

    def permutation(self, owners: Array) -> Array:
        return owners[self.values[:-1].astype(int)]

    def choice(self, owners: Array, size: int, replace: bool) -> Array:
        assert (len(self.values), replace) == (size, False)
        return owners[self.values]


def outcomes(procedure: Procedure, rates: Array, shares: Array) -> Iterator[tuple[float, Plan]]:
    """Every plan that a procedure can draw for one model, with its chance."""
    clients, draws = len(rates), round(float(rates.sum()))
    scripts: Iterator[tuple[float, Array]]
    if procedure == "independent":
        coins = itertools.product([True, False], repeat=clients)
        scripts = (
            (float(np.prod(np.where(drawn, rates, 1 - rates))), np.where(drawn, 0.0, 1 - 1e-12))
            for drawn in coins
        )
    elif procedure == "fixed":
        subsets = [np.array(subset) for subset in itertools.combinations(range(clients), draws)]
        scripts = ((1 / len(subsets), subset) for subset in subsets)
    elif procedure == "multinomial":
        q = rates / rates.sum()
        middle = np.cumsum(q) - q / 2
        scripts = (
            (float(np.prod(q[list(drawn)])), middle[list(drawn)])
            for drawn in itertools.product(range(clients), repeat=draws)
        )
    elif procedure == "systematic":
        scripts = _starts(rates)
    else:
        scripts = _orders(rates, draws)
    for chance, script in scripts:
        if chance > 0:
            yield chance, draw.by(procedure, rates[None], shares[None], Scripted(script))  # type: ignore[arg-type]


def _orders(rates: Array, draws: int) -> Iterator[tuple[float, Array]]:
    for order in itertools.permutations(range(len(rates)), draws):
        chance, left, turn = 1.0, float(rates.sum()), np.full(len(rates), 1e9)
        for k, client in enumerate(order):
            chance *= rates[client] / left
            left -= rates[client]
            turn[client] = k
        yield chance, turn * rates


def _starts(rates: Array) -> Iterator[tuple[float, Array]]:
    """Every order of the clients, and every piece of [0, 1) whose starts draw the same cohort."""
    for order in itertools.permutations(range(len(rates))):
        ends = np.concatenate([[0.0], np.sort(np.cumsum(rates[list(order)]) % 1), [1.0]])
        for low, high in itertools.pairwise(ends.tolist()):
            chance = (high - low) / math.factorial(len(rates))
            yield chance, np.array([*order, (low + high) / 2])


def check_exactly(sampler: Any) -> None:
    """Mean weight, inclusion and variance by enumeration of all that can be drawn."""
    rates = sampler.rates(asked(sampler, experienced(sampler), SHARES, rng.generator(0)), SHARES)
    for s, share in enumerate(SHARES):
        own = share > 0
        check_procedure(sampler.procedure, rates[s, own], share[own], UPDATES[s, own])


def check_procedure(procedure: Procedure, rates: Array, shares: Array, updates: Array) -> None:
    parts = shares[:, None] * updates
    weight, inclusion, squares, total = np.zeros(len(shares)), np.zeros(len(shares)), 0.0, 0.0
    for chance, plan in outcomes(procedure, rates, shares):
        weight[plan.client] += chance * plan.weight
        inclusion[plan.client] += chance / plan.probability
        squares += chance * float(
            ((plan.weight @ updates[plan.client] - parts.sum(axis=0)) ** 2).sum()
        )
        total += chance
    assert total == pytest.approx(1)
    assert weight == pytest.approx(shares, rel=1e-9)
    assert procedure == "sequential" or inclusion == pytest.approx(1, rel=1e-9)
    assert squares == pytest.approx(
        samplers.variance_of(procedure, rates, parts @ parts.T), rel=1e-8, abs=1e-12
    )


# --- the suite


@every_sampler
class TestEverySampler:
    @pytest.mark.parametrize("check", samplers.CHECKS, ids=lambda check: check.__name__)
    def test_the_suite_of_rota_testing(self, sampler: Sampler, check: Any) -> None:
        for shares in samplers.SHARES:
            check(sampler, shares)

    def test_it_is_unbiased_or_says_that_it_is_not(self, sampler: Any) -> None:
        if sampler.unbiased:
            check(sampler)
        else:
            with pytest.raises(AssertionError, match=r"that it is unbiased, but|never draws"):
                samplers.Draws(sampler, experienced(sampler), SHARES, 1000).check_weights()

    def test_clients_that_were_away_can_be_drawn_again(self, sampler: Any) -> None:
        if not isinstance(sampler, Assigning) and not samplers.measurable(sampler, SHARES):
            return
        state = experienced(sampler)
        for few in samplers.reachable(SHARES):
            _, after = step(sampler, state, few, 3)
            if isinstance(sampler, Assigning):
                check_pairs(sampler, few)
            again = asked(sampler, after, SHARES, rng.generator(0))
            assert (sampler.rates(again, SHARES)[SHARES > 0] > 0).all()

    def test_the_names_in_the_state_stay(self, sampler: Sampler) -> None:
        names = sampler.init(SHARES, 50).keys()
        state = experienced(sampler)
        assert state.keys() == names
        for name, value in state.items():
            assert isinstance(value, torch.Tensor if name.startswith("update.") else np.ndarray)

    def test_one_client(self, sampler: Sampler) -> None:
        names = {each.name for each in fields(sampler)}  # type: ignore[arg-type]
        plain = {"budget": 1, "processors": 1, "uploads": None}
        alone = replace(sampler, **{name: plain[name] for name in plain.keys() & names})  # type: ignore[type-var]
        state = alone.init(np.ones((1, 1)), 10)
        for key in range(3):
            plan, state = step(alone, state, np.ones((1, 1)), key)
            assert (plan.client.tolist(), plan.weight.tolist()) == ([0], [1.0])

    def test_what_it_says_of_itself(self, sampler: Any) -> None:
        assert isinstance(sampler.unbiased, bool)
        assert sampler.costs
        told = re.fullmatch(
            r"nothing|norms that the estimator expects"
            r"|(norms|losses|updates) of (all|some|the drawn) clients(,| once,|$).*",
            sampler.needs,
        )
        assert told
        asks = "that" in sampler.needs or told[2] in ("all", "some")
        assert isinstance(sampler, Asking) == asks
        column = {"norms": "norm", "losses": "loss", "updates": "update"}
        assert sampler.sees == {column[word] for word in sampler.needs.split() if word in column}


# --- the suite fails where it must


def off_by_one(scores: Array, budget: float) -> Array:
    """K-Vib's and FedLab's published solver.

    The first client that must be capped gets the scaled value, which is above 1.
    """
    order, n = np.argsort(scores), len(scores)
    a = scores[order]
    last = max(j for j in range(n) if 0 < budget - n + j + 1 <= a[: j + 1].sum() / a[j])
    p = np.array(
        [
            (budget - n + last + 1) * a[i] / a[: last + 1].sum() if i <= last + 1 else 1.0
            for i in range(n)
        ]
    )
    out = np.empty(n)
    out[order] = p
    return out


@dataclass(frozen=True)
class Planted:
    """A sampler with fixed scores that claims to be unbiased; `bug` names its mistake."""

    bug: str
    budget: float = BUDGET
    procedure: ClassVar[Procedure] = "independent"
    unbiased: ClassVar[bool] = True
    scores: ClassVar[Array] = np.array([1.0, 2, 3, 40, 5, 60])

    def init(self, shares: Array, rounds: int) -> State:
        return {}

    def rates(self, state: State, shares: Array) -> Array:
        if self.bug == "off by one":
            return np.stack(
                [_spread(off_by_one(self.scores[row > 0], self.budget), row) for row in shares]
            )
        return fill(np.broadcast_to(self.scores, shares.shape), self.budget, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = draw.independent(self.rates(state, shares), shares, generator)
        if self.bug == "inclusion":
            return replace(plan, probability=plan.probability * 0.9)
        if self.bug == "weights":
            return replace(plan, weight=plan.weight * 1.05)
        if self.bug == "never draws":
            return plan.of(np.flatnonzero(plan.client != 2))
        if self.bug == "variance":  # unbiased, but each draw twice or not at all
            return replace(plan, weight=2 * plan.weight).of(
                np.flatnonzero(generator.random(len(plan)) < 0.5)
            )
        return plan

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state


@dataclass(frozen=True)
class PlantedPairs(Gvr):
    """The same over pairs, with the mistakes of published code, and others."""

    bug: str = ""
    budget: float = BUDGET
    processors: tuple[int, ...] = (2, 1, 3, 1, 2, 1)

    def rates(self, state: State, shares: Array) -> Array:
        if self.bug == "off by one":  # FedLab's solver in eq. 5
            scores = np.nan_to_num(shares * state["norm"])
            total = scores.sum(axis=0)
            return (
                _spread(off_by_one(total[total > 0], self.budget), total)
                * scores
                / np.maximum(total, 1e-300)
            )
        return super().rates(state, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        if self.bug == "without B":  # MMFL's code: share / p of a processor
            return replace(plan, weight=plan.weight * state["processors"][plan.client])
        if self.bug == "drawn twice counts once":
            rates = self.rates(state, shares)
            return replace(
                plan, weight=(shares / np.where(rates > 0, rates, 1))[plan.model, plan.client]
            )
        return plan


@dataclass(frozen=True)
class PublishedRandom(Random):
    """MMFL's code: every drawn processor weighs share / (C / S), with C = budget / processors."""

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        processors = state["processors"]
        factor = (processors * len(shares) / np.maximum((shares > 0).sum(axis=0), 1))[plan.client]
        return replace(plan, weight=plan.weight * factor)


def _spread(values: Array, row: Array) -> Array:
    out = np.zeros(len(row))
    out[row > 0] = values
    return out


def test_the_suite_passes_without_a_bug() -> None:
    check(Planted("none"))
    check(PlantedPairs(bug="none"))


@pytest.mark.parametrize("bug", ["off by one", "inclusion", "weights", "never draws", "variance"])
def test_the_suite_fails_with_a_planted_bug(bug: str) -> None:
    with pytest.raises(AssertionError):
        check(Planted(bug))


@pytest.mark.parametrize("bug", ["off by one", "without B", "drawn twice counts once"])
def test_the_suite_fails_with_a_bug_planted_in_pairs(bug: str) -> None:
    with pytest.raises(AssertionError):
        check(
            PlantedPairs(
                bug=bug, processors=(1,) * 6 if bug == "off by one" else (2, 1, 3, 1, 2, 1)
            )
        )


@pytest.mark.parametrize("processors", [1, 2])
def test_the_published_random_is_biased(processors: int) -> None:
    """By the missing models, and by the processors."""
    check(Random(BUDGET, processors))
    with pytest.raises(AssertionError):
        check(PublishedRandom(BUDGET, processors))


def test_the_published_solver_is_biased_even_if_nobody_looks_at_its_probabilities() -> None:
    """It is the estimate itself that is off: clients drawn for sure count less than their share."""
    draws = samplers.Draws(Planted("off by one"), {}, SHARES)
    with pytest.raises(AssertionError):
        draws.check_weights()
    assert off_by_one(np.array([1.0, 2, 3, 10]), 2).max() > 1


def test_dividing_by_k_times_q_without_replacement_is_biased() -> None:
    """numpy's choice(replace=False, p=q) does not include a client with probability K q."""

    @dataclass(frozen=True)
    class Naive(Planted):
        def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
            plan = draw.sequential(shares, BUDGET, shares, generator)
            return replace(plan, weight=np.full(len(plan), 1 / BUDGET))

    with pytest.raises(AssertionError):
        samplers.Draws(Naive("naive"), {}, SHARES).check_weights()


# --- procedures


@pytest.mark.parametrize("procedure", typing.get_args(Procedure))
@settings(deadline=None)
@given(data=st.data())
def test_procedures_by_enumeration(procedure: Procedure, data: st.DataObject) -> None:
    clients = data.draw(st.integers(2, 5))
    size = data.draw(st.integers(1, min(3, clients)))
    numbers = st.floats(0.01, 1)
    scores = data.draw(arrays(float, clients, elements=numbers))
    shares = data.draw(arrays(float, clients, elements=numbers))
    updates = data.draw(arrays(float, (clients, 2), elements=st.floats(-1, 1)))
    chances = procedure in draw.CHANCES
    rates = waterfill(scores, size) if chances else size * scores / scores.sum()
    check_procedure(procedure, rates, shares, updates)


def test_sequential_inclusion() -> None:
    """q = (.5, .3, .1, .06, .04), two draws: included with (.82, .66, .25, .15, .10), not 2 q."""
    q = np.array([0.5, 0.3, 0.1, 0.06, 0.04])
    inclusion = np.zeros(5)
    for chance, plan in outcomes("sequential", 2 * q, np.full(5, 0.2)):
        inclusion[plan.client] += chance
        assert np.isnan(plan.probability).all()
    assert inclusion == pytest.approx([0.82, 0.66, 0.25, 0.15, 0.10], abs=0.006)


def test_a_fixed_size_beats_coins_where_updates_point_the_same_way() -> None:
    """K-Vib's Lemma 2 compares bounds; the difference is (N-K) / (K(N-1)) (sum |x|^2 - |D|^2)."""
    n, k = 8, 3
    for updates in (np.ones((n, 2)), np.concatenate([np.eye(n), -np.eye(n)])[::2]):
        parts = updates / n
        products = parts @ parts.T
        rates = np.full(n, k / n)
        difference = samplers.variance_of("fixed", rates, products) - samplers.variance_of(
            "independent", rates, products
        )
        assert difference == pytest.approx(
            (n - k) / (k * (n - 1)) * (np.trace(products) - products.sum())
        )


def test_certain_clients_are_always_in_and_impossible_ones_never() -> None:
    for key in range(200):
        plan = draw.independent(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]]), rng.generator(key))
        assert plan.client.tolist() == [0]


@settings(deadline=None)
@given(st.integers(1, 40), st.floats(0.5, 60))
def test_a_budget_must_fit_the_clients(clients: int, budget: float) -> None:
    shares = np.full((1, clients), 1 / clients)
    for name, kind in SAMPLERS.items():
        if name == "full":
            continue
        wide = {
            "ocs": "cohort",
            "aocs": "cohort",
            "pow-d": "candidates",
            "cpow-d": "candidates",
            "rpow-d": "candidates",
        }
        sampler = kind(budget=budget, **({wide[name]: 100} if name in wide else {}))  # type: ignore[call-arg]
        if 1 <= budget <= clients or (
            issubclass(kind, Assigning) and budget < clients
        ):  # whose rates may be any
            sampler.init(shares, 10)
        else:
            with pytest.raises(BadInput, match=r"sampler\.budget"):
                sampler.init(shares, 10)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("kvib", {"theta": 0.0}, "sampler.theta is 0: it must be above 0 and at most 1"),
        ("kvib", {"theta": 1.5}, "sampler.theta is 1.5: it must be above 0 and at most 1"),
        ("kvib", {"gamma": -1.0}, "sampler.gamma is -1: it must be above 0"),
        (
            "kvib-full",
            {"theta": 0.3},
            "sampler.theta only scales sampler.bound in kvib-full, and sampler.bound is not "
            "given: leave sampler.theta out, or give sampler.bound",
        ),
        ("vrb", {"bound": 0.0}, "sampler.bound is 0: it must be above 0"),
        (
            "kvib",
            {"gamma": 1.0, "bound": 1.0},
            "sampler.gamma and sampler.bound both set the regulariser: give one of them",
        ),
        ("mabs", {"eta": 0.0}, "sampler.eta is 0: it must be above 0 and at most 1"),
        ("avare", {"least": 0.0}, "sampler.least is 0: it must be above 0 and at most 1"),
        ("avare", {"decay": -1.0}, "sampler.decay is -1: it must be at least 0"),
        ("osmd", {"alpha": 2.0}, "sampler.alpha is 2: it must be above 0 and at most 1"),
        ("osmd", {"rate": 0.0}, "sampler.rate is 0: it must be above 0"),
        (
            "ocs",
            {"cohort": 2},
            "sampler.cohort is 2: it must be at least sampler.budget, 3, because the "
            "budget is drawn from the cohort",
        ),
        (
            "pow-d",
            {"candidates": 2},
            "sampler.candidates is 2: it must be at least sampler.budget, 3",
        ),
        ("cpow-d", {"examples": 0}, "sampler.examples is 0: it must be at least 1"),
    ],
)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as mistake:
        SAMPLERS[name](budget=3, **options).init(SHARES, 10)  # type: ignore[call-arg]
    assert str(mistake.value) == sentence


# --- optimal probabilities


def oracle(scores: Array, budget: float, floor: float) -> Array:
    """clip(a / level, floor, 1), the level by plain bisection of its logarithm."""
    low, high = (
        math.log(scores.min()) - 1,
        math.log(scores.max() / max(floor, 1e-9)) + math.log(len(scores)) + 25,
    )
    for _ in range(200):
        middle = (low + high) / 2
        spent = np.clip(scores / math.exp(middle), floor, 1).sum()
        low, high = (middle, high) if spent > budget else (low, middle)
    return np.asarray(np.clip(scores / math.exp(high), floor, 1))


@pytest.mark.parametrize(
    ("scores", "budget", "p"),
    [
        ([1, 2, 3, 10], 2, [1 / 6, 1 / 3, 1 / 2, 1]),
        ([1, 2, 3, 10], 1, [0.0625, 0.125, 0.1875, 0.625]),
        ([10, 1, 3, 2], 2, [1, 1 / 6, 1 / 2, 1 / 3]),
        ([0, 0, 5, 5], 2, [0, 0, 1, 1]),
        ([0, 0, 5, 5], 3, [0.5, 0.5, 1, 1]),
        ([0, 0, 0, 0], 1, [0.25, 0.25, 0.25, 0.25]),
        ([7, 7, 7, 7, 7], 2, [0.4] * 5),
        ([1, 2, 3], 3, [1, 1, 1]),
        ([1, 2, 3], 7, [1, 1, 1]),
        ([1, 1, 1e9, 1e9], 2.5, [0.25, 0.25, 1, 1]),
        ([1e-300, 3e-300, 1e300], 2, [0.25, 0.75, 1]),
        ([1e308] * 4, 2, [0.5] * 4),
        ([5e-324, 5e-324], 1, [0.5, 0.5]),
        ([1, 1e17], 1, [1e-17, 1]),
    ],
)
def test_waterfill_vectors(scores: list[float], budget: float, p: list[float]) -> None:
    assert waterfill(np.array(scores, float), budget) == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize(
    ("scores", "budget", "floor", "p"),
    [
        ([1, 1, 1, 100], 2.2, 0.4, [0.4, 0.4, 0.4, 1]),
        ([1, 1, 9, 9], 2.2, 0.1, [0.11, 0.11, 0.99, 0.99]),
        ([0, 0, 5, 5], 2, 0.1, [0.1, 0.1, 0.9, 0.9]),
        ([0, 0, 0, 5], 2, 0.1, [1 / 3, 1 / 3, 1 / 3, 1]),
        ([1, 2], 0.4, 0.2, [0.2, 0.2]),
    ],
)
def test_waterfill_with_a_floor_vectors(
    scores: list[float], budget: float, floor: float, p: list[float]
) -> None:
    assert waterfill(np.array(scores, float), budget, floor) == pytest.approx(p, rel=1e-12)


SCORES = arrays(float, st.integers(1, 30), elements=st.floats(-60, 60).map(math.exp))


@settings(deadline=None)
@given(SCORES, st.floats(0, 1), st.floats(0, 1))
def test_waterfill_against_bisection(scores: Array, part: float, low: float) -> None:
    budget = max(part * len(scores), 1e-3)
    for floor in (0.0, low * min(1.0, budget / len(scores))):
        p = waterfill(scores, budget, floor)
        assert p.sum() == pytest.approx(min(budget, len(scores)), rel=1e-12)
        assert ((p >= floor) & (p <= 1)).all()
        assert p == pytest.approx(oracle(scores, budget, floor), rel=1e-6, abs=1e-12)


ANY = arrays(float, st.integers(1, 12), elements=st.just(0.0) | st.floats(-700, 700).map(math.exp))


@settings(deadline=None)
@given(ANY, st.floats(0.001, 1.1), st.floats(0, 1))
@example(np.array([0.0, 0.0, 0.0, 4e141, 2e141, 4e-183]), 1 / 3, 0.0)
def test_waterfill_on_all_that_a_float_can_be(scores: Array, part: float, low: float) -> None:
    """What must hold of the optimum, without an oracle.

    The budget is spent, and p is in proportion to the scores wherever it is free.
    """
    budget = part * len(scores)
    for floor in (0.0, low * min(1.0, part)):
        p = waterfill(scores, budget, floor)
        assert p.sum() == pytest.approx(min(budget, len(scores)), rel=1e-12)
        assert ((p >= floor) & (p <= 1)).all()
        assert (np.diff(p[np.argsort(scores)]) >= 0).all()
        free = (p > max(floor, 1e-290)) & (p < 1) & (scores > 0)
        ratio = np.log(p[free]) - np.log(scores[free])
        assert ratio == pytest.approx(np.full(free.sum(), ratio[0] if free.any() else 0), abs=1e-9)


@settings(deadline=None)
@given(
    arrays(float, st.integers(2, 6), elements=st.floats(0.05, 5)),
    st.floats(0.1, 0.9),
    st.floats(0, 0.9),
)
def test_waterfill_against_a_solver(scores: Array, part: float, low: float) -> None:
    """No feasible point that SLSQP finds has a smaller sum a^2 / p."""
    from scipy.optimize import minimize

    budget = part * len(scores)
    floor = low * min(1.0, budget / len(scores))
    p = waterfill(scores, budget, floor)
    start = np.full(len(scores), part)
    found = minimize(
        lambda x: float((scores**2 / x).sum()),
        start,
        jac=lambda x: -(scores**2) / x**2,
        bounds=[(max(floor, 1e-6), 1)] * len(scores),
        constraints={"type": "eq", "fun": lambda x: x.sum() - budget, "jac": np.ones_like},
        method="SLSQP",
    )
    assume(found.success and abs(found.x.sum() - budget) < 1e-9)
    assert (scores**2 / p).sum() <= found.fun * (1 + 1e-7)


@settings(deadline=None)
@given(SCORES, st.floats(0.05, 1), st.integers(0, 5), st.permutations(range(5)))
def test_waterfill_does_not_mind_order_ties_and_scale(
    scores: Array, part: float, again: int, order: list[int]
) -> None:
    scores = np.concatenate([scores, np.full(again, scores[0])])
    budget = part * len(scores)
    p = waterfill(scores, budget)
    shuffled = np.random.default_rng(order).permutation(len(scores))
    assert waterfill(scores[shuffled], budget) == pytest.approx(p[shuffled], rel=1e-9)
    assert waterfill(scores * 2.0**40, budget) == pytest.approx(p, rel=1e-12)
    assert np.ptp(p[scores == scores[0]]) == 0


def exactly_filled(scores: Array, budget: float, floor: float) -> list[float]:
    """clip(a / level, floor, 1) in rational numbers, for positive scores: all clips are tried."""
    a = sorted(Fraction(float(score)) for score in scores)
    for floored in range(len(a) + 1):
        for capped in range(floored, len(a) + 1):
            rest = Fraction(budget) - (len(a) - capped) - floored * Fraction(floor)
            some = a[floored:capped]
            level = sum(some) / rest if some and rest > 0 else None
            if level is None:  # all are clipped; any level between the two will do
                if rest == 0 and not some:
                    p = [Fraction(floor)] * floored + [Fraction(1)] * (len(a) - capped)
                    level_low = (
                        a[floored - 1] / Fraction(floor) if floored and floor else Fraction(0)
                    )
                    if capped == len(a) or level_low <= a[capped]:
                        return [float(p[k]) for k in _rank(scores)]
                continue
            p = [max(Fraction(floor), min(Fraction(1), each / level)) for each in a]
            if sum(p) == Fraction(budget):
                return [float(p[k]) for k in _rank(scores)]
    raise AssertionError("no clips fit")


def _rank(scores: Array) -> list[int]:
    """The place of each score in ascending order."""
    return np.argsort(np.argsort(scores, kind="stable"), kind="stable").tolist()


EXTREME = st.one_of(
    st.floats(5e-324, 1e-300),
    st.floats(1e290, float(np.finfo(float).max)),
    st.floats(1e-3, 1e3),
)


@given(arrays(np.float64, st.integers(2, 6), elements=EXTREME), st.floats(0.01, 0.99), st.data())
@example(np.array([5e-324, 1e-323, 1.5e-323]), 0.5, None)
@example(np.array([6e307, 1.7e308]), 0.2, None)
@example(np.array([1e308, 5e-324, 1.5e-323, 1e-323]), 0.34, None)
def test_waterfill_is_exact_on_extreme_floats(scores: Array, part: float, more: Any) -> None:
    """Subnormal scores, scores above 5e307, budgets below 1, with and without a floor."""
    budget = round(64 * part * len(scores)) / 64
    assume(budget > 0)
    floor = more.draw(st.sampled_from([0.0, 1 / 64])) if more else 0.0
    assume(floor * len(scores) <= budget)
    p = waterfill(scores, budget, floor)
    assert p == pytest.approx(exactly_filled(scores, budget, floor), rel=1e-12, abs=1e-300)
    assert p.sum() == pytest.approx(budget, rel=1e-12)


@pytest.mark.parametrize(
    ("scores", "budget", "floor"),
    [
        ([1, 2], 0.5, 0.3),
        ([1, 2], 0, 0),
        ([1, 2], -1, 0),
        ([1, 2], math.nan, 0),
        ([1, -1], 1, 0),
        ([1, math.nan], 1, 0),
        ([math.inf, 1], 1, 0),
    ],
)
def test_waterfill_refuses_what_it_cannot_do(
    scores: list[float], budget: float, floor: float
) -> None:
    with pytest.raises(BadInput, match="waterfill"):
        waterfill(np.array(scores, float), budget, floor)


def test_the_value_of_the_optimum() -> None:
    """(sum_{j<=l} a_j)^2 / (K-N+l) + sum_{j>l} a_j^2."""
    scores = np.array([1.0, 2, 3, 10])
    assert (scores**2 / waterfill(scores, 2)).sum() == pytest.approx(6**2 / (2 - 4 + 3) + 100)


# --- single samplers, by the numbers of their sources


def play(
    sampler: Any, norms: Array, shares: Array, state: State, generator: np.random.Generator
) -> State:
    """One round of one model with given norms."""
    if isinstance(sampler, KVibFull):
        state = {**state, "norm": norms[None]}
    plan = sampler.draw(state, shares, generator)
    seen = Seen.nothing(len(plan))
    seen.norm, seen.reason = norms[plan.client], [""] * len(plan)
    return sampler.observe(state, shares, plan, seen)


def cost_ratio(
    sampler: Any, seed: int, clients: int = 100, budget: int = 10, rounds: int = 500
) -> float:
    """sum_t l_t(p_t) / sum_t l_t(p*_t), against pi_t(i) = base_i (1+t)^(-1/4) e^(0.1 xi).

    The base is log-normal(0, 1.5), scaled to sum to 1.
    """
    generator = np.random.default_rng(seed)
    base = np.exp(1.5 * generator.normal(size=clients))
    base /= base.sum()
    shares = np.full((1, clients), 1 / clients)
    state, paid, best = sampler.init(shares, rounds), 0.0, 0.0
    for t in range(rounds):
        score = base * (1 + t) ** -0.25 * np.exp(0.1 * generator.normal(size=clients))
        paid += (score**2 / sampler.rates(state, shares)[0]).sum()
        best += (score**2 / waterfill(score, budget)).sum()
        state = play(sampler, score * clients, shares, state, generator)
    return paid / best


@pytest.mark.parametrize(
    ("sampler", "ratio"),
    [
        (KVib(10, bound=1e-2), 1.99),
        (KVib(10, bound=1e-3), 1.84),
        (KVibFull(10, bound=1e-3), 1.10),
        (KVib(10), 1.84),
    ],
    ids=["G2=1e-4", "G2=1e-6", "full", "default"],
)
def test_kvib_learns_as_fast_as_it_should(sampler: Any, ratio: float) -> None:
    """Medians: a few bases have one client that is found late."""
    assert np.median([cost_ratio(sampler, seed) for seed in range(7)]) == pytest.approx(
        ratio, rel=0.15
    )


def test_kvib_does_not_depend_on_the_scale_of_the_updates() -> None:
    for factor in (1e-6, 1.0, 1e6):
        shares, generator = np.full((1, 20), 1 / 20), np.random.default_rng(0)
        state = KVib(4).init(shares, 100)
        for _ in range(30):
            state = play(KVib(4), factor * np.arange(1.0, 21), shares, state, generator)
        rates = KVib(4).rates(state, shares)
        if factor == 1e-6:
            first = rates
        assert rates == pytest.approx(first)


def test_kvib_theta_and_gamma() -> None:
    shares = np.full((1, 100), 0.01)
    state = KVib(10, bound=0.1).init(shares, 500)
    assert state["theta"] == pytest.approx([0.27144], abs=1e-5)
    assert state["gamma"] == pytest.approx(0.01 * 100 / (state["theta"] * 10))
    assert KVib(10).init(shares, 5)["theta"] == 1, "T K < N"
    given = KVib(10, theta=0.3, gamma=2.0).init(shares, 500)
    assert (given["theta"], given["gamma"]) == ([0.3], [2.0])
    generator = np.random.default_rng(0)
    for _ in range(20):
        state = play(KVib(10), np.exp(3 * np.arange(100) / 100), shares, state, generator)
    rates = KVib(10).rates(state, shares)
    assert rates.sum() == pytest.approx(10)
    assert rates.min() >= state["theta"][0] * 0.1
    best = waterfill(np.sqrt(state["omega"] + state["gamma"])[0], 10)
    assert rates[0] == pytest.approx((1 - state["theta"]) * best + state["theta"] * 0.1)
    linear = KVib(10, linear=True).rates(state, shares)[0]
    assert linear == pytest.approx(
        (1 - state["theta"]) * waterfill((state["omega"] + state["gamma"])[0], 10)
        + state["theta"] * 0.1
    )


def test_kvib_feedback() -> None:
    """omega_i += (share |g|)^2 / p~ for the drawn; gamma is their sum / (rounds * budget)."""
    shares = np.array([[0.5, 0.3, 0.2]])
    sampler, norms = KVib(2), np.array([2.0, 1.0, 3.0])
    state = sampler.init(shares, 100)
    p = np.array([0.8, 0.5])
    plan = Plan(np.array([0, 2]), np.zeros(2, int), p, shares[0, [0, 2]] / p)
    seen = Seen.nothing(2)
    seen.norm, seen.reason = norms[plan.client], ["", ""]
    state = sampler.observe(state, shares, plan, seen)
    assert state["omega"][0] == pytest.approx([1 / 0.8, 0, 0.36 / 0.5])
    learnt = (1 / 0.8 + 0.36 / 0.5) / 2
    assert leader.sums(state)[0] == pytest.approx(state["omega"][0] + learnt)
    state = sampler.observe(state, shares, plan, seen)
    assert leader.sums(state)[0] == pytest.approx(state["omega"][0] + learnt), (
        "twice the same, in two rounds"
    )


def learns(
    sampler: Any, state: State, shares: Array, clients: list[int], norms: list[float]
) -> State:
    """The state after a round in which these clients sent updates with these norms."""
    some = np.array(clients)
    plan = Plan(some, np.zeros(len(some), int), np.ones(len(some)), shares[0, some])
    seen = Seen.nothing(len(some))
    seen.norm[:], seen.reason = norms, [""] * len(some)
    after: State = sampler.observe(state, shares, plan, seen)
    return after


def test_succession() -> None:
    """Each client's own mean square and that of all, by the rule of succession."""
    shares, sampler = np.array([[0.5, 0.3, 0.1, 0.1]]), Succession(2)
    state = sampler.init(shares, 9)
    assert sampler.rates(state, shares)[0] == pytest.approx(waterfill(shares[0], 2))
    state = learns(sampler, state, shares, [0, 2], [2.0, 4.0])
    mean = (2**2 + 4**2) / 2
    squares = np.array([(mean + 2**2) / 2, mean, (mean + 4**2) / 2, mean])
    assert sampler.rates(state, shares)[0] == pytest.approx(
        waterfill(shares[0] * np.sqrt(squares), 2)
    )
    state = learns(sampler, state, shares, [0], [1.0])
    own = (2**2 + 1**2) / 2  # the newest counts as much as all older ones together
    assert state["norm"][0, 0] == pytest.approx(math.sqrt(own))
    mean = (own + 4**2) / 2
    squares = np.array([(mean + 2 * own) / 3, mean, (mean + 4**2) / 2, mean])
    assert sampler.rates(state, shares)[0] == pytest.approx(
        waterfill(shares[0] * np.sqrt(squares), 2)
    )
    nothing = learns(sampler, sampler.init(shares, 9), shares, [0, 1], [0.0, 0.0])
    squares = np.array([1 / 2, 1 / 2, 1, 1])
    assert sampler.rates(nothing, shares)[0] == pytest.approx(
        waterfill(shares[0] * np.sqrt(squares), 2)
    )


def test_clients_who_are_alike_stay_alike() -> None:
    """Norms that are noise around one level: chances stay close to K / N, and closer in time."""
    n, budget, stream = 50, 5, np.random.default_rng(0)
    shares, sampler = np.full((1, n), 1 / n), Succession(budget)
    state, worst = sampler.init(shares, 100), list[float]()
    for _ in range(100):
        p = sampler.rates(state, shares)[0]
        worst.append(
            float((budget / n / p).mean() - 1)
        )  # what uniform sampling has less, as a part
        drawn = draw.systematic(p[None], shares, stream).client
        state = learns(sampler, state, shares, drawn.tolist(), stream.lognormal(0, 0.2, len(drawn)))
    assert max(worst) < 0.02
    same = learns(sampler, sampler.init(shares, 9), shares, list(range(20)), [3.0] * 20)
    assert sampler.rates(same, shares)[0] == pytest.approx(np.full(n, budget / n))


def test_a_client_that_sends_nothing_is_drawn_again() -> None:
    """sampling/adaptive/succession.py, 5: p >= b K d / sqrt(n + 1), whatever its norms were."""
    n, budget = 20, 4
    shares, sampler = np.full((1, n), 1 / n), Succession(budget)
    state = sampler.init(shares, 1000)
    for times in range(1, 40):
        state = learns(sampler, state, shares, list(range(n)), [0.0] + [1.0] * (n - 1))
        largest = math.sqrt((n - 1) / n)  # b, as G = 1
        assert sampler.rates(state, shares)[0, 0] >= largest * budget / n / math.sqrt(times + 1)


@given(
    arrays(np.float64, 8, elements=st.floats(1e-3, 1e3)),
    arrays(np.float64, 8, elements=st.floats(-2, 2)),
    st.integers(1, 7),
)
def test_scores_with_errors_cost_no_more_than_their_product(
    x: Array, error: Array, budget: int
) -> None:
    """sampling/adaptive/succession.py, 1: at most c C times the least cost."""
    factor = np.exp(error.max() - error.min())
    cost = (x**2 / waterfill(x * np.exp(error), budget)).sum()
    assert cost <= factor * (x**2 / waterfill(x, budget)).sum() * (1 + 1e-9)


@given(
    arrays(np.float64, 8, elements=st.floats(0.01, 1)),
    arrays(np.float64, 8, elements=st.floats(0, 1)),
    st.integers(1, 8),
)
def test_the_first_round_costs_at_most_what_its_bound_says(
    d: Array, norm: Array, budget: int
) -> None:
    """sampling/adaptive/succession.py, 4: the cost of a round in which nothing is known."""
    shares = (d / d.sum())[None]
    sampler = Succession(budget)
    p = sampler.rates(sampler.init(shares, 9), shares)[0]
    x = shares[0] * norm
    assert (x**2 / p).sum() <= norm.max() * x.sum() / budget + (x[p == 1] ** 2).sum() + 1e-12


@pytest.mark.parametrize("norms", [[1e-300, 1e-308, 5e-324], [1e300, 1e-300, 1.0], [1e154] * 3])
def test_succession_with_extreme_norms(norms: list[float]) -> None:
    shares, sampler = np.array([[0.7, 0.2, 0.1 - 1e-9, 1e-9]]), Succession(2)
    state = learns(sampler, sampler.init(shares, 9), shares, [0, 1, 2], norms)
    p = sampler.rates(state, shares)[0]
    assert p.sum() == pytest.approx(2)
    assert p.min() > 0


def test_systematic_draws_of_equal_chances_are_cohorts_of_a_fixed_size() -> None:
    """Every cohort is equally likely, and a fractional budget is rounded up or down."""
    chances: dict[tuple[int, ...], float] = {}
    for chance, plan in outcomes("systematic", np.full(5, 0.4), np.full(5, 0.2)):
        cohort = tuple(plan.client.tolist())
        chances[cohort] = chances.get(cohort, 0.0) + chance
    assert len(chances) == 10
    assert list(chances.values()) == pytest.approx([0.1] * 10)
    stream = rng.generator(0)
    sizes = [len(draw.systematic(np.full((1, 5), 0.5), SHARES[:1, :5], stream)) for _ in range(99)]
    assert set(sizes) == {2, 3}


def test_vrb() -> None:
    """The unit test of its authors: ten points, one drawn once with loss 1."""
    sampler, shares = Vrb(1, theta=1e-12, gamma=1.0), np.full((1, 10), 0.1)
    state = sampler.init(shares, 100)
    plan = Plan(np.array([3]), np.array([0]), np.array([0.1]), np.array([1.0]))
    seen = Seen.nothing(1)
    seen.norm[:], seen.reason = 10.0, [""]
    rates = sampler.rates(sampler.observe(state, shares, plan, seen), shares)[0]
    assert rates[3] == pytest.approx(math.sqrt(11) / (math.sqrt(11) + 9))
    twice = replace(plan, weight=np.array([1.0]))  # 2 * share / (2 * q)
    assert Vrb(2, gamma=1.0).observe(state, shares, twice, seen)["omega"][0, 3] == pytest.approx(
        2 * 1 / 0.1
    )
    assert Vrb(1).init(shares, 1000)["theta"] == pytest.approx((10 / 1000) ** (1 / 3))
    assert Vrb(1).init(shares, 9)["theta"] == 0.3


def test_mabs_does_not_overflow() -> None:
    sampler, shares, generator = Mabs(2), np.full((1, 5), 0.2), np.random.default_rng(0)
    state = sampler.init(shares, 10)
    for norms in (np.ones(5), np.full(5, 1e150), np.array([1e150, 1, 1, 1, 1]), np.zeros(5)):
        state = play(sampler, norms, shares, state, generator)
        rates = sampler.rates(state, shares)
        assert rates.sum() == pytest.approx(2)
        assert rates.min() >= 0.4 * 2 / 5 * (1 - 1e-12)


def test_mabs_step() -> None:
    """w_i += delta pi_i^2 / q_i^3 per draw; delta's scale is the first cohort's mean pi^2."""
    sampler, shares = Mabs(3), np.full((1, 4), 0.25)
    state = sampler.init(shares, 50)
    plan = Plan(
        np.array([0, 3]),
        np.zeros(2, int),
        np.full(2, np.nan),
        np.array([2 * 0.25 / (3 * 0.25), 0.25 / (3 * 0.25)]),
    )
    seen = Seen.nothing(2)
    seen.norm, seen.reason = np.array([4.0, 8.0]), ["", ""]
    after = sampler.observe(state, shares, plan, seen)
    delta = math.sqrt(0.4**4 * math.log(4) / (4**5 * 50)) / 2.5
    assert after["log"][0] == pytest.approx(delta * np.array([2 * 1, 0, 0, 4]) * 4**3)
    softmax = np.exp(after["log"][0]) / np.exp(after["log"][0]).sum()
    assert sampler.rates(after, shares)[0] == pytest.approx(3 * (0.6 * softmax + 0.1))


def test_avare_starts_uniform_and_its_floor_falls() -> None:
    sampler, shares = Avare(1), np.full((1, 5), 0.2)
    state = sampler.init(shares, 100)
    assert sampler.rates(state, shares)[0] == pytest.approx([0.2] * 5)
    known = {"norm": np.array([[0.0, 1, 1, 1, 50]]), "round": np.array([4.0])}
    assert sampler.rates(known, shares)[0].min() == pytest.approx(0.04 + 0.16 / 4)
    late = {**known, "round": np.array([1e9])}
    assert sampler.rates(late, shares)[0] == pytest.approx([0.04, 0.04, 0.04, 0.04, 0.84])
    plan = Plan(np.array([4, 1]), np.zeros(2, int), np.full(2, np.nan), np.ones(2))
    seen = Seen.nothing(2)
    seen.norm[:] = 7.0, np.nan
    after = sampler.observe(known, shares, plan, seen)
    assert after["norm"].tolist() == [[0, 1, 1, 1, 7]]
    assert after["round"] == 5
    unseen = {"norm": np.array([[math.nan, 1, 1, 1, 2]]), "round": np.array([1e9])}
    assert sampler.rates(unseen, shares)[0] == pytest.approx(np.array([2, 1, 1, 1, 2]) / 7)


@settings(deadline=None)
@given(
    arrays(float, st.integers(2, 12), elements=st.floats(-5, 5).map(math.exp)),
    st.floats(0.05, 0.95),
)
def test_osmd_projection(q: Array, alpha: float) -> None:
    """waterfill with a floor is the published projection.

    Entries before m* become alpha / N, and the others are scaled.
    """
    n, ascending = len(q), np.sort(q)
    for m in range(1, n + 1):
        scale = (1 - alpha * (m - 1) / n) / ascending[m - 1 :].sum()
        if ascending[m - 1] * scale > alpha / n:
            break
    published = np.where(
        np.argsort(np.argsort(q, kind="stable"), kind="stable") < m - 1, alpha / n, q * scale
    )
    assert waterfill(q, 1.0, alpha / n) == pytest.approx(published, rel=1e-9)


@given(
    arrays(
        float,
        st.integers(1, 30),
        elements=st.one_of(st.floats(1e-9, 1.0), st.just(0.25), st.just(0.0)),
    ),
    st.one_of(st.floats(1e-6, 1.0), st.just(1.0)),
)
def test_osmd_lifts_as_waterfill_does(q: Array, alpha: float) -> None:
    """The projection that is fast enough for a million clients, against waterfill."""
    assume(q.any())
    lifted = q.copy()
    lift(lifted, alpha / len(q))
    np.testing.assert_allclose(lifted, waterfill(q, 1.0, alpha / len(q)), rtol=1e-9)
    assert lifted.sum() == pytest.approx(1)


def test_osmd_step() -> None:
    """q_i exp(eta a_i / (K^2 q_i^3)), twice for a client drawn twice."""
    sampler, shares = Osmd(3, alpha=0.1, rate=1.0), np.full((1, 4), 0.25)
    state = sampler.init(shares, 50)
    q = np.array([0.4, 0.3, 0.2, 0.1])
    state = {**state, "q": q[None, None]}
    plan = Plan(
        np.array([0, 3]),
        np.zeros(2, int),
        np.full(2, np.nan),
        np.array([2 * 0.25 / (3 * 0.4), 0.25 / (3 * 0.1)]),
    )
    seen = Seen.nothing(2)
    seen.norm, seen.reason = np.array([4.0, 8.0]), ["", ""]  # pi = 1 and 2: a = 1 and 4
    after = sampler.observe(state, shares, plan, seen)
    eta = 9 * 0.1**3 / (4**3 * 4.0) * math.sqrt(math.log(4) / 100)
    moved = q * np.exp(eta * np.array([2 * 1 / (9 * 0.4**3), 0, 0, 4 / (9 * 0.1**3)]))
    assert after["q"][0, 0] == pytest.approx(waterfill(moved, 1.0, 0.025))


def test_osmd_experts() -> None:
    n, t, alpha = 100, 500, 0.4
    expected = (
        math.ceil(0.5 * math.log2((math.log(n) + 4 * (t - 1) * math.log(n / alpha)) / math.log(n)))
        + 1
    )
    state = OsmdAdaptive(5).init(np.full((1, n), 1 / n), t)
    assert len(state["q"]) == expected
    assert np.diff(np.log2(state["eta"][:, 0])) == pytest.approx(1)
    e = np.arange(1, expected + 1)
    assert np.exp(state["trust"][:, 0]) == pytest.approx((1 + 1 / expected) / (e * (e + 1)))
    assert np.exp(state["trust"][:, 0]).sum() == pytest.approx(1)


def test_osmd_trust() -> None:
    """Trust falls by exp(-gamma sum a_i / (K^2 q_e q)), gamma = alpha / N sqrt(8 K / (T a))."""
    sampler, shares = OsmdAdaptive(2, alpha=0.1), np.full((1, 3), 1 / 3)
    state = sampler.init(shares, 4)
    experts = np.random.default_rng(0).dirichlet(np.ones(3), size=(len(state["q"]), 1))
    state = {**state, "q": experts}
    q = sampler.rates(state, shares)[0] / 2
    assert q == pytest.approx(np.exp(state["trust"][:, 0]) @ experts[:, 0])
    plan = Plan(np.array([1]), np.zeros(1, int), np.full(1, np.nan), np.array([1 / 3 / (2 * q[1])]))
    seen = Seen.nothing(1)
    seen.norm[:], seen.reason = 6.0, [""]  # a = 4
    gamma = 0.1 / 3 * math.sqrt(8 * 2 / (4 * 4.0))
    fall = sampler.observe(state, shares, plan, seen)["trust"] - state["trust"]
    assert fall[:, 0] == pytest.approx(-gamma * 4 / (4 * experts[:, 0, 1] * q[1]))


@pytest.mark.parametrize("budget", [3, 8])
def test_aocs_reaches_ocs(budget: int) -> None:
    for seed in range(200):
        scores = np.random.default_rng(seed).lognormal(0, 2, 32)
        assert approximate(scores, budget, 4) == pytest.approx(waterfill(scores, budget), abs=1e-12)


def test_ocs_is_optimal_where_everybody_is_asked() -> None:
    sampler = Ocs(3, cohort=100)
    state = asked(sampler, sampler.init(SHARES, 10), SHARES, rng.generator(0))
    scores = SHARES * np.linalg.norm(UPDATES, axis=2)
    assert sampler.rates(state, SHARES) == pytest.approx(fill(scores, 3, SHARES))


def test_power_of_choice_takes_the_highest_losses() -> None:
    for name in ("pow-d", "cpow-d"):
        sampler: Any = SAMPLERS[name](budget=2, candidates=6)  # type: ignore[call-arg]
        plan, _ = step(sampler, sampler.init(SHARES, 10), SHARES, 0)
        for s in range(2):
            losses = np.where(SHARES[s] > 0, LOSSES[s], -1)
            assert set(plan.client[plan.model == s]) == set(np.argsort(-losses)[:2])
        assert plan.weight == pytest.approx(0.5)
    assert SAMPLERS["cpow-d"](examples=7).ask({}, SHARES, rng.generator(0)).examples == 7  # type: ignore[attr-defined,call-arg]
    sampler = SAMPLERS["rpow-d"](budget=2, candidates=6)  # type: ignore[call-arg]
    state = {"loss": np.array([[3.0, 2, 9, 1, 0, np.inf], [np.inf, 5, 1, 7, 2, 3]])}
    plan = sampler.draw(state, SHARES, rng.generator(0))
    assert sorted(plan.client[plan.model == 0]) == [2, 5]
    assert sorted(plan.client[plan.model == 1]) == [0, 5], "clients 1 and 3 have no data for it"


def test_divfl_is_greedy() -> None:
    """Against the definition, step by step."""
    points = np.random.default_rng(3).normal(size=(9, 4))
    distance = np.linalg.norm(points[:, None] - points, axis=2)
    assert memory.distances(points @ points.T) == pytest.approx(distance, abs=1e-6)
    chosen: list[int] = []
    for _ in range(3):
        costs = {
            i: distance[:, [*chosen, i]].min(axis=1).sum() for i in range(9) if i not in chosen
        }
        chosen.append(min(costs, key=lambda i: costs[i]))
    assert divfl.facilities(distance, 3).tolist() == chosen
    assert sorted(divfl.facilities(np.zeros((4, 4)), 9)) == [0, 1, 2, 3], (
        "clients that are all the same"
    )


def test_clustered_sampling_by_size_goes_by_the_shares_of_the_round() -> None:
    """The strata are cut from clients in order of their data, even after the shares changed."""
    sampler: Any = SAMPLERS["clustered-size"](budget=2)  # type: ignore[call-arg]
    before, now = np.array([[0.1, 0.2, 0.3, 0.4]]), np.array([[0.4, 0.0, 0.35, 0.25]])
    state = sampler.init(before, 10)
    for row in (before[0], before[0] * [1, 0, 1, 1], now[0]):
        clients, mass = sampler.strata(state, 0, row)
        assert clients.tolist() == sorted(
            np.flatnonzero(row).tolist(), key=lambda client: -row[client]
        )
        assert mass == pytest.approx(2 * row[clients] / row.sum())


def test_divfl_asks_everybody_once_and_then_keeps_what_it_sees() -> None:
    sampler: Any = SAMPLERS["divfl"](budget=2)  # type: ignore[call-arg]
    state = sampler.init(SHARES, 10)
    question = sampler.ask(state, SHARES, rng.generator(0))
    assert len(question.rows) == np.count_nonzero(SHARES)
    _, state = step(sampler, state, SHARES, 0)
    assert len(sampler.ask(state, SHARES, rng.generator(0)).rows) == 0
    rows = Plan(np.array([4]), np.array([1]), np.ones(1), np.ones(1))
    after = replies.observe(sampler, state, SHARES, rows, replies.Clients.of(-UPDATES))
    assert after["update.1.4"] == pytest.approx(-UPDATES[1, 4])
    storage = after["update.1.4"].untyped_storage()
    assert storage.nbytes() == after["update.1.4"].nbytes, (
        "it must not keep the whole round's updates alive"
    )
    changed = UPDATES[1].copy()
    changed[4] *= -1
    changed[[1, 3]] = 0  # no data, never known
    assert after["gram.1"] == pytest.approx(changed @ changed.T, rel=1e-5, abs=1e-5)


def masses(sampler: Any, state: State, row: Array) -> Array:
    """r[k, i]: stratum k's distribution, read off the segments."""
    client, mass = sampler.strata(state, 0, row)
    ends = np.cumsum(mass)
    out = np.zeros((round(sampler.budget), len(row)))
    for i, start, end in zip(client, ends - mass, ends, strict=True):
        for k in range(len(out)):
            out[k, i] += max(0.0, min(end, k + 1) - max(start, k))
    return out


@pytest.mark.parametrize("name", ["clustered-size", "clustered-similarity"])
@settings(deadline=None)
@given(data=st.data())
def test_clustered_sampling(name: str, data: st.DataObject) -> None:
    """Strata are distributions, and a client has m * share over all of them.

    The variance is at most that of draws with replacement.
    """
    clients = data.draw(st.integers(2, 9))
    shares = data.draw(arrays(float, clients, elements=st.floats(0.01, 1)))
    shares /= shares.sum()
    sampler: Any = SAMPLERS[name](budget=data.draw(st.integers(1, clients)))  # type: ignore[call-arg]
    state = sampler.init(shares[None], 10)
    updates = data.draw(
        arrays(np.float32, (clients, 2), elements=st.floats(-1, 1, width=32))
    ).astype(float)
    if name == "clustered-similarity":
        state |= {"gram.0": updates @ updates.T}
    r, m = masses(sampler, state, shares), sampler.budget
    assert r.sum(axis=1) == pytest.approx(1, abs=1e-6)
    assert r.sum(axis=0) == pytest.approx(m * shares, abs=1e-6)
    spread = (
        sum(row @ (updates**2).sum(axis=1) - float(((row @ updates) ** 2).sum()) for row in r)
        / m**2
    )
    parts = shares[:, None] * updates
    assert spread <= samplers.variance_of("multinomial", m * shares, parts @ parts.T) + 1e-6
    plan = sampler.draw(state, shares[None], rng.generator(0))
    assert plan.weight.sum() == pytest.approx(1)
    assert plan.probability == pytest.approx(1 - np.prod(1 - r[:, plan.client], axis=0), abs=1e-6)


def test_clusters_are_the_likes() -> None:
    """Two directions, six clients: two strata, one a direction."""
    angle = memory.angles(
        (lambda u: u @ u.T)(np.array([[1, 0], [2, 0.1], [3, 0], [0, 1], [0.1, 5], [0, 2.0]]))
    )
    groups = clustered.clusters(angle, np.full(6, 1 / 3))
    assert sorted(map(sorted, groups)) == [[0, 1, 2], [3, 4, 5]]
    assert memory.angles(np.diag([1.0, 0, 4]))[0] == pytest.approx([0, 0, math.pi / 2])


def test_samplers_that_compare_all_clients_refuse_too_many() -> None:
    with pytest.raises(BadInput, match="30,000 clients are more than the 5,000 it can take"):
        SAMPLERS["divfl"]().init(np.full((1, 30_000), 1 / 30_000), 10)


def test_a_million_clients_are_no_other_case() -> None:
    shares = np.random.default_rng(0).random((1, 200_000))
    shares /= shares.sum()
    for sampler in (Uniform(100), KVib(100)):
        plan = sampler.draw(sampler.init(shares, 500), shares, rng.generator(0))
        assert 50 < len(plan) < 150
    assert len(Full().draw({}, shares, rng.generator(0))) == 200_000


# --- the page


def test_the_page_of_samplers_says_what_they_say_of_themselves() -> None:
    page = (Path(__file__).parents[1] / "docs" / "samplers.md").read_text()
    rows = []
    for row in registry.table("samplers"):
        assert row["sees"] == sorted(SAMPLERS[row["name"]].sees)  # type: ignore[attr-defined]
        cells = [f"`{row['name']}`", "yes" if row["unbiased"] else "no", row["needs"], row["costs"]]
        rows.append(f"| {' | '.join(cells)} |")
    table = page[page.index("| sampler | unbiased |") :].split("\n\n")[0]
    assert re.findall(r"^\| `.*$", table, re.M) == rows
