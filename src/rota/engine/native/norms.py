"""Rules for softmax, LayerNorm and GroupNorm."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from rota.engine.native.operators import rule, summed
from rota.engine.native.program import Place, Unsupported, Writer
from rota.engine.native.structures import NORM, NORM_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD

aten = torch.ops.aten


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
        stats = mean.seen(mean.like.as_strided([a.like.numel() // max(1, wide), 2], [2, 1]))
        if (mean.block, mean.start + mean.like.itemsize) != (scale.block, scale.start):
            raise Unsupported("a LayerNorm whose statistics come from elsewhere")
        d_input = w.new(a.shape)
        rows = [a.like.numel() // max(1, wide), wide]
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
    each = channels // groups
    if a.like.dim() == 4 and a.like.is_contiguous(memory_format=torch.channels_last):
        shape, strides = [n, groups, pixels, each], [channels * pixels, each, channels, 1]
    else:
        a = w.contiguous(a)
        shape = [n, groups, 1, each * pixels]
        strides = [channels * pixels, each * pixels, 0, 1]
    out, *stats = _normalised(w, a, shape, strides, eps)
    along = [channels, *[1] * (a.like.dim() - 2)]
    return [
        _affine(w, out, weight, bias, along),
        *(each.seen(each.like.view(n, groups)) for each in stats),
    ]
