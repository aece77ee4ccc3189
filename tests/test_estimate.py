"""Estimators and server optimisers against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rota import rng
from rota.estimate import ESTIMATORS, SERVERS, Adam, Estimator, FedAvg, Server, Sgd, Unbiased, Yogi
from rota.plan import Chunk, Plan
from rota.sampling import Uniform
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


def chunk(
    rows: list[int], model: int, update: Tensor, buffers: Tensor, reason: list[str] | None = None
) -> Chunk:
    n = len(rows)
    return Chunk(
        np.array(rows),
        model,
        0.1,
        update,
        buffers,
        np.ones(n),
        np.ones(n, int),
        np.ones(n),
        np.ones(n),
        reason or [""] * n,
    )


@pytest.mark.parametrize("estimator", [member() for member in ESTIMATORS.values()], ids=ESTIMATORS)
class TestEveryEstimator:
    def estimate(
        self, estimator: Estimator, chunks: list[Chunk]
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        state = estimator.init(MODELS, SHARES)
        sums = estimator.begin(state, MODELS, PLAN)
        for each in chunks:
            estimator.add(sums, PLAN, each)
        return [*estimator.finish(state, sums)[0]]

    def test_chunking_and_order_do_not_matter(self, estimator: Estimator) -> None:
        update, buffers = torch.randn(3, 5), torch.rand(3, 2)
        whole = self.estimate(estimator, [chunk([0, 1, 3], 0, update, buffers)])
        parts = self.estimate(
            estimator,
            [chunk([3], 0, update[2:], buffers[2:]), chunk([0, 1], 0, update[:2], buffers[:2])],
        )
        for one, two in zip(whole[0], parts[0], strict=True):
            torch.testing.assert_close(one, two)

    def test_a_model_without_rows_has_no_estimate(self, estimator: Estimator) -> None:
        assert self.estimate(estimator, [chunk([2], 1, torch.randn(1, 3), torch.rand(1, 0))])[
            2
        ] == (None, None)

    def test_failed_rows_do_not_count(self, estimator: Estimator) -> None:
        update, buffers = torch.randn(3, 5), torch.rand(3, 2)
        update[1] = torch.nan
        with_failure = self.estimate(
            estimator, [chunk([0, 1, 3], 0, update, buffers, ["", "NaN", ""])]
        )
        without = self.estimate(estimator, [chunk([0, 3], 0, update[[0, 2]], buffers[[0, 2]])])
        for one, two in zip(with_failure[0], without[0], strict=True):
            torch.testing.assert_close(one, two)
        only_failure = self.estimate(estimator, [chunk([0], 0, update[1:2], buffers[1:2], ["NaN"])])
        assert only_failure[0] == (None, None)

    def test_buffers_are_a_mean(self, estimator: Estimator) -> None:
        buffers = torch.rand(3, 2)
        found = self.estimate(estimator, [chunk([0, 1, 3], 0, torch.randn(3, 5), buffers)])[0][1]
        weight = torch.tensor(PLAN.weight[[0, 1, 3]], dtype=torch.float32)
        torch.testing.assert_close(found, weight @ buffers / weight.sum())

    def test_the_state_is_not_changed(self, estimator: Estimator) -> None:
        """A round that is given up leaves nothing behind."""
        state = estimator.init(MODELS, SHARES)
        before = {name: value.clone() for name, value in state.items()}
        sums = estimator.begin(state, MODELS, PLAN)
        estimator.add(sums, PLAN, chunk([0, 1, 3], 0, torch.randn(3, 5), torch.rand(3, 2)))
        _, new = estimator.finish(state, sums)
        assert new.keys() == state.keys()
        torch.testing.assert_close(state, before, equal_nan=True, rtol=0, atol=0)

    def test_a_chunk_is_not_kept(self, estimator: Estimator) -> None:
        """An engine may use its memory again."""
        update, buffers = torch.randn(3, 5), torch.rand(3, 2)
        found = []
        for spoilt in (False, True):
            state = estimator.init(MODELS, SHARES)
            sums = estimator.begin(state, MODELS, PLAN)
            mine = update.clone()
            estimator.add(sums, PLAN, chunk([0, 1, 3], 0, mine, buffers))
            mine.mul_(0 if spoilt else 1)
            found.append(estimator.finish(state, sums))
        torch.testing.assert_close(found[0][1], found[1][1], equal_nan=True, rtol=0, atol=0)
        assert torch.equal(found[0][0][0].update, found[1][0][0].update)  # type: ignore[arg-type]


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
        elif isinstance(server, Adam):
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
