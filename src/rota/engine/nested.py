"""Special ways to train parts of models: FjORD's nested mini-batches, HeteroFL's scaled layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from rota import rng
from rota.arrays import Array
from rota.submodel.cut import Cut

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
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        given = {name: self._slice(name, tensor) for name, tensor in tensors.items()}
        outputs: Tensor = functional_call(self.small.train(), given, (x,))
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in self.indices:
                    axes = [np.arange(n) for n in buffer.shape]
                    for axis, index in self.indices[name].items():
                        axes[axis] = index.numpy()
                    buffer[np.ix_(*axes)] = given[name]
        return outputs

    def _slice(self, name: str, tensor: Tensor) -> Tensor:
        for axis, index in self.indices.get(name, {}).items():
            tensor = tensor.index_select(axis, index.to(tensor.device))
        return tensor


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
