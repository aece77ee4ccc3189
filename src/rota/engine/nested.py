"""Special ways to train parts of models: FjORD's nested mini-batches, HeteroFL's scaled layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from rota import rng
from rota.arrays import Array
from rota.plan import Task
from rota.submodel.choice import NESTED as NESTED
from rota.submodel.cut import Cut

if TYPE_CHECKING:
    from rota.engine.sequential import Net

Indices = dict[str, dict[int, Tensor]]
"""Per tensor: the indices of each axis that a part has."""


def scale(small: nn.Module, whole: nn.Module) -> nn.Module:
    """Divide the outputs of layers that lost units by the share that is left, in training alone."""
    pairs = zip(small.modules(), whole.modules(), strict=True)
    for part, before in pairs:
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            left = len(part.weight) / len(before.weight)  # type: ignore[arg-type]
            if left < 1:
                part.register_forward_hook(_divide(left))
    return small


def _divide(left: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output / left if module.training else output

    return hook


class Nested:
    """A narrower part that trains inside of a wider one: it computes with slices of its tensors.

    So gradients reach the wider part's own parameters, and are 0 where the narrower part has none.
    Running statistics are written back.
    """

    def __init__(self, small: nn.Module, cut: Cut, module: nn.Module, own: Cut | None) -> None:
        self.small, self.module = small, module
        self.indices = cut.indices if own is None else _inside(cut.indices, own.indices)

    def __call__(self, x: Tensor) -> Tensor:
        """The narrower part's outputs."""
        given = {name: self._slice(name, each) for name, each in self.module.named_parameters()}
        # autograd refuses buffers that another pass changes before this one's gradients are taken
        for name, buffer in self.module.named_buffers():
            given[name] = self._slice(name, buffer).clone()
        outputs: Tensor = functional_call(self.small.train(), given, (x,))
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                axes = [np.arange(n) for n in buffer.shape]
                for axis, index in self.indices.get(name, {}).items():
                    axes[axis] = index.numpy()
                buffer[np.ix_(*axes) if axes else ()] = given[name]
        return outputs

    def _slice(self, name: str, tensor: Tensor) -> Tensor:
        for axis, index in self.indices.get(name, {}).items():
            tensor = tensor.index_select(axis, index.to(tensor.device))
        return tensor


class Taught(Nested):
    """A narrower part that learns from the wider one, which learns from the same mini-batch."""

    def __call__(self, x: Tensor) -> Tensor:
        """The narrower part's outputs; the wider part's are kept for the loss."""
        outputs = super().__call__(x)
        self.wide: Tensor = self.module(x)
        return outputs


def inside(how: str, small: Net, cut: Cut, own: Net, mine: Cut | None) -> tuple[Nested, float]:
    """The forward pass of a narrower part inside of a row's own, and its FLOPs per example."""
    if how == "distilled":
        return Taught(small.module, cut, own.module, mine), small.flops + own.flops
    return Nested(small.module, cut, own.module, mine), small.flops


def loss_of(forward: Callable[[Tensor], Tensor], outputs: Tensor, y: Tensor, task: Task) -> Tensor:
    """A mini-batch's loss, from what its forward pass returned.

    With distillation it is the wider part's loss, and the cross-entropy of the narrower part's
    outputs with the wider part's probabilities, through which no gradient flows.
    """
    outputs = _full(outputs)
    if not isinstance(forward, Taught):
        return task.loss(outputs, y).mean()
    wide = _full(forward.wide)
    return task.loss(wide, y).mean() + F.cross_entropy(outputs, wide.detach().softmax(1))


def _full(outputs: Tensor) -> Tensor:
    """Outputs of a pass in lower precision in single precision; the loss is computed in it."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _inside(narrow: Indices, wide: Indices) -> Indices:
    """Where the narrower part's indices lie among those of the wider part."""
    found: Indices = {}
    for name, axes in narrow.items():
        for axis, index in axes.items():
            among = wide.get(name, {}).get(axis)
            if among is not None:
                index = torch.searchsorted(among, index)
            found.setdefault(name, {})[axis] = index
    return found


def draw(key: int, number: int, steps: int) -> Array:
    """Which of some parts each mini-batch trains."""
    return rng.generator(rng.key(key, "nested")).integers(number, size=steps)
