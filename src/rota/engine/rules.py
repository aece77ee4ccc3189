"""From one client's computation to that of many: traced tensors get an axis of rows.

`torch.func.vmap` has a rule for almost every operator. The rules here replace those that are
missing or slow. Products become batched products. Convolutions become im2col and batched products:
vmap turns them into grouped convolutions, which are a slow path of every library.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten, tree_unflatten

from rota import rng
from rota.engine import local

aten = torch.ops.aten


class Unbatchable(Exception):
    """A module that cannot be traced or stacked. The message goes after the words "its model"."""


class Rows(fx.Interpreter):
    """Runs a graph that was traced for one client on inputs with an axis of rows in front."""

    def run_node(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._everywhere(super().run_node(node))
        if node.op != "call_function" or node.target is operator.getitem:
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places:
            return self._everywhere(node.target(*args, **kwargs))  # type: ignore[operator]
        rule = RULES.get(node.target)
        done = rule(*args, **kwargs) if rule else None
        if done is not None:
            return done

        def one(function: Callable[..., Any], *tensors: Tensor) -> Any:
            mine = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                mine[place] = tensor
            one_args, one_kwargs = tree_unflatten(mine, spec)
            return function(*one_args, **one_kwargs)

        tensors = [leaves[place] for place in places]
        return mapped(node.target, one, tensors)

    def _everywhere(self, constant: Any) -> Any:
        """A constant is the same in all rows, and gets a row axis of its own."""
        return (
            constant.expand(self.rows, *constant.shape)
            if isinstance(constant, Tensor)
            else constant
        )

    def run_rows(self, rows: int, *inputs: Any) -> Any:
        self.rows = rows
        return self.run(*inputs)


def mapped(target: Any, one: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """Map one(operator, *tensors) over the rows.

    A result may be None, such as a gradient that is not asked for. An operator for which vmap has
    no rule is decomposed into simpler ones, if torch knows how.
    """
    form: list[tuple[Any, list[bool]]] = []

    def tensors_alone(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        def call(*row: Tensor) -> tuple[Tensor, ...]:
            results, spec = tree_flatten(one(function, *row))
            form[:] = [(spec, [result is not None for result in results])]
            return tuple(result for result in results if result is not None)

        return call

    try:
        with without_loops():
            found = torch.vmap(tensors_alone(target))(*tensors)
    except RuntimeError:
        if target not in decomposition_table:
            raise
        with without_loops():
            found = torch.vmap(tensors_alone(decomposition_table[target]))(*tensors)
    spec, there = form[0]
    each = iter(found)
    return tree_unflatten([next(each) if real else None for real in there], spec)


@contextmanager
def without_loops() -> Iterator[None]:
    """Raise RuntimeError where vmap has no rule for an operator.

    Otherwise it would warn, and loop over the rows slowly.
    """
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(bias.unsqueeze(1) if bias.dim() == 2 else bias, a, b)


def _nll_loss(
    log_p: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor] | None:
    """-log p of the target's class. Padding has a valid class, so nothing needs to be ignored."""
    if weight is not None or reduction != 0 or log_p.dim() != 3 or ignore != -100:
        return None
    return -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), log_p.new_zeros(len(log_p))


def _nll_loss_backward(
    grad: Tensor,
    log_p: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    total: Tensor,
) -> Tensor | None:
    if weight is not None or reduction != 0 or log_p.dim() != 3 or ignore != -100:
        return None
    return torch.zeros_like(log_p).scatter(-1, target.unsqueeze(-1), -grad.unsqueeze(-1))


def _plain_2d(x: Tensor, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    return x.dim() == 5 and groups == 1 and not transposed and all(d == 1 for d in dilation)


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernels can take a tensor."""
    return (
        x.is_cuda
        and x.dtype in (torch.float32, torch.bool)
        and importlib.util.find_spec("triton") is not None
    )


def patches(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """im2col, as [rows, batch * out_height * out_width, channels * kernel]."""
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    windows = padded.unfold(3, size[0], stride[0]).unfold(4, size[1], stride[1])
    # windows are [R, B, C, H', W', kh, kw]
    rows, batch, channels, high, wide = windows.shape[:5]
    return windows.permute(0, 1, 3, 4, 2, 5, 6).reshape(
        rows, batch * high * wide, channels * size[0] * size[1]
    )


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor | None:
    """[R, B, C, H, W] with [R, O, C, kh, kw].

    The result has channels-last strides, which cost the next operators nothing.
    """
    if not _plain_2d(x, dilation, transposed, groups):
        return None
    size = weight.shape[3:]
    high, wide = ((x.shape[3 + i] + 2 * padding[i] - size[i]) // stride[i] + 1 for i in range(2))
    kernel = weight.flatten(2).transpose(1, 2)
    columns = patches(x, size, stride, padding)
    flat = (
        torch.bmm(columns, kernel)
        if bias is None
        else torch.baddbmm(bias.unsqueeze(1), columns, kernel)
    )
    return flat.view(len(x), x.shape[1], high, wide, weight.shape[1]).permute(0, 1, 4, 2, 3)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    if not _plain_2d(x, dilation, transposed, groups):
        return None
    rows, batch, outputs, high, wide = grad.shape
    size = weight.shape[3:]
    flat = grad.permute(0, 1, 3, 4, 2).reshape(rows, batch * high * wide, outputs)
    d_input = d_weight = d_bias = None
    if wanted[0]:
        columns = torch.bmm(flat, weight.flatten(2))  # [R, B * L, C * kernel]
        columns = columns.view(rows * batch, high * wide, -1).transpose(1, 2)
        d_input = F.fold(
            columns, tuple(x.shape[3:]), tuple(size), padding=tuple(padding), stride=tuple(stride)
        ).view(x.shape)
    if wanted[1]:
        d_weight = torch.bmm(flat.transpose(1, 2), patches(x, size, stride, padding)).view(
            weight.shape
        )
    if wanted[2] and bias_sizes is not None:
        d_bias = flat.sum(1)
    return d_input, d_weight, d_bias


def _view(a: Tensor, shape: Sequence[int]) -> Tensor:
    """What is contiguous for one row may not be so in a stack."""
    return a.reshape(len(a), *shape)


@torch.library.custom_op("rota::uniform_at", mutates_args=())
def uniform_at(key: Tensor, step: Tensor, call: int, n: int) -> Tensor:
    """The random numbers of a dropout call, addressed as in `Dropout`, as one operator."""
    if key.is_cuda and importlib.util.find_spec("triton") is not None:
        from rota.engine import kernels

        drawn: Tensor = kernels.uniform_at(key, step, call, n)
        return drawn
    return rng.uniform(rng.fold(rng.fold(rng.fold(key, local.DROPOUT), step), call), n)


RULES: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.bmm,
    aten.addmm.default: _addmm,
    aten.t.default: lambda a: a.transpose(1, 2),
    aten.view.default: _view,
    torch.ops.rota.uniform.default: local.uniform,
    torch.ops.rota.uniform_at.default: uniform_at,
    aten.lift_fresh_copy.default: torch.clone,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
"""Operator -> its computation on stacked tensors. A rule that returns None leaves it to vmap."""
