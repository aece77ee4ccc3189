"""What every channel must do with an update."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota import rng
from rota.testing.samplers import name

SIZES = (1, 7, 512, 1300)
DRAWS = 2000
Z = 5.0
"""A mean may be this many standard errors from what it should be."""


def check_channel(channel: Any) -> None:
    """Put a channel through all checks; AssertionError says what it did wrong.

    The expectation of what it decodes is checked only if `channel.unbiased` is true.
    """
    for size in SIZES:
        for dtype in (torch.float32, torch.float64):
            check_one(channel, update_of(size, dtype))
    if channel.unbiased:
        check_unbiased(channel)


def update_of(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An update with numbers of different magnitudes, and some zeros."""
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-3, 1, size, dtype=torch.float64)
    return (numbers * scale * (torch.arange(size) % 5 != 1)).to(dtype)


def through(channel: Any, update: Tensor, stream: int) -> Tensor:
    """An update as the server gets it."""
    found: Tensor = channel.decode(channel.encode(update, stream), stream, update)
    return found


def check_one(channel: Any, update: Tensor) -> None:
    """One update: bytes, shape, dtype, repetition, and that the client's own stays as it is."""
    me, before = name(channel), update.clone()
    sent = channel.encode(update, 3)
    assert torch.equal(update, before), f"{me} changes the update that it encodes"
    said = channel.nbytes(len(update), update.itemsize)
    used = sum(part.nbytes for part in sent.values())
    assert used == said, f"{me}.nbytes says {said} for {len(update)} numbers, but {used} travel"
    found = channel.decode(sent, 3, update)
    kind = (found.shape, found.dtype)
    assert kind == (update.shape, update.dtype), f"{me} decodes {kind} of {tuple(update.shape)}"
    assert torch.isfinite(found).all(), f"{me} decodes numbers that are not finite"
    assert torch.equal(found, through(channel, update, 3)), f"{me} depends on more than its stream"
    nothing = torch.zeros_like(update)
    assert torch.equal(through(channel, nothing, 3), nothing), f"{me} decodes an update from none"


def check_unbiased(channel: Any) -> None:
    """The mean of many decoded updates is the update, within its standard errors."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(30)
    update = signs * torch.linspace(0.2, 1, 60, dtype=torch.float64)  # nothing too rare to be seen
    streams = [rng.key(0, "check", draw) for draw in range(DRAWS)]
    found = np.stack([through(channel, update, stream).numpy() for stream in streams])
    error = found.std(axis=0, ddof=1) / DRAWS**0.5
    close = 1e-6 * float(update.abs().max())
    off = np.abs(found.mean(axis=0) - update.numpy()) > Z * error + close
    places = np.flatnonzero(off).tolist()
    assert not places, (
        f"{name(channel)} says that it is unbiased, but the mean of {DRAWS} decoded updates is "
        f"off at the numbers {places[:5]}"
    )
