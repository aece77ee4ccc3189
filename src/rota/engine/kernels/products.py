"""Batched products with few rows, outside of linear layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import Blocks, precision


@triton.jit
def _product_kernel(
    a,
    b,
    c,
    bias,
    M,
    N,
    K,
    a_row,
    a_m,
    a_k,
    b_row,
    b_k,
    b_n,
    c_row,
    c_m,
    c_n,
    bias_row,
    HAS_BIAS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """c = a @ b (+ bias), or c -= a @ b, for every row; a is [M, K], b is [K, N], any strides."""
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(N, BN)
    m = tl.program_id(0) // blocks * BM + tl.arange(0, BM)
    n = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a += row * a_row + m[:, None] * a_m
    b += row * b_row + n[None, :] * b_n
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + k
        left = tl.load(a + at[None, :] * a_k, mask=(m[:, None] < M) & (at[None, :] < K), other=0.0)
        right = tl.load(b + at[:, None] * b_k, mask=(at[:, None] < K) & (n[None, :] < N), other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + row * bias_row + n, mask=n < N, other=0.0)[None, :]
    c += row * c_row + m[:, None] * c_m + n[None, :] * c_n
    inside = (m[:, None] < M) & (n[None, :] < N)
    if SUBTRACT:
        total = tl.load(c, mask=inside, other=0.0) - total
    tl.store(c, total, mask=inside)


def _product(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None,
    subtract: bool,
    config: Blocks | None = None,
) -> None:
    rows, m, k = a.shape
    n = b.shape[2]
    bm, bn, bk, warps, stages = config or _product_blocks(m, n, k)
    grid = (triton.cdiv(m, bm) * triton.cdiv(n, bn), rows)
    _product_kernel[grid](
        a,
        b,
        c,
        bias,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        *c.stride(),
        bias.stride(0) if bias is not None else 0,
        HAS_BIAS=bias is not None,
        SUBTRACT=subtract,
        PRECISION=precision(),
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )


def _product_blocks(m: int, n: int, k: int) -> Blocks:
    """Rows, columns and depth of a block; warps; and pipeline stages, measured on an H200."""
    if k <= 16:
        return 32, 64, 16, 4, 2
    return 16 if m <= 16 else 32, 16 if n <= 16 else 64, 64 if k >= 2048 else 32, 2, 2


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether this kernel beats the library's.

    It does for few rows, and for a gradient's product over few examples, but not at full precision.
    """
    return (
        (a.shape[1] <= 32 or a.shape[2] <= 16)
        and (a.dtype != torch.float32 or precision() == "tf32")
        and a.dtype == b.dtype
    )


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for every row."""
    if not _suits(a, b):
        return torch.bmm(a, b)
    c = torch.empty(a.shape[0], a.shape[1], b.shape[2], device=a.device, dtype=a.dtype)
    _product(a, b, c, None, False)
    return c


def baddbmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """bias [rows, 1, n] + a @ b."""
    if not _suits(a, b) or bias.dim() != 3 or bias.shape[1] != 1:
        return torch.baddbmm(bias, a, b)
    c = torch.empty(a.shape[0], a.shape[1], b.shape[2], device=a.device, dtype=a.dtype)
    _product(a, b, c, bias, False)
    return c


def subtract_product_(c: Tensor, a: Tensor, b: Tensor, alpha: int = -1) -> None:
    """c -= a @ b in place: the gradient step of a weight matrix."""
    if _suits(a, b):
        _product(a, b, c, None, True)
    else:
        c.baddbmm_(a, b, alpha=alpha)
