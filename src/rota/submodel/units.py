"""Which units a network has, and which numbers each of them owns.

A unit is what a sub-model keeps or drops as a whole: a convolution's filter, a hidden unit of a
linear layer or an LSTM, an embedding's dimension, a channel of a residual stream. It owns its
incoming weights, its bias, its normalisation and running statistics, and the input slices of all
layers that consume it. The network's inputs and outputs are never dropped.

`find_units` runs the network on an example and watches its operators. It needs no knowledge of the
network's modules, only of torch's operators: it labels all indices (labels.py), and each operator
ties some of them (rules.py). Then it runs a sub-model of half the width, and rejects a network
whose code does not follow.

A sub-model computes what the whole network computes with the dropped units *silenced*: all that
consume a dropped unit get 0 from it, after its normalisation and activation. Setting the input
slices that the unit owns to 0 does the same. LayerNorm and GroupNorm mix the units of an example:
there silenced units do not count in the means and variances either. BatchNorm treats each channel
by itself and needs no such clause. A silenced unit of an LSTM has the hidden state 0 at every step.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rota.arrays import Array
from rota.errors import BadInput, did_you_mean, first_line
from rota.submodel.cut import build, keep
from rota.submodel.labels import KEPT, SPLITS, Axes, Labels, Split, written
from rota.submodel.record import Op, Recording, Stopped, record, storage
from rota.submodel.rules import MOVES, POINTWISE, Unknown, apply


@dataclass(frozen=True)
class Slice:
    """What a layer's units own of one tensor: unit j owns the indices `index[j]` of an axis."""

    tensor: str
    axis: int
    index: Array


@dataclass(frozen=True)
class Layer:
    """Units of one kind: each owns equally many indices of the same tensors."""

    name: str
    size: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Units:
    """A network's droppable layers, in the order in which they are computed.

    `params` and `buffers` are the shapes of the network's tensors, in the order of the flat vectors
    of `Weights`. `even` holds groups of layers that must keep equally many units, such as the
    channels of each group of a GroupNorm.
    """

    layers: tuple[Layer, ...]
    params: dict[str, torch.Size]
    buffers: dict[str, torch.Size]
    even: tuple[tuple[int, ...], ...] = ()

    def counts(self, fraction: float | Sequence[float]) -> list[int]:
        """How many units the layers keep: floor(r n), and at least one. r may differ by layer."""
        sizes = [layer.size for layer in self.layers]
        fractions = [fraction] * len(sizes) if isinstance(fraction, int | float) else fraction
        if len(fractions) != len(sizes) or not all(0 <= r <= 1 for r in fractions):
            raise BadInput(
                f"the kept fraction is {fraction}: give a number from 0 to 1, or one for each of "
                f"the {len(sizes)} layers"
            )
        # the product of .57 and 100 is a little below 57
        return [max(1, math.floor(r * n + 1e-9)) for r, n in zip(fractions, sizes, strict=True)]


def find_units(module: nn.Module, x: Tensor, whole: Collection[str] = ()) -> Units:
    """Find a network's units. `x` is a batch of examples; `whole` names modules to leave alone.

    In a run `whole` is an attribute of the network, if it has one.
    """
    try:
        module, x = copy.deepcopy(module).cpu(), x.cpu()
    except RuntimeError as error:  # torch's own words, about tensors that were computed
        raise BadInput(f"the network cannot be copied: {first_line(error)}") from error
    names = [name for name, _ in module.named_modules()]
    for name in whole:
        if name not in names:
            raise BadInput(f"the module '{name}' is unknown; {did_you_mean(name, names)}")
    x = x[:2] if len(x) > 1 else torch.cat([x, x])  # BatchNorm does not train on one example
    passes = {train: record(module, x, train, whole) for train in (True, False)}
    mistake: BadInput | None = None
    without: Units | None = None
    for split in SPLITS:
        found = _analyse(module, passes, split)
        try:
            _check(module, x, whole, passes, found)
        except BadInput as error:
            mistake = mistake or error
        else:
            if found.units.layers:
                return found.units
            without = found.units
    if without is not None:
        return without
    assert mistake is not None
    raise mistake


class _Found(NamedTuple):
    units: Units
    labels: Labels
    own: dict[str, Axes]
    results: dict[int, list[Axes]]
    """The labels of the operators' results, by the operators' identities."""


def _analyse(module: nn.Module, passes: dict[bool, Recording], split: Split) -> _Found:
    """Give every index of every tensor a label, and tie labels by the operators of all passes."""
    params = {name: each.shape for name, each in module.named_parameters()}
    floats = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
    buffers = {name: each.shape for name, each in floats}
    labels = Labels(split)
    own = {name: labels.fresh(shape) for name, shape in (params | buffers).items()}
    results: dict[int, list[Axes]] = {}
    for each in passes.values():
        known = {id(each.tensors[name]): axes for name, axes in own.items()}
        views: dict[int, dict[int, Tensor]] = defaultdict(dict)

        def axes_of(value: Any, known: dict[int, Axes] = known) -> Any:
            if isinstance(value, Tensor):
                return known.get(id(value), Axes(np.zeros(n, np.int64) for n in value.shape))
            return [axes_of(item) for item in value] if type(value) in (list, tuple) else value

        for op in each.used():
            try:
                found = apply(labels, op, axes_of)
            except Unknown as error:
                raise BadInput(
                    f"{op.part} uses the operator '{error}', and how units pass through it is "
                    f"unknown: use another one{_leave(op.part)}"
                ) from None
            results[id(op)] = found
            for tensor, axes in zip(op.results, found, strict=True):
                before: list[Array] = known.get(id(tensor), Axes())
                known[id(tensor)] = axes
                same = views[storage(tensor)]
                if op.name not in MOVES and any(
                    ((a >= KEPT) & (b < KEPT)).any() for a, b in zip(axes, before, strict=False)
                ):
                    for view in same.values():
                        if view is not tensor:
                            known[id(view)] = written(labels, tensor, axes, view, known[id(view)])
                same[id(tensor)] = tensor
        for output in each.outputs:
            labels.keep(*axes_of(output))
    _even_recurrences(module, labels, own)
    layers, even = _layers(labels, own)
    return _Found(Units(tuple(layers), params, buffers, even), labels, own, results)


def _even_recurrences(module: nn.Module, labels: Labels, own: dict[str, Axes]) -> None:
    """nn.LSTM and nn.GRU have one size for all of their layers and directions."""
    for name, part in module.named_modules():
        if not isinstance(part, nn.RNNBase):
            continue
        for kind in ("weight_hh", "weight_hr"):
            found = [f"{name}.{n}".lstrip(".") for n, _ in part.named_parameters() if kind in n]
            if len(found) > 1:
                labels.even(np.concatenate([own[each][1] for each in found]), len(found))


def _layers(
    labels: Labels, own: dict[str, Axes]
) -> tuple[list[Layer], tuple[tuple[int, ...], ...]]:
    """The classes of tied labels, those with the same kinds of numbers together.

    Where a network divides an axis into equal blocks, units of different blocks are different
    layers. Where the blocks cannot stay equal, their units are kept.
    """
    while True:
        layers, number = _grouped(labels, own)
        even, uneven = set(), False
        for (_, blocks), axis in labels.blocks.items():
            rows = []
            for row in number[np.maximum(labels.root(axis), KEPT)].reshape(blocks, -1):
                counts = Counter(row.tolist())
                rows.append(
                    sorted((layers[i].size if i >= 0 else 0, n, i) for i, n in counts.items())
                )
            if len({tuple((size, n) for size, n, _ in row) for row in rows}) > 1:
                labels.keep(axis)
                uneven = True
            else:
                columns = zip(*([i for _, _, i in row] for row in rows), strict=True)
                even |= {tuple(sorted(set(column))) for column in columns}
        if not uneven:
            return layers, tuple(sorted(group for group in even if len(group) > 1))


def _grouped(labels: Labels, own: dict[str, Axes]) -> tuple[list[Layer], Array]:
    """The layers, and the number of each root's layer: -1 for those that are kept."""
    places = [(name, axis) for name, axes in own.items() for axis in range(len(axes))]
    raw = [own[name][axis] for name, axis in places]
    label, place = np.concatenate(raw), np.repeat(np.arange(len(raw)), [len(each) for each in raw])
    index = np.concatenate([np.arange(len(each)) for each in raw])
    root = labels.root(label)
    found = np.flatnonzero(root > KEPT)
    found = found[np.argsort(root[found], kind="stable")]
    starts = np.flatnonzero(np.diff(root[found], prepend=-1))

    blocks: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for key, (count, axis) in enumerate((n, axis) for (_, n), axis in labels.blocks.items()):
        for block, row in enumerate(labels.root(axis).reshape(count, -1).tolist()):
            for each in row:
                blocks[each][key, block] += 1

    kinds: dict[Any, list[Array]] = defaultdict(list)
    for entries in np.split(found, starts[1:]) if len(found) else []:
        kind = place[entries].tobytes(), frozenset(blocks[int(root[entries[0]])].items())
        kinds[kind].append(entries)

    never = labels.clock + 1
    made = np.where(labels.made > 0, labels.made, never)
    drafts = []
    for units in kinds.values():
        rows = np.stack(units)  # one row per unit, one column per index that it owns
        first = int(np.argmin(made[label[rows[0]]]))  # the column of the tensor that makes the unit
        rows = rows[np.argsort(index[rows[:, first]])]
        when = int(made[label[rows[0, first]]])
        if len(rows) > 1 and when < never:  # every layer keeps one unit
            drafts.append((when, int(index[rows[0, first]]), first, rows))
    drafts.sort(key=lambda draft: draft[:2])

    layers, makers, number = [], [], np.full(len(labels.above), -1)
    for i, (_, _, first, rows) in enumerate(drafts):
        number[root[rows[:, 0]]] = i
        slices = tuple(
            Slice(places[each][0], places[each][1], index[rows[:, place[rows[0]] == each]])
            for each in dict.fromkeys(place[rows[0]].tolist())
        )
        layers.append(Layer("", len(rows), slices))
        makers.append((places[place[rows[0, first]]][0], index[rows[:, first]]))
    names = _names(makers)
    return [replace(layer, name=name) for layer, name in zip(layers, names, strict=True)], number


def _names(makers: list[tuple[str, Array]]) -> list[str]:
    """Name layers by the module that makes their units.

    A maker is a tensor and the indices of the units in it. Where a module makes several layers,
    they are named by their tensors, or by their ranges of one tensor.
    """
    tensors = [tensor for tensor, _ in makers]
    modules = [tensor.rpartition(".")[0] or tensor for tensor in tensors]
    names = []
    for module, (tensor, index) in zip(modules, makers, strict=True):
        name = module if modules.count(module) == tensors.count(tensor) else tensor
        range = f"[{index.min()}:{index.max() + 1}]" if tensors.count(tensor) > 1 else ""
        names.append(name + range)
    return names


def _check(
    module: nn.Module,
    x: Tensor,
    whole: Collection[str],
    passes: dict[bool, Recording],
    found: _Found,
) -> None:
    """Run a sub-model: each operator must give a result of the expected shape.

    Layers of one size keep different counts, so that layers that belong together are noticed if
    the labels do not say so.
    """
    units, labels = found.units, found.labels
    counts = _different_counts(units)
    kept = [
        np.arange(count) * layer.size // count
        for count, layer in zip(counts, units.layers, strict=True)
    ]
    small = build(module, keep(units, kept))
    gone = np.zeros(len(labels.above), bool)
    for layer, each in zip(units.layers, kept, strict=True):
        first = layer.slices[0]
        dropped = np.delete(first.index[:, 0], each)
        gone[labels.root(found.own[first.tensor][first.axis][dropped])] = True
    for train, recording in passes.items():
        try:
            other = record(small, x, train, whole)
        except Stopped as error:
            why = first_line(error.error)
            raise BadInput(
                f"{error.part} cannot run with fewer units ({why}){_sizes(error.part)}"
            ) from error
        pairs = zip(_compared(recording), _compared(other), strict=False)
        for (name, op), (same, smaller) in pairs:
            if name != same:
                raise BadInput(f"{op.part} runs other operators with fewer units{_sizes(op.part)}")
            if repr(_numbers(op)) != repr(_numbers(smaller)):
                raise BadInput(
                    f"{op.part} computes with its number of units ('{op.name}' with "
                    f"{_numbers(op)}): use a constant{_leave(op.part)}"
                )
            for axes, shape in zip(found.results.get(id(op), []), smaller.shapes, strict=False):
                expected = [
                    size if (axis < 0).any() else int((~gone[labels.root(axis)]).sum())
                    for axis, size in zip(axes, shape, strict=True)
                ]
                if expected != list(shape):
                    raise BadInput(
                        f"with fewer units, '{op.name}' in {op.part} has a result of shape "
                        f"{list(shape)} instead of {expected}{_sizes(op.part)}"
                    )


def _different_counts(units: Units) -> list[int]:
    """About half of each layer; layers of one size get different counts where they may."""
    group = list(range(len(units.layers)))
    for even in units.even:
        merged = {group[i] for i in even}
        group = [min(merged) if each in merged else each for each in group]
    taken: Counter[int] = Counter()
    counts: dict[int, int] = {}
    for each, layer in zip(group, units.layers, strict=True):
        if each not in counts:
            n = layer.size
            counts[each] = 2 + (n // 2 - 2 + taken[n]) % (n - 2) if n > 2 else 1
            taken[n] += 1
    return [counts[each] for each in group]


def _compared(recording: Recording) -> list[tuple[str, Op]]:
    """The operators but copies: whether a reshape copies depends on strides as well as on sizes."""
    skip = {"clone", "_to_copy", "alias"}
    same = {"_unsafe_view": "view", "_reshape_copy": "view"}
    return [(same.get(op.name, op.name), op) for op in recording.ops if op.name not in skip]


def _numbers(op: Op) -> list[float]:
    """The numbers that an operator computes with; those of other operators may be sizes."""
    pointwise = op.name in POINTWISE or torch.Tag.pointwise in op.func.tags
    kinds = (int, float) if pointwise else (float,)
    return [each for each in tree_leaves((op.args, op.kwargs)) if type(each) in kinds]


def _sizes(part: str) -> str:
    return f": let it take its sizes from its inputs and weights{_leave(part)}"


def _leave(part: str) -> str:
    """Advice to leave a module as it is; none if it is the network itself."""
    name = part.split("'")[1] if "'" in part else ""
    return f", or leave it as it is with the network's attribute whole=[{name!r}]" if name else ""
