"""How labels move through a network's operators: one rule per operator, or per kind of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.submodel.labels import ANY, KEPT, Axes, Labels
from rota.submodel.record import Op

Result = list[Array | None]
"""The labels of an operator's result; None stands for an axis whose indices are all kept."""


class Unknown(Exception):
    """No rule says how labels move through an operator."""


def apply(labels: Labels, op: Op, axes: Callable[[Any], Any]) -> list[Axes]:
    """The labels of an operator's results; `axes` puts labels in the place of tensors."""
    given = {arg.name: arg.default_value for arg in op.func._schema.arguments}
    given |= dict(zip(given, op.args, strict=False)) | op.kwargs
    given = {name: axes(value) for name, value in given.items()}
    flat = [each for value in given.values() for each in _flatten(value)]
    results = _results(labels, op, given, flat)
    while len(results) < len(op.shapes):
        results.append([None] * len(op.shapes[len(results)]))
    return [
        Axes(
            np.full(size, ANY) if size == 1 else np.full(size, KEPT) if axis is None else axis
            for axis, size in zip(result, shape, strict=True)
        )
        for result, shape in zip(results, op.shapes, strict=True)
    ]


def _results(labels: Labels, op: Op, given: dict[str, Any], flat: list[Axes]) -> list[Result]:
    name = op.name
    if name in UNIFORM:
        return [[np.full(size, ANY) for size in shape] for shape in op.shapes]
    labelled = any(axis.any() for each in flat for axis in each if len(axis) > 1)
    if not labelled and name != "expand":
        return []
    if op.whole or not op.shapes:
        for each in flat:
            labels.keep(*each)
        return []
    if name in RULES:
        return RULES[name](labels, *given.values())
    if "batch_norm" in name:
        return _batch_norm(labels, op, flat)
    if name in REDUCTIONS:
        return [_reduced(labels, given, op, free=name == "sum")] * len(op.shapes)
    if spatial := re.fullmatch(r".*(?:pool|pad|upsample_.*?)([123])d.*", name):
        return _spatial(labels, op, flat[0], int(spatial[1]))
    if name in ALONG:
        labels.keep(flat[0][given["dim"]])
        return [[*flat[0]] for _ in op.shapes]
    if name in MOVES:
        return _moved(labels, op, flat[0])
    if torch.Tag.pointwise in op.func.tags or name in POINTWISE:
        joined = _pointwise(labels, flat)
        return [[*joined] for shape in op.shapes if len(shape) == len(joined)]
    if any((axis > 0).any() for each in flat for axis in each):
        raise Unknown(name)
    return []


def _flatten(value: Any) -> list[Axes]:
    if isinstance(value, Axes):
        return [value]
    return [each for item in value for each in _flatten(item)] if type(value) is list else []


# --- operators that combine tensors ---


def _pointwise(labels: Labels, tensors: list[Axes]) -> list[Array]:
    """Element by element: what is combined is present together. Axes of size 1 are broadcast."""
    joined: list[Array] = []
    for back in range(1, max(map(len, tensors)) + 1):
        here = [each[-back] for each in tensors if len(each) >= back]
        size = max(map(len, here))
        axis = np.full(size, ANY)
        for each in here:
            if len(each) == size:
                axis = labels.tie(axis, each)
        joined.insert(0, axis)
    return joined


def _mm(labels: Labels, a: Axes, b: Axes, *_: Any) -> list[Result]:
    return _addmm(labels, None, a, b)


def _addmm(labels: Labels, bias: Axes | None, a: Axes, b: Axes, *_: Any) -> list[Result]:
    """A matrix product, batched or not: a's columns and b's rows are present together."""
    labels.tie(a[-1], b[-2])
    batch = _pointwise(labels, [Axes(a[:-2]), Axes(b[:-2])]) if len(a) > 2 else []
    out = Axes([*batch, labels.make(a[-2]), labels.make(b[-1])])
    return [[*_pointwise(labels, [out] if bias is None else [bias, out])]]


def _mv(labels: Labels, a: Axes, b: Axes) -> list[Result]:
    labels.tie(a[1], b[0])
    return [[labels.make(a[0])]]


def _dot(labels: Labels, a: Axes, b: Axes) -> list[Result]:
    labels.tie(a[0], b[0])
    return [[]]


def _linear(labels: Labels, x: Axes, weight: Axes, bias: Axes | None) -> list[Result]:
    labels.tie(x[-1], weight[1])
    out = labels.make(weight[0])
    return [[*x[:-1], out if bias is None else labels.tie(out, bias[0])]]


def by_group(groups: int, size: int) -> bool:
    """Whether the unit of a grouped layer is a whole group, or one channel of a group.

    Groups of `size` channels are units themselves where there are more of them than channels in
    one; depthwise convolutions are the extreme. Otherwise all groups keep equally many channels.
    """
    return groups >= size


def _convolution(
    labels: Labels, x: Axes, weight: Axes, bias: Axes | None, *settings: Any
) -> list[Result]:
    *_, transposed, _, groups = settings
    labels.keep(*x[2:], *weight[2:])
    given, out = x[1], weight[1 if transposed else 0]
    if groups == 1:
        labels.tie(given, weight[0 if transposed else 1])
    elif transposed or by_group(groups, len(given) // groups):
        group = _one_label(labels, given.reshape(groups, -1))
        labels.keep(weight[1])
        labels.tie(weight[0].reshape(groups, -1), group)
        if transposed:
            out = np.repeat(group[:, 0], len(out))
    else:
        labels.tie(given.reshape(groups, -1), weight[1][None])
        labels.even(out, groups)
    out = labels.make(out)
    out = out if bias is None else labels.tie(out, bias[0])
    return [[x[0], out, *[None] * (len(x) - 2)]]


def _one_label(labels: Labels, grid: Array) -> Array:
    """Tie the labels of every row of a grid; returns them as a column."""
    labels.tie(grid, grid[:, :1])
    return grid[:, :1]


def _embedding(labels: Labels, weight: Axes, indices: Axes, *_: Any) -> list[Result]:
    labels.keep(weight[0])
    return [[*indices, labels.make(weight[1])]]


def _attention(labels: Labels, query: Axes, key: Axes, value: Axes, *_: Any) -> list[Result]:
    """softmax(q k' / sqrt(size)) v: the size is in the formula, so it is kept."""
    labels.keep(query[3], key[3], value[3])
    heads = labels.tie(labels.tie(query[1], key[1]), value[1])
    labels.tie(key[2], value[2])
    rows = [query[0], heads, query[2]]
    return [[*rows, value[3]], [*rows]]


# --- normalisation ---


def _batch_norm(labels: Labels, op: Op, flat: list[Axes]) -> list[Result]:
    x, *others = flat
    channels = x[1]
    for each in others:
        channels = labels.tie(channels, each[0])
    statistics: list[Result] = [
        [channels] if shape == (len(channels),) else [None] * len(shape) for shape in op.shapes[1:]
    ]
    return [[x[0], channels, *x[2:]], *statistics]


def _group_norm(
    labels: Labels, x: Axes, weight: Axes | None, bias: Axes | None, *sizes: Any
) -> list[Result]:
    """Without weights the layer's size is in its settings alone, and nothing is dropped."""
    *_, groups, _ = sizes
    channels, group = x[1], None
    if weight is None:
        labels.keep(channels)
    for each in (weight, bias):
        channels = channels if each is None else labels.tie(channels, each[0])
    if by_group(groups, len(channels) // groups):
        group = _one_label(labels, channels.reshape(groups, -1))[:, 0]
    elif groups > 1:
        labels.even(channels, groups)
    return [[x[0], channels, *x[2:]], [x[0], group], [x[0], group]]


def _layer_norm(
    labels: Labels, x: Axes, shape: list[int], weight: Axes | None, *others: Any
) -> list[Result]:
    """Without weights the layer's size is in its settings alone, and nothing is dropped."""
    out, start = list(x), len(x) - len(shape)
    for i in range(len(shape)):
        if weight is None:
            labels.keep(x[start + i])
        for each in (weight, *others):
            if isinstance(each, Axes):
                out[start + i] = labels.tie(out[start + i], each[i])
    return [[*out]]


# --- operators along an axis ---


def _reduced(labels: Labels, given: dict[str, Any], op: Op, free: bool) -> Result:
    """A sum over units is one over the kept units. Other reductions would change: they keep all."""
    x = next(value for value in given.values() if isinstance(value, Axes))
    dim = given.get("dim")
    dims = range(len(x)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    gone = {each % len(x) for each in dims} if x else set()
    if not free:
        labels.keep(*(x[axis] for axis in gone))
    stay = given.get("keepdim", False)
    return [None if i in gone else axis for i, axis in enumerate(x) if stay or i not in gone]


def _spatial(labels: Labels, op: Op, x: Axes, dims: int) -> list[Result]:
    """Pooling, padding and resampling work within a channel."""
    labels.keep(*x[-dims:])
    return [[*x[:-dims], *[None] * dims] for _ in op.shapes]


def _pad(labels: Labels, x: Axes, pads: list[int], *_: Any) -> list[Result]:
    """Constants in front of and behind an axis: indices of their own, which are kept."""
    out: Result = [*x]
    for i, (before, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        axis = x[-1 - i]
        if before < 0 or behind < 0:
            labels.keep(axis)
            out[-1 - i] = np.full(len(axis) + before + behind, KEPT)
        elif before or behind:
            out[-1 - i] = np.pad(np.maximum(axis, KEPT), (before, behind))
    return [out]


def _cat(labels: Labels, tensors: list[Axes], dim: int) -> list[Result]:
    parts = [each for each in tensors if len(each) > 1 or each[0].size]
    dim %= len(parts[0])
    out: Result = [*_pointwise(labels, [Axes(each[:dim] + each[dim + 1 :]) for each in parts])]
    out.insert(dim, np.maximum(np.concatenate([each[dim] for each in parts]), KEPT))
    return [out]


def _stack(labels: Labels, tensors: list[Axes], dim: int) -> list[Result]:
    out: Result = [*_pointwise(labels, tensors)]
    out.insert(dim % (len(out) + 1), None)
    return [out]


def _glu(labels: Labels, x: Axes, dim: int) -> list[Result]:
    half = len(x[dim]) // 2
    out: Result = [*x]
    out[dim] = labels.tie(x[dim][:half], x[dim][half:])
    return [out]


# --- operators that move numbers ---


def _moved(labels: Labels, op: Op, x: Axes) -> list[Result]:
    """Run the operator on each axis's indices, and see where they come out."""
    results: list[Result] = [[None] * len(shape) for shape in op.shapes]
    uniform = any((axis < 0).any() for axis in x if len(axis) > 1)
    for i, axis in enumerate(x):
        if len(axis) == 1 or not (uniform or axis.any()):
            continue
        ones = [1] * len(x)
        indices = torch.arange(len(axis)).view(*ones[:i], -1, *ones[i + 1 :])
        indices = indices.expand([len(each) for each in x])
        if op.name.endswith("view"):  # some views of real numbers are none of expanded indices
            moved = indices.reshape(op.shapes[0])
        else:
            moved = op.func(indices, *op.args[1:], **op.kwargs)
        pieces = [moved] if isinstance(moved, Tensor) else moved
        for out, result in zip(pieces, results, strict=True):
            if MOVES[op.name] != "view":
                _check_part(labels, axis, out, slices=MOVES[op.name] == "slice")
            _place(labels, axis, out, result)
    if op.name == "expand":  # new axes, and those that had size 1, repeat one value
        old = [1] * (len(results[0]) - len(x)) + [len(axis) for axis in x]
        for i, size in enumerate(old):
            if size == 1:
                results[0][i] = np.full(op.shapes[0][i], ANY)
    return results


def _varying(out: Tensor) -> list[int]:
    """The axes along which a tensor's numbers differ."""
    axes = [i for i in range(out.dim()) if out.shape[i] > 1 and out.stride(i) != 0]
    if len(axes) == 1:
        return axes
    return [i for i in axes if not torch.equal(out.narrow(i, 0, 1).expand_as(out), out)]


def _check_part(labels: Labels, axis: Array, out: Tensor, slices: bool) -> None:
    """A part of an axis has to be one of several equal blocks; else the whole axis is kept."""
    varying = _varying(out)
    taken = out.flatten().unique() if len(varying) != 1 else _line(out, varying[0])
    n, count = len(axis), len(taken)
    first = int(taken[0]) if count else 0
    if not torch.equal(taken, torch.arange(first, first + count)):
        labels.keep(axis)
    elif count < n and slices and count > 1 and n % count == 0 and first % count == 0:
        labels.even(axis, n // count)
    elif count < n:
        labels.keep(axis)


def _line(out: Tensor, along: int) -> Tensor:
    return out[tuple(slice(None) if i == along else 0 for i in range(out.dim()))]


def _place(labels: Labels, axis: Array, out: Tensor, result: Result) -> None:
    """Write an axis's labels to the axis of the result along which its indices vary."""
    varying = _varying(out)
    if not varying:
        return
    grid = out[tuple(slice(None) if i in varying else 0 for i in range(out.dim()))]
    values = axis[grid.numpy()]
    if (values < 0).all():
        for k, i in enumerate(varying):
            result[i] = _merged(labels, result[i], np.full(values.shape[k], ANY))
        return
    roots = labels.root(values)
    differ = [k for k in range(values.ndim) if (roots != roots.take([0], axis=k)).any()] or [0]
    k = differ[-1 if labels.split == "inner" else 0]
    rows = np.moveaxis(values, k, 0).reshape(values.shape[k], -1)
    labels.tie(rows, rows[:, :1])
    i = varying[k]
    result[i] = _merged(labels, result[i], rows[:, 0])


def _merged(labels: Labels, old: Array | None, new: Array) -> Array:
    """Two axes become one: where both have units, those of the inner axis are kept."""
    if old is None:
        return new
    first, second = labels.root(old) > KEPT, labels.root(new) > KEPT
    labels.keep(new[first & second])
    return np.where(first, old, np.where(second, new, np.maximum(old, new)))


def _words(text: str) -> set[str]:
    return set(text.split())


UNIFORM = _words(
    """zeros ones full empty rand randn scalar_tensor empty_strided
    new_zeros new_ones new_full new_empty new_empty_strided"""
)
POINTWISE = _words(
    """_prelu_kernel hardswish bernoulli native_dropout log_sigmoid_forward floor_divide
    masked_fill fill zero copy _to_copy lift_fresh lift_fresh_copy detach alias rrelu_with_noise
    empty_like zeros_like ones_like full_like rand_like randn_like"""
)
"""Operators that work element by element without being tagged so by torch."""
REDUCTIONS = _words(
    """sum mean amax amin max min argmax argmin prod var std var_mean std_mean logsumexp
    linalg_vector_norm norm any all median"""
)
ALONG = _words("_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp sort")
MOVES = {
    **dict.fromkeys(
        _words(
            """view _unsafe_view _reshape_copy permute transpose t unsqueeze squeeze expand flip
            repeat pixel_shuffle pixel_unshuffle"""
        ),
        "view",
    ),
    **dict.fromkeys(
        _words(
            """slice select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind"""
        ),
        "slice",
    ),
    **dict.fromkeys(_words("index index_select gather roll"), "index"),
}
RULES: dict[str, Callable[..., list[Result]]] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "mv": _mv,
    "dot": _dot,
    "linear": _linear,
    "convolution": _convolution,
    "embedding": _embedding,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "constant_pad_nd": _pad,
    "cat": _cat,
    "stack": _stack,
    "glu": _glu,
}
