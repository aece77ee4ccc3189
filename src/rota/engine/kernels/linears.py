"""Linear layers of stacks with small mini-batches.

Moving the weights from and to memory bounds their speed, so they are moved as seldom as possible.
The forward pass reads the weights once, and adds bias and ReLU. The backward pass reads them once
and writes them once: one kernel computes the gradient of the input, takes the step of weights and
bias, and applies the mask of the ReLU before the layer. Arithmetic bounds the speed of wide
mini-batches, so the library computes these. Block sizes are a fixed function of the shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import contiguous_last, precision, rounded

WIDEST = 64  # the widest mini-batch for these kernels
PROGRAMS = 500  # as many keep the memory of a large GPU busy


@triton.jit(do_not_specialize=["B", "splits", "length"])
def _linear_kernel(
    x,
    w,
    bias,
    y,
    B,
    splits,
    length,
    x_row,
    w_row,
    bias_row,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[b, n] = sum over k of x[b, k] * w[n, k]; SPLIT: sums over parts of k, y[split, b, n]."""
    across: tl.constexpr = (N + BN - 1) // BN
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    split = tl.program_id(0) // across % splits
    row = (tl.program_id(0) // (across * splits)).to(tl.int64)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    x += row * x_row + m[:, None] * K
    w += row * w_row + n[:, None] * K
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, length, BK):
        at = (
            tl.multiple_of(split * length + start, 16) + k
        )  # the compiler does not see it, and loads would be narrow
        left = tl.load(x + at[None, :], mask=(m[:, None] < B) & (at[None, :] < K), other=0.0)
        right = tl.load(w + at[None, :], mask=(n[:, None] < N) & (at[None, :] < K), other=0.0)
        total = tl.dot(left, tl.trans(right).to(left.dtype), total, input_precision=PRECISION)
    if HAS_BIAS and not SPLIT:
        total += tl.load(bias + row * bias_row + n, mask=n < N, other=0.0)[None, :]
    if RELU and not SPLIT:
        total = tl.where(total < 0.0, 0.0, total)
    to = y + (row * splits + split) * B * N + m[:, None] * N + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(m[:, None] < B) & (n[None, :] < N))


@triton.jit(do_not_specialize=["B", "splits"])
def _add_splits_kernel(
    pieces,
    bias,
    y,
    B,
    splits,
    bias_row,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    blocks = tl.cdiv(B * N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < B * N
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, splits, TOGETHER):
        split = start + tl.arange(0, TOGETHER)
        places = pieces + (row * splits + split)[:, None] * (B * N) + at[None, :]
        total += tl.sum(
            tl.load(places, mask=(split < splits)[:, None] & inside[None, :], other=0.0), 0
        )
    if HAS_BIAS:
        total += tl.load(bias + row * bias_row + at % N, mask=inside, other=0.0)
    if RELU:
        total = tl.where(total < 0.0, 0.0, total)
    tl.store(y + row * B * N + at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B"])
def _linear_backward_kernel(
    dy,
    x,
    w,
    dx,
    dw,
    db,
    scale,
    B,
    dy_row,
    x_row,
    w_row,
    dw_row,
    db_row,
    K: tl.constexpr,
    N: tl.constexpr,
    WANTED: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """For some inputs k and all outputs n: dx = dy @ w with the old weights, and dw = dy^T @ x.

    dw is written, or subtracted from w.
    """
    across: tl.constexpr = (K + BK - 1) // BK
    first = tl.program_id(0) % across
    row = (tl.program_id(0) // across).to(tl.int64)
    m = tl.arange(0, BM)
    k = first * BK + tl.arange(0, BK)
    within = (m[:, None] < B) & (k[None, :] < K)
    inputs = tl.load(x + row * x_row + m[:, None] * K + k[None, :], mask=within, other=0.0)
    dy += row * dy_row + m[:, None] * N
    w += row * w_row + k[None, :]
    dw += row * dw_row + k[None, :]
    total = tl.zeros((BM, BK), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        inside = (n[:, None] < N) & (k[None, :] < K)
        grads = tl.load(dy + n[None, :], mask=(m[:, None] < B) & (n[None, :] < N), other=0.0)
        step = tl.dot(tl.trans(grads), inputs, input_precision=PRECISION)
        if WANTED or SUBTRACT:
            before = tl.load(w + n[:, None] * K, mask=inside, other=0.0)
        if WANTED:
            total = tl.dot(grads, before.to(grads.dtype), total, input_precision=PRECISION)
        if SUBTRACT:
            step = before - step
        tl.store(dw + n[:, None] * K, step, mask=inside)
        if HAS_BIAS:
            if first == 0:
                sums = tl.sum(grads.to(tl.float32), 0)
                to = db + row * db_row + n
                if SUBTRACT:
                    sums = tl.load(to, mask=n < N, other=0.0) - sums
                tl.store(to, sums, mask=n < N)
    if WANTED:
        if GATE:
            total = tl.where(inputs > 0.0, total * scale, 0.0)
        tl.store(
            dx + (row * B + m)[:, None] * K + k[None, :], total.to(dx.dtype.element_ty), mask=within
        )


def _forward_blocks(n: int, k: int) -> tuple[int, ...]:
    """Outputs and depth of a block; warps; and stages. They are measured on an H200."""
    return min(64, rounded(n)), 64 if k >= 64 else rounded(k), 4, 3 if k < 2048 else 2


def _backward_blocks(n: int, k: int, wanted: bool) -> tuple[int, ...]:
    """Outputs and inputs of a block; warps; and stages."""
    if k >= 1024:
        return min(32, rounded(n)), 128, 4, 3
    return (
        (min(32, rounded(n)), min(32, rounded(k)), 4, 2)
        if wanted
        else (min(64, rounded(n)), min(64, rounded(k)), 4, 2)
    )


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    relu: bool,
    config: tuple[int, ...] | None = None,
) -> Tensor:
    rows, batch, inputs = x.shape
    outputs = weight.shape[1]
    bn, bk, warps, stages, *given = config or _forward_blocks(outputs, inputs)
    tiles = rows * triton.cdiv(outputs, bn)
    splits = given[0] if given else max(1, min(16, triton.cdiv(PROGRAMS, tiles), inputs // 512))
    length = triton.cdiv(triton.cdiv(inputs, splits), bk) * bk
    splits = triton.cdiv(inputs, length)
    y = torch.empty(rows, batch, outputs, device=x.device, dtype=x.dtype)
    to = y if splits == 1 else torch.empty(rows, splits, batch, outputs, device=x.device)
    bias_row = bias.stride(0) if bias is not None else 0
    _linear_kernel[(tiles * splits,)](
        x,
        weight,
        bias,
        to,
        batch,
        splits,
        length,
        x.stride(0),
        weight.stride(0),
        bias_row,
        K=inputs,
        N=outputs,
        SPLIT=splits > 1,
        HAS_BIAS=bias is not None,
        RELU=relu,
        PRECISION=precision(),
        BM=rounded(batch),
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _add_splits_kernel[(rows * triton.cdiv(batch * outputs, 256),)](
            to,
            bias,
            y,
            batch,
            splits,
            bias_row,
            N=outputs,
            HAS_BIAS=bias is not None,
            RELU=relu,
            BLOCK=256,
            TOGETHER=4,
            num_warps=2,
        )
    return y


@torch.library.custom_op("rota::linear_rows", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """x [R, B, I] with every row's own weights [R, O, I] and bias [R, O], and ReLU if asked."""
    if x.shape[1] <= WIDEST:
        return _forward(contiguous_last(x, 2), contiguous_last(weight, 2), bias, relu)
    turned = weight.transpose(1, 2).to(x.dtype)
    y = (
        torch.bmm(x, turned)
        if bias is None
        else torch.baddbmm(bias.unsqueeze(1).to(x.dtype), x, turned)
    )
    return y.relu_() if relu else y


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: float,
    wanted: bool,
    dw: Tensor,
    db: Tensor | None,
    subtract: bool,
    config: tuple[int, ...] | None = None,
) -> Tensor:
    rows, batch, inputs = x.shape
    outputs = weight.shape[1]
    bn, bk, warps, stages = config or _backward_blocks(outputs, inputs, wanted)
    dx = torch.empty(x.shape if wanted else 0, device=x.device, dtype=x.dtype)
    _linear_backward_kernel[(rows * triton.cdiv(inputs, bk),)](
        dy,
        x,
        weight,
        dx,
        dw,
        db,
        scale,
        batch,
        dy.stride(0),
        x.stride(0),
        weight.stride(0),
        dw.stride(0),
        db.stride(0) if db is not None else 0,
        K=inputs,
        N=outputs,
        WANTED=wanted,
        GATE=scale != 0,
        HAS_BIAS=db is not None,
        SUBTRACT=subtract,
        PRECISION=precision(),
        BM=rounded(batch),
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )
    return dx


def linear_backward_(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: float,
    wanted: bool,
    dw: Tensor,
    db: Tensor | None,
    subtract: bool,
) -> Tensor:
    """The gradients of a linear layer.

    Those of weights and bias are written to dw and db, or subtracted from them in place. The result
    is the gradient of the input, if wanted. With a scale, it is multiplied by the scale where
    x > 0, and is 0 elsewhere: this is the gradient before the ReLU (and dropout) that x came from.
    """
    if x.shape[1] <= WIDEST:
        whole = [contiguous_last(each, 2) for each in (dy, x, weight)]
        return _backward(whole[0], whole[1], whole[2], scale, wanted, dw, db, subtract)
    dx = torch.bmm(dy, weight.to(dy.dtype)) if wanted else x.new_empty(0)
    if wanted and scale:
        dx = torch.ops.aten.threshold_backward(dx.mul_(scale) if scale != 1 else dx, x, 0)
    if subtract and dy.dtype == dw.dtype:
        dw.baddbmm_(dy.transpose(1, 2), x, alpha=-1)
    elif subtract:
        dw.sub_(torch.bmm(dy.transpose(1, 2), x))
    else:
        dw.copy_(torch.bmm(dy.transpose(1, 2), x))
    if db is not None:
        total = dy.sum(1, dtype=db.dtype)
        _ = db.sub_(total) if subtract else db.copy_(total)
    return dx


@torch.library.custom_op("rota::linear_rows_backward", mutates_args=())
def linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: float, wanted: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for input, weights and bias, as new tensors."""
    dw = torch.empty(weight.shape, device=x.device, dtype=weight.dtype)
    db = torch.empty(weight.shape[:2], device=x.device, dtype=weight.dtype)
    dx = linear_backward_(dy, x, weight, scale, wanted, dw, db if biased else None, False)
    return dx, dw, db
