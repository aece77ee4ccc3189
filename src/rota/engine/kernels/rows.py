"""The beginning and the end of a stack's work, each with one pass over the parameters.

Rows are put in place at the beginning, and their results are taken out at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import rounded

BLOCK = 4096


@triton.jit(do_not_specialize=["rows", "room", "width"])
def _load_kernel(
    index,
    weight,
    key,
    steps,
    rate,
    index_to,
    weight_to,
    key_to,
    steps_to,
    rate_to,
    loss_to,
    number_to,
    rows,
    room,
    width,
    FUSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    place = (tl.program_id(0) // blocks).to(tl.int64)  # of a step and a row
    t = place // rows
    row = place % rows
    block = tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    own = tl.load(rate + row)
    share = tl.load(weight + place * width + column, mask=inside, other=0.0)
    if FUSED:
        share = share * own.to(tl.float64)
    to = (t * room + row) * width + column
    tl.store(weight_to + to, share.to(tl.float32), mask=inside)
    tl.store(
        index_to + to, tl.load(index + place * width + column, mask=inside, other=0), mask=inside
    )
    if (t == 0) & (block == 0):
        tl.store(key_to + row, tl.load(key + row))
        tl.store(steps_to + row, tl.load(steps + row))
        tl.store(rate_to + row, own)
        tl.store(loss_to + row, 0.0)
        tl.store(number_to + row, tl.zeros((), tl.int64))


def load(
    index: Tensor,
    weight: Tensor,
    key: Tensor,
    steps: Tensor,
    rate: Tensor,
    tables: tuple[Tensor, Tensor],
    state: tuple[Tensor, ...],
    fused: bool,
) -> None:
    """Copy a schedule [steps, rows, width] to a stack's tables, and set the stack's state.

    The state is (key, last, rate, loss, number) of the rows, from their keys, steps and rates.
    """
    number, rows, width = index.shape
    block = min(256, rounded(width))
    _load_kernel[(number * rows * triton.cdiv(width, block),)](
        index,
        weight,
        key,
        steps,
        rate,
        *tables,
        *state,
        rows,
        tables[0].shape[1],
        width,
        FUSED=fused,
        BLOCK=block,
    )


@triton.jit(do_not_specialize=["n"])
def _spread_kernel(theta, to, n, room, theta_row, to_row, BLOCK: tl.constexpr):
    blocks = tl.cdiv(room, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        to + row * to_row + j,
        tl.load(theta + row * theta_row + j, mask=j < n, other=0.0),
        mask=j < room,
    )


def spread(theta: Tensor, to: Tensor) -> None:
    """Copy rows of parameters [rows, n], perhaps all the same, to their places in a stack."""
    rows, n = theta.shape
    room = _room(to)
    _spread_kernel[(rows * triton.cdiv(room, BLOCK),)](
        theta, to, n, room, theta.stride(0), to.stride(0), BLOCK=BLOCK, num_warps=8
    )


def _room(matrix: Tensor) -> int:
    """The columns of a stack's matrix, with padding so that whole vectors can be stored."""
    return min(-(-matrix.shape[1] // 64) * 64, matrix.stride(0))


@triton.jit(do_not_specialize=["n"])
def _difference_kernel(
    before, after, update, squares, n, room, before_row, after_row, update_row, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(room, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    j = block * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(after + row * after_row + j, mask=j < room, other=0.0)
    change = tl.where(
        j < n, tl.load(before + row * before_row + j, mask=j < n, other=0.0) - end, 0.0
    )
    tl.store(update + row * update_row + j, change, mask=j < room)
    tl.store(squares + row * blocks + block, tl.sum(change * change, 0))


@triton.jit(do_not_specialize=["blocks", "rows"])
def _numbers_kernel(squares, loss, out, blocks, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(squares + row * blocks + at, mask=at < blocks, other=0.0).to(tl.float64)
    tl.store(out + row, tl.sqrt(tl.sum(total, 0)))
    tl.store(out + rows + row, tl.load(loss + row).to(tl.float64))


def results(before: Tensor, after: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """The updates before - after [rows, n]; and their norms and the rows' losses, [2, rows]."""
    rows, n = before.shape
    room = _room(after)
    update = torch.empty(rows, room, device=before.device)[:, :n]
    blocks = triton.cdiv(room, BLOCK)
    squares = torch.empty(rows, blocks, device=before.device)
    _difference_kernel[(rows * blocks,)](
        before,
        after,
        update,
        squares,
        n,
        room,
        before.stride(0),
        after.stride(0),
        update.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    numbers = torch.empty(2, rows, dtype=torch.float64, device=before.device)
    _numbers_kernel[(rows,)](squares, loss, numbers, blocks, rows, BLOCK=256, num_warps=4)
    return update, numbers
