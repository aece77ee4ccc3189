"""Which units a part of a given width consists of: federated dropout in its variants.

All clients of one width hold the same part in a round. So parts are few, rows of one width can be
trained together, and the estimator knows the share of the data that could hold each scalar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.plan import Model, State
from rota.submodel.units import Layer, Units

NESTED = ("nested", "distilled")
"""The ways to train in which a mini-batch may train a narrower part than the row's own."""


class Wanted(NamedTuple):
    """A part that is wanted: of which model, how wide, and in which round."""

    number: int
    model: Model
    units: Units
    width: float
    now: int

    @property
    def counts(self) -> list[int]:
        """How many units each layer keeps."""
        return self.units.counts(self.width)


class Choice(Protocol):
    """Decides which units are kept. A value: what it learns is in the state.

    A choice may have an attribute `trains`, which says how its parts are trained:

    - "plain": as any network (without the attribute, too)
    - "nested": each mini-batch trains a part drawn from all that are not wider than the row's own,
      each as likely as the others. A narrower part must be a part of the wider ones.
    - "distilled": the same, and where a mini-batch trains a narrower part, the row's own part
      trains on it, too, and its probabilities are the narrower part's targets
    - "scaled": during training the outputs of every linear layer and convolution that lost units
      are divided by the share of its units that is left
    """

    def init(self, units: list[Units]) -> State:
        """The state before the first round; `units` are those of each model."""

    def keep(self, state: State, wanted: Wanted, generator: np.random.Generator) -> list[Array]:
        """The units that each layer keeps, in ascending order: wanted.counts of them."""


@dataclass(frozen=True)
class Ordered:
    """Ordered dropout: the first units of every layer (FjORD, HeteroFL; FLuID's baseline)."""

    sees: ClassVar[frozenset[str]] = frozenset()

    def init(self, units: list[Units]) -> State:
        return {}

    def keep(self, state: State, wanted: Wanted, generator: np.random.Generator) -> list[Array]:
        return [np.arange(count) for count in wanted.counts]


@dataclass(frozen=True)
class Fjord(Ordered):
    """FjORD: ordered parts, and each mini-batch trains one that is not wider than the client's own.

    A mini-batch's width is drawn from the widths that clients have in this round, up to the
    client's own. With `distil`, the client's own part learns from every mini-batch, and narrower
    parts learn its probabilities instead of the labels (FjORD's self-distillation).
    """

    distil: bool = False

    @property
    def trains(self) -> str:
        return "distilled" if self.distil else "nested"


@dataclass(frozen=True)
class HeteroFl(Ordered):
    """HeteroFL: ordered parts whose smaller layers are scaled up in training.

    Its static batch norm is a property of the network. Its masked cross-entropy is left out.
    """

    trains: ClassVar[str] = "scaled"


@dataclass(frozen=True)
class Random(Ordered):
    """Random federated dropout: random units of every layer, drawn anew in every round."""

    def keep(self, state: State, wanted: Wanted, generator: np.random.Generator) -> list[Array]:
        kept = []
        for layer, count in zip(wanted.units.layers, wanted.counts, strict=True):
            kept.append(np.sort(generator.permutation(layer.size)[:count]))
        return kept


@dataclass(frozen=True)
class Rolling(Ordered):
    """A rolling window over the units, which moves by one unit per round (FedRolex)."""

    def keep(self, state: State, wanted: Wanted, generator: np.random.Generator) -> list[Array]:
        kept = []
        for layer, count in zip(wanted.units.layers, wanted.counts, strict=True):
            kept.append(np.sort((wanted.now - 1 + np.arange(count)) % layer.size))
        return kept


@dataclass(frozen=True)
class Importance(Ordered):
    """The units with the largest weights, by the sum of the magnitudes that each owns.

    FIARSE keeps the largest parameters; here whole units are kept, so that the part is a smaller
    model.
    """

    def keep(self, state: State, wanted: Wanted, generator: np.random.Generator) -> list[Array]:
        size = split(wanted.units, wanted.model.params.abs())
        kept = []
        for layer, count in zip(wanted.units.layers, wanted.counts, strict=True):
            score = per_unit(layer, size, "sum").cpu().numpy()
            kept.append(np.sort(np.argsort(-score, kind="stable")[:count]))
        return kept


def split(units: Units, flat: Tensor) -> dict[str, Tensor]:
    """A flat vector of parameters as named tensors (views)."""
    pieces = flat.split([shape.numel() for shape in units.params.values()])
    named = zip(units.params.items(), pieces, strict=True)
    return {name: piece.view(shape) for (name, shape), piece in named}


def per_unit(layer: Layer, values: dict[str, Tensor], how: str) -> Tensor:
    """One number per unit of a layer: the "sum", "amax" or "amin" of what it owns."""
    found = []
    for each in layer.slices:
        if each.tensor in values:
            value = values[each.tensor].movedim(each.axis, 0)
            by_index = getattr(value.reshape(len(value), -1), how)(dim=1)
            index = torch.as_tensor(each.index, device=by_index.device)
            found.append(getattr(by_index[index.view(layer.size, -1)], how)(dim=1))
    return getattr(torch.stack(found), how)(dim=0)  # type: ignore[no-any-return]
