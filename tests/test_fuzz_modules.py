"""Random modules and plans on both engines: the same updates, or one plain sentence.

The batched engine must train what the plain engine trains, to the same numbers, by whichever back
end. What no back end can train goes to the plain engine, and a sentence says so.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from test_native_random import federation, random_job, updates, work
from torch import Tensor, nn

from rota.engine import Batched, make
from rota.errors import BadInput
from rota.experiment import Experiment
from rota.plan import Task
from rota.running.check import check

WIDE = 8
DTYPES = [torch.float32, torch.float64, torch.float64, torch.float64, torch.bfloat16, torch.float16]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, scaled: bool) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return x + (out if self.scale is None else self.scale * out)


class Twice(nn.Module):
    """One layer under two names, or a weight that another layer uses transposed."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE, bias=False)
        self.again = nn.Linear(WIDE, WIDE) if transposed else self.first
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.transposed:
            return self.again(hidden @ self.first.weight.T)
        return self.again(hidden)


class Attention(nn.Module):
    """Self-attention over the second axis, with a causal mask in a buffer or without one."""

    def __init__(self, heads: int, masked: bool, dropout: float) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDE, heads, dropout, batch_first=True)
        mask = torch.full((32, 32), -torch.inf).triu(1) if masked else None
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = None if self.mask is None else self.mask[:n, :n]
        out: Tensor = self.inner(x, x, x, need_weights=False, attn_mask=mask)[0]
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int) -> None:
        super().__init__()
        self.inner = kind(WIDE, WIDE, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Odd(nn.Module):
    """Python that depends on shapes, einsum, gated units, and a product of parameters."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.a = nn.Parameter(torch.randn(WIDE, 3) / 3)
        self.b = nn.Parameter(torch.randn(3, WIDE) / 3)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case 0:
                return x + torch.einsum("...i,ij,jk->...k", x, self.a, self.b)
            case 1:
                return x + x @ (self.a @ self.b)
            case 2:
                gate, value = (x @ self.a @ self.b).chunk(2, dim=-1)
                return torch.cat([torch.sigmoid(gate) * value, value], dim=-1)
            case _:
                return x * torch.softmax(x @ self.a @ self.b, dim=-1) + self.b.mean(0)


class Middle(nn.Module):
    """The mean over all axes between examples and features."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() == 2 else x.flatten(1, -2).mean(1)


def block(draw: Generator, long: bool, deep: int = 0) -> nn.Module:
    """A random module from [..., WIDE] to [..., WIDE]; `long` says that there is a second axis."""
    made: list[Any] = [
        lambda: nn.Linear(WIDE, WIDE, bias=bool(draw.random() < 0.7)),
        lambda: nn.LayerNorm(WIDE, elementwise_affine=bool(draw.random() < 0.7)),
        lambda: nn.Sequential(
            nn.Linear(WIDE, WIDE), [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh][draw.integers(4)]()
        ),
        lambda: nn.Dropout(0.3),
        lambda: Twice(bool(draw.random() < 0.5)),
        lambda: Odd(int(draw.integers(4))),
        lambda: nn.PReLU(),
    ]
    if deep < 2:
        made += [lambda: Residual(block(draw, long, deep + 1), bool(draw.random() < 0.5))] * 2
        made.append(lambda: nn.Sequential(*(block(draw, long, deep + 1) for _ in range(2))))
    if long:
        heads, masked = int(draw.choice([1, 2, 4])), bool(draw.random() < 0.5)
        dropout = 0.2 if draw.random() < 0.2 else 0.0
        made += [
            lambda: Attention(heads, masked, dropout),
            lambda: Recurrent([nn.GRU, nn.LSTM, nn.RNN][draw.integers(3)], 1),
            lambda: nn.TransformerEncoderLayer(WIDE, heads, 16, dropout, batch_first=True),
        ]
    else:
        made += [lambda: nn.BatchNorm1d(WIDE), lambda: nn.GroupNorm(2, WIDE)]
    module: nn.Module = made[draw.integers(len(made))]()
    return module


def module(draw: Generator, shape: tuple[int, ...], tokens: int, classes: int) -> nn.Module:
    """A random network; some have frozen, unused or shared parameters."""
    first: nn.Module = nn.Embedding(tokens, WIDE) if tokens else nn.Linear(shape[-1], WIDE)
    long = bool(tokens) or len(shape) > 1
    layers = [block(draw, long) for _ in range(1 + draw.integers(4))]
    last = nn.Linear(WIDE, classes)
    if isinstance(first, nn.Embedding) and tokens == classes and draw.random() < 0.7:
        last.weight = first.weight  # tied, as in language models
    net = nn.Sequential(first, *layers, Middle(), last)
    if draw.random() < 0.15:
        net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    if draw.random() < 0.15:
        some = list(net.parameters())
        some[draw.integers(len(some) - 1)].requires_grad_(False)
    return net


def task(draw: Generator) -> Task:
    classes, tokens = int(draw.choice([2, 3, 10])), 0
    dtype = DTYPES[draw.integers(len(DTYPES))]
    match draw.integers(3):
        case 0:
            shape: tuple[int, ...] = (int(draw.choice([1, 4, 9])),)
        case 1:
            shape = (int(draw.integers(1, 7)), int(draw.choice([1, 5])))
        case _:
            shape = (int(draw.integers(1, 7)),)
            tokens = int(draw.choice([classes, 5, 17]))
    with torch.random.fork_rng():
        torch.manual_seed(int(draw.integers(1 << 32)))
        net = module(draw, shape, tokens, classes).to(dtype)
    data = federation(draw, shape, tokens, classes, dtype)
    return Task(net, data, **work(draw, dtype == torch.float64))


def one(seed: int, caplog: pytest.LogCaptureFixture) -> str:
    """Train a random job on both engines: "same", "fell back", or "refused"."""
    draw = np.random.default_rng(seed)
    some = task(draw)
    what = Experiment([some], seed=seed)
    try:
        check(what)
    except BadInput:
        return "refused"
    caplog.clear()
    fast, plain = (make(name, what, "cpu") for name in ("batched", "sequential"))
    assert isinstance(fast, Batched)
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) == 1 - len(fast.families), said
    for sentence in said:
        assert "runs on the sequential engine, one client at a time: its model" in sentence
        assert "\n" not in sentence
        assert len(sentence) < 300
    job = random_job(draw, some, plain.initial()[0])
    ours, theirs = updates(fast, job), updates(plain, job)
    assert [bool(reason) for reason in ours[0]] == [bool(reason) for reason in theirs[0]]
    start = job.models[0].params.double()
    double = start.dtype == job.models[0].params.dtype
    for found, right, bad in zip(*ours[1:], *theirs[1:], theirs[0], strict=True):
        finite = torch.isfinite(right)
        assert (torch.isfinite(found) == finite).all()
        if bad:
            continue
        found, right = (each[finite].double() for each in (found, right))
        scale = float(right.norm()) + 1e-4 * float(start.norm())
        close = 0.0 if not fast.families else 1e-6 if double else 0.05
        assert float((found - right).norm()) <= close * scale
    return "same" if fast.families else "fell back"


def fuzz(seconds: float, least: int, caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """Random modules until the time is over, but at least some."""
    seed = int(os.environ.get("ROTA_FUZZ", random.randrange(2**32)))
    print(f"seed {seed}: to repeat it, set ROTA_FUZZ={seed}")
    counted, end, number = Counter[str](), time.monotonic() + seconds, 0
    while number < least or time.monotonic() < end:
        try:
            counted[one(seed + number, caplog)] += 1
        except BaseException as error:
            error.add_note(f"the module of ROTA_FUZZ={seed + number}")
            raise
        number += 1
    print(number, "modules:", dict(counted))
    return counted


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "stacks"])
def test_modules_at_random(
    native: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_NATIVE", native)
    assert fuzz(0, 4, caplog).total() == 4


@pytest.mark.faults
@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "stacks"])
def test_modules_at_random_for_two_minutes(
    native: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_NATIVE", native)
    counted = fuzz(120, 40, caplog)
    assert counted["same"] > 5
    assert counted["fell back"] > 5
