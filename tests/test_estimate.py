"""Estimators and server optimisers against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rota import rng
from rota.estimate import ESTIMATORS, SERVERS, Adam, FedAvg, Server, Sgd, Unbiased, Yogi
from rota.plan import Chunk, Plan
from rota.sampling import Uniform
from rota.testing import estimators, replies
from rota.weights import Weights

PLAN = Plan(
    np.array([4, 0, 2, 1]), np.array([0, 0, 1, 0]), np.full(4, 0.5), np.array([0.6, 0.3, 0.8, 0.5])
)
SHARES = np.array(
    [[0.15, 0.25, 0.1, 0.1, 0.3, 0.1], [0.1, 0.2, 0.4, 0.1, 0.1, 0.1], np.full(6, 1 / 6)]
)
MODELS = [
    Weights(torch.randn(5), torch.rand(2)),
    Weights(torch.randn(3), torch.rand(0)),
    Weights(torch.randn(2), torch.rand(1)),
]


def chunk(rows: list[int], model: int, update: Tensor, buffers: Tensor) -> Chunk:
    return replies.chunk(np.array(rows), model, update, buffers)


@pytest.mark.parametrize("name", ESTIMATORS)
class TestEveryEstimator:
    @pytest.mark.parametrize("check", estimators.CHECKS, ids=lambda check: check.__name__)
    def test_the_suite_of_rota_testing(self, name: str, check: Any) -> None:
        check(ESTIMATORS[name]())

    def test_full_participation_is_the_exact_sum(self, name: str) -> None:
        estimators.check_full_participation(ESTIMATORS[name]())

    def test_it_is_unbiased_or_says_that_it_is_not(self, name: str) -> None:
        estimator: Any = ESTIMATORS[name]()
        if estimator.unbiased:
            estimators.check_unbiased(estimator)
            estimators.check_unbiased_failures(estimator)
        else:
            with pytest.raises(AssertionError, match="says that it is unbiased, but the mean"):
                estimators.check_unbiased(estimator)

    def test_buffers_are_a_mean(self, name: str) -> None:
        estimator, buffers = ESTIMATORS[name](), torch.rand(3, 2)
        sums = estimator.begin(state := estimator.init(MODELS, SHARES), MODELS, PLAN)
        estimator.add(sums, PLAN, chunk([0, 1, 3], 0, torch.randn(3, 5), buffers))
        weight = torch.tensor(PLAN.weight[[0, 1, 3]], dtype=torch.float32)
        found = estimator.finish(state, sums)[0][0].buffers
        torch.testing.assert_close(found, weight @ buffers / weight.sum())

    def test_the_first_state_is_not_changed(self, name: str) -> None:
        estimator = ESTIMATORS[name]()
        state = estimator.init(MODELS, SHARES)
        before = {key: value.clone() for key, value in state.items()}
        sums = estimator.begin(state, MODELS, PLAN)
        estimator.add(sums, PLAN, chunk([0, 1, 3], 0, torch.randn(3, 5), torch.rand(3, 2)))
        _, new = estimator.finish(state, sums)
        assert new.keys() == state.keys()
        torch.testing.assert_close(state, before, equal_nan=True, rtol=0, atol=0)


def test_unbiased_is_the_sum_and_fedavg_the_mean() -> None:
    update = torch.randn(3, 5)
    weight = torch.tensor(PLAN.weight[[0, 1, 3]], dtype=torch.float32)
    for estimator, expected in (
        (Unbiased(), weight @ update),
        (FedAvg(), weight @ update / weight.sum()),
    ):
        sums = estimator.begin({}, MODELS, PLAN)
        estimator.add(sums, PLAN, chunk([0, 1, 3], 0, update, torch.rand(3, 2)))
        torch.testing.assert_close(estimator.finish({}, sums)[0][0].update, expected)


def test_fedavg_weighs_by_examples_under_uniform_sampling() -> None:
    """McMahan: n_i / sum of n_j over the cohort."""
    sizes = np.array([10.0, 30, 20, 40])
    plan = Uniform(2).draw({}, (sizes / sizes.sum())[None], rng.generator(3))
    assert plan.weight / plan.weight.sum() == pytest.approx(
        sizes[plan.client] / sizes[plan.client].sum()
    )


def reference(server: Server, params: Tensor, updates: list[Tensor]) -> Tensor:
    """The optimisers written out by hand."""
    w = params.double().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, update in enumerate(updates, start=1):
        g = update.double()
        if isinstance(server, Sgd):
            m = server.momentum * m + g
            w = w - server.lr * m
        elif type(server) is Adam:
            m, v = (
                server.beta1 * m + (1 - server.beta1) * g,
                server.beta2 * v + (1 - server.beta2) * g * g,
            )
            w = w - server.lr * (m / (1 - server.beta1**t)) / (
                (v / (1 - server.beta2**t)).sqrt() + server.eps
            )
        elif isinstance(server, Yogi):
            m = server.beta1 * m + (1 - server.beta1) * g
            v = v - (1 - server.beta2) * torch.sign(v - g * g) * g * g
            w = w - server.lr * m / (v.sqrt() + server.eps)
    return w.float()


@pytest.mark.parametrize(
    "server",
    [*(member() for member in SERVERS.values()), Sgd(0.5, momentum=0.9)],
    ids=[*SERVERS, "momentum"],
)
def test_every_server_follows_its_formula_and_keeps_its_input(server: Server) -> None:
    start = torch.randn(7)
    params, state, before = start, {}, start.clone()
    updates = [torch.randn(7) for _ in range(5)]
    for update in updates:
        params, state = server.step(
            params, update, {name: value.clone() for name, value in state.items()}
        )
    torch.testing.assert_close(params, reference(server, start, updates), rtol=1e-4, atol=1e-5)
    assert torch.equal(start, before)
    frozen = {name: value.clone() for name, value in state.items()}
    server.step(params, updates[0], state)
    assert all(torch.equal(frozen[name], state[name]) for name in state), (
        "a step must not change the state it was given"
    )
