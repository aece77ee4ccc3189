"""LSTM layers: all steps in time as one operator each way, with one launch per step.

In torch's operators a layer has a dozen of them per step in time, and twice as many backward. That
makes thousands of launches, and a local step that takes long to trace. Here one launch computes a
step's product, its gates and its state. Its results are in memory when the next launch begins, so
no program waits for another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import Blocks, contiguous_last, precision, rounded


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _place(t, B, T: tl.constexpr, U: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A program's row, examples m and units n, where their step t lies, and which pairs exist."""
    across: tl.constexpr = (U + BN - 1) // BN
    blocks = tl.cdiv(B, BM) * across
    row = (tl.program_id(0) // blocks).to(tl.int64)
    m = tl.program_id(0) % blocks // across * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    return row, m, n, ((row * B + m) * T + t)[:, None], (m[:, None] < B) & (n[None, :] < U)


@triton.jit(do_not_specialize=["t", "B"])
def _forward_kernel(
    inputs,
    w,
    hidden,
    gates,
    cells,
    t,
    B,
    w_row,
    T: tl.constexpr,
    U: tl.constexpr,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Step t of some examples m and units n: z = inputs[t] + hidden[t - 1] @ w^T.

    There is one product for each gate.
    """
    row, m, n, now, inside = _place(t, B, T, U, BM, BN)
    four = now * (4 * U) + n[None, :]
    zi = tl.load(inputs + four, mask=inside, other=0.0).to(tl.float32)
    zf = tl.load(inputs + four + U, mask=inside, other=0.0).to(tl.float32)
    zg = tl.load(inputs + four + 2 * U, mask=inside, other=0.0).to(tl.float32)
    zo = tl.load(inputs + four + 3 * U, mask=inside, other=0.0).to(tl.float32)
    if FIRST:
        c = tl.zeros((BM, BN), tl.float32)
    else:
        c = tl.load(cells + (now - 1) * U + n[None, :], mask=inside, other=0.0)
        w += row * w_row + n[None, :] * U
        for start in range(0, U, BK):
            k = start + tl.arange(0, BK)
            before = tl.load(
                hidden + (now - 1) * U + k[None, :],
                mask=(m[:, None] < B) & (k[None, :] < U),
                other=0.0,
            )
            within = (k[:, None] < U) & (n[None, :] < U)
            wi = tl.load(w + k[:, None], mask=within, other=0.0).to(before.dtype)
            wf = tl.load(w + k[:, None] + U * U, mask=within, other=0.0).to(before.dtype)
            wg = tl.load(w + k[:, None] + 2 * U * U, mask=within, other=0.0).to(before.dtype)
            wo = tl.load(w + k[:, None] + 3 * U * U, mask=within, other=0.0).to(before.dtype)
            zi = tl.dot(before, wi, zi, input_precision=PRECISION)
            zf = tl.dot(before, wf, zf, input_precision=PRECISION)
            zg = tl.dot(before, wg, zg, input_precision=PRECISION)
            zo = tl.dot(before, wo, zo, input_precision=PRECISION)
    i, f, g, o = tl.sigmoid(zi), tl.sigmoid(zf), _tanh(zg), tl.sigmoid(zo)
    c = f * c + i * g
    tl.store(gates + four, i.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + four + U, f.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + four + 2 * U, g.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + four + 3 * U, o.to(gates.dtype.element_ty), mask=inside)
    tl.store(cells + now * U + n[None, :], c, mask=inside)
    tl.store(hidden + now * U + n[None, :], (o * _tanh(c)).to(hidden.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["t", "B"])
def _backward_kernel(
    d_hidden,
    gates,
    cells,
    w,
    d_gates,
    d_cell,
    t,
    B,
    w_row,
    T: tl.constexpr,
    U: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The gradients of step t of some examples m and units n, after those of step t + 1.

    dh = d_hidden[t] + d_gates[t + 1] @ w^T, and from it the gradients of the gates. w is [U, 4U]
    here, because tensor cores take 32-bit numbers only in this order. d_cell is the gradient that
    the later step gives by way of the cell. A program reads and writes its own part alone.
    """
    row, m, n, now, inside = _place(t, B, T, U, BM, BN)
    four = now * (4 * U) + n[None, :]
    d_cell += (row * B + m)[:, None] * U + n[None, :]
    dh = tl.load(d_hidden + now * U + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if LAST:
        dc = tl.zeros((BM, BN), tl.float32)
    else:
        dc = tl.load(d_cell, mask=inside, other=0.0)
        w += row * w_row + n[None, :] * (4 * U)
        for start in range(0, 4 * U, BK):
            k = start + tl.arange(0, BK)
            after = tl.load(
                d_gates + (now + 1) * (4 * U) + k[None, :],
                mask=(m[:, None] < B) & (k[None, :] < 4 * U),
                other=0.0,
            )
            right = tl.load(w + k[:, None], mask=(k[:, None] < 4 * U) & (n[None, :] < U), other=0.0)
            dh = tl.dot(after, right.to(after.dtype), dh, input_precision=PRECISION)
    i = tl.load(gates + four, mask=inside, other=0.0).to(tl.float32)
    f = tl.load(gates + four + U, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gates + four + 2 * U, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(gates + four + 3 * U, mask=inside, other=0.0).to(tl.float32)
    bent = _tanh(tl.load(cells + now * U + n[None, :], mask=inside, other=0.0))
    before = tl.load(cells + (now - 1) * U + n[None, :], mask=inside & (t > 0), other=0.0)
    dc += dh * o * (1.0 - bent * bent)
    tl.store(d_cell, dc * f, mask=inside)
    tl.store(d_gates + four, (dc * g * i * (1.0 - i)).to(d_gates.dtype.element_ty), mask=inside)
    tl.store(
        d_gates + four + U, (dc * before * f * (1.0 - f)).to(d_gates.dtype.element_ty), mask=inside
    )
    tl.store(
        d_gates + four + 2 * U, (dc * i * (1.0 - g * g)).to(d_gates.dtype.element_ty), mask=inside
    )
    tl.store(
        d_gates + four + 3 * U,
        (dh * bent * o * (1.0 - o)).to(d_gates.dtype.element_ty),
        mask=inside,
    )


def _blocks(batch: int, units: int, products: int) -> Blocks:
    """Examples, units and depth of a block; warps; and stages of the pipeline.

    Blocks of more products are less deep.
    """
    return min(64, rounded(batch)), min(32, rounded(units)), 32 if products == 4 else 64, 4, 3


def _forward(
    inputs: Tensor, weight: Tensor, config: Blocks | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, batch, time, _ = inputs.shape
    units = weight.shape[2]
    hidden = torch.empty(rows, batch, time, units, device=inputs.device, dtype=inputs.dtype)
    gates, cells = torch.empty_like(inputs), torch.empty(hidden.shape, device=inputs.device)
    bm, bn, bk, warps, stages = config or _blocks(batch, units, 4)
    for t in range(time):
        _forward_kernel[(rows * triton.cdiv(batch, bm) * triton.cdiv(units, bn),)](
            inputs,
            weight,
            hidden,
            gates,
            cells,
            t,
            batch,
            weight.stride(0),
            T=time,
            U=units,
            FIRST=t == 0,
            PRECISION=precision(),
            BM=bm,
            BN=bn,
            BK=bk,
            num_warps=warps,
            num_stages=stages,
        )
    return hidden, gates, cells


def _backward(
    d_hidden: Tensor, gates: Tensor, cells: Tensor, weight: Tensor, config: Blocks | None = None
) -> Tensor:
    rows, batch, time, units = cells.shape
    d_gates, d_cell = torch.empty_like(gates), torch.empty(rows, batch, units, device=cells.device)
    turned = weight.transpose(1, 2).contiguous()
    bm, bn, bk, warps, stages = config or _blocks(batch, units, 1)
    for t in reversed(range(time)):
        _backward_kernel[(rows * triton.cdiv(batch, bm) * triton.cdiv(units, bn),)](
            d_hidden,
            gates,
            cells,
            turned,
            d_gates,
            d_cell,
            t,
            batch,
            turned.stride(0),
            T=time,
            U=units,
            LAST=t == time - 1,
            PRECISION=precision(),
            BM=bm,
            BN=bn,
            BK=bk,
            num_warps=warps,
            num_stages=stages,
        )
    return d_gates


@torch.library.custom_op("rota::recurrent_rows", mutates_args=())
def recurrent_rows(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """models.text.recurrent for inputs [R, B, T, 4U] with every row's own weights [R, 4U, U].

    One row may come without R. Also returns what the gradient needs: the gates i, f, g, o, and the
    cells, which are float32 whatever the inputs are.
    """
    if inputs.dim() == 3:
        hidden, gates, cells = _forward(inputs.contiguous()[None], contiguous_last(weight, 2)[None])
        return hidden[0], gates[0], cells[0]
    return _forward(inputs.contiguous(), contiguous_last(weight, 2))


@torch.library.custom_op("rota::recurrent_rows_backward", mutates_args=())
def recurrent_rows_backward(
    d_hidden: Tensor, gates: Tensor, cells: Tensor, weight: Tensor
) -> Tensor:
    """The gradient of the inputs of `recurrent_rows`, from the gradient of its hidden states."""
    whole = [each.contiguous() for each in (d_hidden, gates, cells)]
    if gates.dim() == 3:
        return _backward(
            whole[0][None], whole[1][None], whole[2][None], contiguous_last(weight, 2)[None]
        )[0]
    return _backward(whole[0], whole[1], whole[2], contiguous_last(weight, 2))


class Recurrent(torch.autograd.Function):
    """One row's `recurrent_rows` with its gradient, for torch.func and its tracer."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = recurrent_rows(inputs, weight)
        return out

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(*output, inputs[1])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @torch.no_grad()  # a step takes no gradient of a gradient
    def backward(ctx: Any, d_hidden: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of inputs and weights.

        That of the weights is a product over all steps at once in torch's operators, which a fused
        step subtracts in place.
        """
        hidden, gates, cells, weight = ctx.saved_tensors
        d_inputs = recurrent_rows_backward(d_hidden, gates, cells, weight)
        before = F.pad(
            hidden, (0, 0, 1, -1)
        )  # the hidden states one step later; before the first there are zeros
        d_weight = d_inputs.flatten(0, 1).t() @ before.flatten(0, 1)
        return d_inputs, d_weight.to(weight.dtype)
