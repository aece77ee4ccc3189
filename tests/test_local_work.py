"""A client's local work, written out once here, against everything that does it.

The order of mini-batches and the local optimisers exist in torch for one client (sequential) and
for many (stacks), in C (library) and on a GPU (graphs, whose schedule is a Triton kernel). These
tests compare all of them that this machine has.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import federation
from torch import Tensor, nn

from rota import rng, weights
from rota.data.federation import Federation
from rota.engine import Batched, local, make
from rota.engine.backends import Backend, Graphs, Library, Stacks
from rota.engine.native import build
from rota.experiment import Experiment
from rota.plan import Chunk, Local, Plan, Task, whole
from rota.weights import Weights

NOW, SEED = 3, 5
SIZES = [9, 23, 1, 16, 40]
OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "decay": {"weight_decay": 0.1},
    "clip": {"clip": 0.3},
    "prox": {"prox": 0.7},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "lr decay": {"lr_decay": 0.5},
    "a rate that has decayed to nothing": {"lr_decay": 1e-30},
    "schedules": {"lr_decay": 0.5, "lr_steps": (2, 3), "lr_warmup": 4, "lr_cosine": 9},
    "local decay": {"lr_local_decay": 0.7},
    "local decay of adamw": {
        "optimizer": "adamw",
        "lr": 0.02,
        "weight_decay": 0.2,
        "lr_local_decay": 0.8,
        "prox": 0.3,
    },
    "all of sgd": {
        "momentum": 0.5,
        "nesterov": True,
        "weight_decay": 0.1,
        "clip": 0.3,
        "prox": 0.7,
        "lr_decay": 0.9,
    },
    "all of adam": {
        "optimizer": "adam",
        "lr": 0.01,
        "weight_decay": 0.05,
        "clip": 0.3,
        "prox": 0.7,
    },
}
ORDERS: dict[str, dict[str, Any]] = {
    "mini-batches": {"batch": 7, "epochs": 2},
    "single examples": {"batch": 1},
    "one batch": {"batch": None, "epochs": 3},
    "a large batch": {"batch": 64, "epochs": 2},
    "steps": {"batch": 4, "steps": 11},
    "one step": {"batch": 6, "steps": 1},
    "steps of one batch": {"batch": None, "steps": 4},
}


def smooth(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 6), nn.Tanh(), nn.Linear(6, classes))


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """It cannot train on a single example, and its buffers are results, too."""
    layers = nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, classes)
    return nn.Sequential(*layers)


class Trained(NamedTuple):
    """What one row gives."""

    update: Tensor
    buffers: Tensor
    loss: float
    steps: int
    examples: int


def mini_batches(task: Task, examples: int, key: Tensor, least: int) -> list[Tensor]:
    """A new order in every epoch, cut into mini-batches; one below `least` is left out."""
    size, found, epoch = task.batch or examples, list[Tensor](), 0
    wanted = task.steps or task.epochs * len(range(0, examples, size))
    while len(found) < wanted and epoch < 100:
        order = rng.permutation(rng.fold(key, epoch), examples)
        pieces = [order[first : first + size] for first in range(0, examples, size)]
        found += [piece for piece in pieces if len(piece) >= least]
        epoch += 1
        if task.steps is None and epoch == task.epochs:
            break
    return found[:wanted]


def rate_of(task: Task) -> float:
    """The learning rate of round NOW."""
    past = [each for each in task.lr_steps if each <= NOW] if task.lr_steps else range(1, NOW)
    rate = task.lr * task.lr_decay ** len(past)
    if task.lr_cosine:
        rate *= np.cos(np.pi * (NOW - 1) / task.lr_cosine / 2) ** 2
    return rate * min(1.0, NOW / (task.lr_warmup + 1))


def written_out(task: Task, row: int, start: Weights, anchor: Tensor, shift: Tensor) -> Trained:
    """Local training of client `row`, in double precision."""
    module = task.build().double()
    least = 2 if any(isinstance(part, nn.BatchNorm1d) for part in module.modules()) else 1
    x, y = task.federation.train.of(row)
    key = rng.as_tensor([rng.key(SEED, "train", NOW, row, 0)])[0]
    first_rate = rate_of(task)
    theta, buffers = start.params.clone(), start.buffers
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    losses, examples = [], 0
    weights.load(module, start)
    module.train()
    for number, batch in enumerate(mini_batches(task, len(y), key, least), 1):
        loss = F.cross_entropy(module(x[batch].double()), y[batch])
        g = torch.cat(
            [each.flatten() for each in torch.autograd.grad(loss, [*module.parameters()])]
        )
        g = g + task.prox * (theta - anchor)
        g = g * min(1.0, (task.clip or np.inf) / (float(g.norm()) + 1e-6))
        rate = first_rate * task.lr_local_decay ** (number - 1)
        decay = task.weight_decay * theta
        g = g + shift + (decay if task.optimizer != "adamw" else 0)
        if task.optimizer in ("adam", "adamw"):
            first = 0.9 * first + 0.1 * g
            second = 0.999 * second + 0.001 * g**2
            root = (second / (1 - 0.999**number)).sqrt()
            theta = theta - rate * (decay if task.optimizer == "adamw" else 0)
            theta = theta - rate * first / (1 - 0.9**number) / (root + 1e-8)
        else:
            first = task.momentum * first + g
            theta = theta - rate * (g + task.momentum * first if task.nesterov else first)
        buffers = weights.read(module).buffers
        weights.load(module, Weights(theta, buffers))
        losses.append(loss.item())
        examples += len(batch)
    mean = float(np.mean(losses)) if losses else np.nan
    return Trained(start.params - theta, buffers, mean, len(losses), examples)


def doubled(data: Federation, dtype: torch.dtype) -> Federation:
    parts = (replace(part, x=part.x.to(dtype)) for part in (data.train, data.test))
    return Federation(data.name, *parts, data.classes)


def local_of(start: Weights) -> Local:
    """A start, an anchor and a shift of its own for each row."""
    generator = torch.Generator().manual_seed(1)
    n = len(start.params)

    def noise(scale: float) -> Tensor:
        random = torch.randn(len(SIZES), n, generator=generator, dtype=torch.float64)
        return (scale * random).to(start.params)

    params, anchor, shift = start.params + noise(0.1), start.params + noise(0.1), noise(0.2)
    buffers = start.buffers.expand(len(SIZES), -1)
    return Local(
        lambda rows: Weights(params[rows], buffers[rows]),
        lambda rows: anchor[rows],
        lambda rows: shift[rows],
    )


BACKENDS: dict[str, type[Backend] | None] = {
    "sequential": None,
    "stacks": Stacks,
    "library": Library,
    "graphs": Graphs,
    "sequential on a GPU": None,
}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
WHERE = [
    "sequential",
    "stacks",
    pytest.param("library", marks=compiler),
    pytest.param("graphs", marks=[cuda, triton]),
    pytest.param("sequential on a GPU", marks=cuda),
]
CASES = [(optimiser, "mini-batches", smooth) for optimiser in OPTIMISERS]
CASES += [(optimiser, order, smooth) for optimiser in ("sgd", "momentum") for order in ORDERS]
CASES += [("all of sgd", order, normed) for order in ORDERS if order != "single examples"]


@pytest.mark.parametrize(("optimiser", "order", "model"), CASES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "float"])
def test_local_work_is_what_is_written_out(
    where: str, optimiser: str, order: str, model: Any, dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setenv("ROTA_NATIVE", "1" if where == "library" else "0")
    work: dict[str, Any] = {"lr": 0.1, **OPTIMISERS[optimiser], **ORDERS[order]}
    data = doubled(federation(SIZES), dtype)
    task = Task(lambda shape, classes: model(shape, classes).to(dtype), data, **work)
    device = "cuda" if "GPU" in where or where == "graphs" else "cpu"
    name = "sequential" if "sequential" in where else "batched"
    engine = make(name, Experiment([task], seed=SEED), device)
    if isinstance(engine, Batched):
        assert isinstance(engine.families[0].backend, BACKENDS[where])
    plan = Plan(np.arange(5), np.zeros(5, np.int64), np.ones(5), np.ones(5))
    job = whole(engine.initial(), plan, NOW)
    start = job.models[0].weights
    bound = 1e-9 if dtype == torch.float64 else 2e-3
    for given in (Local(), local_of(start)):
        for row, found in rows(engine.train(replace(job, local=given))).items():
            place = np.array([row])
            begin = given.start(place) if given.start else None
            mine = (
                Weights(*(side[0].cpu().double() for side in begin)) if begin else start_of(start)
            )
            anchor = given.anchor(place)[0].cpu().double() if given.anchor else mine.params
            shift = given.shift(place)[0].cpu().double() if given.shift else 0 * anchor
            expected = written_out(task, row, mine, anchor, shift)
            assert (found.steps, found.examples) == (expected.steps, expected.examples)
            if expected.steps:
                assert found.loss == pytest.approx(expected.loss, rel=bound)
            assert apart(found.update, expected.update) < bound
            assert apart(found.buffers, expected.buffers) < bound


def start_of(start: Weights) -> Weights:
    return Weights(*(side.cpu().double() for side in start))


def rows(chunks: Any) -> dict[int, Trained]:
    found: dict[int, Trained] = {}
    chunk: Chunk
    for chunk in chunks:
        for at, row in enumerate(chunk.rows.tolist()):
            assert chunk.reason[at] == ("" if chunk.steps[at] else local.TOO_FEW)
            found[row] = Trained(
                chunk.update[at].cpu().double(),
                chunk.buffers[at].cpu().double(),
                float(chunk.loss[at]),
                int(chunk.steps[at]),
                int(chunk.examples[at]),
            )
    assert sorted(found) == [*range(len(SIZES))]
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.mark.parametrize("name", ["sequential", "batched"])
def test_any_optimiser_of_torch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It begins anew in every row, and the batched engine leaves it to the sequential one."""
    made = []

    def own(params: Any, lr: float) -> torch.optim.Optimizer:
        made.append(lr)
        return torch.optim.RMSprop(params, lr=lr, alpha=0.5)

    data = doubled(federation(SIZES), torch.float64)
    model = smooth(data.roster.shape, 3).double()
    task = Task(model, data, lr=0.01, batch=7, lr_decay=0.5, lr_local_decay=0.9, optimizer=own)
    engine = make(name, Experiment([task], seed=SEED), "cpu")
    assert ("an optimiser of your own" in caplog.text) == (name == "batched")
    plan = Plan(np.arange(5), np.zeros(5, np.int64), np.ones(5), np.ones(5))
    job = whole(engine.initial(), plan, NOW)
    start = job.models[0].weights
    chunks = list(engine.train(job))
    assert made[-5:] == [0.0025] * 5
    for chunk in chunks:
        for row, update in zip(chunk.rows.tolist(), chunk.update, strict=True):
            weights.load(model, start)
            x, y = data.train.of(row)
            key = rng.as_tensor([rng.key(SEED, "train", NOW, row, 0)])[0]
            optimiser = torch.optim.RMSprop(model.parameters(), lr=0.0025, alpha=0.5)
            for batch in mini_batches(task, len(y), key, 1):
                optimiser.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimiser.step()
                optimiser.param_groups[0]["lr"] *= 0.9
            torch.testing.assert_close(update, start.params - weights.read(model).params)
