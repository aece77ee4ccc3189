"""Sub-models: which units they keep, and where their numbers lie in the whole model's vectors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rota.arrays import Array
from rota.errors import BadInput
from rota.submodel.rules import by_group
from rota.weights import Weights

if TYPE_CHECKING:
    from rota.submodel.units import Units


@dataclass(frozen=True)
class Cut:
    """A sub-model: the units that each layer keeps, in ascending order.

    Two cuts that keep equally many units of each layer are modules of the same shape.
    """

    units: Units
    kept: tuple[Array, ...]

    @cached_property
    def indices(self) -> dict[str, dict[int, Tensor]]:
        """Per tensor that is smaller: the indices that are left of each axis."""
        left: dict[tuple[str, int], Array] = {}
        shapes = self.units.params | self.units.buffers
        for layer, kept in zip(self.units.layers, self.kept, strict=True):
            gone = np.ones(layer.size, bool)
            gone[kept] = False
            for each in layer.slices:
                place = each.tensor, each.axis
                mask = left.setdefault(place, np.ones(shapes[each.tensor][each.axis], bool))
                mask[each.index[gone]] = False
        out: dict[str, dict[int, Tensor]] = {}
        for (name, axis), mask in left.items():
            out.setdefault(name, {})[axis] = torch.from_numpy(np.flatnonzero(mask))
        return out

    @cached_property
    def places(self) -> Tensor:
        """Where the sub-model's parameters lie in the vector of the whole model's, ascending."""
        return _places(self.units.params, self.indices)

    @cached_property
    def buffer_places(self) -> Tensor:
        """Where the sub-model's buffers lie in the vector of the whole model's, ascending."""
        return _places(self.units.buffers, self.indices)


@dataclass(frozen=True, eq=False)
class SubModel:
    """A part of a model that some clients hold in a round.

    `cut` has the units that it keeps. `share` is the share of the model's data whose clients hold
    this part in this round, drawn or not; clients of width 0 do not count.
    """

    model: int
    width: float
    share: float
    cut: Cut

    @property
    def places(self) -> Tensor:
        """Where its parameters lie in the model's flat vector."""
        return self.cut.places

    @property
    def buffer_places(self) -> Tensor:
        """Where its buffers lie in the model's flat vector."""
        return self.cut.buffer_places

    def of(self, weights: Weights) -> Weights:
        """The part of a model's weights, or of rows of weights."""
        return extract(weights, self.cut)


def keep(units: Units, kept: Sequence[Array]) -> Cut:
    """The sub-model that keeps the given units of each layer."""
    if len(kept) != len(units.layers):
        raise BadInput(f"the cut has {len(kept)} layers: give kept units for {len(units.layers)}")
    cut = Cut(units, tuple(np.asarray(each) for each in kept))
    for layer, each in zip(units.layers, cut.kept, strict=True):
        fine = each.ndim == 1 and len(each) and each.dtype.kind in "iu"
        if not fine or each[0] < 0 or each[-1] >= layer.size or (np.diff(each) <= 0).any():
            raise BadInput(
                f"the kept units of layer '{layer.name}' are wrong: give at least one of the "
                f"numbers 0 to {layer.size - 1}, in ascending order and without repeats"
            )
    for group in units.even:
        if len({len(cut.kept[i]) for i in group}) > 1:
            names = ", ".join(f"'{units.layers[i].name}'" for i in group)
            raise BadInput(f"the layers {names} must keep equally many units")
    return cut


def extract(weights: Weights, cut: Cut) -> Weights:
    """The sub-model's part of the whole model's state, or of rows of states."""
    params, buffers = weights
    return Weights(
        params.index_select(-1, cut.places.to(params.device)),
        buffers.index_select(-1, cut.buffer_places.to(buffers.device)),
    )


def scatter(whole: Weights, part: Weights, cut: Cut) -> Weights:
    """The whole model's state with the sub-model's numbers in their places."""
    params, buffers = whole
    return Weights(
        params.index_copy(-1, cut.places.to(params.device), part.params),
        buffers.index_copy(-1, cut.buffer_places.to(buffers.device), part.buffers),
    )


def add_at(whole: Tensor, places: Tensor | None, values: Tensor | float) -> None:
    """Add numbers to a vector in place: at some places, none of which occurs twice, or at all."""
    if places is None:
        whole += values
        return
    each = torch.as_tensor(values, dtype=whole.dtype, device=whole.device).expand(len(places))
    whole.scatter_add_(0, places.to(whole.device), each)  # several times faster than whole[places]


def build(module: nn.Module, cut: Cut) -> nn.Module:
    """A copy of the module that has the kept units alone, and their weights."""
    memo: dict[int, Tensor] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in cut.indices:
            smaller = tensor.detach()
            for axis, left in cut.indices[name].items():
                smaller = smaller.index_select(axis, left.to(tensor.device))
            if isinstance(tensor, nn.Parameter):
                smaller = nn.Parameter(smaller, tensor.requires_grad)
            memo[id(tensor)] = smaller  # deepcopy takes it for the tensor's copy
    small = copy.deepcopy(module, memo)
    for part in small.modules():
        _resize(part)
    return small


def _resize(part: nn.Module) -> None:
    """Set the sizes that torch's own layers remember to those of their tensors."""
    weight = getattr(part, "weight", None)
    shape = weight.shape if isinstance(weight, Tensor) else None
    if isinstance(part, nn.RNNBase):
        _resize_recurrence(part)
    elif isinstance(part, nn.RNNCellBase):
        part.hidden_size, part.input_size = part.weight_hh.shape[1], part.weight_ih.shape[1]
    elif isinstance(part, nn.modules.batchnorm._NormBase):
        known = part.running_mean if shape is None else weight
        part.num_features = part.num_features if known is None else len(known)
    elif shape is None:
        return
    elif isinstance(part, nn.Linear):
        part.out_features, part.in_features = shape
    elif isinstance(part, nn.Bilinear):
        part.out_features, part.in1_features, part.in2_features = shape
    elif isinstance(part, nn.Embedding):
        part.embedding_dim = shape[1]
    elif isinstance(part, nn.modules.conv._ConvNd):
        _resize_convolution(part)
    elif isinstance(part, nn.GroupNorm):
        if by_group(part.num_groups, part.num_channels // part.num_groups):
            part.num_groups = shape[0] * part.num_groups // part.num_channels
        part.num_channels = shape[0]
    elif isinstance(part, nn.LayerNorm):
        part.normalized_shape = tuple(shape)
    elif isinstance(part, nn.PReLU):
        part.num_parameters = shape[0]


def _resize_recurrence(part: nn.RNNBase) -> None:
    tensors = dict(part.named_parameters(recurse=False))
    gates = {"LSTM": 4, "GRU": 3}.get(part.mode, 1)
    part.input_size = tensors["weight_ih_l0"].shape[1]
    part.hidden_size = tensors["weight_ih_l0"].shape[0] // gates
    part.proj_size = len(tensors["weight_hr_l0"]) if part.proj_size else 0


def _resize_convolution(part: nn.modules.conv._ConvNd) -> None:
    first, second = part.weight.shape[:2]
    size = part.in_channels // part.groups
    if part.groups > 1 and (part.transposed or by_group(part.groups, size)):
        before = part.in_channels if part.transposed else part.out_channels
        part.groups = part.groups * first // before
    if part.transposed:
        part.in_channels, part.out_channels = first, second * part.groups
    else:
        part.out_channels, part.in_channels = first, second * part.groups


def _places(shapes: dict[str, torch.Size], indices: dict[str, dict[int, Tensor]]) -> Tensor:
    sizes = {
        name: [len(indices.get(name, {}).get(i, range(n))) for i, n in enumerate(shape)]
        for name, shape in shapes.items()
    }
    places = torch.empty(sum(map(prod, sizes.values())), dtype=torch.int64)
    start, filled = 0, 0
    for name, shape in shapes.items():
        count = prod(sizes[name])
        out = places[filled : filled + count].view(sizes[name])
        _fill(out, shape, indices.get(name, {}), start)
        start, filled = start + shape.numel(), filled + count
    return places


def _fill(out: Tensor, shape: torch.Size, left: dict[int, Tensor], start: int) -> None:
    """Write the places of what is left of a tensor that begins at `start`."""
    places = torch.tensor(start)
    for axis in reversed(range(len(shape))):
        each = left.get(axis, torch.arange(shape[axis])) * prod(shape[axis + 1 :])
        each = each.view(-1, *[1] * (len(shape) - axis - 1))
        places = torch.add(each, places, out=out if axis == 0 else None)
    if not shape:
        out.fill_(start)
