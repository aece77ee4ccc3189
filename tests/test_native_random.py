"""Random modules, data and local work: the C library against plain autograd.

ROTA_CASES says how many cases run. `make test-native-sanitized` runs 1,000, with the library under
AddressSanitizer and UndefinedBehaviorSanitizer. A case's number is its seed.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor, nn

from rota.data.federation import Federation, Part
from rota.engine import Batched, Engine, make
from rota.engine.backends import Library
from rota.engine.native import build
from rota.experiment import Experiment
from rota.models.text import LSTM, Last, OneHot
from rota.plan import Job, Local, Model, Plan, Task, whole
from rota.weights import Weights

CASES = int(os.environ.get("ROTA_CASES", "40"))
pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_NATIVE", "1")


def activation(draw: Generator) -> list[nn.Module]:
    smooth = [nn.Tanh(), nn.Sigmoid(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Softplus()]
    chosen = [nn.ReLU(), nn.LeakyReLU(), nn.ELU(), *smooth][draw.integers(9)]
    return [] if draw.random() < 0.2 else [chosen]


def dropout(draw: Generator) -> list[nn.Module]:
    return [nn.Dropout(float(draw.uniform(0.1, 0.6)))] if draw.random() < 0.2 else []


def dense(draw: Generator, wide: int, classes: int) -> list[nn.Module]:
    """A few linear layers of odd sizes."""
    layers: list[nn.Module] = []
    for _ in range(draw.integers(3)):
        new = int(draw.choice([1, 2, 7, 15, 16, 17, 33, 40, 65, 130]))
        layers.append(nn.Linear(wide, new, bias=bool(draw.random() < 0.8)))
        if draw.random() < 0.2:
            layers.append(nn.BatchNorm1d(new))
        elif draw.random() < 0.2 and new > 2:
            layers.append(nn.LayerNorm(new, elementwise_affine=bool(draw.random() < 0.8)))
        layers += activation(draw) + dropout(draw)
        wide = new
    return [*layers, nn.Linear(wide, classes)]


def images(draw: Generator, classes: int) -> tuple[list[nn.Module], tuple[int, ...]]:
    """Convolutions and pools of all sizes, strides and paddings that fit, then linear layers."""
    channels = int(draw.choice([1, 2, 3, 5, 8, 16, 17, 20]))
    high, wide = (int(n) for n in draw.integers(1, 13, 2))
    shape = (channels, high, wide)
    layers: list[nn.Module] = []
    for _ in range(1 + draw.integers(3)):
        size, stride, padding = (
            tuple(int(n) for n in draw.choice(choice, 2))
            for choice in ([1, 2, 3, 3, 4, 5], [1, 1, 1, 2, 3], [0, 0, 1, 2, 3])
        )
        if draw.random() < 0.6:  # Winograd's products are for squares with stride 1
            size, stride = (size[0], size[0]), (1, 1)
        high_, wide_ = (
            (n + 2 * p - k) // s + 1
            for n, k, s, p in zip((high, wide), size, stride, padding, strict=True)
        )
        if high_ < 1 or wide_ < 1:
            continue
        outputs = int(draw.choice([1, 2, 4, 8, 9, 16, 19, 33]))
        bias = bool(draw.random() < 0.7)
        layers.append(nn.Conv2d(channels, outputs, size, stride, padding, bias=bias))
        channels, high, wide = outputs, high_, wide_
        if draw.random() < 0.2:
            layers.append(nn.BatchNorm2d(channels))
        elif draw.random() < 0.3 and high * wide > 2:
            groups = [n for n in range(1, channels + 1) if channels % n == 0]
            layers.append(nn.GroupNorm(int(draw.choice(groups)), channels))
        layers += activation(draw) + dropout(draw)
        if draw.random() < 0.3 and min(high, wide) > 1:
            size = int(draw.integers(2, min(4, high, wide) + 1))
            stride, padding = int(draw.integers(1, 4)), int(draw.integers(0, size // 2 + 1))
            layers.append(nn.MaxPool2d(size, stride, padding))
            high, wide = ((n + 2 * padding - size) // stride + 1 for n in (high, wide))
    flat = channels * high * wide
    return [*layers, nn.Flatten(), *dense(draw, flat, classes)], shape


class Attention(nn.TransformerEncoderLayer):
    """A layer of a transformer, causal for some lengths."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        long = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(long, dtype=x.dtype)
        return super().forward(x, src_mask=mask if long % 2 else None)


def text(draw: Generator, tokens: int, classes: int) -> tuple[list[nn.Module], tuple[int, ...]]:
    """Embedded or one-hot tokens, read by an LSTM or all at once."""
    length, wide = int(draw.integers(1, 8)), int(draw.choice([1, 3, 8, 16, 21]))
    padding = int(draw.integers(tokens)) if draw.random() < 0.3 else None
    layers: list[nn.Module] = [nn.Embedding(tokens, wide, padding_idx=padding)]
    if draw.random() < 0.3:
        layers, wide = [OneHot(tokens)], tokens
    # a LayerNorm of one number divides rounding errors by the root of its eps
    if draw.random() < 0.4 and isinstance(layers[0], nn.Embedding) and wide > 2:
        heads = int(draw.choice([n for n in (1, 2, 3, 4) if wide % n == 0]))
        first = bool(draw.random() < 0.5)
        layers.append(Attention(wide, heads, 2 * wide, 0.0, norm_first=first, batch_first=True))
    if draw.random() < 0.5 or isinstance(layers[0], OneHot):
        units = int(draw.choice([1, 5, 16, 18]))
        return [*layers, LSTM(wide, units), Last(), *dense(draw, units, classes)], (length,)
    return [*layers, nn.Flatten(), *dense(draw, wide * length, classes)], (length,)


def work(draw: Generator, smooth: bool) -> dict[str, Any]:
    """The local work: mini-batches, epochs or steps, and an optimiser."""
    options: list[dict[str, Any]] = [
        {},
        {"momentum": 0.9},
        {"momentum": 0.5, "nesterov": True},
        {"weight_decay": 0.1},
        {"clip": 0.5},
        {"prox": 0.3, "momentum": 0.9, "clip": 1.0, "weight_decay": 0.01},
        {"optimizer": "adam", "lr": 0.01},
    ]
    chosen = {"lr": 0.05, **options[draw.integers(len(options) - (not smooth))]}
    batch = None if draw.random() < 0.2 else int(draw.integers(1, 9))
    long = {"steps": int(draw.integers(1, 6))} if draw.random() < 0.3 else {"epochs": 2}
    return {**chosen, **long, "batch": batch}


def federation(
    draw: Generator, shape: tuple[int, ...], tokens: int, classes: int, dtype: torch.dtype
) -> Federation:
    """One to four clients, some with one example."""
    sizes = [int(n) for n in draw.choice([1, 1, 2, 3, 5, 8, 13], 1 + draw.integers(4))]
    total = sum(sizes)
    y = torch.from_numpy(draw.integers(0, classes, total))
    if tokens:
        x = torch.from_numpy(draw.integers(0, tokens, (total, *shape)))
    else:
        x = torch.from_numpy(draw.normal(size=(total, *shape))).to(dtype)
    part = Part(x, y, np.cumsum([0, *sizes]))
    return Federation("random", part, part, classes)


def damage(draw: Generator, data: Federation) -> None:
    """Put one token or label outside, now that the engines have checked all data."""
    x, y = data.train.x, data.train.y
    where, bad = int(draw.integers(len(y))), int(draw.choice([-1, 10**9]))
    (y if x.is_floating_point() or draw.random() < 0.5 else x)[where] = bad


def random_task(draw: Generator) -> Task:
    dtype = [torch.float32, torch.float64][draw.integers(2)]
    classes, tokens = int(draw.choice([1, 2, 3, 10, 17])), 0
    kind = draw.integers(3)
    with torch.random.fork_rng():
        torch.manual_seed(int(draw.integers(1 << 32)))
        if kind == 0:
            shape: tuple[int, ...] = (int(draw.choice([1, 2, 7, 16, 31, 64, 100])),)
            layers = dense(draw, shape[0], classes)
        elif kind == 1:
            layers, shape = images(draw, classes)
        else:
            tokens = int(draw.integers(2, 30))
            layers, shape = text(draw, tokens, classes)
    module = nn.Sequential(*layers).to(dtype)
    data = federation(draw, shape, tokens, classes, dtype)
    return Task(module, data, **work(draw, dtype == torch.float64))


def random_job(draw: Generator, task: Task, model: Model) -> Job:
    """Some clients in any order, some of which start elsewhere, pull elsewhere or are corrected."""
    n = int(draw.integers(1, task.data.clients + 1))
    plan = Plan(draw.permutation(task.data.clients)[:n], np.zeros(n, int), np.ones(n), np.ones(n))

    def lines(scale: float) -> Tensor:
        noise = torch.from_numpy(draw.normal(size=(n, len(model.weights.params)))) * scale
        return noise.to(model.weights.params.dtype)

    params, shift = model.weights.params + lines(0.1), lines(0.01)
    buffers, anchor = model.weights.buffers.expand(n, -1), lines(0.1)
    chosen = draw.random(3) < 0.2
    local = Local(
        start=(lambda rows: Weights(params[rows], buffers[rows])) if chosen[0] else None,
        anchor=(lambda rows: anchor[rows]) if chosen[1] else None,
        shift=(lambda rows: shift[rows]) if chosen[2] else None,
    )
    return whole([model], plan, int(draw.integers(1, 100)), local)


def updates(engine: Engine, job: Job) -> tuple[list[str], Tensor]:
    """Each row's reason of failure, and the updates and buffers."""
    n = len(job.plan)
    reason, found = [""] * n, [torch.empty(0)] * n
    for chunk in engine.train(job):
        for row, why, update, buffers in zip(
            chunk.rows.tolist(), chunk.reason, chunk.update, chunk.buffers, strict=True
        ):
            reason[row], found[row] = why, torch.cat([update, buffers])
    return reason, torch.stack(found)


@pytest.mark.parametrize("number", range(CASES))
def test_random_work_agrees_with_autograd(number: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = np.random.default_rng(number)
    task = random_task(draw)
    fast, plain = (
        make(name, Experiment([task], seed=number), "cpu") for name in ("batched", "sequential")
    )
    assert isinstance(fast, Batched)
    said = [record.message for record in caplog.records if record.name.startswith("rota")]
    if said and all("normalises over mini-batches of a single example" in each for each in said):
        pytest.skip("torch refuses it")
    assert not said
    assert isinstance(fast.families[0].backend, Library), "it must not have fallen back"
    model = plain.initial()[0]
    job = random_job(draw, task, model)
    compare(updates(fast, job), updates(plain, job), model.weights.params)
    if draw.random() < 0.2:
        damage(draw, task.federation)
        compare(updates(fast, job), updates(plain, job), model.weights.params)


def compare(
    ours: tuple[list[str], Tensor], theirs: tuple[list[str], Tensor], start: Tensor
) -> None:
    """The same rows fail, and the others have nearly the same updates."""
    assert [bool(reason) for reason in ours[0]] == [bool(reason) for reason in theirs[0]]
    close = 1e-7 if start.dtype == torch.float64 else 0.02
    for found, right in zip(ours[1], theirs[1], strict=True):
        assert torch.isfinite(right).all()
        scale = float(right.norm()) + 1e-4 * float(start.norm())
        assert float((found - right).norm()) <= close * scale
