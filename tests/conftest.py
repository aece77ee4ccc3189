"""Small federations and networks that many tests share."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch
from torch import nn

import rota
from rota.data.federation import Federation
from rota.engine import ENGINES

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell without job control ignores Ctrl-C for what it starts in the background, and so would
    # all processes that tests start and interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)


def federation(
    sizes: list[int], classes: int = 3, features: int = 4, seed: int = 0, own_test: bool = False
) -> Federation:
    """Gaussian blobs, dealt to clients of the given sizes."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(classes, features)) * 2

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = generator.integers(classes, size=n)
        return (centres[y] + generator.normal(size=(n, features))).astype(np.float32), y

    test = [draw(10) for _ in sizes] if own_test else draw(60)
    return rota.from_clients([draw(n) for n in sizes], test, classes=classes, name="blobs")


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Dropout and BatchNorm in one: everything that has a state or a stream of its own."""
    return nn.Sequential(
        nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, classes)
    )


@pytest.fixture
def blobs() -> Federation:
    return federation([5, 12, 20, 31, 8, 17])


HERE = [name for name in ENGINES if name != "flower"]
"""The engines that train in this process."""
