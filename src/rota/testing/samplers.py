"""What every sampler must do: draw valid plans, remember in its state, be what it declares.

Each check takes a sampler and a matrix of shares [models, clients]. It raises AssertionError with a
sentence that says what the sampler did wrong.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.metrics import variance
from rota.plan import COLUMNS, Plan, Seen, State, checked
from rota.policies import EVERYTHING, Observing, Watching, sees
from rota.sampling import Asking, Sampler, asks, draw
from rota.testing.replies import Clients, ask, observe, play

ROUNDS = 50
"""The number of rounds that samplers are told at first."""
DRAWS = 3_000
"""How many plans are drawn from one state."""
ERRORS = 6.0
"""A mean may be this many standard errors away from what it should be.

With at least FEWEST draws of a pair, a correct sampler is farther away with a probability of about
2e-7 for each mean. A suite tests about two hundred means, so it fails with a probability below
1e-4. Seeds are fixed, so a sampler that passes once always passes.
"""
FEWEST = 100
SHARES: tuple[Array, ...] = (
    np.array([[0.3, 0.2, 0.1, 0.25, 0.1, 0.05]]),
    np.array([[0.3, 0.2, 0.1, 0.25, 0.1, 0.05], [0.5, 0.0, 0.2, 0.0, 0.25, 0.05]]),
    np.array(
        [
            [0.3, 0.2, 0.1, 0.25, 0.15, 0.0],
            [0.5, 0.0, 0.2, 0.05, 0.25, 0.0],
            [0.0, 0.4, 0.1, 0.5, 0.0, 0.0],
        ]
    ),
)
"""One, two and three models for six clients. Some clients have no data for some models."""
REACHED = ((1, 1, 1, 0, 1, 0), (1, 0, 0, 0, 0, 1), (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 0))
"""Which of six clients can be reached; each with a chance of 0.6."""


def check_sampler(
    sampler: Sampler, shares: Array | Sequence[Array] | None = None, draws: int = DRAWS
) -> None:
    """Put a sampler through all checks; AssertionError says what it did wrong.

    The default `shares` are for six clients and one to three models, so give the sampler a budget
    of about three, or give shares of your own: one matrix [models, clients], or several. The
    expectation of the weights is checked only if `sampler.unbiased` is true.
    """
    shares = SHARES if shares is None else shares
    for matrix in [shares] if isinstance(shares, np.ndarray) else shares:
        for check in CHECKS:
            check(copy.deepcopy(sampler), matrix.copy())
        if getattr(sampler, "unbiased", False):
            check_unbiased(sampler, matrix, draws)


def clients_of(shares: Array) -> Clients:
    """Clients with unequal updates and losses."""
    generator = np.random.default_rng(0)
    models, clients = shares.shape
    sizes = generator.lognormal(0, 1.2, (1, clients, 1))
    update = generator.normal(size=(models, clients, 3)) * sizes + 0.3
    loss, examples, seconds = generator.random((3, models, clients)) + 0.1
    return Clients.of(update, loss, np.ceil(100 * examples), seconds)


def experienced(sampler: Sampler, shares: Array, rounds: int = 4) -> State:
    """The state after some rounds, in which adaptive samplers have learned."""
    state, clients = sampler.init(shares, ROUNDS), clients_of(shares)
    for key in range(rounds):
        _, state = play(sampler, state, shares, key, clients)
    return state


def reachable(shares: Array) -> Iterator[Array]:
    """The shares of rounds in which some clients, or all, cannot be reached."""
    for reached in REACHED:
        here = np.resize(np.array(reached), shares.shape[1])
        yield shares * here / 0.6


# --- the checks


def check_declarations(sampler: Sampler, shares: Array) -> None:
    """`sees` has names of columns, and "update" if and only if the sampler watches the stream."""
    me, known = name(sampler), ", ".join(sorted(EVERYTHING))
    for method in ("init", "draw"):
        assert callable(getattr(sampler, method, None)), f"{me} has no method `{method}`"
    declared = set(sees(sampler))
    assert declared <= EVERYTHING, (
        f"{me} declares in `sees` the unknown {sorted(declared - EVERYTHING)}: known are {known}"
    )
    if hasattr(sampler, "sees"):
        assert ("update" in declared) == isinstance(sampler, Watching), (
            f"{me} must declare 'update' in `sees` if and only if it has the methods `watch`, "
            "`see` and `learn`"
        )


def check_arrays(sampler: Sampler, shares: Array) -> None:
    """The state is a dict of arrays and tensors."""
    for state in (sampler.init(shares, ROUNDS), experienced(sampler, shares)):
        arrays_only(name(sampler), state)


def check_plans(sampler: Sampler, shares: Array) -> None:
    """Every plan is valid, whoever can be reached."""
    clients = clients_of(shares)
    state = sampler.init(shares, ROUNDS)
    for key in range(20):
        plan, state = play(sampler, state, shares, key, clients)
        _valid(sampler, plan, shares, "a plan")
    for few in reachable(shares):
        plan, after = play(sampler, state, few, 3, clients)
        _valid(sampler, plan, few, "a plan for a round in which some clients cannot be reached")
        plan, _ = play(sampler, after, shares, 4, clients)
        _valid(sampler, plan, shares, "a plan after such a round")


def check_inputs_stay(sampler: Sampler, shares: Array) -> None:
    """No method changes what it is given."""
    me, clients, state = name(sampler), clients_of(shares), experienced(sampler, shares)
    kept, same_shares = copy.deepcopy(state), shares.copy()
    after = ask(sampler, state, shares, rng.generator(1), clients)
    _unchanged(f"asking or watching changed the state that {me} was given", kept, state)
    before = copy.deepcopy(after)
    plan = sampler.draw(after, shares, rng.generator(2))
    _unchanged(f"`draw` of {me} changed the state that it was given", before, after)
    same_plan, seen = copy.deepcopy(plan), clients.seen(plan, sees(sampler))
    same_seen = copy.deepcopy(seen)
    observe(sampler, after, shares, plan, clients)
    if isinstance(sampler, Observing):
        sampler.observe(after, shares, plan, seen)
    _unchanged(f"`observe` or `learn` of {me} changed the state that it was given", before, after)
    _unchanged(f"{me} changed the plan that it had drawn", _rows(same_plan), _rows(plan))
    _unchanged(f"`observe` of {me} changed what it was shown", _columns(same_seen), _columns(seen))
    assert np.array_equal(shares, same_shares), f"{me} changed the shares that it was given"


def check_same_generator_same_plan(sampler: Sampler, shares: Array) -> None:
    """All randomness comes from the generator that the sampler is given."""
    clients, plans = clients_of(shares), []
    for seed in (0, 1):
        with _global_seeds(seed):
            mine = copy.deepcopy(sampler)
            plans.append(play(mine, experienced(mine, shares), shares, 5, clients)[0])
    assert _same_plans(*plans), (
        f"{name(sampler)} draws other plans from the same generator: take all random numbers from "
        "it"
    )


def check_state(sampler: Sampler, shares: Array) -> None:
    """The state holds all that the sampler remembers, so a checkpoint is enough to resume."""
    me, clients = name(sampler), clients_of(shares)
    fresh = copy.deepcopy(sampler)
    state = experienced(sampler, shares)
    saved = through_a_checkpoint(state)
    went_on, _ = play(sampler, state, shares, 7, clients)
    resumed, _ = play(fresh, saved, shares, 7, clients)
    assert _same_plans(went_on, resumed), (
        f"{me} draws another plan after a resume: keep all that it remembers in its state"
    )


def check_failures(sampler: Sampler, shares: Array) -> None:
    """Rows that failed do not spoil later plans."""
    clients = clients_of(shares)
    nobody = replace(clients, failed=np.ones(shares.shape, bool))
    some = replace(clients, failed=np.arange(shares.shape[1]) % 2 + np.zeros(shares.shape) > 0)
    for failing, which in ((some, "some rows"), (nobody, "all rows")):
        for state in (sampler.init(shares, ROUNDS), experienced(sampler, shares)):
            for key in range(3):
                plan, state = play(sampler, state, shares, key, failing)
                _valid(sampler, plan, shares, f"a plan in a run in which {which} fail")
            _goes_on(sampler, state, shares, f"after {which} failed")


def check_extremes(sampler: Sampler, shares: Array) -> None:
    """Norms that overflow, enormous losses, and updates of zero do not spoil later plans."""
    clients = clients_of(shares)
    for what, size in (("infinite", np.inf), ("of 1e300", 1e300), ("of 0", 0.0)):
        state = sampler.init(shares, ROUNDS)
        values = np.full(shares.shape, size)
        for some in (values, np.where(np.arange(shares.shape[1]) % 2, values, 1.0)):
            odd = replace(clients, norm=some, loss=np.minimum(some, 1e300))
            for key in range(2):
                plan, state = play(sampler, state, shares, key, odd)
                _valid(sampler, plan, shares, f"a plan among norms and losses {what}")
            _goes_on(sampler, state, shares, f"after norms and losses {what}")
    for what, factor in (("enormous", 1e15), ("of zero", 0.0)):
        state = sampler.init(shares, ROUNDS)
        scaled = Clients.of(factor * clients.update, clients.loss)
        for key in range(3):
            plan, state = play(sampler, state, shares, key, scaled)
            _valid(sampler, plan, shares, f"a plan among updates {what}")
        _goes_on(sampler, state, shares, f"after updates {what}")


def check_sees(sampler: Sampler, shares: Array) -> None:
    """Columns that `sees` does not name make no difference."""
    clients, me = clients_of(shares), name(sampler)
    for hidden in sorted(COLUMNS - set(sees(sampler))):
        other = replace(clients, **{hidden: 3.7 * getattr(clients, hidden)[:, ::-1] + 1.3})
        one, two = (sampler.init(shares, ROUNDS) for _ in range(2))
        for key in range(4):
            plan, one = play(sampler, one, shares, key, clients, EVERYTHING)
            again, two = play(sampler, two, shares, key, other, EVERYTHING)
            same = _same_plans(plan, again) and not _difference(one, two)
            assert same, f"{me} learns from '{hidden}', which its `sees` does not name: add it"


CHECKS: tuple[Callable[[Sampler, Array], None], ...] = (
    check_declarations,
    check_arrays,
    check_plans,
    check_inputs_stay,
    check_same_generator_same_plan,
    check_state,
    check_failures,
    check_extremes,
    check_sees,
)
"""The checks that every sampler must pass."""


# --- unbiased samplers: by many draws


def check_unbiased(sampler: Any, shares: Array, draws: int = DRAWS) -> None:
    """The mean weight of each pair is its share, and stated chances and variances are true."""
    state = experienced(sampler, shares)
    everybody = Draws(sampler, state, shares, draws)
    for found in (everybody, Draws(sampler, state, next(reachable(shares)), draws // 2)):
        found.check_weights()
        found.check_chances()
    if measurable(sampler, shares):
        check_rates(sampler, shares)
        everybody.check_variance()


def measurable(sampler: Any, shares: Array) -> bool:
    """Whether the sampler's rates and its procedure determine its draws."""
    if not hasattr(sampler, "rates") or not hasattr(sampler, "procedure"):
        return False
    asking = isinstance(sampler, Asking)
    return not asking or asks(sampler, shares, ROUNDS) is not None


class Draws:
    """Many plans from one state, as weights and stated chances [draws, models, clients].

    Both are 0 for pairs that were not drawn.
    """

    def __init__(self, sampler: Any, state: State, shares: Array, number: int = DRAWS) -> None:
        self.sampler, self.state, self.shares = sampler, state, shares
        self.clients = clients_of(shares)
        self.weight, self.chance = np.zeros((2, number, *shares.shape))
        for key in range(number):
            plan = self._plan(key)
            self.weight[key, plan.model, plan.client] = plan.weight
            self.chance[key, plan.model, plan.client] = plan.probability

    def _plan(self, key: int) -> Plan:
        generator = rng.generator(rng.key(1, key))
        state = ask(self.sampler, self.state, self.shares, generator, self.clients)
        plan: Plan = self.sampler.draw(state, self.shares, generator)
        return plan

    def check_weights(self) -> None:
        """The mean weights are the shares, and the mean estimate is full participation's."""
        me, often = name(self.sampler), np.count_nonzero(self.weight, axis=0)
        for s, i in np.argwhere(self.shares > 0).tolist():
            pair = f"client {i} for model {s}"
            if often[s, i] >= FEWEST:
                what = f"{me} says that it is unbiased, but the mean weight of {pair}"
                near(self.weight[:, s, i], self.shares[s, i], what, "its share")
            chance = self._chance_to_miss(s, i)
            assert often[s, i] or chance > 1e-7, f"{me} never draws {pair}, which has data for it"
        updates = self.clients.update
        estimates = np.einsum("ksn,snd->ksd", self.weight, updates)
        full = np.einsum("sn,snd->sd", self.shares, updates)
        for s, d in np.argwhere(np.ones(full.shape)).tolist():
            if often[s].sum() >= FEWEST and often[s][self.shares[s] > 0].min() >= FEWEST:
                what = f"{me} says that it is unbiased, but the mean estimate for model {s}"
                near(estimates[:, s, d], full[s, d], what, "full participation's")

    def _chance_to_miss(self, s: int, i: int) -> float:
        """How likely it was that a pair was never drawn, if its rate is known; 0 if it is not."""
        if not hasattr(self.sampler, "rates"):
            return 0.0
        state = ask(self.sampler, self.state, self.shares, rng.generator(0), self.clients)
        rate = float(self.sampler.rates(state, self.shares)[s, i])
        return float(np.exp(-rate * len(self.weight)))

    def check_chances(self) -> None:
        """A pair is drawn as often as stated: the mean of drawn / p over all draws is 1."""
        if np.isnan(self.chance).any():
            return
        seldom = np.divide(1.0, self.chance, out=np.zeros_like(self.chance), where=self.chance > 0)
        for s, i in np.argwhere(np.count_nonzero(self.chance, axis=0) >= FEWEST).tolist():
            what = f"{name(self.sampler)} states a wrong probability: the mean of drawn / p"
            near(seldom[:, s, i], 1.0, f"{what} of client {i} for model {s}", "it must be")

    def check_variance(self) -> None:
        """The spread of each model's estimates is what the procedure's formula says."""
        state = ask(self.sampler, self.state, self.shares, rng.generator(0), self.clients)
        rates = self.sampler.rates(state, self.shares)
        for s, share in enumerate(self.shares):
            parts = share[:, None] * self.clients.update[s]
            away = self.weight[:, s] @ self.clients.update[s] - parts.sum(axis=0)
            own = share > 0
            expected = variance_of(self.sampler.procedure, rates[s, own], parts[own] @ parts[own].T)
            what = (
                f"{name(self.sampler)} does not draw by its `rates` and `procedure`: the variance"
            )
            near((away**2).sum(axis=1), expected, f"{what} for model {s}", "the formula's")


def variance_of(procedure: Any, rates: Array, products: Array) -> float:
    """The variance of a procedure from the inner products of all x_i."""
    scores, total = np.sqrt(np.diag(products)), float(np.sqrt(max(products.sum(), 0.0)))
    return variance.of(procedure, rates, scores, total, products)


def check_rates(sampler: Any, shares: Array) -> None:
    """The rates spend the budget, and are probabilities if they are used for coins."""
    me, coins = name(sampler), sampler.procedure in draw.CHANCES
    state, clients = experienced(sampler, shares), clients_of(shares)
    for matrix in (shares, *reachable(shares)):
        known = ask(sampler, state, matrix, rng.generator(0), clients)
        rates, owners = sampler.rates(known, matrix), (matrix > 0).sum(axis=1)
        able = np.minimum(sampler.budget, owners) if coins else sampler.budget
        spent = np.where(owners > 0, able, 0.0)
        assert np.allclose(rates.sum(axis=1), spent, rtol=1e-12, atol=0), (
            f"the rates of {me} sum to {rates.sum(axis=1)}, not to its budget: {spent}"
        )
        assert (rates >= 0).all(), f"{me} has rates below 0"
        assert not rates[matrix == 0].any(), f"{me} has rates above 0 for clients without data"
        assert not coins or (rates <= 1).all(), f"{me} has probabilities above 1"


def near(values: Array, expected: float, what: str, which: str) -> None:
    """Refuse a mean that is too many standard errors away from what is expected."""
    mean, error = float(values.mean()), float(values.std()) / np.sqrt(len(values))
    assert abs(mean - expected) <= ERRORS * error + 1e-9, (
        f"{what} is {mean:.4g} over {len(values)} draws (standard error {error:.1g}), and {which} "
        f"is {expected:.4g}"
    )


# --- small tools


def name(policy: object) -> str:
    """The policy's class."""
    return type(policy).__name__


def arrays_only(me: str, state: Any) -> None:
    """Refuse a state that a checkpoint cannot hold."""
    assert isinstance(state, dict), f"the state of {me} is a {type(state).__name__}, not a dict"
    for key, value in state.items():
        assert isinstance(key, str), f"the state of {me} has the name {key!r}, which is no text"
        assert isinstance(value, np.ndarray | torch.Tensor), (
            f"state['{key}'] of {me} is a {type(value).__name__}: a checkpoint holds only arrays "
            "and tensors"
        )
        assert not isinstance(value, np.ndarray) or value.dtype.kind in "biuf", (
            f"state['{key}'] of {me} has the dtype {value.dtype}: a checkpoint holds only numbers"
        )


def through_a_checkpoint(state: State) -> State:
    """The state as a checkpoint returns it: copies of all arrays, in the order of their names."""
    out: State = {}
    for key in sorted(state):
        value = state[key]
        if isinstance(value, torch.Tensor):
            out[key] = value.detach().clone()
        else:
            out[key] = torch.from_numpy(np.array(value, order="C")).numpy().copy()
    return out


def _valid(sampler: Sampler, plan: Plan, shares: Array, what: str) -> None:
    try:
        checked(plan, shares)
    except BadInput as mistake:
        raise AssertionError(f"{name(sampler)} drew {what} that is wrong: {mistake}") from mistake


def _goes_on(sampler: Sampler, state: State, shares: Array, when: str) -> None:
    clients, rows = clients_of(shares), 0
    for key in range(10):
        plan, state = play(sampler, state, shares, key, clients)
        _valid(sampler, plan, shares, f"a plan {when}")
        rows += len(plan)
    assert rows, f"{name(sampler)} draws nobody any more {when}"


def _same_plans(one: Plan, two: Plan) -> bool:
    return not _difference(_rows(one), _rows(two))


def _difference(one: State, two: State) -> str:
    """The name of the first entry that differs; "" if all are the same to the bit."""
    if one.keys() != two.keys():
        return ", ".join(sorted(one.keys() ^ two.keys()))
    for key, value in one.items():
        mine, other = np.asarray(value), np.asarray(two[key])
        if mine.shape != other.shape or not np.array_equal(mine, other, equal_nan=True):
            return key
    return ""


def _unchanged(sentence: str, before: State, after: State) -> None:
    changed = _difference(before, after)
    assert not changed, f"{sentence} ('{changed}'): work on copies"


def _rows(plan: Plan) -> State:
    names = ("client", "model", "probability", "weight")
    return {each: getattr(plan, each) for each in names}


def _columns(seen: Seen) -> State:
    return {column: getattr(seen, column) for column in (*sorted(COLUMNS), "ok")}


@contextmanager
def _global_seeds(seed: int) -> Iterator[None]:
    """Seed the global generators, which a sampler should not use, and restore them afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
