"""Estimators that remember: unbiased by enumeration of every draw, and equal to their formulas."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, federation, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_loop import fragile, sick
from torch import nn

import rota
from rota import loop, rng
from rota.arrays import Array
from rota.data.federation import Federation
from rota.engine import make
from rota.errors import BadInput
from rota.estimate import (
    ESTIMATORS,
    Adam,
    Estimate,
    Estimator,
    FedAvg,
    FedStale,
    FedVarp,
    Mifa,
    Scaffold,
    Server,
    Sgd,
    StaleVr,
    StaleVre,
    Unbiased,
)
from rota.estimate.memory import Place, Tensors, settle
from rota.experiment import Experiment
from rota.plan import Chunk, Local, Plan, Question, Seen, Task
from rota.running.check import check
from rota.sampling import SAMPLERS, Full, Ocs, RoundRobin, Uniform
from rota.testing import replies
from rota.weights import Weights

PLACES: tuple[Place, ...] = ("device", "cpu", "disk")
STALE = [
    FedVarp(),
    FedStale(beta=0.0),
    FedStale(),
    FedStale(beta=1.3),
    StaleVr(),
    StaleVre(),
    StaleVre(start=1.0),
    Mifa(),
]


# ---- three clients, two models: every draw of the processors, with its probability


class Toy(NamedTuple):
    """Shares d[s, i], the clients' processors, and the chance p[s, i] that one draws a model.

    Client 2 has no data for model 1.
    """

    share: Array = np.array([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]])
    processors: Array = np.array([2, 1, 1])
    chance: Array = np.array([[0.3, 0.5, 0.4], [0.45, 0.3, 0.0]])


TOY = Toy()
SIZES = (4, 3)
MODELS = [
    Weights(torch.zeros(size, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    for size in SIZES
]
Updates = list[Array]
"""For each model [clients, parameters]."""


def draws(share: Array, reached: Array) -> Iterator[tuple[float, Plan]]:
    """Every assignment of the processors to a model or to none, and its probability.

    A pair that is drawn twice is one row of twice the weight.
    """
    owners = np.repeat(np.arange(3), TOY.processors)
    choices = [[None, *np.flatnonzero(TOY.chance[:, i] * reached[i])] for i in owners]
    for drawn in itertools.product(*choices):
        probability, times = 1.0, np.zeros(share.shape)
        for i, s in zip(owners, drawn, strict=True):
            probability *= (
                1 - reached[i] * TOY.chance[:, i].sum() if s is None else TOY.chance[s, i]
            )
            times[(s, i) if s is not None else (slice(0), 0)] += 1
        model, client = np.nonzero(times)
        weight = (
            times[model, client]
            * share[model, client]
            / (TOY.processors[client] * TOY.chance[model, client])
        )
        yield probability, Plan(client, model, np.full(len(client), np.nan), weight)


def everybody(share: Array) -> Plan:
    model, client = np.nonzero(share)
    return Plan(client, model, np.ones(len(client)), share[model, client])


def chunks(
    plan: Plan, updates: Updates, reason: Callable[[int, int], str] = lambda *_: ""
) -> Iterator[Chunk]:
    """What comes back for a plan: first one row of each model, then the others."""
    for s in range(len(updates)):
        for rows in np.split(np.flatnonzero(plan.model == s), [1]):
            if len(rows):
                update = torch.from_numpy(updates[s][plan.client[rows]])
                why = [reason(s, i) for i in plan.client[rows].tolist()]
                yield replies.chunk(rows, s, update, reason=why)


def ask(estimator: Estimator, state: Tensors, rows: Plan, updates: Updates) -> Tensors:
    """Show the estimator what the asked would send, as the probe does."""
    for chunk in chunks(rows, updates):
        _, state = estimator.residual(state, rows, chunk)  # type: ignore[attr-defined]
    return state


def estimate(
    estimator: Estimator, state: Tensors, plan: Plan, updates: Updates, **more: Any
) -> tuple[Updates, Tensors]:
    """One round: each model's estimate (0 for None), and the state after it."""
    models = [
        Weights(torch.zeros(u.shape[1], dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
        for u in updates
    ]
    sums = estimator.begin(state, models, plan)
    for chunk in chunks(plan, updates, **more):
        estimator.add(sums, plan, chunk)
    found, new = estimator.finish(state, sums)
    return [
        np.zeros(u.shape[1]) if e.update is None else e.update.numpy()
        for e, u in zip(found, updates, strict=True)
    ], new


def some_updates(seed: int, shape: tuple[int, ...] = SIZES, clients: int = 3) -> Updates:
    generator = np.random.default_rng(seed)
    return [generator.normal(1.0, 1.0, (clients, size)) for size in shape]


def remembering(estimator: Estimator) -> Tensors:
    """The state after rounds in which all pairs except (model 0, client 1) succeeded.

    Each last succeeded a different number of rounds ago.
    """
    state = estimator.init(MODELS, TOY.share)
    for seed, pairs in enumerate(
        [[(0, 0), (0, 2), (1, 0), (1, 1)], [(0, 0), (1, 1)], [(1, 0)], [(0, 2), (1, 1)]]
    ):
        updates, (model, client) = some_updates(seed), np.array(pairs).T
        if isinstance(estimator, StaleVr):
            state = ask(estimator, state, everybody(TOY.share), updates)
        plan = Plan(client, model, np.ones(len(client)), np.full(len(client), 0.7))
        state = estimate(estimator, state, plan, updates)[1]
    return state


def distribution(
    estimator: Estimator,
    state: Tensors,
    updates: Updates,
    share: Array = TOY.share,
    reached: Array | None = None,
) -> Any:
    """Every draw's probability and estimates."""
    if isinstance(estimator, StaleVr):
        state = ask(estimator, state, everybody(share), updates)
    for probability, plan in draws(share, np.ones(3) if reached is None else reached):
        yield probability, estimate(estimator, state, plan, updates)[0]


def target(updates: Updates) -> Updates:
    return [TOY.share[s] @ updates[s] for s in range(2)]


def test_the_draws_are_all_there() -> None:
    every = list(draws(TOY.share, np.ones(3)))
    assert len(every) == 3 * 3 * 3 * 2
    assert sum(p for p, _ in every) == pytest.approx(1)
    assert {len(plan) for _, plan in every} == {0, 1, 2, 3, 4}
    assert any((plan.model == 0).all() and len(plan) for _, plan in every), "nobody trains model 1"


@pytest.mark.parametrize("estimator", [Unbiased(), *STALE], ids=repr)
@pytest.mark.parametrize("remembered", [False, True], ids=["nothing remembered", "remembered"])
def test_unbiased_by_enumeration(estimator: Any, remembered: bool) -> None:
    """Over all draws, also those in which no client trains a model; biased ones are biased."""
    state = remembering(estimator) if remembered else estimator.init(MODELS, TOY.share)
    updates, mean = some_updates(9), [np.zeros(size) for size in SIZES]
    for probability, found in distribution(estimator, state, updates):
        mean = [m + probability * f for m, f in zip(mean, found, strict=True)]
    for s in range(2):
        away = np.abs(mean[s] - target(updates)[s]).max()
        assert away < 1e-12 if estimator.unbiased else away > 0.05


@pytest.mark.parametrize("estimator", [e for e in STALE if e.unbiased], ids=repr)
def test_unbiased_where_clients_cannot_always_be_reached(estimator: Any) -> None:
    """Over the coins that say which clients can be reached, and then over all draws.

    A beta may be fitted only for clients that can be reached.
    """
    state, updates, q = remembering(estimator), some_updates(9), np.array([0.5, 0.8, 1.0])
    mean = [np.zeros(size) for size in SIZES]
    for reached in itertools.product([0, 1], [0, 1], [1]):
        here = np.array(reached)
        chance = np.prod(np.where(here, q, 1 - q))
        for probability, found in distribution(
            estimator, state, updates, TOY.share * here / q, here
        ):
            mean = [m + chance * probability * f for m, f in zip(mean, found, strict=True)]
    for s in range(2):
        assert mean[s] == pytest.approx(target(updates)[s], abs=1e-12)


def test_variance() -> None:
    """E|estimate - D|^2 = sum (d / B)^2 |G - beta h|^2 (1/p - 1) over processors.

    At equal p, the variance of stale-vr is the smallest.
    """
    updates = some_updates(9)
    for s in range(2):  # updates that correlate with the remembered ones
        updates[s] = 0.7 * some_updates(3)[s] + 0.4 * updates[s]
    d = target(updates)
    variance = {}
    for estimator in (Unbiased(), *STALE):
        state = remembering(estimator)
        spread = sum(
            p * sum(((f - m) ** 2).sum() for f, m in zip(found, d, strict=True))
            for p, found in distribution(estimator, state, updates)
        )
        variance[repr(estimator)] = spread
        if not getattr(estimator, "unbiased", True):
            continue
        if isinstance(estimator, StaleVr):
            state = ask(estimator, state, everybody(TOY.share), updates)
        expected = 0.0
        for s, i in zip(*np.nonzero(TOY.share), strict=True):
            old = state[f"memory.{s}"][i].numpy() if "beta" in state else 0.0
            away = updates[s][i] - (float(state["beta"][s, i]) if "beta" in state else 0.0) * old
            expected += (
                (TOY.share[s, i] ** 2 / TOY.processors[i])
                * (away**2).sum()
                * (1 / TOY.chance[s, i] - 1)
            )
        assert spread == pytest.approx(expected)
    best = variance.pop(repr(StaleVr()))
    assert variance[repr(FedStale(beta=0.0))] == pytest.approx(variance[repr(Unbiased())])
    for name, other in variance.items():
        assert best < other or name == repr(Mifa()), name
    assert best < 0.9 * variance[repr(Unbiased())]


VECTORS = arrays(np.float64, 5, elements=st.floats(-10, 10, width=32))


@pytest.mark.parametrize(("sign", "counts"), [(1.0, 1.0), (-1.0, 0.0)])
def test_a_beta_of_the_last_time_is_between_0_and_1(sign: float, counts: float) -> None:
    """Fitted to a small h, beta would be 1000 in the next round: unbiased, but useless."""
    estimator, share = StaleVr(), np.ones((1, 1))
    state = estimator.init(
        [Weights(torch.zeros(3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))], share
    )
    nobody = Plan(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))
    for size in (1e-3, sign):
        updates = [np.full((1, 3), size)]
        found, state = estimate(
            estimator, ask(estimator, state, everybody(share), updates), everybody(share), updates
        )
        np.testing.assert_allclose(found[0], updates[0][0])
    found, _ = estimate(estimator, state, nobody, updates)
    np.testing.assert_allclose(found[0], counts * updates[0][0])


@settings(deadline=None, max_examples=100)
@given(new=VECTORS, old=VECTORS, other=st.floats(-3, 3))
def test_the_best_beta(new: Array, old: Array, other: float) -> None:
    """<G, h> / |h|^2 makes |G - beta h| least; it is 0 where h is."""
    estimator, one = StaleVr(), np.ones((1, 1))
    state = estimator.init([Weights(torch.zeros(5, dtype=torch.float64), torch.zeros(0))], one)
    state = estimate(
        estimator, ask(estimator, state, everybody(one), [old[None]]), everybody(one), [old[None]]
    )[1]
    (chunk,) = chunks(everybody(one), [new[None]])
    norm, state = estimator.residual(state, everybody(one), chunk)
    beta = float(state["beta"][0, 0])
    assert norm[0] == pytest.approx(np.linalg.norm(new - beta * old))
    assert norm[0] <= np.linalg.norm(new - other * old) * (1 + 1e-12) + 1e-12
    if not old.any():
        assert beta == 0
        assert norm[0] == pytest.approx(np.linalg.norm(new))


# ---- against the formulas, written out


def reference(
    estimator: Any, share: Array, rounds: list[tuple[dict[tuple[int, int], float], Updates]]
) -> Iterator[tuple[Updates, Any]]:
    """The formulas, one pair at a time: estimates, and StaleVRE's beta and slope.

    Each round has the drawn pairs' weights, and all updates.
    """
    models, clients = share.shape
    h = {(s, i): np.zeros(rounds[0][1][s].shape[1]) for s in range(models) for i in range(clients)}
    beta = dict.fromkeys(h, getattr(estimator, "beta", 1.0))
    kappa, last = dict.fromkeys(h, 0.0), dict[tuple[int, int], int]()

    def best(new: Array, old: Array) -> float:
        return float(new @ old / (old @ old)) if old.any() else 0.0

    for t, (drawn, updates) in enumerate(rounds):
        if isinstance(estimator, StaleVr):
            beta = {(s, i): best(updates[s][i], old) for (s, i), old in h.items()}
        if isinstance(estimator, StaleVre):
            for pair, seen in last.items():
                beta[pair] = max(0.0, estimator.start - (t - seen) * kappa[pair])
        out = []
        for s in range(models):
            total = np.zeros(updates[s].shape[1])
            for i in range(clients):
                if isinstance(estimator, Mifa):
                    total += share[s, i] * (updates[s][i] if (s, i) in drawn else h[s, i])
                    continue
                total += share[s, i] * beta[s, i] * h[s, i]
                if (s, i) in drawn:
                    total += drawn[s, i] * (updates[s][i] - beta[s, i] * h[s, i])
            out.append(total)
        yield out, (dict(beta), dict(kappa))
        for s, i in drawn:
            if isinstance(estimator, StaleVre) and (s, i) in last:
                kappa[s, i] = max(
                    0.0, (estimator.start - best(updates[s][i], h[s, i])) / (t - last[s, i])
                )
            last[s, i] = t
            h[s, i] = updates[s][i]


@pytest.mark.parametrize(
    "estimator", [replace(e, memory=place) for e in STALE for place in PLACES], ids=repr
)
@pytest.mark.parametrize("models", [1, 2])
def test_the_formulas(estimator: Any, models: int) -> None:
    """Twelve rounds of slowly changing updates, some without clients or with failures."""
    generator = np.random.default_rng(models)
    clients, shape = 5, SIZES[:models]
    share = generator.dirichlet(np.ones(clients), models)
    updates, rounds, plans = some_updates(0, shape, clients), [], []
    for t in range(12):
        updates = [
            0.8 * u + 0.5 * n for u, n in zip(updates, some_updates(t, shape, clients), strict=True)
        ]
        drawn = generator.random((models, clients)) < 0.5
        drawn[0] &= t not in (0, 4, 5)
        failed = drawn & (generator.random(drawn.shape) < 0.1)
        model, client = np.nonzero(drawn)
        plan = Plan(
            client, model, np.full(len(client), 0.5), generator.uniform(0.1, 3.0, len(client))
        )
        came = {
            (s, i): w * drawn[s].sum() / (drawn & ~failed)[s].sum()  # they stand for all
            for s, i, w in zip(model, client, plan.weight, strict=True)
            if not failed[s, i]
        }
        rounds.append((came, updates))
        plans.append((plan, failed))
    assert any(failed.any() for _, failed in plans)
    state = estimator.init(
        [Weights(torch.zeros(size, dtype=torch.float64), torch.zeros(0)) for size in shape], share
    )
    for (plan, failed), (_, now), (expected, (beta, kappa)) in zip(
        plans, rounds, reference(estimator, share, rounds), strict=True
    ):
        if isinstance(estimator, StaleVr):
            state = ask(estimator, state, everybody(share), now)
        known = ~np.isnan(state["norm"].numpy())
        for pair in zip(*np.nonzero(known), strict=True):
            assert float(state["beta"][pair]) == pytest.approx(beta[pair])
            if isinstance(estimator, StaleVre):
                assert float(state["slope"][pair]) == pytest.approx(kappa[pair])
        found, state = estimate(
            estimator,
            state,
            plan,
            now,
            reason=lambda s, i, failed=failed: "crashed" * int(failed[s, i]),
        )
        for one, two in zip(found, expected, strict=True):
            assert one == pytest.approx(two)


def test_what_is_expected() -> None:
    """|h - beta h|, and NaN where nothing is remembered."""
    estimator = StaleVre()
    state = remembering(estimator)
    expected = estimator.expected(state, everybody(TOY.share))
    assert np.isnan(expected).tolist() == [False, True, False, False, False]
    settle(state)
    for (s, i), value in zip(np.argwhere(TOY.share > 0), expected, strict=True):
        h, beta = state[f"memory.{s}"][i].numpy(), float(state["beta"][s, i])
        assert np.isnan(value) or value == pytest.approx(np.linalg.norm(h - beta * h))
    assert (state["slope"] > 0).any()
    assert (state["beta"][state["slope"] > 0] < estimator.start).all()


def test_what_is_weighed_is_what_the_sampler_sees() -> None:
    """`add` gives the norms of the differences, as `residual` does before the draw."""
    for estimator in STALE:
        state, updates, plan = remembering(estimator), some_updates(8), everybody(TOY.share)
        state = ask(estimator, state, plan, updates)
        sums = estimator.begin(state, MODELS, plan)
        for chunk in chunks(plan, updates):
            before = estimator.residual(state, plan, chunk)[0]
            assert estimator.add(sums, plan, chunk) == pytest.approx(before)
            beta = state["beta"][chunk.model].numpy()[plan.client[chunk.rows]]
            old = state[f"memory.{chunk.model}"].numpy()[plan.client[chunk.rows]]
            assert before == pytest.approx(
                np.linalg.norm(chunk.update.numpy() - beta[:, None] * old, axis=1)
            )


def test_a_round_can_be_given_up() -> None:
    """However far a round went, the state that it began from gives the same again."""
    for estimator in STALE:
        states = [remembering(estimator) for _ in range(2)]
        updates, plan = some_updates(8), everybody(TOY.share)
        given_up = (
            ask(estimator, states[0], plan, updates)
            if isinstance(estimator, StaleVr)
            else states[0]
        )
        sums = estimator.begin(given_up, MODELS, plan)
        for chunk in chunks(plan, some_updates(7)):
            estimator.add(sums, plan, chunk)
        estimator.finish(given_up, sums)
        one, two = (estimate(estimator, state, plan, updates) for state in states)
        for a, b in zip(one[0], two[0], strict=True):
            assert (a == b).all()
        for state in (one[1], two[1]):
            settle(state)
        assert all(
            torch.equal(one[1][name].nan_to_num(-1), two[1][name].nan_to_num(-1)) for name in one[1]
        )


def test_a_memory_without_a_place() -> None:
    with pytest.raises(
        BadInput, match=r"estimator\.memory is 'gpu', but it takes one of 'device', 'cpu', 'disk'"
    ):
        FedVarp(memory="gpu").init(MODELS, TOY.share)  # type: ignore[arg-type]


def test_a_memory_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = [Weights(torch.zeros(1).expand(10**15), torch.zeros(0))]
    for place in PLACES[:2]:
        with pytest.raises(
            BadInput,
            match=r"memory of 3 clients would take 12,000,000 GB, .* set estimator\.memory to",
        ):
            FedVarp(memory=place).init(huge, TOY.share)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 50, 50))
    with pytest.raises(BadInput, match=r"takes 72 bytes, more than .* has: set TMPDIR"):
        FedVarp(memory="disk").init(MODELS[1:], TOY.share[1:])
    alone = [sum(size * TOY.share.shape[1] * 8 for size in SIZES[s : s + 1]) for s in range(2)]
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, max(alone))
    )
    with pytest.raises(BadInput, match=rf"takes {sum(alone)} bytes, more than .* has: set TMPDIR"):
        FedVarp(memory="disk").init(MODELS, TOY.share)  # each would fit, but not both


@pytest.mark.parametrize(
    "server", [Sgd(), Sgd(momentum=0.9), Adam()], ids=["sgd", "momentum", "adam"]
)
def test_with_a_beta_of_0_nothing_is_remembered(blobs: Federation, server: Server) -> None:
    """The plain sum, and the server's moments of a model without clients do not change."""
    tasks = [Task(linear, blobs, name=name) for name in ("a", "b")]
    ends = [
        rota.run(tasks, RoundRobin(1), estimator=e, server=server, rounds=5).state.models
        for e in (Unbiased(), FedStale(beta=0.0))
    ]
    for plain, stale in zip(*ends, strict=True):
        torch.testing.assert_close(plain.params, stale.params)


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        (FedStale(beta=float("nan")), "beta"),
        (FedStale(beta=-3), "beta"),
        (StaleVre(start=-1), "start"),
    ],
)
def test_factors_that_make_no_sense(estimator: FedVarp, name: str) -> None:
    with pytest.raises(
        BadInput, match=rf"estimator\.{name} is .*: it must be at least 0, and finite"
    ):
        estimator.init(MODELS, TOY.share)


# ---- SCAFFOLD


class Scaffolding(NamedTuple):
    """A plain implementation's state: the model, each client's control, and the common one."""

    model: torch.Tensor
    mine: list[torch.Tensor]
    common: torch.Tensor


def scaffold_round(
    task: Task, model: int, state: Scaffolding, cohort: list[int], weight: Array, now: int
) -> Scaffolding:
    """One round of SCAFFOLD (option II), with the sum of d_i c_i recomputed from all controls."""
    module = task.build()
    sizes = [p.numel() for p in module.parameters()]
    lr, mine, step = (
        task.lr * task.lr_decay ** (now - 1),
        list(state.mine),
        torch.zeros_like(state.model),
    )
    for client, w in zip(cohort, weight.tolist(), strict=True):
        nn.utils.vector_to_parameters(state.model.clone(), module.parameters())
        x, y = task.data.train.of(client)
        key = rng.as_tensor([rng.key(0, "train", now, client, model)])[0]
        count = 0
        for epoch in range(task.epochs):
            for batch in rng.permutation(rng.fold(key, epoch), len(y)).split(task.batch or len(y)):
                grads = torch.autograd.grad(
                    F.cross_entropy(module(x[batch]), y[batch]), list(module.parameters())
                )
                shift = (state.common - state.mine[client]).split(sizes)
                with torch.no_grad():
                    for p, g, c in zip(module.parameters(), grads, shift, strict=True):
                        p -= lr * (g + c.view_as(p))
                count += 1
        end = nn.utils.parameters_to_vector(module.parameters()).detach()
        mine[client] = state.mine[client] - state.common + (state.model - end) / (lr * count)
        step += w * (state.model - end)
    share = task.data.train.sizes / task.data.train.sizes.sum()
    common = sum(
        (float(d) * c for d, c in zip(share, mine, strict=True)), torch.zeros_like(state.common)
    )
    return Scaffolding(state.model - step, mine, common)


def two_layers(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 6), nn.Tanh(), nn.Linear(6, classes))


@pytest.mark.parametrize(
    ("engine", "native"), [("sequential", "1"), ("batched", "1"), ("batched", "0")]
)
def test_scaffold_is_scaffold(engine: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rounds with several local steps and three of six clients.

    Clients with more data take more steps, and two of the models share their stacks.
    """
    monkeypatch.setenv("ROTA_NATIVE", native)
    data = federation([5, 12, 20, 31, 8, 17])
    tasks = [
        Task(two_layers, data, lr=0.1, batch=6, epochs=2, lr_decay=0.9, name="a"),
        Task(two_layers, data, lr=0.05, batch=6, epochs=2, name="b"),
        Task(
            linear,
            federation([9, 4, 11, 6, 13, 21], seed=3),
            lr=0.2,
            batch=None,
            epochs=4,
            name="c",
        ),
    ]
    experiment = rota.Experiment(tasks, Uniform(3), estimator=Scaffold(), rounds=6)
    machine = make(engine, Experiment(tasks), "cpu")
    state = loop.begin(experiment, machine)
    plain = [
        Scaffolding(m.params.clone(), [torch.zeros_like(m.params)] * 6, torch.zeros_like(m.params))
        for m in state.models
    ]
    for now in range(1, 7):
        state, record = loop.play(experiment, machine, state)
        for s, (task, name) in enumerate(zip(tasks, experiment.names, strict=True)):
            cohort = record["cohort"][name]
            plain[s] = scaffold_round(
                task, s, plain[s], cohort, experiment.shares[s, cohort] * 6 / 3, now
            )
            torch.testing.assert_close(state.models[s].params, plain[s].model, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(
                state.policies["estimator"][f"common.{s}"], plain[s].common, rtol=1e-3, atol=1e-4
            )
    settle(state.policies["estimator"])
    for s in range(3):
        torch.testing.assert_close(
            state.policies["estimator"][f"memory.{s}"],
            torch.stack(plain[s].mine),
            rtol=1e-3,
            atol=1e-4,
        )
    assert float(plain[0].common.norm()) > 0.01
    uncorrected = loop.begin(replace(experiment, estimator=Unbiased()), machine)
    for _ in range(6):
        uncorrected, _ = loop.play(replace(experiment, estimator=Unbiased()), machine, uncorrected)
    assert not torch.allclose(
        uncorrected.models[0].params, state.models[0].params, rtol=1e-2, atol=1e-3
    )


def test_scaffold_ends_where_all_gradients_end() -> None:
    """With full participation and whole-data steps, SCAFFOLD reaches the optimum of all data.

    FedAvg does not, because the clients are unequal.
    """
    generator = np.random.default_rng(0)
    clients = [
        (generator.normal(k, 1 + k, (20, 3)).astype(np.float32), np.arange(20) % 2)
        for k in range(3)
    ]
    data = rota.from_clients(clients, clients[0], classes=2)
    task = Task(linear, data, lr=0.05, batch=None, epochs=20, weight_decay=0.1)

    def gradient(estimator: Any) -> float:
        run = rota.run([task], Full(), estimator=estimator, rounds=150, device="cpu", evaluate=150)
        module = run.models[run.experiment.names[0]]
        loss = F.cross_entropy(module(data.train.x), data.train.y) + 0.05 * sum(
            (p**2).sum() for p in module.parameters()
        )
        return float(
            sum((g**2).sum() for g in torch.autograd.grad(loss, list(module.parameters()))) ** 0.5
        )

    assert gradient(Scaffold()) < 1e-4
    assert gradient(Unbiased()) > 1e-2


def test_a_client_that_fails_keeps_its_control() -> None:
    task = Task(fragile, sick([1]))
    experiment = rota.Experiment([task], Full(), estimator=Scaffold())
    machine = make("sequential", Experiment([task]), "cpu")
    state = loop.begin(experiment, machine)
    for _ in range(2):
        state, record = loop.play(experiment, machine, state)
        assert [failure["client"] for failure in record["failures"]] == [1]
    settle(state.policies["estimator"])
    memory = state.policies["estimator"]["memory.0"]
    assert torch.isfinite(memory).all()
    assert (memory.norm(dim=1) > 0).tolist() == [True, False, True]
    torch.testing.assert_close(state.policies["estimator"]["common.0"], memory.mean(dim=0))


# ---- in a run


PAIRS = [
    ("mmfl-gvr", FedVarp()),
    ("mmfl-gvr", StaleVr()),
    ("mmfl-vre", StaleVre()),
    ("mmfl-random", FedStale()),
    ("uniform", Mifa()),
]


@pytest.mark.parametrize(("sampler", "estimator"), PAIRS, ids=repr)
def test_they_learn(sampler: str, estimator: Any) -> None:
    tasks = [
        Task(linear, federation([12, 5, 20, 9, 14, 17]), name="a"),
        Task(linear, federation([9, 4, 11, 0, 13, 21], seed=3), name="b"),
    ]
    run = rota.run(tasks, SAMPLERS[sampler](budget=3), estimator=estimator, rounds=25, device="cpu")  # type: ignore[call-arg]
    assert run.summary["accuracy"] > 0.8


@pytest.mark.parametrize("engine", HERE)
def test_fedvarp_of_everybody_is_full_participation(engine: str) -> None:
    """With full participation, the memory makes no difference."""
    task = Task(linear, federation([12, 5, 20, 9]))
    plain, *others = (
        rota.run([task], Full(), estimator=e, rounds=4, engine=engine, device="cpu")
        .state.models[0]
        .params
        for e in (Unbiased(), FedVarp(), FedStale(beta=0.5), StaleVre(), Mifa())
    )
    for other in others:
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("estimator", [FedVarp, StaleVr, StaleVre, Mifa, Scaffold])
def test_on_a_gpu_wherever_the_memory_is(estimator: Any, engine: str, place: Place) -> None:
    data = federation([12, 5, 20, 9, 14, 17])
    tasks = [
        Task(two_layers, data, batch=6, name="a"),
        Task(linear, federation([9, 4, 11, 0, 13, 21], seed=3), name="b"),
    ]
    sampler = SAMPLERS["mmfl-gvr"](budget=4) if estimator is StaleVr else Uniform(3)  # type: ignore[call-arg]
    options: dict[str, Any] = {"estimator": estimator(memory=place), "rounds": 4, "engine": engine}
    there, here = (
        rota.run(tasks, sampler, device=device, **options).state for device in ("cuda", "cpu")
    )
    for s in range(2):
        assert there.estimator[f"memory.{s}"].device.type == (
            "cuda" if place == "device" else "cpu"
        )
        torch.testing.assert_close(
            there.models[s].params.cpu(), here.models[s].params, rtol=1e-3, atol=1e-4
        )
        torch.testing.assert_close(
            there.estimator[f"waiting.{s}"].cpu(),
            here.estimator[f"waiting.{s}"],
            rtol=1e-2,
            atol=1e-3,
        )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_says_what_it_is(estimator: str) -> None:
    member: Any = ESTIMATORS[estimator]
    assert member.unbiased is (estimator not in ("fedavg", "mifa"))
    assert member.needs == ("norms of all clients" if estimator == "stale-vr" else "nothing")
    assert ("on the server" in member.costs) == (estimator not in ("unbiased", "fedavg"))
    assert member.sees == ({"update"} if "on the server" in member.costs else set())


def test_the_page_on_estimators_is_that_of_the_list() -> None:
    page = (Path(__file__).parents[1] / "docs" / "estimators.md").read_text()
    for name, member in ESTIMATORS.items():
        facts: Any = member
        assert (
            f"| `{name}` | {'yes' if facts.unbiased else 'no'} | {facts.needs} | {facts.costs} |"
            in page
        )
    assert page.split("```")[0].count("| `") == len(ESTIMATORS)


def sentence(sampler: str, estimator: Any, metrics: tuple[str, ...] = (), **task: Any) -> str:
    experiment = rota.Experiment(
        [Task(linear, federation([5, 9, 7]), **task)],
        SAMPLERS[sampler](**({"budget": 2} if sampler != "full" else {})),
        estimator=estimator,
        metrics=metrics,
    )
    try:
        check(experiment)
    except BadInput as mistake:
        return str(mistake)
    return ""


class Own(Uniform):
    """A sampler of the user's own, whose words for people say nothing to the program."""

    needs = "no updates at all"
    what: Any = "norm"

    def ask(self, state: Any, shares: Array, generator: np.random.Generator) -> Question:
        return Question(rota.sampling.draw.everybody(shares), self.what)

    def hear(self, state: Any, plan: Plan, seen: Seen) -> Any:
        return state


class Expectant(Own):
    what = "expected"


def test_a_users_sampler_is_checked_by_its_question() -> None:
    tasks = [Task(linear, federation([5, 9, 7]))]
    assert len(rota.run(tasks, Own(2), estimator=StaleVr(), rounds=2).records) == 2
    assert len(rota.run(tasks, Expectant(2), estimator=StaleVre(), rounds=2).records) == 2
    wrong = "'Expectant' draws by the norms that an estimator expects, and 'unbiased' cannot tell"
    with pytest.raises(BadInput, match=wrong):
        rota.run(tasks, Expectant(2), rounds=2)


def test_policies_that_do_not_go_together() -> None:
    some = rota.Experiment([Task(linear, federation([5, 9, 7]))], Ocs(1, cohort=2), StaleVr())
    with pytest.raises(BadInput, match="needs the norms of all"):
        check(some)
    assert sentence("round-robin-server", StaleVr()) == "", "which asks all of one model"
    assert sentence("uniform", StaleVr()) == (
        "the estimator 'stale-vr' needs the norms of all clients: use a sampler that asks for "
        "them, such as mmfl-gvr"
    )
    assert sentence("mmfl-vre", FedVarp()) == (
        "the sampler 'mmfl-vre' draws by the norms that an estimator expects, and 'fedvarp' "
        "cannot tell them: use stale-vre"
    )
    for wrong in ({"optimizer": "adam"}, {"momentum": 0.9}, {"lr_local_decay": 0.9}):
        assert sentence("uniform", Scaffold(), **wrong) == (
            "the estimator 'scaffold' is made for plain SGD: set optimizer to 'sgd', momentum to 0 "
            "and lr_local_decay to 1, or use another estimator"
        )
    for estimator in (FedVarp(), Scaffold()):
        name = type(estimator).__name__.lower()
        assert sentence("uniform", estimator, ("regret",)) == (
            f"metrics measure the updates themselves, but the estimator '{name}' weighs something "
            "else: leave metrics out"
        )


TOGETHER = [
    *PAIRS,
    ("optimal", StaleVr()),
    ("uniform", StaleVre()),
    ("uniform", Scaffold()),
    ("full", Mifa()),
]


@pytest.mark.parametrize(("sampler", "estimator"), TOGETHER, ids=repr)
def test_policies_that_go_together(sampler: str, estimator: Any) -> None:
    assert sentence(sampler, estimator) == ""
    assert sentence("uniform", FedAvg(), ("regret",)) == ""


# ---- personal models


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Ditto (Li et al. 2021): model 0 is FedAvg's, and every client has a model 1 of its own.

    A client's own model starts where it was, and the second task's `prox` pulls it to model 0.
    """

    controls: ClassVar[int] = 0

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        return {"own": models[1].params.repeat(shares.shape[1], 1)}

    def local(self, state: Tensors, models: list[Weights], plan: Plan) -> Local:
        def start(rows: Array) -> Weights:
            own = torch.from_numpy(plan.model[rows] == 1)[:, None]
            params = torch.where(own, state["own"][plan.client[rows]], models[0].params)
            return Weights(params, models[0].buffers.expand(len(rows), -1))

        return Local(start, anchor=lambda rows: models[0].params.expand(len(rows), -1))

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> Any:
        return super().begin({}, models, plan), state["own"].clone()

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> None:
        came = np.flatnonzero(chunk.ok)
        if chunk.model == 0:
            super().add(sums[0], plan, chunk)
        else:
            sums[1][plan.client[chunk.rows[came]]] -= chunk.update[came]

    def finish(self, state: Tensors, sums: Any) -> tuple[list[Estimate], Tensors]:
        return super().finish({}, sums[0])[0], {"own": sums[1]}


def plain_steps(task: Task, client: int, begin: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """Whole-data steps of w <- w - lr (gradient + prox (w - centre)), written out."""
    module, (x, y) = task.build(), task.federation.train.of(client)
    nn.utils.vector_to_parameters(begin.clone(), module.parameters())
    for _ in range(task.epochs):
        loss = F.cross_entropy(module(x), y)
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(module.parameters())
            gradient = torch.cat([g.flatten() for g in grads])
            flat = flat - task.lr * (gradient + task.prox * (flat - centre))
            nn.utils.vector_to_parameters(flat, module.parameters())
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize(
    ("engine", "native"), [("sequential", "1"), ("batched", "1"), ("batched", "0")]
)
def test_ditto_can_be_written_with_starts_and_anchors(
    engine: str, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_NATIVE", native)
    data = federation([5, 12, 20, 31])
    work: dict[str, Any] = {"lr": 0.1, "batch": None, "epochs": 3}
    tasks = [
        Task(linear, data, name="global", **work),
        Task(linear, data, name="own", prox=2.0, **work),
    ]
    check(rota.Experiment([replace(each, momentum=0.9) for each in tasks], Full(), Ditto()))
    experiment = rota.Experiment(tasks, Full(), Ditto(), rounds=4)
    check(experiment)
    machine = make(engine, experiment, "cpu")
    state = loop.begin(experiment, machine)
    centre = state.models[0].params.clone()
    own = [state.models[1].params.clone() for _ in range(4)]
    for _ in range(4):
        state, _ = loop.play(experiment, machine, state)
        own = [plain_steps(tasks[1], client, each, centre) for client, each in enumerate(own)]
        ends = [plain_steps(tasks[0], client, centre, centre) for client in range(4)]
        shares = torch.from_numpy(experiment.shares[0]).float()
        centre = shares @ torch.stack(ends)
        torch.testing.assert_close(state.models[0].params, centre, rtol=1e-4, atol=1e-5)
        mine = state.policies["estimator"]["own"]
        torch.testing.assert_close(mine, torch.stack(own), rtol=1e-4, atol=1e-5)
    assert min(float((each - centre).norm()) for each in own) > 0.01
