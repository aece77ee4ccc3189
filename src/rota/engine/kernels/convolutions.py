"""Convolutions of stacks, whose rows have their own weights, with bias, ReLU and max pooling.

The forward kernel adds the bias and does ReLU and 2x2 max pooling, so the whole image of outputs is
never written. The backward kernel applies the mask of the ReLU before the convolution. All are
implicit products without im2col: [pixels, taps x channels] @ [taps x channels, outputs]. Images
have their channels last in memory. Block sizes are a fixed function of the shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import Blocks, contiguous_last, laid_as, precision, rounded
from rota.engine.kernels.filters import add_pieces, thin, weight_gradient
from rota.engine.kernels.pooling import unpool
from rota.engine.kernels.taps import image, patch, tapwise


@triton.jit
def _larger(value, corner, other, this: tl.constexpr):
    """The larger of two, or the first of equal ones; NaN is larger than all, as in torch."""
    takes = (other > value) | ((other != other) & (value == value))
    return tl.where(takes, other, value), tl.where(takes, this, corner)


@triton.jit(do_not_specialize=["M"])
def _convolution_kernel(
    x,
    w,
    bias,
    y,
    which,
    gate,
    scale,
    M,
    x_row,
    w_row,
    bias_row,
    y_row,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_h: tl.constexpr,
    x_w: tl.constexpr,
    y_b: tl.constexpr,
    y_c: tl.constexpr,
    y_h: tl.constexpr,
    y_w: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    POOL: tl.constexpr,
    GATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[pixel, o] = sum over taps and channels of x[pixel + tap, c] * w[o, tap, c].

    A block of the depth belongs to one tap. With POOL there is one accumulator for each of a
    window's four pixels, and HO and WO are the pooled sizes.
    """
    by: tl.constexpr = 2 if POOL else 1
    eh: tl.constexpr = PH > 0 or (HO * by - 1) * SH - PH + KH > H
    ew: tl.constexpr = PW > 0 or (WO * by - 1) * SW - PW + KW > W
    across: tl.constexpr = (O + BN - 1) // BN
    blocks = tl.cdiv(M, BM) * across
    row = (tl.program_id(0) // blocks).to(tl.int64)
    m = tl.program_id(0) % blocks // across * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    top = m // WO % HO * (SH * by) - PH
    left = m % WO * (SW * by) - PW
    base = m // (WO * HO) * x_b + top * x_h + left * x_w
    depth: tl.constexpr = KH * KW * C
    x += row * x_row
    w += row * w_row + n[:, None] * depth
    k = tl.arange(0, BK)
    real = m < M
    t0 = tl.zeros((BM, BN), tl.float32)
    t1 = tl.zeros((BM, BN), tl.float32)
    t2 = tl.zeros((BM, BN), tl.float32)
    t3 = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        i = start // C // KW
        j = start // C % KW
        c = tl.multiple_of(start % C, 16) + k
        taps = tl.trans(tl.load(w + (start + k)[None, :], mask=n[:, None] < O, other=0.0))
        t0 = tl.dot(
            image(x, base, top, left, real, i, j, c, x_h, x_w, H, W, eh, ew),
            taps,
            t0,
            input_precision=PRECISION,
        )
        if POOL:
            t1 = tl.dot(
                image(x, base, top, left, real, i, j + SW, c, x_h, x_w, H, W, eh, ew),
                taps,
                t1,
                input_precision=PRECISION,
            )
            t2 = tl.dot(
                image(x, base, top, left, real, i + SH, j, c, x_h, x_w, H, W, eh, ew),
                taps,
                t2,
                input_precision=PRECISION,
            )
            t3 = tl.dot(
                image(x, base, top, left, real, i + SH, j + SW, c, x_h, x_w, H, W, eh, ew),
                taps,
                t3,
                input_precision=PRECISION,
            )
    at = (
        row * y_row
        + (m // (WO * HO) * y_b + m // WO % HO * y_h + m % WO * y_w)[:, None]
        + (n * y_c)[None, :]
    )
    inside = real[:, None] & (n[None, :] < O)
    if POOL:
        corner = tl.zeros((BM, BN), tl.uint8)
        t0, corner = _larger(t0, corner, t1, 1)
        t0, corner = _larger(t0, corner, t2, 2)
        t0, corner = _larger(t0, corner, t3, 3)
        tl.store(which + at, corner.to(tl.uint8), mask=inside)
    if HAS_BIAS:
        t0 += tl.load(bias + row * bias_row + n, mask=n < O, other=0.0)[None, :]
    if RELU:
        t0 = tl.where(t0 < 0.0, 0.0, t0)
    if GATE:
        t0 = tl.where(tl.load(gate + at, mask=inside, other=0.0) > 0.0, t0 * scale, 0.0)
    tl.store(y + at, t0.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _thin_convolution_kernel(
    x,
    w,
    bias,
    y,
    which,
    gate,
    scale,
    M,
    x_row,
    w_row,
    bias_row,
    y_row,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_h: tl.constexpr,
    x_w: tl.constexpr,
    y_b: tl.constexpr,
    y_c: tl.constexpr,
    y_h: tl.constexpr,
    y_w: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    POOL: tl.constexpr,
    GATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The same for few channels; w is [O, c, tap], as in torch.

    The product is transposed, so that neighbouring threads load neighbouring pixels.
    """
    by: tl.constexpr = 2 if POOL else 1
    eh: tl.constexpr = PH > 0 or (HO * by - 1) * SH - PH + KH > H
    ew: tl.constexpr = PW > 0 or (WO * by - 1) * SW - PW + KW > W
    across: tl.constexpr = (O + BN - 1) // BN
    blocks = tl.cdiv(M, BM) * across
    row = (tl.program_id(0) // blocks).to(tl.int64)
    m = tl.program_id(0) % blocks // across * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    top = m // WO % HO * (SH * by) - PH
    left = m % WO * (SW * by) - PW
    base = m // (WO * HO) * x_b + top * x_h + left * x_w
    depth: tl.constexpr = KH * KW * C
    area: tl.constexpr = KH * KW
    x += row * x_row
    w += row * w_row + n[:, None] * depth
    real = m < M
    t0 = tl.zeros((BN, BM), tl.float32)
    t1 = tl.zeros((BN, BM), tl.float32)
    t2 = tl.zeros((BN, BM), tl.float32)
    t3 = tl.zeros((BN, BM), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        i = k // KW % KH
        j = k % KW
        taps = tl.load(w + k[None, :], mask=(n[:, None] < O) & (k[None, :] < depth), other=0.0).to(
            x.dtype.element_ty
        )
        t0 = tl.dot(
            taps,
            patch(x, base, top, left, real, i, j, k, 0, area, depth, x_c, x_h, x_w, H, W, eh, ew),
            t0,
            input_precision=PRECISION,
        )
        if POOL:
            t1 = tl.dot(
                taps,
                patch(
                    x,
                    base,
                    top,
                    left + SW,
                    real,
                    i,
                    j,
                    k,
                    SW * x_w,
                    area,
                    depth,
                    x_c,
                    x_h,
                    x_w,
                    H,
                    W,
                    eh,
                    ew,
                ),
                t1,
                input_precision=PRECISION,
            )
            t2 = tl.dot(
                taps,
                patch(
                    x,
                    base,
                    top + SH,
                    left,
                    real,
                    i,
                    j,
                    k,
                    SH * x_h,
                    area,
                    depth,
                    x_c,
                    x_h,
                    x_w,
                    H,
                    W,
                    eh,
                    ew,
                ),
                t2,
                input_precision=PRECISION,
            )
            t3 = tl.dot(
                taps,
                patch(
                    x,
                    base,
                    top + SH,
                    left + SW,
                    real,
                    i,
                    j,
                    k,
                    SH * x_h + SW * x_w,
                    area,
                    depth,
                    x_c,
                    x_h,
                    x_w,
                    H,
                    W,
                    eh,
                    ew,
                ),
                t3,
                input_precision=PRECISION,
            )
    at = (
        row * y_row
        + (m // (WO * HO) * y_b + m // WO % HO * y_h + m % WO * y_w)[None, :]
        + (n * y_c)[:, None]
    )
    inside = real[None, :] & (n[:, None] < O)
    if POOL:
        corner = tl.zeros((BN, BM), tl.uint8)
        t0, corner = _larger(t0, corner, t1, 1)
        t0, corner = _larger(t0, corner, t2, 2)
        t0, corner = _larger(t0, corner, t3, 3)
        tl.store(which + at, corner.to(tl.uint8), mask=inside)
    if HAS_BIAS:
        t0 += tl.load(bias + row * bias_row + n, mask=n < O, other=0.0)[:, None]
    if RELU:
        t0 = tl.where(t0 < 0.0, 0.0, t0)
    if GATE:
        t0 = tl.where(tl.load(gate + at, mask=inside, other=0.0) > 0.0, t0 * scale, 0.0)
    tl.store(y + at, t0.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _turn_kernel(
    w,
    out,
    w_row,
    C: tl.constexpr,
    O: tl.constexpr,
    AREA: tl.constexpr,
    BACK: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
):
    """Write w [O, C, tap] as [O, tap, C].

    With BACK, for the gradient of the input, write it as [C, tap, O], with the taps from the last
    to the first. A block is read in its order in memory. Its results lie together too, one tap
    apart from the next.
    """
    wide: tl.constexpr = C * AREA
    along: tl.constexpr = (wide + BK - 1) // BK
    blocks: tl.constexpr = (O + BO - 1) // BO * along
    row = (tl.program_id(0) // blocks).to(tl.int64)
    o = (tl.program_id(0) % blocks // along * BO + tl.arange(0, BO))[:, None]
    k = (tl.program_id(0) % along * BK + tl.arange(0, BK))[None, :]
    inside = (o < O) & (k < wide)
    value = tl.load(w + row * w_row + o * wide + k, mask=inside, other=0.0).to(out.dtype.element_ty)
    at = (
        (k // AREA * AREA + AREA - 1 - k % AREA) * O + o
        if BACK
        else o * wide + k % AREA * C + k // AREA
    )
    tl.store(out + row * (O * wide) + at, value, mask=inside)


def _convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    y: Tensor,
    *,
    size: Sequence[int],
    by_tap: bool,
    relu: bool = False,
    pool: bool = False,
    gate: Tensor | None = None,
    scale: float = 1.0,
    config: Blocks | None = None,
) -> Tensor:
    """Convolve x [R, B, C, H, W] with w [R, outputs, depth] into y [R, B, outputs, ...].

    `gate` has the memory layout of y. The result says which of its four pixels each window took;
    without pooling it means nothing.
    """
    rows, batch, channels, high, wide = x.shape
    outputs, *out = y.shape[2:]
    which = (
        torch.empty_strided(y.shape, y.stride(), device=x.device, dtype=torch.uint8) if pool else y
    )
    m = batch * out[0] * out[1]
    bm, bn, bk, warps, stages = config or _convolution_blocks(
        outputs, channels, size[0] * size[1] * channels, by_tap, pool, x.dtype
    )
    kernel = _convolution_kernel if by_tap else _thin_convolution_kernel
    kernel[(rows * triton.cdiv(m, bm) * triton.cdiv(outputs, bn),)](
        x,
        w,
        bias,
        y,
        which,
        gate,
        scale,
        m,
        x.stride(0),
        w.stride(0),
        bias.stride(0) if bias is not None else 0,
        y.stride(0),
        C=channels,
        H=high,
        W=wide,
        O=outputs,
        KH=size[0],
        KW=size[1],
        HO=out[0],
        WO=out[1],
        SH=stride[0],
        SW=stride[1],
        PH=padding[0],
        PW=padding[1],
        x_b=x.stride(1),
        x_c=x.stride(2),
        x_h=x.stride(3),
        x_w=x.stride(4),
        y_b=y.stride(1),
        y_c=y.stride(2),
        y_h=y.stride(3),
        y_w=y.stride(4),
        HAS_BIAS=bias is not None,
        RELU=relu,
        POOL=pool,
        GATE=gate is not None,
        PRECISION=precision(),
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )
    return which


def _convolution_blocks(
    outputs: int, channels: int, depth: int, by_tap: bool, pool: bool, dtype: torch.dtype
) -> Blocks:
    """Pixels (or windows), outputs and depth of a block; warps; and stages of the pipeline.

    They are measured on an H200.
    """
    bn, three = min(64, rounded(outputs)), precision() == "tf32x3"
    if not by_tap:
        return (
            64 if pool else 128,
            min(32, bn),
            32 if depth > 16 else 16,
            2 if pool and not three else 4,
            1,
        )
    bk = 32 if channels % 32 == 0 else 16
    if dtype == torch.bfloat16:
        return (64, bn, bk, 4, 3) if pool else (128, bn, 64 if channels % 64 == 0 else bk, 4, 3)
    return (
        (64, bn, bk, 4, 2)
        if pool
        else (128, 128 if outputs % 128 == 0 and not three else bn, bk, 8, 3)
    )


def _turned(weight: Tensor, back: bool, dtype: torch.dtype) -> Tensor:
    rows, outputs, channels, *size = weight.shape
    area = size[0] * size[1]
    out = torch.empty(
        rows,
        channels if back else outputs,
        area * (outputs if back else channels),
        device=weight.device,
        dtype=dtype,
    )
    bo, bk = (32, 64) if back else (1, 1024)
    _turn_kernel[(rows * triton.cdiv(outputs, bo) * triton.cdiv(channels * area, bk),)](
        weight, out, weight.stride(0), C=channels, O=outputs, AREA=area, BACK=back, BO=bo, BK=bk
    )
    return out


def _side(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    return [
        (x.shape[3 + i] + 2 * padding[i] - weight.shape[3 + i]) // stride[i] + 1 for i in range(2)
    ]


@torch.library.custom_op("rota::convolution_rows", mutates_args=())
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    relu: bool,
    pool: bool,
    planar: bool,
) -> tuple[Tensor, Tensor]:
    """Every row's convolution with its own weights [R, O, C, kh, kw].

    ReLU and 2x2 pooling follow if asked. The second result says which of its four pixels each
    window took; without pooling it means nothing.
    """
    out = [side // 2 if pool else side for side in _side(x, weight, stride, padding)]
    by_tap = tapwise(x)
    w = _turned(weight, False, x.dtype) if by_tap else contiguous_last(weight, 4)
    y = _images(x, weight.shape[1], out, planar)
    which = _convolve(
        x, w, bias, stride, padding, y, size=weight.shape[3:], by_tap=by_tap, relu=relu, pool=pool
    )
    return y, which if pool else x.new_empty(0, dtype=torch.uint8)


def _images(x: Tensor, channels: int, sides: Sequence[int], planar: bool) -> Tensor:
    """Room for images of x's batch, [R, B, channels, *sides].

    The channels are last in memory, or first if `planar`.
    """
    shape = (*x.shape[:2], channels, *sides) if planar else (*x.shape[:2], *sides, channels)
    out = torch.empty(shape, device=x.device, dtype=x.dtype)
    return out if planar else out.permute(0, 1, 4, 2, 3)


def _input_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    scale: float,
) -> Tensor:
    """The gradient of a convolution's input.

    It has the layout of x if x masks it; otherwise its channels are last in memory. Pixels that lie
    `stride` apart see the same taps, every stride-th one. So each set of these pixels is a
    convolution of dy without a stride.
    """
    by_tap, size = tapwise(dy), weight.shape[3:]
    dx = (
        torch.empty_strided(x.shape, x.stride(), device=x.device, dtype=dy.dtype)
        if scale
        else _images(dy, x.shape[2], x.shape[3:], False)
    )
    if any(step > taps for step, taps in zip(stride, size, strict=True)):
        dx.zero_()  # there are pixels that no tap sees
    for first in itertools.product(
        *(range(min(step, side)) for step, side in zip(stride, x.shape[3:], strict=True))
    ):
        tap = [(first[i] + padding[i]) % stride[i] for i in range(2)]
        some = weight[..., tap[0] :: stride[0], tap[1] :: stride[1]]
        if not some.numel():
            continue
        turned = (
            _turned(contiguous_last(some, 4), True, dy.dtype)
            if by_tap
            else some.flip(3, 4).transpose(1, 2).to(dy.dtype).contiguous()
        )
        around = [some.shape[3 + i] - 1 - (first[i] + padding[i]) // stride[i] for i in range(2)]
        here = (..., slice(first[0], None, stride[0]), slice(first[1], None, stride[1]))
        gate = x[here] if scale else None
        _convolve(
            dy,
            turned,
            None,
            [1, 1],
            around,
            dx[here],
            size=some.shape[3:],
            by_tap=by_tap,
            gate=gate,
            scale=scale,
        )
    return dx


def convolution_backward_(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    which: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    scale: float,
    wanted: bool,
    dw: Tensor,
    db: Tensor | None,
    subtract: bool,
) -> Tensor:
    """The gradients of a convolution.

    Those of weights and bias are written to dw and db, or subtracted from them in place. The result
    is the gradient of the input, if wanted. With a scale, it is multiplied by the scale where
    x > 0, and is 0 elsewhere: this is the gradient before the ReLU (and dropout) that x came from.
    With `which`, a 2x2 pooling followed the convolution, and dy is the gradient after it.
    """
    size, sums = weight.shape[3:], None
    few = thin(x, size)
    if which is not None and (wanted or not few):
        out = _side(x, weight, stride, padding)
        dy, sums = unpool(dy, which, out[0], out[1])
        which = None
    if which is not None:
        dy = laid_as(which, dy)
    elif dy.stride(2) != 1 or not dy.permute(0, 1, 3, 4, 2).is_contiguous():
        dy = dy.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    dx = _input_gradient(dy, x, weight, stride, padding, scale) if wanted else x.new_empty(0)
    pieces = weight_gradient(x, dy, size, stride, padding, which)
    if db is not None and sums is None and not few:
        sums = dy.sum((1, 3, 4), dtype=torch.float32).unsqueeze(1)
    add_pieces(pieces, sums, dw, db, few, subtract)
    return dx


@torch.library.custom_op("rota::convolution_rows_backward", mutates_args=())
def convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    which: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    scale: float,
    wanted: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for input, weights and bias, as new tensors."""
    dw = torch.empty(weight.shape, device=x.device, dtype=weight.dtype)
    db = torch.empty(weight.shape[:2], device=x.device, dtype=weight.dtype)
    dx = convolution_backward_(
        dy, x, weight, which, stride, padding, scale, wanted, dw, db if biased else None, False
    )
    return dx, dw, db
