"""BatchNorm of stacks: every row has its own statistics, over its real examples alone.

Each pass takes two launches. Torch's operators would take dozens, each with a pass over memory.
Here the first launch makes sums over parts of the pixels. Every program of the second one adds
these up before it writes its part of the result. Results have the memory layout of the input.
Statistics are float32, and block sizes are a fixed function of the shapes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import contiguous_last, rounded

PROGRAMS = 2048  # as many keep the memory of a large GPU busy
ELEMENTS = 2048  # of a block
TOGETHER = 16  # parts that are added up at once


@triton.jit
def _place(parts, C: tl.constexpr, BC: tl.constexpr):
    """A program's row, part of the pixels, and channels."""
    across: tl.constexpr = (C + BC - 1) // BC
    row = (tl.program_id(0) // (across * parts)).to(tl.int64)
    return (
        row,
        tl.program_id(0) // across % parts,
        tl.program_id(0) % across * BC + tl.arange(0, BC),
    )


@triton.jit
def _at(m, c, S: tl.constexpr, b: tl.constexpr, by_c: tl.constexpr, s: tl.constexpr):
    """Where pixels and channels lie in a row's memory: [pixels, channels]."""
    return ((m // S).to(tl.int64) * b + m % S * s)[:, None] + (c * by_c)[None, :]


@triton.jit
def _real(mask, row, m, M, last, S: tl.constexpr):
    """Whether pixels belong to real examples."""
    return tl.load(mask + row * (M // S) + m // S, mask=m < last, other=0) != 0


@triton.jit
def _pieces(
    pieces, row, start, parts, c, EACH: tl.constexpr, C: tl.constexpr, TOGETHER: tl.constexpr
):
    """Where some parts' numbers for channels c begin, [parts, channels], and which parts exist.

    A part has EACH numbers per channel.
    """
    p = start + tl.arange(0, TOGETHER)
    return pieces + ((row * parts + p) * EACH * C)[:, None] + c[None, :], (p < parts)[:, None] & (
        c < C
    )[None, :]


@triton.jit(do_not_specialize=["M", "length", "parts"])
def _parts_kernel(
    x,
    mask,
    pieces,
    M,
    length,
    parts,
    x_row,
    C: tl.constexpr,
    S: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_s: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """The number of a part's real pixels, their mean, and their sum of squares around it.

    Each place of a block has its own numbers until the end.
    """
    row, part, c = _place(parts, C, BC)
    last = tl.minimum(part * length + length, M)
    n = tl.zeros((BM,), tl.float32)
    mean = tl.zeros((BM, BC), tl.float32)
    squares = tl.zeros((BM, BC), tl.float32)
    for start in range(part * length, last, BM):
        m = tl.multiple_of(start, BM) + tl.arange(0, BM)
        real = _real(mask, row, m, M, last, S)
        value = tl.load(
            x + row * x_row + _at(m, c, S, x_b, x_c, x_s),
            mask=(m < last)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        value = tl.where(real[:, None], value.to(tl.float32), 0.0)
        one = real.to(tl.float32)
        n += one
        off = value - mean
        mean += off * (one / tl.maximum(n, 1.0))[:, None]
        squares += off * (value - mean) * one[:, None]
    count = tl.sum(n, 0)
    middle = tl.sum(mean * n[:, None], 0) / tl.maximum(count, 1.0)
    off = mean - middle[None, :]
    around = tl.sum(squares + off * off * n[:, None], 0)
    to = pieces + (row * parts + part) * 3 * C + c
    tl.store(to, tl.zeros((BC,), tl.float32) + count, mask=c < C)
    tl.store(to + C, middle, mask=c < C)
    tl.store(to + 2 * C, around, mask=c < C)


@triton.jit(do_not_specialize=["M", "length", "parts"])
def _normalise_kernel(
    x,
    weight,
    bias,
    pieces,
    out,
    mean_to,
    rstd_to,
    unbiased_to,
    M,
    length,
    parts,
    eps,
    x_row,
    out_row,
    weight_row,
    bias_row,
    C: tl.constexpr,
    S: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_s: tl.constexpr,
    out_b: tl.constexpr,
    out_c: tl.constexpr,
    out_s: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Combine the parts' statistics to the row's, and normalise a part of the pixels with them."""
    row, part, c = _place(parts, C, BC)
    count = tl.zeros((BC,), tl.float32)
    mean = tl.zeros((BC,), tl.float32)
    squares = tl.zeros((BC,), tl.float32)
    for start in range(0, parts, TOGETHER):
        at, inside = _pieces(pieces, row, start, parts, c, 3, C, TOGETHER)
        n = tl.load(at, mask=inside, other=0.0)
        middle = tl.load(at + C, mask=inside, other=0.0)
        around = tl.load(at + 2 * C, mask=inside, other=0.0)
        both = count + tl.sum(n, 0)
        step = tl.sum(n * (middle - mean[None, :]), 0) / tl.maximum(both, 1.0)
        off = middle - (mean + step)[None, :]
        squares += tl.sum(around + n * off * off, 0) + count * step * step
        mean += step
        count = both
    rstd = tl.rsqrt(squares / tl.maximum(count, 1.0) + eps)
    if part == 0:
        tl.store(mean_to + row * C + c, mean, mask=c < C)
        tl.store(rstd_to + row * C + c, rstd, mask=c < C)
        tl.store(unbiased_to + row * C + c, squares / tl.maximum(count - 1.0, 1.0), mask=c < C)
    scale = rstd
    shift = tl.zeros((BC,), tl.float32)
    if HAS_WEIGHT:
        scale *= tl.load(weight + row * weight_row + c, mask=c < C, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift += tl.load(bias + row * bias_row + c, mask=c < C, other=0.0).to(tl.float32)
    last = tl.minimum(part * length + length, M)
    for start in range(part * length, last, BM):
        m = tl.multiple_of(start, BM) + tl.arange(0, BM)
        inside = (m < last)[:, None] & (c < C)[None, :]
        value = tl.load(x + row * x_row + _at(m, c, S, x_b, x_c, x_s), mask=inside, other=0.0).to(
            tl.float32
        )
        value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        if RELU:
            value = tl.where(value < 0.0, 0.0, value)
        tl.store(
            out + row * out_row + _at(m, c, S, out_b, out_c, out_s),
            value.to(out.dtype.element_ty),
            mask=inside,
        )


@triton.jit(do_not_specialize=["M", "length", "parts"])
def _sums_kernel(
    g,
    x,
    mean,
    rstd,
    pieces,
    M,
    length,
    parts,
    g_row,
    x_row,
    C: tl.constexpr,
    S: tl.constexpr,
    g_b: tl.constexpr,
    g_c: tl.constexpr,
    g_s: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_s: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums over a part of the pixels: of the gradient, and of gradient * normalised input."""
    row, part, c = _place(parts, C, BC)
    middle = tl.load(mean + row * C + c, mask=c < C, other=0.0)[None, :]
    scale = tl.load(rstd + row * C + c, mask=c < C, other=0.0)[None, :]
    plain = tl.zeros((BM, BC), tl.float32)
    times = tl.zeros((BM, BC), tl.float32)
    last = tl.minimum(part * length + length, M)
    for start in range(part * length, last, BM):
        m = tl.multiple_of(start, BM) + tl.arange(0, BM)
        inside = (m < last)[:, None] & (c < C)[None, :]
        slope = tl.load(g + row * g_row + _at(m, c, S, g_b, g_c, g_s), mask=inside, other=0.0).to(
            tl.float32
        )
        value = tl.load(x + row * x_row + _at(m, c, S, x_b, x_c, x_s), mask=inside, other=0.0).to(
            tl.float32
        )
        plain += slope
        times += slope * ((value - middle) * scale)
    to = pieces + (row * parts + part) * 2 * C + c
    tl.store(to, tl.sum(plain, 0), mask=c < C)
    tl.store(to + C, tl.sum(times, 0), mask=c < C)


@triton.jit(do_not_specialize=["M", "length", "parts"])
def _gradient_kernel(
    g,
    x,
    mean,
    rstd,
    weight,
    mask,
    pieces,
    dx,
    dweight,
    dbias,
    M,
    length,
    parts,
    g_row,
    x_row,
    dx_row,
    weight_row,
    C: tl.constexpr,
    S: tl.constexpr,
    g_b: tl.constexpr,
    g_c: tl.constexpr,
    g_s: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_s: tl.constexpr,
    dx_b: tl.constexpr,
    dx_c: tl.constexpr,
    dx_s: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Add the parts' sums up, and compute the gradient of a part of the input with them."""
    row, part, c = _place(parts, C, BC)
    plain = tl.zeros((BC,), tl.float32)
    times = tl.zeros((BC,), tl.float32)
    for start in range(0, parts, TOGETHER):
        at, inside = _pieces(pieces, row, start, parts, c, 2, C, TOGETHER)
        plain += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
        times += tl.sum(tl.load(at + C, mask=inside, other=0.0), 0)
    if part == 0:
        tl.store(dbias + row * C + c, plain, mask=c < C)
        tl.store(dweight + row * C + c, times, mask=c < C)
    B = M // S
    n = tl.zeros((128,), tl.float32)
    for start in range(0, B, 128):
        b = start + tl.arange(0, 128)
        n += (tl.load(mask + row * B + b, mask=b < B, other=0) != 0).to(tl.float32)
    count = tl.maximum(tl.sum(n, 0) * S, 1.0)
    middle = tl.load(mean + row * C + c, mask=c < C, other=0.0)[None, :]
    rstd_c = tl.load(rstd + row * C + c, mask=c < C, other=0.0)
    scale = rstd_c
    if HAS_WEIGHT:
        scale *= tl.load(weight + row * weight_row + c, mask=c < C, other=0.0).to(tl.float32)
    plain = (plain / count)[None, :]
    times = (times / count * rstd_c)[None, :]
    last = tl.minimum(part * length + length, M)
    for start in range(part * length, last, BM):
        m = tl.multiple_of(start, BM) + tl.arange(0, BM)
        inside = (m < last)[:, None] & (c < C)[None, :]
        slope = tl.load(g + row * g_row + _at(m, c, S, g_b, g_c, g_s), mask=inside, other=0.0).to(
            tl.float32
        )
        value = tl.load(x + row * x_row + _at(m, c, S, x_b, x_c, x_s), mask=inside, other=0.0).to(
            tl.float32
        )
        real = _real(mask, row, m, M, last, S).to(tl.float32)[
            :, None
        ]  # padding has no part in the statistics
        value = (slope - real * (plain + (value - middle) * times)) * scale[None, :]
        tl.store(
            dx + row * dx_row + _at(m, c, S, dx_b, dx_c, dx_s),
            value.to(dx.dtype.element_ty),
            mask=inside,
        )


def _flat(x: Tensor) -> Tensor:
    """x [R, B, C, ...] as [R, B, C, pixels]: a view, if x has one of the usual memory layouts."""
    return x.reshape(*x.shape[:3], x.shape[3:].numel())


def _lying(x: Tensor) -> Tensor:
    """x, or a copy if it has some other layout."""
    return x if _flat(x).data_ptr() == x.data_ptr() else x.contiguous()


def _blocks(x: Tensor) -> dict[str, int]:
    """How a flat x is divided: pixels and channels per block, and the parts' length and number.

    Enough parts keep a GPU busy, and few enough are quickly added up.
    """
    rows, batch, channels, area = x.shape
    m = batch * area
    bc = min(64 if x.stride(2) == 1 else 16, rounded(channels))
    bm = min(ELEMENTS // bc, rounded(m))
    parts = max(1, min(64, -(-PROGRAMS // (rows * triton.cdiv(channels, bc))), math.isqrt(m // 8)))
    length = triton.cdiv(triton.cdiv(m, parts), bm) * bm
    return {
        "M": m,
        "length": length,
        "parts": triton.cdiv(m, length),
        "C": channels,
        "S": area,
        "BM": bm,
        "BC": bc,
        "num_warps": 4,
    }


def _strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of flat tensors, by the kernels' names for them."""
    return {
        f"{name}_{axis}": x.stride(at)
        for name, x in tensors.items()
        for at, axis in enumerate(("row", "b", "c", "s"))
    }


def _grid(x: Tensor, sizes: dict[str, int]) -> tuple[int]:
    return (len(x) * sizes["parts"] * triton.cdiv(sizes["C"], sizes["BC"]),)


def _mask(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8) if mask.dtype == torch.bool else mask.contiguous()


def _given(**params: Tensor | None) -> dict[str, Any]:
    """Which parameters exist, and their strides."""
    has = {f"HAS_{name.upper()}": p is not None for name, p in params.items()}
    return {**has, **{f"{name}_row": 0 if p is None else p.stride(0) for name, p in params.items()}}


def _row(param: Tensor | None) -> Tensor | None:
    """One row's parameter as a stack of one."""
    return None if param is None else param.unsqueeze(0)


@torch.library.custom_op("rota::batch_norm_rows", mutates_args=())
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise every row's x [R, B, C, ...] over the examples where mask [R, B] is not 0.

    ReLU follows if asked. One row may come without the axis of rows. Also returns the mean,
    1 / standard deviation, and the unbiased variance, each [R, C] and in float32, whatever x is.
    """
    if mask.dim() > 1:
        return _forward(x, weight, bias, mask, eps, relu)
    out, mean, rstd, unbiased = _forward(
        x.unsqueeze(0), _row(weight), _row(bias), mask.unsqueeze(0), eps, relu
    )
    return out[0], mean[0], rstd[0], unbiased[0]


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = _lying(x)
    flat, mask = _flat(x), _mask(mask)
    out = torch.empty_like(x, dtype=torch.float32)
    to = out.view(flat.shape)
    mean, rstd, unbiased = (
        torch.empty(flat.shape[0], flat.shape[2], device=x.device) for _ in range(3)
    )
    sizes = _blocks(flat)
    pieces = torch.empty(len(x), sizes["parts"], 3, sizes["C"], device=x.device)
    weight, bias = (None if p is None else contiguous_last(p, 1) for p in (weight, bias))
    _parts_kernel[_grid(x, sizes)](flat, mask, pieces, **sizes, **_strides(x=flat))
    _normalise_kernel[_grid(x, sizes)](
        flat,
        weight,
        bias,
        pieces,
        to,
        mean,
        rstd,
        unbiased,
        **sizes,
        **_strides(x=flat, out=to),
        **_given(weight=weight, bias=bias),
        eps=eps,
        RELU=relu,
        TOGETHER=TOGETHER,
    )
    return out, mean, rstd, unbiased


@torch.library.custom_op("rota::batch_norm_rows_backward", mutates_args=())
def batch_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, the weight and the bias."""
    if mask.dim() > 1:
        return _backward(g, x, mean, rstd, weight, mask)
    first = g.unsqueeze(0), x.unsqueeze(0), mean.unsqueeze(0), rstd.unsqueeze(0)
    dx, dweight, dbias = _backward(*first, _row(weight), mask.unsqueeze(0))
    return dx[0], dweight[0], dbias[0]


def _backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x = _lying(x)
    slope, flat, mask = _flat(g), _flat(x), _mask(mask)
    dx = torch.empty_like(x)
    to = dx.view(flat.shape)
    mean, rstd = mean.contiguous(), rstd.contiguous()
    dweight, dbias = (torch.empty(mean.shape, device=x.device) for _ in range(2))
    sizes = _blocks(flat)
    pieces = torch.empty(len(x), sizes["parts"], 2, sizes["C"], device=x.device)
    weight = None if weight is None else contiguous_last(weight, 1)
    _sums_kernel[_grid(x, sizes)](
        slope, flat, mean, rstd, pieces, **sizes, **_strides(g=slope, x=flat)
    )
    _gradient_kernel[_grid(x, sizes)](
        slope,
        flat,
        mean,
        rstd,
        weight,
        mask,
        pieces,
        to,
        dweight,
        dbias,
        **sizes,
        **_strides(g=slope, x=flat, dx=to),
        **_given(weight=weight),
        TOGETHER=TOGETHER,
    )
    return dx, dweight, dbias


class BatchNorm(torch.autograd.Function):
    """`batch_norm` with its gradient: torch.func differentiates it, but no custom operator."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor, Tensor] = batch_norm(x, weight, bias, mask, eps, False)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, mask, _ = inputs
        _, mean, rstd, unbiased = output
        ctx.mark_non_differentiable(mean, rstd, unbiased)
        ctx.save_for_backward(x, mean, rstd, weight, mask)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[3]
        with torch.no_grad():  # torch.func would differentiate again
            dx, dweight, dbias = batch_norm_backward(g, *ctx.saved_tensors)
        return dx, None if weight is None else dweight, dbias if ctx.biased else None, None, None
