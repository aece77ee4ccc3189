"""Dropout, the loss, a step's examples and the schedule: one launch instead of several."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import rounded


@triton.jit
def _mix(z):
    """rng._mix, the finaliser of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _fold(key, word):
    """rng.fold."""
    return _mix(key + (word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _uniform(key, j):
    """Number j of rng.uniform: the upper 24 bits of a word, in [0, 1)."""
    return (_mix(key + (j + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 40).to(
        tl.float32
    ) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["call"])
def _uniform_kernel(key, number, out, n, call, FOLDED: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(key + row).to(tl.uint64, bitcast=True)
    if FOLDED:
        mine = _fold(_fold(_mix(mine), tl.load(number + row)), call)
    tl.store(out + row * n + j, _uniform(mine, j), mask=j < n)


def uniform(key: Tensor, n: int) -> Tensor:
    """rng.uniform in one kernel."""
    out = torch.empty(*key.shape, n, device=key.device)
    _uniform_kernel[(triton.cdiv(n, 1024) * max(1, key.numel()),)](
        key.contiguous(), key, out, n, 0, FOLDED=False, BLOCK=1024
    )
    return out


def uniform_at(key: Tensor, number: Tensor, call: int, n: int) -> Tensor:
    """rules.uniform_at in one kernel."""
    out = torch.empty(*key.shape, n, device=key.device)
    _uniform_kernel[(triton.cdiv(n, 1024) * max(1, key.numel()),)](
        key.contiguous(), number.contiguous(), out, n, call, FOLDED=True, BLOCK=1024
    )
    return out


@triton.jit(do_not_specialize=["call"])
def _drop_kernel(y, key, number, x, n, call, p, scale, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(key + row).to(tl.uint64, bitcast=True)
    mine = _fold(_fold(_mix(mine), tl.load(number + row)), call)
    value = tl.load(y + row * n + j, mask=j < n, other=0.0)
    tl.store(
        x + row * n + j,
        tl.where(_uniform(mine, j) >= p, value * scale, 0.0).to(x.dtype.element_ty),
        mask=j < n,
    )


@torch.library.custom_op("rota::drop_rows", mutates_args=())
def drop(y: Tensor, key: Tensor, number: Tensor, call: int, p: float) -> Tensor:
    """The mask of local.Dropout's c-th call in a step on every row of y [R, ...], in one kernel."""
    y = y.contiguous()
    x = torch.empty_like(y)
    n = y[0].numel()
    _drop_kernel[(len(y) * triton.cdiv(n, 1024),)](
        y, key, number, x, n, call, p, 1 / (1 - p), BLOCK=1024
    )
    return x


@triton.jit(do_not_specialize=["B", "C"])
def _cross_entropy_kernel(z, y, weight, loss, dz, B, C, BB: tl.constexpr, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    total = tl.zeros((BB,), tl.float32)
    for start in range(0, B, BB):
        b = start + tl.arange(0, BB)
        inside = (b[:, None] < B) & (c[None, :] < C)
        at = (row * B + b)[:, None] * C + c[None, :]
        value = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(c[None, :] < C, value, float("-inf"))
        largest = tl.max(value, 1)
        e = tl.exp(value - largest[:, None])
        whole = tl.sum(e, 1)
        target = tl.load(y + row * B + b, mask=b < B, other=0)
        part = tl.load(weight + row * B + b, mask=b < B, other=0.0)
        right = c[None, :] == target[:, None]
        picked = tl.sum(tl.where(right, value, 0.0), 1)
        total += tl.where(b < B, part * (tl.log(whole) + largest - picked), 0.0)
        tl.store(
            dz + at, (e / whole[:, None] - tl.where(right, 1.0, 0.0)) * part[:, None], mask=inside
        )
    tl.store(loss + row, tl.sum(total, 0))


CLASSES = 1024  # the most for one block


@torch.library.custom_op("rota::cross_entropy_rows", mutates_args=())
def cross_entropy(z: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of the cross-entropies of logits z [R, B, C], and its gradient with z."""
    rows, batch, classes = z.shape
    z, y, weight = z.contiguous(), y.contiguous(), weight.contiguous()
    loss, dz = torch.empty(rows, device=z.device), torch.empty(z.shape, device=z.device)
    bc = rounded(classes)
    _cross_entropy_kernel[(rows,)](
        z,
        y,
        weight,
        loss,
        dz,
        batch,
        classes,
        BB=min(rounded(batch), max(1, 4096 // bc)),
        BC=bc,
        num_warps=4,
    )
    return loss, dz


@triton.jit(do_not_specialize=["room", "width"])
def _take_kernel(
    x, y, index, weight, number, x_to, y_to, weight_to, room, width, D, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(D, BLOCK)
    place = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = tl.load(number) * room * width + place
    example = tl.load(index + at)
    d = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_to + place * D + d, tl.load(x + example * D + d, mask=d < D), mask=d < D)
    if block == 0:
        tl.store(y_to + place, tl.load(y + example))
        tl.store(weight_to + place, tl.load(weight + at))


def take(
    x: Tensor, y: Tensor, index: Tensor, weight: Tensor, number: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The first rows' mini-batches of step `number`: x, y at index[number], and weight[number]."""
    if y.dim() > 1 or not x.is_contiguous():
        now = [table.index_select(0, number[:1])[0, :rows] for table in (index, weight)]
        return x[now[0]], y[now[0]], now[1]
    _, room, width = index.shape
    size = x[0].numel()
    x_to = torch.empty(rows, width, *x.shape[1:], device=x.device, dtype=x.dtype)
    y_to = torch.empty(rows, width, device=y.device, dtype=y.dtype)
    weight_to = torch.empty(rows, width, device=weight.device, dtype=weight.dtype)
    block = min(1024, rounded(size))
    _take_kernel[(rows * width * triton.cdiv(size, block),)](
        x, y, index, weight, number, x_to, y_to, weight_to, room, width, size, BLOCK=block
    )
    return x_to, y_to, weight_to


@triton.jit(do_not_specialize=["base", "rows", "longest", "epoch"])
def _words_kernel(table, key, words, rows, longest, epoch, BLOCK: tl.constexpr):
    blocks = tl.cdiv(longest, BLOCK)
    place = tl.program_id(0) // blocks  # of an epoch and a row
    row = place % rows
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(table + row).to(tl.uint64, bitcast=True)
    mine = _fold(_fold(mine, tl.load(table + rows + row)), tl.load(table + 2 * rows + row))
    tl.store(key + row, mine.to(tl.int64, bitcast=True))
    mine = _fold(mine, epoch + place // rows)
    word = _mix(mine + (j + 1).to(tl.uint64) * 0x9E3779B97F4A7C15).to(tl.int64, bitcast=True)
    word = tl.where(j < tl.load(table + 3 * rows + row), word, 0x7FFFFFFFFFFFFFFF)
    tl.store(words + place.to(tl.int64) * longest + j, word, mask=j < longest)


def words(table: Tensor, first: int, epochs: int, longest: int) -> tuple[Tensor, Tensor]:
    """Each row's key, and the words that order its examples in some epochs.

    The words are [epochs, rows, longest]. Beyond a row's own examples they are the largest ones.
    """
    rows = table.shape[1]
    key = torch.empty(rows, dtype=torch.int64, device=table.device)
    out = torch.empty(epochs, rows, longest, dtype=torch.int64, device=table.device)
    _words_kernel[(epochs * rows * triton.cdiv(longest, 256),)](
        table, key, out, rows, longest, first, BLOCK=256
    )
    return key, out


@triton.jit(do_not_specialize=["rows", "longest", "width", "first", "last"])
def _index_kernel(
    table, order, index, weight, rows, longest, width, first, last, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(width, BLOCK)
    place = (tl.program_id(0) // blocks).to(tl.int64)  # of a step and a row
    t = place // rows
    row = place % rows
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(table + 3 * rows + row)
    offset = tl.load(table + 4 * rows + row)
    steps = tl.load(table + 5 * rows + row)
    each = tl.load(table + 6 * rows + row)
    bound = tl.load(table + 7 * rows + row)
    epoch = t // each
    begin = t % each * bound
    real = (t < steps) & (begin + column < count) & (column < bound)
    at = (tl.maximum(epoch - first, 0) * rows + row) * longest + begin + column
    mine = (column < width) & ((epoch >= first) & (epoch < last) | (t >= steps) & (first == 0))
    picked = tl.load(order + at, mask=real & mine, other=0)
    number = tl.minimum(bound, count - begin).to(tl.float64)
    tl.store(index + place * width + column, offset + picked, mask=mine)
    tl.store(weight + place * width + column, tl.where(real, 1.0 / number, 0.0), mask=mine)


def indices(table: Tensor, order: Tensor, first: int, index: Tensor, weight: Tensor) -> None:
    """The mini-batches of the epochs in `order` [epochs, rows, longest], which begin at `first`.

    They are written to index and weight, both [steps, rows, width].
    """
    steps, rows, width = index.shape
    block = min(256, rounded(width))
    _index_kernel[(steps * rows * triton.cdiv(width, block),)](
        table,
        order,
        index,
        weight,
        rows,
        order.shape[2],
        width,
        first,
        first + len(order),
        BLOCK=block,
    )
