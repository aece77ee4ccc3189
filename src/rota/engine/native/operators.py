"""Rules for torch's basic operators: what instructions each becomes. Views cost nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rota.engine.native.program import (
    FILL,
    INT_ADD,
    INT_AND,
    INT_MUL,
    INT_SHIFT,
    INT_XOR,
    PRODUCT,
    REAL,
    SUM,
    Place,
    Unsupported,
    Writer,
    merged,
)

aten = torch.ops.aten
Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    def keep(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return keep


@rule(
    aten.t.default, aten.transpose.int, aten.permute.default, aten.select.int, aten.split.Tensor, aten.unbind.int, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.detach.default, aten.alias.default,
)  # fmt: skip
def _view(w: Writer, target: Any, a: Place, *args: Any) -> Any:
    seen = target(a.like, *args)
    return a.seen(seen) if isinstance(seen, Tensor) else [a.seen(each) for each in seen]


@rule(aten.view.default, aten._unsafe_view.default)
def _shaped(w: Writer, target: Any, a: Place, shape: Sequence[int]) -> Place:
    try:
        return a.seen(a.like.view(list(shape)))
    except RuntimeError:  # its memory is in another order
        a = w.contiguous(a)
        return a.seen(a.like.view(list(shape)))


@rule(aten.clone.default)
def _clone(w: Writer, target: Any, a: Place, **_: Any) -> Place:
    return a  # nothing here is changed in place but the parameters, buffers and sums at the end


def _number(w: Writer, value: Any) -> Place:
    return value if isinstance(value, Place) else w.constant(float(value))


def _pointwise(name: str) -> Rule:
    def write(w: Writer, target: Any, *args: Any, **kwargs: Any) -> Place:
        if kwargs.get("alpha", 1) != 1:
            raise Unsupported(f"{name} with a factor")
        if any(isinstance(a, Place) and a.whole for a in args):
            return _integers(w, name, *args)
        places = [_number(w, a) for a in args]
        shape = torch.broadcast_shapes(*(place.shape for place in places))
        fullest = next((place for place in places if place.shape == shape), places[0])
        return w.each(name, w.like(fullest, shape), *places)

    return write


def _integers(w: Writer, name: str, a: Any, b: Any) -> Place:
    """Words of randomness: single integers. Codes compared with one another become 0 or 1."""
    if name == "eq" and isinstance(b, Place):
        return w.each(
            "eq", w.new(torch.broadcast_shapes(a.shape, b.shape)), _as_real(w, a), _as_real(w, b)
        )
    codes = {"add": INT_ADD, "mul": INT_MUL, "xor": INT_XOR, "shift": INT_SHIFT, "and": INT_AND}
    sides = [side if isinstance(side, Place) else _word(w, side) for side in (a, b)]
    if name not in codes or any(side.like.numel() != 1 for side in sides):
        raise Unsupported(f"{name} of integers")
    out = w.new((), whole=True)
    w.emit(codes[name], [out, *sides])
    return out


def _word(w: Writer, value: int) -> Place:
    return w.constant(torch.tensor((value + (1 << 63)) % (1 << 64) - (1 << 63)))


for _name, _targets in {
    "add": (aten.add.Tensor, aten.add.Scalar), "sub": (aten.sub.Tensor, aten.sub.Scalar), "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar), "neg": (aten.neg.default,), "relu": (aten.relu.default,), "exp": (aten.exp.default,),
    "sigmoid": (aten.sigmoid.default,), "tanh": (aten.tanh.default,), "sqrt": (aten.sqrt.default,), "rsqrt": (aten.rsqrt.default,),
    "sigmoid_backward": (aten.sigmoid_backward.default,), "tanh_backward": (aten.tanh_backward.default,),
    "ge": (aten.ge.Scalar, aten.ge.Tensor), "gt": (aten.gt.Scalar, aten.gt.Tensor), "le": (aten.le.Scalar, aten.le.Tensor),
    "lt": (aten.lt.Scalar, aten.lt.Tensor), "eq": (aten.eq.Scalar, aten.eq.Tensor), "ne": (aten.ne.Scalar, aten.ne.Tensor),
    "lerp": (aten.lerp.Tensor,), "where": (aten.where.self,), "xor": (aten.bitwise_xor.Tensor,), "and": (aten.bitwise_and.Scalar,),
    "shift": (aten.__rshift__.Scalar,),
}.items():  # fmt: skip
    rule(*_targets)(_pointwise(_name))


@rule(aten.threshold_backward.default)
def _threshold_backward(
    w: Writer, target: Any, gradient: Place, a: Place, threshold: float
) -> Place:
    if threshold != 0:
        raise Unsupported("a threshold other than 0")
    return w.each("threshold_backward", w.like(a, a.shape), gradient, a)


@rule(aten.clamp.default)
def _clamp(
    w: Writer, target: Any, a: Place, least: float | None = None, most: float | None = None
) -> Place:
    low, high = (
        -math.inf if least is None else float(least),
        math.inf if most is None else float(most),
    )
    return w.each("clamp", w.like(a, a.shape), a, w.constant(low), w.constant(high))


@rule(aten.pow.Tensor_Scalar)
def _pow(w: Writer, target: Any, a: Place, exponent: float) -> Place:
    if exponent == 2:
        return w.each("square", w.like(a, a.shape), a)
    return w.each("pow", w.like(a, a.shape), a, w.constant(float(exponent)))


@rule(aten._to_copy.default)
def _to_copy(w: Writer, target: Any, a: Place, dtype: torch.dtype | None = None, **_: Any) -> Place:
    if dtype not in (None, w.dtype, torch.float32):
        raise Unsupported(f"a conversion to {dtype}")
    return _as_real(w, a) if a.whole else a


def _as_real(w: Writer, a: Place) -> Place:
    if not a.whole:
        return a
    if not a.like.is_contiguous():
        raise Unsupported("a conversion of scattered integers")
    out = w.new(a.shape)
    w.emit(REAL, [out, a], [a.like.numel()])
    return out


@rule(aten.arange.default)
def _arange(w: Writer, target: Any, end: int, **_: Any) -> Place:
    return w.constant(torch.arange(end, dtype=w.dtype))


def _product(w: Writer, out: Place, a: Place, b: Place, keep: int, sign: int) -> Place:
    (m, k), n = a.shape, b.shape[1]
    space = w.scratch(w.product_space(m, n))
    if 1 not in out.like.stride() or any(place.whole for place in (out, a, b)):
        raise Unsupported("a product with scattered results")
    w.emit(
        PRODUCT,
        [out, a, b, space],
        extra=[m, n, k, *a.like.stride(), *b.like.stride(), *out.like.stride(), keep, sign],
    )
    return out


@rule(aten.mm.default)
def _mm(w: Writer, target: Any, a: Place, b: Place) -> Place:
    return _product(w, w.new((a.shape[0], b.shape[1])), a, b, 0, 1)


@rule(aten.addmm.default)
def _addmm(w: Writer, target: Any, bias: Place, a: Place, b: Place) -> Place:
    return _product(w, w.each("copy", w.new((a.shape[0], b.shape[1])), bias), a, b, 1, 1)


@rule(torch.Tensor.addmm_)
def _addmm_(w: Writer, target: Any, c: Place, a: Place, b: Place, alpha: int = 1) -> Place:
    return _product(w, c, a, b, 1, alpha)


@rule(torch.Tensor.add_)
def _add_(w: Writer, target: Any, c: Place, a: Place) -> Place:
    return w.each("add", c, c, a)


@rule(torch.Tensor.sub_)
def _sub_(w: Writer, target: Any, c: Place, a: Place) -> Place:
    return w.each("sub", c, c, a)


@rule(torch.Tensor.copy_)
def _copy_(w: Writer, target: Any, c: Place, a: Place) -> Place:
    return w.each("copy", c, a)


def summed(w: Writer, a: Place, dims: Sequence[int], keep: bool) -> Place:
    if a.whole:
        raise Unsupported("a sum of integers")
    gone = {d % a.like.dim() for d in dims}
    kept = w.new([1 if d in gone else n for d, n in enumerate(a.shape)])
    w.emit(FILL, [kept, w.constant(0.0)], [kept.like.numel()])
    moves = tuple(0 if d in gone else s for d, s in enumerate(kept.like.stride()))
    shape, (of_input, of_sum) = merged(a.shape, [a.like.stride(), moves])
    w.emit(SUM, [kept, a], shape, [of_sum, of_input])
    return (
        kept
        if keep
        else kept.seen(kept.like.view([n for d, n in enumerate(a.shape) if d not in gone]))
    )


@rule(aten.sum.dim_IntList)
def _sum(w: Writer, target: Any, a: Place, dims: Sequence[int], keep: bool = False) -> Place:
    return summed(w, a, dims or range(a.like.dim()), keep)


@rule(aten.sum.default)
def _sum_all(w: Writer, target: Any, a: Place) -> Place:
    return summed(w, a, range(a.like.dim()), False)


@rule(aten.mean.dim)
def _mean(w: Writer, target: Any, a: Place, dims: Sequence[int], keep: bool = False) -> Place:
    total = summed(w, a, dims, keep)
    return w.each(
        "mul", w.new(total.shape), total, w.constant(1 / math.prod(a.shape[d] for d in dims))
    )


def _filled(w: Writer, shape: Sequence[int], value: float) -> Place:
    out = w.new(shape)
    w.emit(FILL, [out, w.constant(value)], [out.like.numel()])
    return out


@rule(aten.new_zeros.default)
def _new_zeros(w: Writer, target: Any, a: Place, shape: Sequence[int], **_: Any) -> Place:
    return _filled(w, shape, 0.0)


@rule(aten.ones_like.default)
def _ones_like(w: Writer, target: Any, a: Place, **_: Any) -> Place:
    return _filled(w, a.shape, 1.0)


@rule(aten.zeros_like.default)
def _zeros_like(w: Writer, target: Any, a: Place, **_: Any) -> Place:
    return _filled(w, a.shape, 0.0)


@rule(aten.select_backward.default)
def _select_backward(
    w: Writer, target: Any, gradient: Place, sizes: Sequence[int], dim: int, index: int
) -> Place:
    out = _filled(w, sizes, 0.0)
    w.each("copy", out.seen(out.like.select(dim, index)), gradient)
    return out


@rule(aten.cat.default)
def _cat(w: Writer, target: Any, pieces: Sequence[Place], dim: int = 0) -> Place:
    out = w.new(torch.cat([piece.like for piece in pieces], dim).shape)
    at = 0
    for piece in pieces:
        w.each("copy", out.seen(out.like.narrow(dim, at, piece.shape[dim])), piece)
        at += piece.shape[dim]
    return out


@rule(aten.stack.default)
def _stack(w: Writer, target: Any, pieces: Sequence[Place], dim: int = 0) -> Place:
    out = w.new(torch.stack([piece.like for piece in pieces], dim).shape)
    for i, piece in enumerate(pieces):
        w.each("copy", out.seen(out.like.select(dim, i)), piece)
    return out
