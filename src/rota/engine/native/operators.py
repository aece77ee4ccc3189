"""Rules that turn torch's basic operators into instructions. Views need no instruction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota.engine.native.program import Place, Unsupported, Writer, merged
from rota.engine.native.structures import (
    ARENA,
    CONSTANTS,
    FILL,
    INT_ADD,
    INT_AND,
    INT_MUL,
    INT_SHIFT,
    INT_XOR,
    PRODUCT,
    REAL,
    SUM,
)

aten = torch.ops.aten
Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""Operator -> a function of the writer, the operator and its arguments that returns its result."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Make a function the rule of these operators."""

    def keep(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return keep


@rule(
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.squeeze_.dim,
    aten.t_.default,
    aten.transpose_.default,
    aten.unbind.int,
    aten.unsafe_split.Tensor,
    aten.unsqueeze.default,
    aten.unsqueeze_.default,
)
def _view(w: Writer, target: Any, a: Place, *args: Any) -> Any:
    seen = target(a.like.detach(), *args)  # those that end in _ change what they are given
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
    return _copied(w, a)


def _copied(w: Writer, a: Place) -> Place:
    """A copy, if the step changes intermediate results in place.

    Parameters, buffers and sums change, too, but only at the end of a step.
    """
    if w.changes and not a.whole:
        return w.each("copy", w.like(a, a.shape), a)
    return a


def _number(w: Writer, value: Any) -> Place:
    return value if isinstance(value, Place) else w.constant(float(value))


def _pointwise(name: str) -> Rule:
    def write(w: Writer, target: Any, *args: Any, alpha: float = 1) -> Place:
        args = _multiplied(w, name, args, alpha)
        if any(isinstance(a, Place) and a.whole for a in args):
            if not any(_real(a) for a in args):
                return _integers(w, name, *args)
            args = tuple(_as_real(w, a) if isinstance(a, Place) else a for a in args)
        places = [_number(w, a) for a in args]
        shape = torch.broadcast_shapes(*(place.shape for place in places))
        fullest = next((place for place in places if place.shape == shape), places[0])
        return w.each(name, w.like(fullest, shape), *places)

    return write


def _multiplied(w: Writer, name: str, args: tuple[Any, ...], alpha: float) -> tuple[Any, ...]:
    """The arguments of a sum or a difference whose second number counts `alpha` times."""
    if alpha == 1 and (name not in ("add", "sub") or len(args) < 3):
        return args
    first, second, *rest = args
    if rest or not (isinstance(second, Place) and _real(second)):
        raise Unsupported(f"{name} with a factor")
    factor = w.constant(float(alpha))
    return first, w.each("mul", w.like(second, second.shape), second, factor)


def _real(value: Any) -> bool:
    return not value.whole if isinstance(value, Place) else isinstance(value, float)


WORDS = {"add": INT_ADD, "mul": INT_MUL, "xor": INT_XOR, "shift": INT_SHIFT, "and": INT_AND}
"""The operators that are known on integers."""


def _integers(w: Writer, name: str, a: Any, b: Any) -> Place:
    """Single integers, which are words of randomness; or tensors of integers that are compared."""
    if name == "eq" and isinstance(a, Place) and isinstance(b, Place):
        if not (_small(w, a) or _small(w, b)):
            raise Unsupported("a comparison of integers that real numbers may not hold exactly")
        out = w.new(torch.broadcast_shapes(a.shape, b.shape))
        return w.each("eq", out, _as_real(w, a), _as_real(w, b))
    if name not in WORDS or (name == "shift" and b not in range(64)):
        raise Unsupported(f"{name} of integers")
    sides = [side if isinstance(side, Place) else _word(w, side) for side in (a, b)]
    if any(side.like.numel() != 1 for side in sides):
        raise Unsupported(f"{name} of many integers")
    out = w.new(torch.broadcast_shapes(*(side.shape for side in sides)), whole=True)
    w.emit(WORDS[name], [out, *sides])
    return out


def _small(w: Writer, a: Place) -> bool:
    """Whether these are known integers, none of which is a larger one that was rounded."""
    if a.space != CONSTANTS:
        return False
    values = np.frombuffer(bytes(w.constants[slice(*a.extent)]), np.int64)
    return bool((np.abs(values) < 1 / torch.finfo(w.dtype).eps).all())


def _word(w: Writer, value: int) -> Place:
    return w.constant(torch.tensor((value + (1 << 63)) % (1 << 64) - (1 << 63)))


POINTWISE = {
    "abs": (aten.abs.default,),
    "add": (aten.add.Tensor, aten.add.Scalar),
    "and": (aten.bitwise_and.Scalar,),
    "div": (aten.div.Tensor, aten.div.Scalar),
    "eq": (aten.eq.Scalar, aten.eq.Tensor),
    "erf": (aten.erf.default,),
    "exp": (aten.exp.default,),
    "ge": (aten.ge.Scalar, aten.ge.Tensor),
    "gt": (aten.gt.Scalar, aten.gt.Tensor),
    "le": (aten.le.Scalar, aten.le.Tensor),
    "lerp": (aten.lerp.Tensor,),
    "log": (aten.log.default,),
    "lt": (aten.lt.Scalar, aten.lt.Tensor),
    "maximum": (aten.maximum.default,),
    "minimum": (aten.minimum.default,),
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "ne": (aten.ne.Scalar, aten.ne.Tensor),
    "neg": (aten.neg.default,),
    "relu": (aten.relu.default,),
    "rsqrt": (aten.rsqrt.default,),
    "shift": (aten.__rshift__.Scalar,),
    "sigmoid": (aten.sigmoid.default,),
    "sigmoid_backward": (aten.sigmoid_backward.default,),
    "silu": (aten.silu.default,),
    "sqrt": (aten.sqrt.default,),
    "sub": (aten.sub.Tensor, aten.sub.Scalar),
    "tanh": (aten.tanh.default,),
    "tanh_backward": (aten.tanh_backward.default,),
    "where": (aten.where.self,),
    "xor": (aten.bitwise_xor.Tensor,),
}
for _name, _targets in POINTWISE.items():
    rule(*_targets)(_pointwise(_name))


def _in_place(name: str) -> Rule:
    def write(w: Writer, target: Any, a: Place, *args: Any, alpha: float = 1) -> Place:
        if a.whole or a.space != ARENA:
            raise Unsupported(f"{name} into what is not an intermediate result")
        a, *places = (_number(w, each) for each in _multiplied(w, name, (a, *args), alpha))
        inputs = places if name == "copy" else [a, *places]
        return w.each(name, a, *(_as_real(w, each) for each in inputs))

    return write


IN_PLACE = {
    "add": (aten.add_.Tensor, aten.add_.Scalar),
    "copy": (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor),
    "div": (aten.div_.Tensor, aten.div_.Scalar),
    "exp": (aten.exp_.default,),
    "mul": (aten.mul_.Tensor, aten.mul_.Scalar),
    "relu": (aten.relu_.default,),
    "sigmoid": (aten.sigmoid_.default,),
    "sub": (aten.sub_.Tensor, aten.sub_.Scalar),
    "tanh": (aten.tanh_.default,),
}
for _name, _targets in IN_PLACE.items():
    rule(*_targets)(_in_place(_name))


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
    low = w.constant(-math.inf if least is None else float(least))
    high = w.constant(math.inf if most is None else float(most))
    return w.each("clamp", w.like(a, a.shape), a, low, high)


@rule(aten.pow.Tensor_Scalar)
def _pow(w: Writer, target: Any, a: Place, exponent: float) -> Place:
    if exponent == 2:
        return w.each("square", w.like(a, a.shape), a)
    return w.each("pow", w.like(a, a.shape), a, w.constant(float(exponent)))


@rule(aten._to_copy.default)
def _to_copy(w: Writer, target: Any, a: Place, dtype: torch.dtype | None = None, **_: Any) -> Place:
    if dtype is None or (a.whole and dtype == torch.int64):
        return _copied(w, a)
    if dtype not in (w.dtype, torch.float32):
        raise Unsupported(f"a conversion to {dtype}")
    return _as_real(w, a) if a.whole else _copied(w, a)


def _as_real(w: Writer, a: Place) -> Place:
    if not a.whole:
        return a
    if not a.like.is_contiguous():
        raise Unsupported("a conversion of scattered integers")
    out = w.new(a.shape)
    w.emit(REAL, [out, a], [a.like.numel()])
    return out


def _product(w: Writer, out: Place, a: Place, b: Place, keep: int, sign: int) -> Place:
    """out = sign * a b, plus what is there if `keep`; with three axes for many pairs."""
    (*many, m, k), n = a.shape, b.shape[-1]
    space = w.scratch(w.product_space(m, n))
    places = (out, a, b)
    if 1 not in out.like.stride()[-2:] or any(place.whole for place in places):
        raise Unsupported("a product with scattered results")
    strides = [stride for place in (a, b, out) for stride in place.like.stride()[-2:]]
    steps = [place.like.stride()[:-2] for place in places]
    w.emit(PRODUCT, [*places, space], many, steps, [m, n, k, *strides, keep, sign])
    return out


@rule(aten.bmm.default)
def _bmm(w: Writer, target: Any, a: Place, b: Place) -> Place:
    return _product(w, w.new((*a.shape[:2], b.shape[2])), a, b, 0, 1)


@rule(aten.baddbmm.default)
def _baddbmm(w: Writer, target: Any, bias: Place, a: Place, b: Place) -> Place:
    out = w.each("copy", w.new((*a.shape[:2], b.shape[2])), bias)
    return _product(w, out, a, b, 1, 1)


@rule(aten.mm.default)
def _mm(w: Writer, target: Any, a: Place, b: Place) -> Place:
    return _product(w, w.new((a.shape[0], b.shape[1])), a, b, 0, 1)


@rule(aten.addmm.default)
def _addmm(w: Writer, target: Any, bias: Place, a: Place, b: Place) -> Place:
    return _product(w, w.each("copy", w.new((a.shape[0], b.shape[1])), bias), a, b, 1, 1)


@rule(torch.Tensor.addmm_, torch.Tensor.baddbmm_)
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


def summed(w: Writer, a: Place, dims: Sequence[int] | None, keep: bool) -> Place:
    """The sum over some axes; over all if there are none."""
    if a.whole:
        raise Unsupported("a sum of integers")
    gone = {d % a.like.dim() for d in dims or range(a.like.dim())}
    kept = w.new([1 if d in gone else n for d, n in enumerate(a.shape)])
    w.emit(FILL, [kept, w.constant(0.0)], [kept.like.numel()])
    moves = tuple(0 if d in gone else s for d, s in enumerate(kept.like.stride()))
    shape, (of_input, of_sum) = merged(a.shape, [a.like.stride(), moves])
    w.emit(SUM, [kept, a], shape, [of_sum, of_input])
    if keep:
        return kept
    return kept.seen(kept.like.view([n for d, n in enumerate(a.shape) if d not in gone]))


@rule(aten.sum.dim_IntList)
def _sum(w: Writer, target: Any, a: Place, dims: Sequence[int] | None, keep: bool = False) -> Place:
    return summed(w, a, dims, keep)


@rule(aten.sum.default)
def _sum_all(w: Writer, target: Any, a: Place) -> Place:
    return summed(w, a, None, False)


@rule(aten.mean.dim)
def _mean(
    w: Writer, target: Any, a: Place, dims: Sequence[int] | None, keep: bool = False
) -> Place:
    total = summed(w, a, dims, keep)
    number = math.prod(a.shape[d] for d in dims or range(a.like.dim()))
    return w.each("mul", w.new(total.shape), total, w.constant(1 / number))


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


@rule(aten.empty_like.default)
def _empty_like(w: Writer, target: Any, a: Place, **_: Any) -> Place:
    return w.like(a, a.shape)


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
