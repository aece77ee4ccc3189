"""How much arithmetic local training takes, counted on the network itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rota.plan import Task


def tasks_flops(tasks: list[Task]) -> list[float]:
    """`step_flops` of each task; tasks that share a network and data are counted once."""
    kinds = {(id(task.model), id(task.data)): task for task in tasks}
    flops = {kind: step_flops(task, task.federation.train.x) for kind, task in kinds.items()}
    return [flops[id(task.model), id(task.data)] for task in tasks]


def step_flops(task: Task, x: Tensor) -> float:
    """FLOPs of the forward and backward pass of one example: three times the forward pass.

    `x` holds any example.
    """
    return module_flops(task.build, x)


def module_flops(build: Callable[[], nn.Module], x: Tensor) -> float:
    """The same for a network that a function makes."""
    x = x[:1]
    # BatchNorm may refuse to take statistics of a single example
    pair = x.repeat(2, *[1] * (x.dim() - 1))
    try:  # on "meta" nothing is computed, and an LSTM shows its products
        return 1.5 * _count(build().eval().to("meta"), pair.to("meta"))
    except Exception:  # the forward pass needs values, or makes tensors on a real device
        return 1.5 * _count(build().eval(), pair)


def _count(module: nn.Module, x: Tensor) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return float(counter.get_total_flops())
