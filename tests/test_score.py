"""Evaluation: several models in one pass give what each gives alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from torch import Tensor, nn

from rota.data.federation import Federation, Part
from rota.engine import Batched, Score, make
from rota.engine.sequential import Sequential
from rota.experiment import Experiment
from rota.models import cnn, leaf_lstm, two_nn
from rota.plan import Model, Plan, Task, whole
from rota.scores import cross_entropy
from rota.weights import Weights, load, read
from rota.world.devices import Devices

SIZES = [5, 12, 20, 8]


class Branching(nn.Linear):
    """A module that looks at its values: it cannot be mapped over models."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return -out if float(out.sum()) > 0 else out


def branching(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Branching(shape[0], classes)


def convolution(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, classes)
    )


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that vmap has no rule for: it goes through numpy."""
    return torch.from_numpy(outputs.numpy().sum(-1)) + targets


def pair(tasks: list[Task]) -> tuple[Batched, Sequential, list[Weights]]:
    batched, plain = (make(name, Experiment(tasks), "cpu") for name in ("batched", "sequential"))
    assert isinstance(batched, Batched)
    assert isinstance(plain, Sequential)
    return batched, plain, plain.initial()


def assert_same(found: list[Score], wanted: list[Score]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.accuracy == pytest.approx(b.accuracy, abs=1e-9)
        assert (a.by_client is None) == (b.by_client is None)
        if a.by_client is not None and b.by_client is not None:
            np.testing.assert_allclose(a.by_client, b.by_client)


@pytest.mark.parametrize("own_test", [False, True])
@pytest.mark.parametrize(
    ("model", "together"),
    [(linear, True), (network, True), (branching, False), (convolution, False)],
)
def test_a_pass_over_several_models_is_a_pass_over_each(
    model: object, together: bool, own_test: bool
) -> None:
    data = federation(SIZES, own_test=own_test)
    batched, plain, models = pair([Task(model, data, lr=lr) for lr in (0.1, 0.2, 0.3)])
    scores = batched.evaluate(models)
    assert_same(scores, plain.evaluate(models))
    assert len({score.loss for score in scores}) == 3
    assert list(batched.plain.scorer.stacks.values()) == [together]
    assert plain.scorer.stacks == {}


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [(two_nn, (1, 28, 28), 10), (cnn, (1, 28, 28), 10), (leaf_lstm, (12,), 80)],
)
def test_networks_of_the_zoo(model: object, shape: tuple[int, ...], classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(classes, (9, *shape), generator=generator)
    x = letters if model is leaf_lstm else torch.rand(9, *shape, generator=generator)
    part = Part(x, torch.arange(9), np.array([0, 4, 9]))
    data = Federation("nine", part, part, classes)
    batched, plain, models = pair([Task(model, data) for _ in range(2)])
    assert_same(batched.evaluate(models), plain.evaluate(models))


@pytest.mark.parametrize("name", ["batched", "sequential"])
def test_some_of_the_models_in_any_order(name: str) -> None:
    one, two = federation(SIZES), federation(SIZES, seed=1, own_test=True)
    tasks = [
        Task(linear, one),
        Task(linear, two),
        Task(network, one),
        Task(linear, one),
        Task(linear, two),
        Task(linear, one),
    ]
    engine = make(name, Experiment(tasks), "cpu")
    models = engine.initial()
    all_of_them = engine.evaluate(models)
    for which in ([5, 0, 3], [4], [1, 2, 4], []):
        assert_same(engine.evaluate(models, which), [all_of_them[s] for s in which])


def test_more_models_than_a_stack_and_more_examples_than_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.engine.score.STACK", 3)
    batched, plain, models = pair([Task(linear, federation(SIZES))] * 8)
    whole = plain.evaluate(models)
    monkeypatch.setattr("rota.engine.score.ON_CPU", 7)
    assert_same(batched.evaluate(models), whole)
    assert_same(plain.evaluate(models), whole)


def mixing(classes: int) -> nn.Module:
    """BatchNorm without running statistics: results depend on the batch, in evaluation too."""
    first = (
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 3, 2, padding=1),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.ReLU(),
    )
    last = (
        nn.Flatten(),
        nn.Linear(27, 5),
        nn.BatchNorm1d(5, affine=False, track_running_stats=False),
        nn.Linear(5, classes),
    )
    return nn.Sequential(*first, *last)


def alone(engine: Sequential, weights: Weights, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The loss and accuracy of a pass over these examples and no others, by the module itself."""
    module = engine.modules[0].eval()
    load(module, weights)
    with torch.no_grad():
        outputs = module(x)
    return cross_entropy(outputs, y).mean().item(), (outputs.argmax(1) == y).double().mean().item()


@pytest.mark.parametrize("most", [1000, 15])
def test_clients_know_the_statistics_of_their_own_examples_alone(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rota.engine.score.BATCH", most)
    data = federation([5, 12, 30, 8, 2], own_test=True)
    batched, plain, models = pair([Task(mixing, data, lr=lr) for lr in (0.1, 0.2)])
    clients = np.array([3, 0, 2, 4, 1])
    plan = Plan(clients, np.zeros(5, np.int64), np.ones(5), np.ones(5))
    bounds = data.train.offsets
    parts = [
        (data.train.x[bounds[i] : bounds[i + 1]], data.train.y[bounds[i] : bounds[i + 1]])
        for i in clients
    ]
    halves = 2 if most < 30 else 1  # of the largest client's examples
    expected = [
        np.mean(
            [
                alone(plain, models[0], a, b)[0]
                for a, b in zip(x.tensor_split(k), y.tensor_split(k), strict=True)
            ]
        )
        for k, (x, y) in zip((1, 1, halves, 1, 1), parts, strict=True)
    ]
    for engine in (batched, plain):
        seen = engine.losses(whole(models, plan, 1))
        np.testing.assert_allclose(seen.loss, expected, rtol=1e-5)
        assert seen.examples.tolist() == [8, 5, 30, 2, 12]
        score = engine.evaluate(models)[0]
        tests = [
            alone(
                plain,
                models[0],
                data.test.x[10 * i : 10 * i + 10],
                data.test.y[10 * i : 10 * i + 10],
            )
            for i in range(5)
        ]
        assert score.loss == pytest.approx(np.mean([loss for loss, _ in tests]), rel=1e-5)
        assert score.by_client is not None
        np.testing.assert_allclose(score.by_client, [accuracy for _, accuracy in tests])


def test_statistics_of_a_shared_test_set_are_those_of_equal_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rota.engine.score.BATCH", 59)
    monkeypatch.setattr("rota.engine.score.ON_CPU", 7)
    data = federation(SIZES)
    batched, plain, models = pair([Task(mixing, data)])
    halves = [
        alone(plain, models[0], *half)
        for half in zip(data.test.x.tensor_split(2), data.test.y.tensor_split(2), strict=True)
    ]
    for engine in (batched, plain):
        (score,) = engine.evaluate(models)
        assert score.loss == pytest.approx(np.mean([loss for loss, _ in halves]), rel=1e-5)
        assert score.accuracy == pytest.approx(np.mean([accuracy for _, accuracy in halves]))


def test_a_client_with_a_single_example_has_a_loss() -> None:
    data = federation([1, 6])
    batched, _, models = pair([Task(mixing, data)])
    plan = Plan(np.arange(2), np.zeros(2, np.int64), np.ones(2), np.ones(2))
    assert np.isfinite(batched.losses(whole(models, plan, 1)).loss).all()


def test_a_loss_that_cannot_be_mapped_is_taken_one_model_at_a_time() -> None:
    data = federation(SIZES)
    engine = Sequential(
        [Task(linear, data, loss=summed), Task(linear, data, loss=summed)],
        Devices(),
        0,
        torch.device("cpu"),
    )
    models = engine.initial()
    assert_same(engine.scorer.together(models, [0, 1]), engine.evaluate(models))
    assert list(engine.scorer.stacks.values()) == [False]


def test_models_with_losses_of_their_own_are_not_mixed() -> None:
    def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * cross_entropy(outputs, targets)

    data = federation(SIZES)
    module = linear(data.shape, data.classes)
    engine = make(
        "batched", Experiment([Task(module, data), Task(module, data, loss=doubled)]), "cpu"
    )
    single, double = engine.evaluate(engine.initial())
    assert double.loss == pytest.approx(2 * single.loss)


def test_test_parts_are_held_once() -> None:
    data = federation(SIZES)
    batched, _, models = pair([Task(linear, data), Task(network, data)])
    batched.evaluate(models)
    assert len(batched.plain.scorer.held) == 1
    assert batched.plain.data[0][0] is batched.plain.data[1][0]


def test_stacks_are_tested_right_by_several_threads() -> None:
    """Threads must not share a module whose weights a stack replaces while it runs."""

    class Slow(nn.Module):
        """Gives way to other threads between its layers."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).relu()
            time.sleep(0.002)
            out: Tensor = self.second(hidden)
            return out

    task = Task(Slow, federation([5, 12], features=4), name="slow")
    scorer = make("batched", Experiment([task]), "cpu").plain.scorer  # type: ignore[attr-defined]
    models = [Model(0, read(task.build(seed))) for seed in range(4)]
    expected = [score.loss for score in scorer.one_by_one(models, range(4))]
    scorer.threads = ThreadPoolExecutor(8, initializer=torch.set_num_threads, initargs=(1,))
    scorer.passes = lambda s, sizes: [(slice(at, at + 4), None) for at in range(0, 60, 4)]
    for _ in range(5):
        found = [score.loss for score in scorer.together(models, range(4))]
        assert found == pytest.approx(expected, rel=1e-5)
