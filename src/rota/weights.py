"""A model's state as two flat vectors, so that the server's arithmetic is vector arithmetic.

A model is `Weights(params, buffers)`: one float vector holds all parameters, and another one all
floating-point buffers, such as BatchNorm's running statistics. So the clients' updates are the rows
of a matrix, an estimate is a vector-matrix product, the norm of an update is the norm of a row, and
a memory of all clients' updates is one array. Integer buffers, such as BatchNorm's batch counter,
are neither trained nor shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Weights(NamedTuple):
    params: Tensor
    buffers: Tensor

    @property
    def nbytes(self) -> int:
        """What one transfer of the model weighs."""
        return self.params.nbytes + self.buffers.nbytes


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(t.detach().reshape(-1) for t in tensors)])


def read(module: nn.Module) -> Weights:
    """Copy a module's state out."""
    params = list(module.parameters())
    return Weights(_flat(params, params[0]), _flat([b for _, b in _buffers(module)], params[0]))


def _pieces(module: nn.Module, weights: Weights) -> Iterator[tuple[str, Tensor, Tensor]]:
    """A module's tensors: the name of each, itself, and its part of a state (a view)."""
    for flat, pairs in (
        (weights.params, list(module.named_parameters())),
        (weights.buffers, _buffers(module)),
    ):
        pieces = flat.split([t.numel() for _, t in pairs])
        for (name, tensor), piece in zip(pairs, pieces, strict=True):
            yield name, tensor, piece.view_as(tensor)


def load(module: nn.Module, weights: Weights) -> None:
    """Copy a state into a module."""
    with torch.no_grad():
        for _, tensor, piece in _pieces(module, weights):
            tensor.copy_(piece)


def named(module: nn.Module, weights: Weights) -> dict[str, Tensor]:
    """The state as named tensors (views), as in the module's own state_dict."""
    return {name: piece for name, _, piece in _pieces(module, weights)}
