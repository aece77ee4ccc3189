"""Triton kernels for stacks on a GPU: batched products with few rows, and convolutions with one kernel a client.

Libraries' batched products are tuned for large matrices, and their grouped convolutions for few groups; a stack has many small
problems, each with weights of its own, bound by memory. Block sizes are a fixed function of the shapes (not tuned at run time), so
that a repeated run is bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product_kernel(
    a, b, c, bias, M, N, K, a_row, a_m, a_k, b_row, b_k, b_n, c_row, c_m, c_n, bias_row,
    HAS_BIAS: tl.constexpr, SUBTRACT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
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
    a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, subtract: bool, config: tuple[int, int, int, int, int] | None = None
) -> None:
    rows, m, k = a.shape
    n = b.shape[2]
    bm, bn, bk, warps, stages = config or _product_blocks(m, n, k)
    grid = (triton.cdiv(m, bm) * triton.cdiv(n, bn), rows)
    _product_kernel[grid](
        a, b, c, bias, m, n, k, *a.stride(), *b.stride(), *c.stride(), bias.stride(0) if bias is not None else 0,
        HAS_BIAS=bias is not None, SUBTRACT=subtract, PRECISION=precision(), BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _product_blocks(m: int, n: int, k: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a block, warps, and stages of the pipeline: measured on an H200."""
    if k <= 16:
        return 32, 64, 16, 4, 2
    return 16 if m <= 16 else 32, 16 if n <= 16 else 64, 64 if k >= 2048 else 32, 2, 2


def _suits(a: Tensor, b: Tensor) -> bool:
    """Whether the kernel here beats the library's: few rows, or a gradient's product over few examples; not at full precision."""
    return (a.shape[1] <= 32 or a.shape[2] <= 16) and (a.dtype != torch.float32 or precision() == "tf32") and a.dtype == b.dtype


def precision() -> str:
    """What torch is set to for products of float32 matrices."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


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


@triton.jit
def _uniform_kernel(key, out, n, BLOCK: tl.constexpr):
    """rng.uniform: SplitMix64 of key + (j + 1) * golden ratio, its upper 24 bits as a number in [0, 1)."""
    row = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(key + row).to(tl.uint64, bitcast=True) + (j + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    tl.store(out + row * n + j, (z >> 40).to(tl.float32) * 5.9604644775390625e-08, mask=j < n)


def uniform(key: Tensor, n: int) -> Tensor:
    """rng.uniform in one kernel."""
    out = torch.empty(*key.shape, n, device=key.device)
    _uniform_kernel[(triton.cdiv(n, 1024), max(1, key.numel()))](key.contiguous(), out, n, BLOCK=1024)
    return out


@triton.jit
def _convolution_kernel(
    x, w, bias, y, M, H, W, O, HO, WO, x_row, x_b, x_c, x_h, x_w, bias_row, SH, SW, PH, PW,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[pixel, o] = sum over taps and channels of x[pixel + tap, c] * w[tap, c, o]: an implicit product, without im2col."""
    row = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    top = m // WO % HO * SH - PH
    left = m % WO * SW - PW
    depth: tl.constexpr = KH * KW * C
    x += row * x_row + m // (WO * HO) * x_b + top * x_h + left * x_w
    w += row * depth * O
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        c = k % C
        i = k // C // KW
        j = k // C % KW
        high = top[:, None] + i[None, :]
        wide = left[:, None] + j[None, :]
        inside = (m[:, None] < M) & (k[None, :] < depth) & (high >= 0) & (high < H) & (wide >= 0) & (wide < W)
        pixels = tl.load(x[:, None] + (i * x_h + j * x_w + c * x_c)[None, :], mask=inside, other=0.0)
        taps = tl.load(w + k[:, None] * O + n[None, :], mask=(k[:, None] < depth) & (n[None, :] < O), other=0.0)
        total = tl.dot(pixels, taps, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + row * bias_row + n, mask=n < O, other=0.0)[None, :]
    tl.store(y + row * M * O + m[:, None] * O + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < O))


@triton.jit
def _weight_gradient_kernel(
    x, dy, dw, M, H, W, O, HO, WO, x_row, x_b, x_c, x_h, x_w, SH, SW, PH, PW,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, c] = sum over pixels of dy[pixel, o] * x[pixel + tap, c]."""
    row = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    depth: tl.constexpr = KH * KW * C
    c = k % C
    i = k // C // KW
    j = k // C % KW
    shift = i * x_h + j * x_w + c * x_c
    x += row * x_row
    dy += row * M * O
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, M, BK):
        p = start + tl.arange(0, BK)
        top = p // WO % HO * SH - PH
        left = p % WO * SW - PW
        high = top[:, None] + i[None, :]
        wide = left[:, None] + j[None, :]
        inside = (p[:, None] < M) & (k[None, :] < depth) & (high >= 0) & (high < H) & (wide >= 0) & (wide < W)
        base = p // (WO * HO) * x_b + top * x_h + left * x_w
        pixels = tl.load(x + base[:, None] + shift[None, :], mask=inside, other=0.0)
        grads = tl.load(dy + p[None, :] * O + o[:, None], mask=(p[None, :] < M) & (o[:, None] < O), other=0.0)
        total = tl.dot(grads, pixels, total, input_precision=PRECISION)
    tl.store(dw + row * O * depth + o[:, None] * depth + k[None, :], total, mask=(o[:, None] < O) & (k[None, :] < depth))


def _convolve(
    x: Tensor, taps: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], out: Sequence[int], config: Any = None
) -> Tensor:
    """x [R, B, C, H, W] with taps [R, kh, kw, C, O], contiguous -> [R, B, O, *out] with the channels last in memory."""
    rows, batch, channels, high, wide = x.shape
    kh, kw, outputs = taps.shape[1], taps.shape[2], taps.shape[4]
    y = torch.empty(rows, batch, out[0], out[1], outputs, device=x.device, dtype=x.dtype)
    m = batch * out[0] * out[1]
    bm, bn, bk, warps, stages = config or _convolution_blocks(outputs, kh * kw * channels)
    _convolution_kernel[(triton.cdiv(m, bm), triton.cdiv(outputs, bn), rows)](
        x, taps, bias, y, m, high, wide, outputs, out[0], out[1], *x.stride(), bias.stride(0) if bias is not None else 0,
        *stride, *padding, C=channels, KH=kh, KW=kw, HAS_BIAS=bias is not None, PRECISION=precision(),
        BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def _convolution_blocks(outputs: int, depth: int) -> tuple[int, int, int, int, int]:
    return 128, 16 if outputs <= 16 else 32, 32 if depth > 16 else 16, 4, 3


def _weight_gradient(
    x: Tensor, dy: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], config: Any = None
) -> Tensor:
    rows, batch, channels, high, wide = x.shape
    outputs, out_high, out_wide = dy.shape[2:]
    dy = dy.permute(0, 1, 3, 4, 2).contiguous()
    depth = size[0] * size[1] * channels
    dw = torch.empty(rows, outputs, size[0], size[1], channels, device=x.device, dtype=x.dtype)
    bm, bn, bk, warps, stages = config or _weight_blocks(outputs, depth)
    _weight_gradient_kernel[(triton.cdiv(depth, bn), triton.cdiv(outputs, bm), rows)](
        x, dy, dw, batch * out_high * out_wide, high, wide, outputs, out_high, out_wide, *x.stride(), *stride, *padding,
        C=channels, KH=size[0], KW=size[1], PRECISION=precision(), BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dw.permute(0, 1, 4, 2, 3)


def _weight_blocks(outputs: int, depth: int) -> tuple[int, int, int, int, int]:
    return 16 if outputs <= 16 else 32, *((32, 64, 8, 3) if depth <= 32 else (64, 32, 4, 3))


@torch.library.custom_op("rota::convolution_rows", mutates_args=())
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Every row's convolution with its own weights [R, O, C, kh, kw]."""
    size = weight.shape[3:]
    out = [(x.shape[3 + i] + 2 * padding[i] - size[i]) // stride[i] + 1 for i in range(2)]
    return _convolve(x, weight.permute(0, 3, 4, 2, 1).contiguous(), bias, stride, padding, out)


@torch.library.custom_op("rota::convolution_rows_input", mutates_args=())
def input_gradient(dy: Tensor, weight: Tensor, padding: Sequence[int], high: int, wide: int) -> Tensor:
    """The gradient of a convolution of stride 1 for its input: dy convolved with the turned kernel."""
    size = weight.shape[3:]
    taps = weight.flip(3, 4).permute(0, 3, 4, 1, 2).contiguous()
    return _convolve(dy, taps, None, [1, 1], [size[i] - 1 - padding[i] for i in range(2)], [high, wide])


@torch.library.custom_op("rota::convolution_rows_weight", mutates_args=())
def weight_gradient(x: Tensor, dy: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The gradient of a convolution for its weights: [R, O, C, kh, kw]."""
    return _weight_gradient(x, dy, size, stride, padding)
