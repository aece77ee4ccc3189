"""The gradient of 2x2 max pooling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import laid_as, rounded


@triton.jit(do_not_specialize=["M"])
def _unpool_kernel(
    g,
    which,
    dy,
    sums,
    M,
    g_row,
    dy_row,
    O: tl.constexpr,
    HP: tl.constexpr,
    WP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    g_b: tl.constexpr,
    g_c: tl.constexpr,
    g_h: tl.constexpr,
    g_w: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradient before a 2x2 pooling, and its sums over a block.

    It is each window's gradient at the window's largest pixel, and 0 at the others.
    """
    blocks = tl.cdiv(M, BM)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    m = block * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    high = m // WP % HP
    wide = m % WP
    inside = (m[:, None] < M) & (n[None, :] < O)
    at = (
        row * g_row + (m // (WP * HP) * g_b + high * g_h + wide * g_w)[:, None] + (n * g_c)[None, :]
    )
    value = tl.load(g + at, mask=inside, other=0.0)
    corner = tl.load(which + at, mask=inside, other=0)
    first = (
        dy
        + row * dy_row
        + ((m // (WP * HP) * H + high * 2) * W + wide * 2)[:, None] * O
        + n[None, :]
    )
    for j in tl.static_range(4):
        tl.store(
            first + (j // 2 * W + j % 2) * O,
            tl.where(corner == j, value, 0.0).to(value.dtype),
            mask=inside,
        )
    tl.store(sums + (row * blocks + block) * O + n, tl.sum(value.to(tl.float32), 0), mask=n < O)


def unpool(g: Tensor, which: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
    """The gradient before a 2x2 pooling, and its sums over parts of the pixels.

    The gradient is [R, B, O, high, wide], with the channels last in memory.
    """
    rows, batch, outputs, small_high, small_wide = g.shape
    g = laid_as(which, g)
    whole = high == 2 * small_high and wide == 2 * small_wide
    dy = (torch.empty if whole else torch.zeros)(
        rows, batch, high, wide, outputs, device=g.device, dtype=g.dtype
    )
    m = batch * small_high * small_wide
    bm, bn = max(8, 2048 // rounded(outputs)), rounded(outputs)
    sums = torch.empty(rows, triton.cdiv(m, bm), outputs, device=g.device)
    _unpool_kernel[(rows * triton.cdiv(m, bm),)](
        g,
        which,
        dy,
        sums,
        m,
        g.stride(0),
        dy.stride(0),
        O=outputs,
        HP=small_high,
        WP=small_wide,
        H=high,
        W=wide,
        g_b=g.stride(1),
        g_c=g.stride(2),
        g_h=g.stride(3),
        g_w=g.stride(4),
        BM=bm,
        BN=bn,
        num_warps=4,
    )
    return dy.permute(0, 1, 4, 2, 3), sums


@torch.library.custom_op("rota::unpool_rows", mutates_args=())
def unpooled(g: Tensor, which: Tensor, high: int, wide: int) -> Tensor:
    """The image of `unpool` alone, for poolings that no convolution has merged."""
    return unpool(g, which, high, wide)[0]
