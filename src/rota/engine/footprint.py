"""How much memory local training takes on a client's device, counted on the network itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rota.engine.optimisers import fresh
from rota.plan import Task


class Footprint(NamedTuple):
    """Bytes of training: a fixed number, and a number per example in a mini-batch."""

    fixed: float
    example: float

    def of(self, batch: float) -> float:
        """Bytes of training with mini-batches of this size."""
        return self.fixed + batch * self.example


def footprint(task: Task, build: Callable[[], nn.Module], x: Tensor) -> Footprint:
    """The bytes that training a network takes; x holds any example.

    The fixed part is the weights, their gradients, and the local optimiser's moments. The part of
    each example is what the forward pass saves for the backward pass.
    """
    # BatchNorm may refuse to train on a single example
    pair = x[:1].repeat(2, *[1] * (x.dim() - 1))
    try:
        module = build().train().to("meta")
        saved = _saved(module, pair.to("meta"))
    except Exception:  # the forward pass needs values, or makes tensors on a real device
        module = build().train()
        saved = _saved(module, pair)
    params = sum(each.nbytes for each in module.parameters())
    buffers = sum(each.nbytes for each in module.buffers())
    return Footprint((2 + moments(task)) * params + buffers, saved / 2)


def moments(task: Task) -> int:
    """How many numbers the local optimiser remembers per parameter."""
    probe = nn.Parameter(torch.zeros(2))
    optimiser = fresh(task, 1, [probe])
    probe.grad = torch.zeros(2)
    optimiser.step()
    remembered = optimiser.state[probe].values()
    return sum(isinstance(each, Tensor) and each.shape == probe.shape for each in remembered)


def _saved(module: nn.Module, x: Tensor) -> float:
    """The bytes that a forward pass saves for the backward pass, without the weights."""
    weights = {id(each) for each in module.parameters()}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights and not isinstance(tensor, nn.Parameter):
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in weights:
                found[id(base)] = base  # several operators may save one tensor
        return tensor

    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, _same):
        module(x)
    return float(sum(each.nbytes for each in found.values()))


def _same(tensor: Tensor) -> Tensor:
    return tensor
