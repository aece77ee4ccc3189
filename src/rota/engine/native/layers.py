"""Rules for the operators of layers and losses. Images have their channels last in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rota.engine import local
from rota.engine.native.operators import rule, summed
from rota.engine.native.program import Place, Unsupported, Writer
from rota.engine.native.structures import (
    CONVOLUTION,
    EMBEDDING,
    EMBEDDING_BACKWARD,
    INPUT_GRADIENT,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    NLL,
    NLL_BACKWARD,
    POOL,
    POOL_BACKWARD,
    UNIFORM,
    WEIGHT_GRADIENT,
)

aten = torch.ops.aten


@rule(aten._log_softmax.default)
def _log_softmax(w: Writer, target: Any, a: Place, dim: int, half: bool) -> Place:
    if dim % a.like.dim() != a.like.dim() - 1:
        raise Unsupported("a softmax over another axis than the last")
    out = w.new(a.shape)
    w.emit(LOG_SOFTMAX, [out, w.contiguous(a)], [a.like.numel() // a.shape[-1], a.shape[-1]])
    return out


@rule(aten._log_softmax_backward_data.default)
def _log_softmax_backward(
    w: Writer, target: Any, gradient: Place, out: Place, dim: int, dtype: Any
) -> Place:
    if dim % out.like.dim() != out.like.dim() - 1:
        raise Unsupported("a softmax over another axis than the last")
    done, shape = w.new(out.shape), [out.like.numel() // out.shape[-1], out.shape[-1]]
    w.emit(LOG_SOFTMAX_BACKWARD, [done, w.contiguous(gradient), w.contiguous(out)], shape)
    return done


def _check_loss(log_p: Place, y: Place, weight: Any, reduction: int) -> None:
    if weight is not None or reduction != 0 or log_p.like.dim() != 2:
        raise Unsupported("a loss with class weights or over several places")
    if not y.whole:
        raise Unsupported("a loss whose labels are not integers")


@rule(aten.nll_loss_forward.default)
def _nll(
    w: Writer, target: Any, log_p: Place, y: Place, weight: Any, reduction: int, ignored: int
) -> list[Place]:
    _check_loss(log_p, y, weight, reduction)
    out, strides = w.new(y.shape), [(), (), y.like.stride()]
    w.emit(NLL, [out, w.contiguous(log_p), y], log_p.shape, strides, [ignored])
    return [out, out]


@rule(aten.nll_loss_backward.default)
def _nll_backward(
    w: Writer,
    target: Any,
    gradient: Place,
    log_p: Place,
    y: Place,
    weight: Any,
    reduction: int,
    ignored: int,
    total: Place,
) -> Place:
    _check_loss(log_p, y, weight, reduction)
    out, strides = w.new(log_p.shape), [(), gradient.like.stride(), y.like.stride()]
    w.emit(NLL_BACKWARD, [out, gradient, y], log_p.shape, strides, [ignored])
    return out


def _image_shape(
    x: Place, weight: Place, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int
) -> list[int]:
    """The numbers of convolution.h's Shape."""
    plain = groups == 1 and not transposed and all(d == 1 for d in dilation)
    if x.like.dim() != 4 or not plain or not weight.like.is_contiguous():
        raise Unsupported("a convolution that is grouped, dilated, transposed or not over images")
    (b, c, high, wide), (o, _, *size) = x.shape, weight.shape
    out = [
        (n + 2 * p - k) // s + 1
        for n, k, s, p in zip((high, wide), size, stride, padding, strict=True)
    ]
    return [b, c, high, wide, o, *out, *size, *stride, *padding]


def _images(w: Writer, *shape: int) -> Place:
    like = torch.empty(shape, device="meta").to(memory_format=torch.channels_last)
    return w.new(shape, like.stride())


@rule(aten.convolution.default)
def _convolution(
    w: Writer,
    target: Any,
    x: Place,
    weight: Place,
    bias: Place | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Place:
    shape = _image_shape(x, weight, stride, padding, dilation, transposed, groups)
    x = w.channels_last(x)
    out = _images(w, shape[0], shape[4], shape[5], shape[6])
    scratch, bias = w.scratch(w.space(shape)), bias and w.contiguous(bias)
    w.emit(CONVOLUTION, [out, x, weight, bias, scratch], extra=[*shape, 0, int(bias is not None)])
    return out


@rule(aten.convolution_backward.default)
def _convolution_backward(
    w: Writer,
    target: Any,
    gradient: Place,
    x: Place,
    weight: Place,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
) -> list[Place | None]:
    shape = _image_shape(x, weight, stride, padding, dilation, transposed, groups)
    gradient = w.channels_last(gradient)
    d_input = d_weight = d_bias = None
    if wanted[0]:
        d_input, scratch = _images(w, *x.shape), w.scratch(w.space(shape))
        w.emit(INPUT_GRADIENT, [d_input, gradient, weight, scratch], extra=shape)
    if wanted[1]:
        x, d_weight = w.channels_last(x), w.new(weight.shape)
        scratch = w.scratch(w.space(shape))
        w.emit(WEIGHT_GRADIENT, [d_weight, x, gradient, scratch], extra=shape)
    if wanted[2]:
        d_bias = summed(w, gradient, [0, 2, 3], False)
    return [d_input, d_weight, d_bias]


def _pool_shape(
    x: Place, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> list[int]:
    """The numbers of rota.c's Pool."""
    if x.like.dim() != 4 or any(d != 1 for d in dilation) or ceil:
        raise Unsupported("a max-pool that is dilated, rounds up or is not over images")
    kernel, step, pad = ([v[0], v[-1]] for v in (size, stride or size, padding))
    b, c, high, wide = x.shape
    out = [
        (n + 2 * p - k) // s + 1 for n, k, s, p in zip((high, wide), kernel, step, pad, strict=True)
    ]
    return [b, c, high, wide, *out, *kernel, *step, *pad]


@rule(aten.max_pool2d_with_indices.default)
def _pool(
    w: Writer,
    target: Any,
    x: Place,
    size: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    ceil: bool = False,
) -> list[Place]:
    shape = _pool_shape(x, size, stride, padding, dilation, ceil)
    x = w.channels_last(x)
    out = _images(w, shape[0], shape[1], shape[4], shape[5])
    taps = w.new([out.like.numel()])
    w.emit(POOL, [out, x, taps], extra=shape)
    return [out, taps]


@rule(aten.max_pool2d_with_indices_backward.default)
def _pool_backward(
    w: Writer,
    target: Any,
    gradient: Place,
    x: Place,
    size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
    taps: Place,
) -> Place:
    shape = _pool_shape(x, size, stride, padding, dilation, ceil)
    gradient, out = w.channels_last(gradient), _images(w, *x.shape)
    w.emit(POOL_BACKWARD, [out, gradient, taps], extra=shape)
    return out


def _average_windows(
    x: Place, size: Any, stride: Any, padding: Any, ceil: bool, divisor: Any
) -> tuple[float, list[int], list[tuple[slice, slice]]]:
    """What an average-pool divides by, its output's height and width, and where each tap reads."""
    if x.like.dim() != 4 or ceil or divisor is not None or any(padding):
        raise Unsupported("an average-pool that is padded, rounds up or is not over images")
    (high, wide), (down, right) = ([v[0], v[-1]] for v in (size, stride or size))
    rows, columns = (x.shape[2] - high) // down + 1, (x.shape[3] - wide) // right + 1
    taps = [
        (slice(u, u + (rows - 1) * down + 1, down), slice(v, v + (columns - 1) * right + 1, right))
        for u in range(high)
        for v in range(wide)
    ]
    return high * wide, [rows, columns], taps


@rule(aten.avg_pool2d.default)
def _average_pool(
    w: Writer,
    target: Any,
    x: Place,
    size: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    ceil: bool = False,
    counts_padding: bool = True,
    divisor: Any = None,
) -> Place:
    number, out, taps = _average_windows(x, size, stride, padding, ceil, divisor)
    total = _images(w, *x.shape[:2], *out)
    w.each("copy", total, w.constant(0.0))
    for rows, columns in taps:
        w.each("add", total, total, x.seen(x.like[:, :, rows, columns]))
    return w.each("mul", total, total, w.constant(1 / number))


@rule(aten.avg_pool2d_backward.default)
def _average_pool_backward(
    w: Writer,
    target: Any,
    gradient: Place,
    x: Place,
    size: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    counts_padding: bool,
    divisor: Any,
) -> Place:
    number, _, taps = _average_windows(x, size, stride, padding, ceil, divisor)
    share = w.each("mul", w.like(gradient, gradient.shape), gradient, w.constant(1 / number))
    out = _images(w, *x.shape)
    w.each("copy", out, w.constant(0.0))
    for rows, columns in taps:
        tap = out.seen(out.like[:, :, rows, columns])
        w.each("add", tap, tap, share)
    return out


def _check_tokens(tokens: Place) -> None:
    if not tokens.whole or not tokens.like.is_contiguous():
        raise Unsupported("an embedding of scattered tokens, or of numbers that are not integers")


@rule(aten.embedding.default)
def _embedding(w: Writer, target: Any, table: Place, tokens: Place, *_: Any) -> Place:
    _check_tokens(tokens)
    (number, wide), table = table.shape, w.contiguous(table)
    out = w.new([*tokens.shape, wide])
    w.emit(EMBEDDING, [out, table, tokens], [tokens.like.numel(), wide], extra=[number])
    return out


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(
    w: Writer, target: Any, gradient: Place, tokens: Place, number: int, padding: int, scaled: bool
) -> Place:
    _check_tokens(tokens)
    if scaled:
        raise Unsupported("an embedding scaled by frequency")
    wide = gradient.shape[-1]
    out, operands = w.new([number, wide]), [w.contiguous(gradient), tokens]
    shape = [tokens.like.numel(), wide]
    w.emit(EMBEDDING_BACKWARD, [out, *operands], shape, extra=[number, padding])
    return out


@rule(local.uniform._opoverload)
def _uniform(w: Writer, target: Any, key: Place, n: int) -> Place:
    if key.like.numel() != 1:
        raise Unsupported("random numbers of several keys")
    out = w.new([*key.shape, n])
    w.emit(UNIFORM, [out, key], [n])
    return out
