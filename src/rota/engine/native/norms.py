"""Rules for softmax, LayerNorm and GroupNorm."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rota.engine.native.operators import rule, summed
from rota.engine.native.program import Place, Unsupported, Writer
from rota.engine.native.structures import (
    GROUP_BACKWARD,
    GROUP_FACTORS,
    GROUP_SCALED,
    GROUP_STATS,
    GROUP_SUMS,
    NORM,
    NORM_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
)

aten = torch.ops.aten
SPARE = 16
"""Numbers of a vector of rota.c, at most."""


def _rows(place: Place, dim: int) -> list[int]:
    """How many rows a tensor has along its last axis, and how long they are."""
    if dim % place.like.dim() != place.like.dim() - 1:
        raise Unsupported("a softmax over another axis than the last")
    return [place.like.numel() // max(1, place.shape[-1]), place.shape[-1]]


@rule(aten._softmax.default, aten._safe_softmax.default)
def _softmax(w: Writer, target: Any, a: Place, dim: int, *_: Any, **__: Any) -> Place:
    out, safe = w.new(a.shape), target is aten._safe_softmax.default
    w.emit(SOFTMAX, [out, w.contiguous(a)], _rows(a, dim), extra=[int(safe)])
    return out


@rule(aten._softmax_backward_data.default)
def _softmax_backward(
    w: Writer, target: Any, gradient: Place, out: Place, dim: int, dtype: Any
) -> Place:
    done = w.new(out.shape)
    operands = [done, w.contiguous(gradient), w.contiguous(out)]
    w.emit(SOFTMAX_BACKWARD, operands, _rows(out, dim))
    return done


def _normalised(
    w: Writer, a: Place, shape: Sequence[int], strides: Sequence[int], eps: float
) -> tuple[Place, Place, Place]:
    """(a - mean) / sd in groups of shape[2] x shape[3] numbers; the means, and 1 / sd.

    The strides are those of `a` along the four axes. The result is laid out in the same way.
    """
    out = w.like(a, a.shape)
    stats = w.new([shape[0] * shape[1], 2])
    (bits,) = struct.unpack("q", struct.pack("d", eps))
    w.emit(NORM, [out, a, stats], shape, [strides, strides], [bits])
    return out, stats.seen(stats.like[:, 0]), stats.seen(stats.like[:, 1])


def _affine(
    w: Writer, out: Place, weight: Place | None, bias: Place | None, shape: Sequence[int]
) -> Place:
    """out * weight + bias, where both have the given shape."""
    for name, vector in (("mul", weight), ("add", bias)):
        if vector is not None:
            vector = w.contiguous(vector)
            out = w.each(name, w.like(out, out.shape), out, vector.seen(vector.like.view(*shape)))
    return out


@rule(aten.native_layer_norm.default)
def _layer_norm(
    w: Writer,
    target: Any,
    a: Place,
    shape: Sequence[int],
    weight: Place | None,
    bias: Place | None,
    eps: float,
) -> list[Place]:
    a, wide = w.contiguous(a), math.prod(shape)
    rows = a.like.numel() // max(1, wide)
    out, *stats = _normalised(w, a, [rows, 1, 1, wide], [wide, 0, 0, 1], eps)
    kept = [*a.shape[: -len(shape)], *[1] * len(shape)]
    return [
        _affine(w, out, weight, bias, shape),
        *(each.seen(each.like.view(kept)) for each in stats),
    ]


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    w: Writer,
    target: Any,
    gradient: Place,
    a: Place,
    shape: Sequence[int],
    mean: Place,
    scale: Place,
    weight: Place | None,
    bias: Place | None,
    wanted: Sequence[bool],
) -> list[Place | None]:
    gradient, a = w.contiguous(gradient), w.contiguous(a)
    ahead = list(range(a.like.dim() - len(shape)))
    wide = math.prod(shape)
    d_input = d_weight = d_bias = None
    if wanted[0]:
        inner = _affine(w, gradient, weight, None, shape)
        rows = [a.like.numel() // max(1, wide), wide]
        stats, d_input = _both(mean, scale, rows[0]), w.new(a.shape)
        w.emit(NORM_BACKWARD, [d_input, inner, a, stats], rows)
    if wanted[1]:
        apart = w.each("sub", w.new(a.shape), a, mean)
        apart = w.each("mul", w.new(a.shape), apart, scale)
        apart = w.each("mul", w.new(a.shape), apart, gradient)
        d_weight = summed(w, apart, ahead, False) if ahead else apart
    if wanted[2]:
        d_bias = summed(w, gradient, ahead, False) if ahead else gradient
    return [d_input, d_weight, d_bias]


@rule(aten.native_group_norm.default)
def _group_norm(
    w: Writer,
    target: Any,
    a: Place,
    weight: Place | None,
    bias: Place | None,
    n: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> list[Place]:
    image = _pixels_last(w, a, n, channels)
    stats, space = w.new([n * groups, 2]), w.scratch(channels + SPARE)
    shape = [n, pixels, channels, groups]
    (bits,) = struct.unpack("q", struct.pack("d", eps))
    w.emit(GROUP_STATS, [stats, image, space], shape, extra=[bits])
    mean, scale = (stats.seen(stats.like[:, i].view(n, groups)) for i in range(2))
    factor, shift = (w.new([n, groups, channels // groups]) for _ in range(2))
    w.each("copy", factor, scale.seen(scale.like.unsqueeze(-1)))
    if weight is not None:
        weight = w.contiguous(weight)
        w.each("mul", factor, factor, weight.seen(weight.like.view(groups, -1)))
    w.each("mul", shift, factor, mean.seen(mean.like.unsqueeze(-1)))
    w.each("neg", shift, shift)
    if bias is not None:
        bias = w.contiguous(bias)
        w.each("add", shift, shift, bias.seen(bias.like.view(groups, -1)))
    out = w.like(image, image.shape)
    w.emit(GROUP_SCALED, [out, image, factor, shift], shape)
    return [out.seen(_unflattened(out.like, a.shape)), mean, scale]


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(
    w: Writer,
    target: Any,
    gradient: Place,
    a: Place,
    mean: Place,
    scale: Place,
    weight: Place | None,
    n: int,
    channels: int,
    pixels: int,
    groups: int,
    wanted: Sequence[bool],
) -> list[Place | None]:
    gradient, image = (_pixels_last(w, each, n, channels) for each in (gradient, a))
    stats, shape = _both(mean, scale, n * groups), [n, pixels, channels, groups]
    sums, factors = w.new([n, 2, channels]), w.new([n, 3, channels])
    w.emit(GROUP_SUMS, [sums, gradient, image, stats], shape)
    d_input = None
    if wanted[0]:
        own = weight and w.contiguous(weight)
        w.emit(GROUP_FACTORS, [factors, sums, stats, own], shape, extra=[int(own is not None)])
        out = w.like(image, image.shape)
        w.emit(GROUP_BACKWARD, [out, gradient, image, factors], shape)
        d_input = out.seen(_unflattened(out.like, a.shape))
    d_bias, d_weight = (
        summed(w, sums.seen(sums.like[:, i]), [0], False) if wanted[2 - i] else None
        for i in range(2)
    )
    return [d_input, d_weight, d_bias]


def _pixels_last(w: Writer, a: Place, n: int, channels: int) -> Place:
    """A tensor with any number of axes as images [n, channels, high, wide], channels last."""
    if a.like.dim() != 4:
        a = w.contiguous(a)
        a = a.seen(a.like.view(n, channels, -1, 1))
    return w.channels_last(a)


def _unflattened(like: Tensor, shape: Sequence[int]) -> Tensor:
    """The layout of an image as a tensor that had another number of axes."""
    return like if len(shape) == 4 else like.squeeze(-1).view(shape)


def _both(mean: Place, scale: Place, number: int) -> Place:
    """Means and 1 / sd as one tensor [number, 2], as which a normalisation has written them."""
    if (mean.block, mean.start + mean.like.itemsize) != (scale.block, scale.start):
        raise Unsupported("a normalisation whose statistics come from elsewhere")
    return mean.seen(mean.like.as_strided([number, 2], [2, 1]))
