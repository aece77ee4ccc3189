"""Many samplers in one stack: its runs are those of rota.run, and its variances are exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation

import rota
from rota import models
from rota.metrics import variance
from rota.sampling import (
    Avare,
    ClusteredSize,
    Full,
    KVib,
    KVibFull,
    Succession,
    Uniform,
    Vrb,
)
from rota_lab.reproduce import kvib_stack
from rota_lab.reproduce.kvib_stack import Lane, Meter, Row, Stack, own_updates, shared_updates

SIZES = [5, 12, 70, 31, 8, 140]
SAMPLERS: list[Callable[[], Any]] = [
    lambda: Uniform(2),
    lambda: KVib(2, bound=0.01),
    lambda: KVibFull(2),
    lambda: Vrb(2, "independent"),
    lambda: Avare(2),
    lambda: Succession(2),
]


@pytest.mark.parametrize("twice", [False, True])
def test_a_lane_is_a_run_of_rota(twice: bool) -> None:
    data, rounds, rate = federation(SIZES), 12, 0.05
    lanes = [Lane("full", Full(), rate)]
    lanes += [Lane(str(k), one(), rate * (1 + k)) for k, one in enumerate(SAMPLERS)]
    stack = Stack(data, lanes, 3, twice)
    meters, weights, _ = own_updates(stack, rounds)
    tested = stack.tested(weights)
    loss = {"loss": kvib_stack.softmax_twice} if twice else {}
    for lane, meter, score in list(zip(lanes, meters, tested, strict=True))[1:]:
        task = rota.Task(models.logistic, data, lr=lane.lr, batch=64, **loss)  # type: ignore[arg-type]
        other = rota.run(
            [task],
            lane.sampler,
            rounds=rounds,
            seed=3,
            engine="sequential",
            metrics=["cost", "regret", "variance"],
        )
        assert sum(meter.cost) == pytest.approx(other.summary["cost_total"], rel=1e-3)
        totals = meter.totals()
        assert totals["variance"] == pytest.approx(other.summary["variance_total"], rel=1e-3)
        assert totals["regret"] == pytest.approx(other.summary["regret_total"], rel=2e-3)
        assert totals["late"] == pytest.approx(sum(other.rounds["variance"][6:]), rel=1e-3)
        assert score["loss"] == pytest.approx(other.summary["loss"], rel=1e-4)


def test_recorded_updates_are_those_of_the_first_lane() -> None:
    """A sampler that learns nothing measures the same on recorded updates as on its own."""
    stack = Stack(federation(SIZES), [Lane("full", Full(), 0.05)], 0)
    meters, _, recorded = own_updates(stack, 5)
    assert meters[0].totals() == {"variance": 0.0, "late": 0.0}
    again = shared_updates(Lane("uniform", Uniform(2)), stack.shares, recorded, 0)
    expected = [variance.fixed(2, row.scores, row.total) for row in recorded]
    assert again.variance == pytest.approx(expected)
    products = recorded[0].products
    assert products is not None
    assert np.sqrt(np.diag(products)) == pytest.approx(recorded[0].scores, rel=1e-4)
    assert np.sqrt(products.sum()) == pytest.approx(recorded[0].total, rel=1e-4)


def vectors() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(5, 3)) * np.arange(1, 6)[:, None]


def test_the_mean_over_sequential_draws_is_their_exact_variance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvib_stack, "DRAWS", 20_000)
    x, rates = vectors(), 2 * np.array([0.4, 0.1, 0.2, 0.05, 0.25])
    got = kvib_stack.sequential(rates, x @ x.T, np.random.default_rng(1))
    assert got == pytest.approx(variance.sequential(rates, 2, x @ x.T), rel=0.03)


def test_the_variance_of_strata_is_that_of_all_that_can_be_drawn() -> None:
    shares, x = np.array([0.4, 0.1, 0.2, 0.05, 0.25]), vectors()
    sampler = ClusteredSize(2)
    client, mass = sampler.strata(sampler.init(shares[None], 1), 0, shares)
    start = np.cumsum(mass) - mass
    chance = [
        np.array(
            [max(min(a + m, k + 1) - max(a, k), 0.0) for a, m in zip(start, mass, strict=True)]
        )
        for k in range(2)
    ]
    expected, g = 0.0, x / shares[:, None]
    for one, two in itertools.product(range(5), repeat=2):
        estimate = (g[client[one]] + g[client[two]]) / 2
        expected += chance[0][one] * chance[1][two] * float(((estimate - x.sum(axis=0)) ** 2).sum())
    assert kvib_stack.clustered(client, mass, shares, x @ x.T) == pytest.approx(expected)


def test_a_first_pass_is_known_before_the_first_round() -> None:
    shares = np.full((1, 4), 0.25)
    meter = Meter(Lane("avare", Avare(2), start=np.copy), shares, 10, 0)
    row = Row(np.array([1.0, 2.0, 3.0, 4.0]), 5.0)
    meter.round(1, row)
    assert meter.cost[0] == pytest.approx(30 * 2)  # Avare's first round is uniform
    assert meter.best[0] == pytest.approx(100 / 2)  # p = a / 5
    meter.round(2, row)
    assert not np.isnan(meter.state["norm"]).any()


def test_gradients_are_torchs() -> None:
    stack = Stack(federation(SIZES), [Lane("full", Full(), 0.05)], 0, True)
    weights = torch.randn_like(stack.first)[:, :, 0].requires_grad_()
    losses, slopes = stack.gradients(weights.detach())
    x, y = stack.x[2], stack.y[2].argmax(dim=1)
    loss = kvib_stack.softmax_twice(x @ weights, y).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert losses[2] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert weights.grad is not None
    np.testing.assert_allclose(slopes[2], weights.grad.numpy(), rtol=1e-4, atol=1e-6)
