"""Convolutions of stacks: every row has weights of its own, and what surrounds a convolution in a network happens inside it.

Forward: bias, ReLU and 2x2 max pooling, so that the whole image of outputs is never written. Backward: the mask of the ReLU before it.
All are implicit products, without im2col: [pixels, taps x channels] @ [taps x channels, outputs]. Images have their channels last in
memory. Block sizes are a fixed function of the shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import Blocks, contiguous_last, precision, rounded

TAPS = 5  # the most taps of a kernel's row for which the weight gradient has accumulators


@triton.jit
def _larger(value, corner, other, this: tl.constexpr):
    """The larger of two, or the first of equal ones; NaN is larger than all, as in torch."""
    takes = (other > value) | ((other != other) & (value == value))
    return tl.where(takes, other, value), tl.where(takes, this, corner)


@triton.jit
def _image(x, base, top, left, real, i, j, c, x_h: tl.constexpr, x_w: tl.constexpr,
           H: tl.constexpr, W: tl.constexpr, EH: tl.constexpr, EW: tl.constexpr):  # fmt: skip
    """What a tap sees from some pixels: [pixels, channels]. EH and EW: whether taps reach over the edges."""
    if EH:
        real = real & (top + i >= 0) & (top + i < H)
    if EW:
        real = real & (left + j >= 0) & (left + j < W)
    shift = tl.multiple_of(i * x_h + j * x_w, 16)  # the compiler does not see it, and loads would be narrow
    return tl.load(x + base[:, None] + (shift + c)[None, :], mask=real[:, None], other=0.0)


@triton.jit(do_not_specialize=["M"])
def _convolution_kernel(
    x, w, bias, y, which, gate, scale, M, x_row, w_row, bias_row, y_row,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    x_b: tl.constexpr, x_c: tl.constexpr, x_h: tl.constexpr, x_w: tl.constexpr,
    y_b: tl.constexpr, y_c: tl.constexpr, y_h: tl.constexpr, y_w: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[pixel, o] = sum over taps and channels of x[pixel + tap, c] * w[o, tap, c]; a block of the depth is one tap's.

    With POOL there is one accumulator for each of a window's four pixels, and HO and WO are the pooled sizes.
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
        t0 = tl.dot(_image(x, base, top, left, real, i, j, c, x_h, x_w, H, W, eh, ew), taps, t0, input_precision=PRECISION)
        if POOL:
            t1 = tl.dot(_image(x, base, top, left, real, i, j + SW, c, x_h, x_w, H, W, eh, ew), taps, t1, input_precision=PRECISION)
            t2 = tl.dot(_image(x, base, top, left, real, i + SH, j, c, x_h, x_w, H, W, eh, ew), taps, t2, input_precision=PRECISION)
            t3 = tl.dot(_image(x, base, top, left, real, i + SH, j + SW, c, x_h, x_w, H, W, eh, ew), taps, t3, input_precision=PRECISION)
    at = row * y_row + (m // (WO * HO) * y_b + m // WO % HO * y_h + m % WO * y_w)[:, None] + (n * y_c)[None, :]
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


@triton.jit
def _patch(x, base, top, left, real, i, j, k, SHIFT: tl.constexpr, AREA: tl.constexpr, depth: tl.constexpr, x_c: tl.constexpr,
           x_h: tl.constexpr, x_w: tl.constexpr, H: tl.constexpr, W: tl.constexpr, EH: tl.constexpr, EW: tl.constexpr):  # fmt: skip
    """What taps and channels see from some pixels: [taps x channels, pixels], in which the pixels are neighbours in memory."""
    real = real[None, :] & (k < depth)[:, None]
    if EH:
        real = real & ((top[None, :] + i[:, None]).to(tl.uint32, bitcast=True) < H)
    if EW:
        real = real & ((left[None, :] + j[:, None]).to(tl.uint32, bitcast=True) < W)
    return tl.load(x + (base + SHIFT)[None, :] + (i * x_h + j * x_w + k // AREA * x_c)[:, None], mask=real, other=0.0)


@triton.jit(do_not_specialize=["M"])
def _thin_convolution_kernel(
    x, w, bias, y, which, gate, scale, M, x_row, w_row, bias_row, y_row,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    x_b: tl.constexpr, x_c: tl.constexpr, x_h: tl.constexpr, x_w: tl.constexpr,
    y_b: tl.constexpr, y_c: tl.constexpr, y_h: tl.constexpr, y_w: tl.constexpr,
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same for few channels, transposed, so that neighbouring threads load neighbouring pixels; w is [O, c, tap], as torch has it."""
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
        taps = tl.load(w + k[None, :], mask=(n[:, None] < O) & (k[None, :] < depth), other=0.0).to(x.dtype.element_ty)
        t0 = tl.dot(taps, _patch(x, base, top, left, real, i, j, k, 0, area, depth, x_c, x_h, x_w, H, W, eh, ew), t0,
                    input_precision=PRECISION)  # fmt: skip
        if POOL:
            t1 = tl.dot(taps, _patch(x, base, top, left + SW, real, i, j, k, SW * x_w, area, depth, x_c, x_h, x_w, H, W, eh, ew), t1,
                        input_precision=PRECISION)  # fmt: skip
            t2 = tl.dot(taps, _patch(x, base, top + SH, left, real, i, j, k, SH * x_h, area, depth, x_c, x_h, x_w, H, W, eh, ew), t2,
                        input_precision=PRECISION)  # fmt: skip
            t3 = tl.dot(taps, _patch(x, base, top + SH, left + SW, real, i, j, k, SH * x_h + SW * x_w, area, depth, x_c, x_h, x_w,
                                     H, W, eh, ew), t3, input_precision=PRECISION)  # fmt: skip
    at = row * y_row + (m // (WO * HO) * y_b + m // WO % HO * y_h + m % WO * y_w)[None, :] + (n * y_c)[:, None]
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


@triton.jit(do_not_specialize=["M", "length", "splits"])
def _weight_gradient_kernel(
    x, dy, pieces, M, length, splits, x_row,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    x_b: tl.constexpr, x_c: tl.constexpr, x_h: tl.constexpr, x_w: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """pieces[split, o, tap, c] = sum over a split's pixels of dy[pixel, o] * x[pixel + tap, c], for the KW taps of one kernel row."""
    eh: tl.constexpr = PH > 0 or (HO - 1) * SH - PH + KH > H
    ew: tl.constexpr = PW > 0 or (WO - 1) * SW - PW + KW > W
    across: tl.constexpr = (O + BM - 1) // BM
    along: tl.constexpr = C // BN
    here = tl.program_id(0)
    i = here % KH
    n = here // KH % along * BN + tl.arange(0, BN)
    m = here // (KH * along) % across * BM + tl.arange(0, BM)
    split = here // (KH * along * across) % splits
    row = (here // (KH * along * across * splits)).to(tl.int64)
    x += row * x_row
    dy += row * M * O
    t0 = tl.zeros((BM, BN), tl.float32)
    t1 = tl.zeros((BM, BN), tl.float32)
    t2 = tl.zeros((BM, BN), tl.float32)
    t3 = tl.zeros((BM, BN), tl.float32)
    t4 = tl.zeros((BM, BN), tl.float32)
    for start in range(split * length, tl.minimum(split * length + length, M), BK):
        p = start + tl.arange(0, BK)
        real = p < M
        top = p // WO % HO * SH - PH
        left = p % WO * SW - PW
        base = p // (WO * HO) * x_b + top * x_h + left * x_w
        grads = tl.load(dy + p[:, None] * O + m[None, :], mask=real[:, None] & (m[None, :] < O), other=0.0)
        turned = tl.trans(grads)
        t0 = tl.dot(turned, _image(x, base, top, left, real, i, 0, n, x_h, x_w, H, W, eh, ew), t0, input_precision=PRECISION)
        if KW > 1:
            t1 = tl.dot(turned, _image(x, base, top, left, real, i, 1, n, x_h, x_w, H, W, eh, ew), t1, input_precision=PRECISION)
        if KW > 2:
            t2 = tl.dot(turned, _image(x, base, top, left, real, i, 2, n, x_h, x_w, H, W, eh, ew), t2, input_precision=PRECISION)
        if KW > 3:
            t3 = tl.dot(turned, _image(x, base, top, left, real, i, 3, n, x_h, x_w, H, W, eh, ew), t3, input_precision=PRECISION)
        if KW > 4:
            t4 = tl.dot(turned, _image(x, base, top, left, real, i, 4, n, x_h, x_w, H, W, eh, ew), t4, input_precision=PRECISION)
    depth: tl.constexpr = KH * KW * C
    at = pieces + (row * splits + split) * O * depth + m[:, None] * depth + (i * KW * C + n)[None, :]
    inside = tl.broadcast_to(m[:, None] < O, (BM, BN))
    tl.store(at, t0, mask=inside)
    if KW > 1:
        tl.store(at + C, t1, mask=inside)
    if KW > 2:
        tl.store(at + 2 * C, t2, mask=inside)
    if KW > 3:
        tl.store(at + 3 * C, t3, mask=inside)
    if KW > 4:
        tl.store(at + 4 * C, t4, mask=inside)


@triton.jit(do_not_specialize=["M", "length", "splits"])
def _thin_weight_gradient_kernel(
    x, dy, which, pieces, M, length, splits, x_row, dy_row,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    x_b: tl.constexpr, x_c: tl.constexpr, x_h: tl.constexpr, x_w: tl.constexpr,
    y_b: tl.constexpr, y_c: tl.constexpr, y_h: tl.constexpr, y_w: tl.constexpr,
    POOL: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same as pieces[split, o, c x tap], for few channels; one column more has the sums of dy, which are the bias's gradient.

    With POOL, dy is the gradient behind a 2x2 pooling, and `which` says at which pixel of its window each stands.
    """
    by: tl.constexpr = 2 if POOL else 1
    eh: tl.constexpr = PH > 0 or (HO * by - 1) * SH - PH + KH > H
    ew: tl.constexpr = PW > 0 or (WO * by - 1) * SW - PW + KW > W
    depth: tl.constexpr = KH * KW * C
    area: tl.constexpr = KH * KW
    across: tl.constexpr = (O + BM - 1) // BM
    along: tl.constexpr = depth // BN + 1
    here = tl.program_id(0)
    k = here % along * BN + tl.arange(0, BN)
    o = here // along % across * BM + tl.arange(0, BM)
    split = here // (along * across) % splits
    row = (here // (along * across * splits)).to(tl.int64)
    i = k // KW % KH
    j = k % KW
    x += row * x_row
    dy += row * dy_row
    which += row * dy_row
    ones = (k == depth)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for start in range(split * length, tl.minimum(split * length + length, M), BK):
        p = start + tl.arange(0, BK)
        real = p < M
        top = p // WO % HO * (SH * by) - PH
        left = p % WO * (SW * by) - PW
        base = p // (WO * HO) * x_b + top * x_h + left * x_w
        at = (p // (WO * HO) * y_b + p // WO % HO * y_h + p % WO * y_w)[:, None] + (o * y_c)[None, :]
        inside = real[:, None] & (o[None, :] < O)
        grads = tl.load(dy + at, mask=inside, other=0.0)
        if POOL:
            corner = tl.load(which + at, mask=inside, other=0)
            for at_corner in tl.static_range(4):
                seen = _patch(x, base, top + at_corner // 2 * SH, left + at_corner % 2 * SW, real, i, j, k,
                              at_corner // 2 * SH * x_h + at_corner % 2 * SW * x_w, area, depth, x_c, x_h, x_w, H, W, eh, ew)  # fmt: skip
                seen = tl.where(ones, 1.0, seen).to(seen.dtype)
                total = tl.dot(seen, tl.where(corner == at_corner, grads, 0.0).to(grads.dtype), total, input_precision=PRECISION)
        else:
            seen = _patch(x, base, top, left, real, i, j, k, 0, area, depth, x_c, x_h, x_w, H, W, eh, ew)
            seen = tl.where(ones, 1.0, seen).to(seen.dtype)
            total = tl.dot(seen, grads, total, input_precision=PRECISION)
    to = pieces + ((row * splits + split) * O + o[None, :]) * (depth + 1) + k[:, None]
    tl.store(to, total, mask=(o[None, :] < O) & (k[:, None] <= depth))


@triton.jit(do_not_specialize=["splits", "parts"])
def _add_pieces_kernel(
    pieces, sums, dw, db, splits, parts, dw_row, db_row, C: tl.constexpr, O: tl.constexpr, AREA: tl.constexpr,
    HAS_BIAS: tl.constexpr, SUBTRACT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SUMS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """dw[o, c, tap] (and db) from the pieces: written, or subtracted in place. `sums` [parts, O] are dy's sums over parts of the pixels.

    A program has one output, all taps and some channels: they are read by tap, as the pieces lie in memory, and written by channel.
    """
    across: tl.constexpr = (C + BC - 1) // BC
    row = (tl.program_id(0) // (across * O)).to(tl.int64)
    o = tl.program_id(0) // across % O
    tap = tl.arange(0, BT)
    c = tl.program_id(0) % across * BC + tl.arange(0, BC)
    inside = (tap < AREA)[:, None] & (c < C)[None, :]
    at = pieces + (row * splits * O + o) * (AREA * C) + tap[:, None] * C + c[None, :]
    total = tl.zeros((BT, BC), tl.float32)
    for start in range(0, splits, TOGETHER):
        split = (start + tl.arange(0, TOGETHER))[:, None, None]
        total += tl.sum(tl.load(at[None, :, :] + split * (O * AREA * C), mask=(split < splits) & inside[None, :, :], other=0.0), 0)
    place = dw + row * dw_row + o * (C * AREA) + c[:, None] * AREA + tap[None, :]
    _put(place, tl.trans(total), (c < C)[:, None] & (tap < AREA)[None, :], SUBTRACT)
    if HAS_BIAS:
        if tl.program_id(0) % (across * O) == 0:
            channel = tl.arange(0, SUMS)
            whole = tl.zeros((SUMS,), tl.float32)
            for begin in range(0, parts, 16):
                part = begin + tl.arange(0, 16)
                inner = sums + (row * parts + part)[:, None] * O + channel[None, :]
                whole += tl.sum(tl.load(inner, mask=(part < parts)[:, None] & (channel < O)[None, :], other=0.0), 0)
            _put(db + row * db_row + channel, whole, channel < O, SUBTRACT)


@triton.jit(do_not_specialize=["splits"])
def _add_thin_pieces_kernel(
    pieces, dw, db, splits, dw_row, db_row, depth: tl.constexpr, O: tl.constexpr, HAS_BIAS: tl.constexpr, SUBTRACT: tl.constexpr,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The same for few channels, whose pieces lie in memory as dw does, with a column more for db."""
    wide: tl.constexpr = depth + 1
    blocks: tl.constexpr = (O * wide + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < O * wide
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, splits, TOGETHER):
        split = (start + tl.arange(0, TOGETHER))[:, None]
        places = pieces + (row * splits + split) * (O * wide) + at[None, :]
        total += tl.sum(tl.load(places, mask=(split < splits) & inside[None, :], other=0.0), 0)
    o = at // wide
    k = at % wide
    if HAS_BIAS:
        _put(db + row * db_row + o, total, inside & (k == depth), SUBTRACT)
    _put(dw + row * dw_row + o * depth + k, total, inside & (k < depth), SUBTRACT)


@triton.jit
def _put(place, value, inside, SUBTRACT: tl.constexpr):
    if SUBTRACT:
        value = tl.load(place, mask=inside, other=0.0) - value
    tl.store(place, value, mask=inside)


@triton.jit
def _turn_kernel(
    w, out, w_row, C: tl.constexpr, O: tl.constexpr, AREA: tl.constexpr, BACK: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """w [O, C, tap] as [O, tap, C]; or BACK, for the gradient of the input, as [C, tap, O] with the taps from the last to the first.

    A block is read as it lies in memory; what comes out of it lies together too, but for the taps.
    """
    wide: tl.constexpr = C * AREA
    along: tl.constexpr = (wide + BK - 1) // BK
    blocks: tl.constexpr = (O + BO - 1) // BO * along
    row = (tl.program_id(0) // blocks).to(tl.int64)
    o = (tl.program_id(0) % blocks // along * BO + tl.arange(0, BO))[:, None]
    k = (tl.program_id(0) % along * BK + tl.arange(0, BK))[None, :]
    inside = (o < O) & (k < wide)
    value = tl.load(w + row * w_row + o * wide + k, mask=inside, other=0.0).to(out.dtype.element_ty)
    at = (k // AREA * AREA + AREA - 1 - k % AREA) * O + o if BACK else o * wide + k % AREA * C + k // AREA
    tl.store(out + row * (O * wide) + at, value, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _unpool_kernel(
    g, which, dy, sums, M, g_row, dy_row, O: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    g_b: tl.constexpr, g_c: tl.constexpr, g_h: tl.constexpr, g_w: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient before a 2x2 pooling: each window's gradient at its largest pixel, zero at the others; and its sums over a block."""
    blocks = tl.cdiv(M, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    m = block * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    high = m // WP % HP
    wide = m % WP
    inside = (m[:, None] < M) & (n[None, :] < O)
    at = row * g_row + (m // (WP * HP) * g_b + high * g_h + wide * g_w)[:, None] + (n * g_c)[None, :]
    value = tl.load(g + at, mask=inside, other=0.0)
    corner = tl.load(which + at, mask=inside, other=0)
    first = dy + row * dy_row + ((m // (WP * HP) * H + high * 2) * W + wide * 2)[:, None] * O + n[None, :]
    for j in tl.static_range(4):
        tl.store(first + (j // 2 * W + j % 2) * O, tl.where(corner == j, value, 0.0).to(value.dtype), mask=inside)
    tl.store(sums + (row * blocks + block) * O + n, tl.sum(value.to(tl.float32), 0), mask=n < O)


def _convolve(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], out: Sequence[int], *, size: Sequence[int],
    outputs: int, by_tap: bool, relu: bool = False, pool: bool = False, planar: bool = False, gate: Tensor | None = None,
    scale: float = 1.0, into: Tensor | None = None, config: Blocks | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [R, B, C, H, W] with w [R, outputs, depth] -> [R, B, outputs, *out]; the channels are last in memory, or first if `planar`.

    With `into`, the result is written there, and `gate` lies in memory as it does.
    """
    rows, batch, channels, high, wide = x.shape
    shape = (rows, batch, outputs, *out) if planar else (rows, batch, *out, outputs)
    if into is not None:
        y = into
    else:
        y = torch.empty(shape, device=x.device, dtype=x.dtype)
        y = y if planar else y.permute(0, 1, 4, 2, 3)
    which = torch.empty_strided(y.shape, y.stride(), device=x.device, dtype=torch.uint8) if pool else y
    m = batch * out[0] * out[1]
    bm, bn, bk, warps, stages = config or _convolution_blocks(outputs, channels, size[0] * size[1] * channels, by_tap, pool, x.dtype)
    kernel = _convolution_kernel if by_tap else _thin_convolution_kernel
    kernel[(rows * triton.cdiv(m, bm) * triton.cdiv(outputs, bn),)](
        x, w, bias, y, which, gate, scale, m, x.stride(0), w.stride(0), bias.stride(0) if bias is not None else 0, y.stride(0),
        C=channels, H=high, W=wide, O=outputs, KH=size[0], KW=size[1], HO=out[0], WO=out[1], SH=stride[0], SW=stride[1],
        PH=padding[0], PW=padding[1], x_b=x.stride(1), x_c=x.stride(2), x_h=x.stride(3), x_w=x.stride(4),
        y_b=y.stride(1), y_c=y.stride(2), y_h=y.stride(3), y_w=y.stride(4), HAS_BIAS=bias is not None, RELU=relu,
        POOL=pool, GATE=gate is not None, PRECISION=precision(), BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y, which


def _convolution_blocks(outputs: int, channels: int, depth: int, by_tap: bool, pool: bool, dtype: torch.dtype) -> Blocks:
    """Pixels (or windows), outputs and depth of a block, warps, and stages of the pipeline: measured on an H200."""
    bn, three = min(64, rounded(outputs)), precision() == "tf32x3"
    if not by_tap:
        return 64 if pool else 128, min(32, bn), 32 if depth > 16 else 16, 2 if pool and not three else 4, 1
    bk = 32 if channels % 32 == 0 else 16
    if dtype == torch.bfloat16:
        return (64, bn, bk, 4, 3) if pool else (128, bn, 64 if channels % 64 == 0 else bk, 4, 3)
    return (64, bn, bk, 4, 2) if pool else (128, 128 if outputs % 128 == 0 and not three else bn, bk, 8, 3)


def _by_tap(x: Tensor) -> bool:
    """Whether a block of the depth can be one tap's channels."""
    return x.shape[2] % 16 == 0 and x.stride(2) == 1


def _turned(weight: Tensor, back: bool, dtype: torch.dtype) -> Tensor:
    rows, outputs, channels, *size = weight.shape
    area = size[0] * size[1]
    out = torch.empty(rows, channels if back else outputs, area * (outputs if back else channels), device=weight.device, dtype=dtype)
    bo, bk = (32, 64) if back else (1, 1024)
    _turn_kernel[(rows * triton.cdiv(outputs, bo) * triton.cdiv(channels * area, bk),)](
        weight, out, weight.stride(0), C=channels, O=outputs, AREA=area, BACK=back, BO=bo, BK=bk
    )
    return out


def _side(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    return [(x.shape[3 + i] + 2 * padding[i] - weight.shape[3 + i]) // stride[i] + 1 for i in range(2)]


@torch.library.custom_op("rota::convolution_rows", mutates_args=())
def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], relu: bool, pool: bool, planar: bool
) -> tuple[Tensor, Tensor]:
    """Every row's convolution with its own weights [R, O, C, kh, kw], then ReLU and 2x2 pooling if asked.

    The second result says which of its four pixels each window took; without pooling it means nothing.
    """
    out = _side(x, weight, stride, padding)
    out = [side // 2 for side in out] if pool else out
    by_tap = _by_tap(x)
    w = _turned(weight, False, x.dtype) if by_tap else contiguous_last(weight, 4)
    more: dict[str, Any] = {"size": weight.shape[3:], "outputs": weight.shape[1], "by_tap": by_tap}
    y, which = _convolve(x, w, bias, stride, padding, out, **more, relu=relu, pool=pool, planar=planar)
    return y, which if pool else x.new_empty(0, dtype=torch.uint8)


def _input_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], scale: float) -> Tensor:
    """The gradient of a convolution's input, in the layout of x if it is masked by it, else with the channels last in memory.

    Pixels that lie `stride` apart see the same taps, every stride-th one: together they are a convolution of dy without a stride.
    """
    rows, batch, channels, high, wide = x.shape
    by_tap, size = _by_tap(dy), weight.shape[3:]
    dx = torch.empty(rows, batch, high, wide, channels, device=x.device, dtype=dy.dtype).permute(0, 1, 4, 2, 3)
    dx = torch.empty_strided(x.shape, x.stride(), device=x.device, dtype=dy.dtype) if scale else dx
    if any(step > taps for step, taps in zip(stride, size, strict=True)):
        dx.zero_()  # there are pixels that no tap sees
    for first in itertools.product(*(range(min(step, side)) for step, side in zip(stride, x.shape[3:], strict=True))):
        tap = [(first[i] + padding[i]) % stride[i] for i in range(2)]
        some = weight[..., tap[0] :: stride[0], tap[1] :: stride[1]]
        if not some.numel():
            continue
        turned = _turned(contiguous_last(some, 4), True, dy.dtype) if by_tap else some.flip(3, 4).transpose(1, 2).to(dy.dtype).contiguous()
        around = [some.shape[3 + i] - 1 - (first[i] + padding[i]) // stride[i] for i in range(2)]
        here = (..., slice(first[0], None, stride[0]), slice(first[1], None, stride[1]))
        _convolve(
            dy, turned, None, [1, 1], around, dx[here].shape[3:], size=some.shape[3:], outputs=channels, by_tap=by_tap,
            gate=x[here] if scale else None, scale=scale, into=dx[here],
        )  # fmt: skip
    return dx


def _weight_gradient(
    x: Tensor, dy: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], which: Tensor | None = None,
    config: tuple[int, ...] | None = None,
) -> tuple[Tensor, bool]:  # fmt: skip
    """Sums over parts of the pixels, [R, parts, ...], and whether they are in the layout for few channels.

    With `which` (few channels only), dy is the gradient behind a 2x2 pooling.
    """
    rows, batch, channels, high, wide = x.shape
    outputs, out_high, out_wide = dy.shape[2:]
    m = batch * out_high * out_wide
    thin = not (_by_tap(x) and size[1] <= TAPS)
    bm, bn, bk, warps, stages, *given = config or _weight_blocks(channels, outputs, size, thin)
    depth = size[0] * size[1] * channels
    tiles = rows * triton.cdiv(outputs, bm) * (depth // bn + 1 if thin else size[0] * (channels // bn))
    parts = given[0] if given else _parts(m, bk, tiles, thin)
    length = triton.cdiv(triton.cdiv(m, parts), bk) * bk
    parts = triton.cdiv(m, length)
    pieces = torch.empty(rows, parts, outputs, depth + thin, device=x.device)
    sizes = {
        "C": channels, "H": high, "W": wide, "O": outputs, "KH": size[0], "KW": size[1], "HO": out_high, "WO": out_wide,
        "SH": stride[0], "SW": stride[1], "PH": padding[0], "PW": padding[1],
        "x_b": x.stride(1), "x_c": x.stride(2), "x_h": x.stride(3), "x_w": x.stride(4),
        "PRECISION": precision(), "BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    if thin:
        _thin_weight_gradient_kernel[(tiles * parts,)](
            x, dy, dy if which is None else which, pieces, m, length, parts, x.stride(0), dy.stride(0),
            y_b=dy.stride(1), y_c=dy.stride(2), y_h=dy.stride(3), y_w=dy.stride(4), POOL=which is not None, **sizes,
        )  # fmt: skip
    else:
        _weight_gradient_kernel[(tiles * parts,)](x, dy, pieces, m, length, parts, x.stride(0), **sizes)
    return pieces, thin


def _weight_blocks(channels: int, outputs: int, size: Sequence[int], thin: bool) -> tuple[int, ...]:
    """Outputs, channels (or columns) and pixels of a block, warps, stages."""
    bm, three = min(64, rounded(outputs)), precision() == "tf32x3"
    if thin:
        return min(32, bm), 32 if size[0] * size[1] * channels < 32 else 64, 32, 4 if three else 2, 1
    return min(32, bm) if three else bm, 32 if channels % 32 == 0 else 16, 32, 2, 3


def _parts(m: int, bk: int, tiles: int, thin: bool) -> int:
    """Into how many parts the pixels are divided, so that there are programs enough to keep a large GPU busy."""
    programs, least = (3200, 2) if thin else (1600, 8)
    return max(1, min(128 if thin else 64, -(-m // (least * bk)), -(-programs // tiles)))


def convolution_backward_(
    dy: Tensor, x: Tensor, weight: Tensor, which: Tensor | None, stride: Sequence[int], padding: Sequence[int], scale: float, wanted: bool,
    dw: Tensor, db: Tensor | None, subtract: bool,
) -> Tensor:  # fmt: skip
    """The gradients of a convolution: dw and db are written, or subtracted in place; the result is the input's (if wanted).

    With a scale, that one is multiplied by it where x > 0, and 0 elsewhere: the ReLU (and dropout) that x came from. With `which`, dy is
    the gradient behind the 2x2 pooling of what the convolution gave.
    """
    rows, outputs, channels, *size = weight.shape
    sums = None
    thin = not (_by_tap(x) and size[1] <= TAPS)
    if which is not None and (wanted or not thin):
        out = _side(x, weight, stride, padding)
        dy, sums = unpool(dy, which, out[0], out[1])
        which = None
    if which is not None:
        dy = _as(which, dy)
    elif dy.stride(2) != 1 or not dy.permute(0, 1, 3, 4, 2).is_contiguous():
        dy = dy.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    dx = _input_gradient(dy, x, weight, stride, padding, scale) if wanted else x.new_empty(0)
    pieces, thin = _weight_gradient(x, dy, size, stride, padding, which)
    area, more = size[0] * size[1], {"O": outputs, "HAS_BIAS": db is not None, "SUBTRACT": subtract, "TOGETHER": 4, "num_warps": 4}
    by_row = (dw.stride(0), 0 if db is None else db.stride(0))
    if thin:
        _add_thin_pieces_kernel[(rows * triton.cdiv(outputs * pieces.shape[3], 512),)](
            pieces, dw, db, pieces.shape[1], *by_row, depth=area * channels, BLOCK=512, **more
        )
        return dx
    if db is not None and sums is None:
        sums = dy.sum((1, 3, 4), dtype=torch.float32).unsqueeze(1)
    bt = triton.next_power_of_2(area)
    bc = min(max(1, 1024 // bt), rounded(channels))
    _add_pieces_kernel[(rows * outputs * triton.cdiv(channels, bc),)](
        pieces, sums, dw, db, pieces.shape[1], 0 if sums is None else sums.shape[1], *by_row, C=channels, AREA=area, BT=bt, BC=bc,
        SUMS=rounded(outputs), **more,
    )  # fmt: skip
    return dx


@torch.library.custom_op("rota::convolution_rows_backward", mutates_args=())
def convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, which: Tensor | None, stride: Sequence[int], padding: Sequence[int], scale: float, wanted: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients for input, weights and bias, as new tensors."""
    dw = torch.empty(weight.shape, device=x.device, dtype=weight.dtype)
    db = torch.empty(weight.shape[:2], device=x.device, dtype=weight.dtype)
    dx = convolution_backward_(dy, x, weight, which, stride, padding, scale, wanted, dw, db if biased else None, False)
    return dx, dw, db


def _as(like: Tensor, x: Tensor) -> Tensor:
    """x, lying in memory as another tensor of its shape."""
    return x if x.stride() == like.stride() else torch.empty_strided(like.shape, like.stride(), device=x.device, dtype=x.dtype).copy_(x)


def unpool(g: Tensor, which: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
    """The gradient before a 2x2 pooling, [R, B, O, high, wide] with the channels last in memory, and its sums over parts of the pixels."""
    rows, batch, outputs, small_high, small_wide = g.shape
    g = _as(which, g)
    whole = high == 2 * small_high and wide == 2 * small_wide
    dy = (torch.empty if whole else torch.zeros)(rows, batch, high, wide, outputs, device=g.device, dtype=g.dtype)
    m = batch * small_high * small_wide
    bm, bn = max(8, 2048 // rounded(outputs)), rounded(outputs)
    sums = torch.empty(rows, triton.cdiv(m, bm), outputs, device=g.device)
    _unpool_kernel[(rows * triton.cdiv(m, bm),)](
        g, which, dy, sums, m, g.stride(0), dy.stride(0), O=outputs, HP=small_high, WP=small_wide, H=high, W=wide,
        g_b=g.stride(1), g_c=g.stride(2), g_h=g.stride(3), g_w=g.stride(4), BM=bm, BN=bn, num_warps=4,
    )  # fmt: skip
    return dy.permute(0, 1, 4, 2, 3), sums


@torch.library.custom_op("rota::unpool_rows", mutates_args=())
def unpooled(g: Tensor, which: Tensor, high: int, wide: int) -> Tensor:
    """`unpool`'s image alone, where no convolution takes its place."""
    return unpool(g, which, high, wide)[0]
