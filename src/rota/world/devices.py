"""The virtual clock: how long a client's row would take on its device, from a profile rather than from this machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rota import rng
from rota.arrays import Array
from rota.plan import Task


@dataclass(frozen=True)
class Devices:
    """The clients' devices: sustained speed in GFLOP/s, link in Mbit/s each way, and how unequal they are.

    `spread` is the sigma of a log-normal factor (median 1) on each client's speed and, independently, its link.
    The defaults are a mid-range phone on a home connection.
    """

    gflops: float = 5.0
    mbps: float = 20.0
    spread: float = 0.0

    def profile(self, clients: int, seed: int) -> tuple[Array, Array]:
        """Each client's FLOP/s and bytes/s."""
        generator = rng.generator(rng.key(seed, "devices"))
        factor = np.exp(self.spread * generator.standard_normal((2, clients)))
        return self.gflops * 1e9 * factor[0], self.mbps * 1e6 / 8 * factor[1]


def step_flops(task: Task, x: Tensor) -> float:
    """FLOPs of one example's forward and backward pass (three forward passes' worth), counted on the module itself; x is any one example."""
    x = x[:1]
    pair = x.expand(2, *x.shape[1:])  # of a single one BatchNorm may refuse to take statistics
    try:
        return 1.5 * _count(
            task.build().eval().to("meta"), pair.to("meta")
        )  # no arithmetic is done, and LSTMs show their products
    except (
        RuntimeError,
        NotImplementedError,
    ):  # a forward pass that makes tensors of its own on a real device
        return 1.5 * _count(task.build().eval(), pair)


def _count(module: nn.Module, x: Tensor) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return float(counter.get_total_flops())
