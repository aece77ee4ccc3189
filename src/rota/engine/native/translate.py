"""A traced step as instructions for rota.c: every operator one instruction or a few, by the rules here; views cost nothing.

Images have their channels last in memory. What has no rule raises `Unsupported`, and the step then runs as torch operators.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from rota.engine import local
from rota.engine.native.program import (
    CONVOLUTION,
    EMBEDDING,
    EMBEDDING_BACKWARD,
    FILL,
    INPUT_GRADIENT,
    INT_ADD,
    INT_AND,
    INT_MUL,
    INT_SHIFT,
    INT_XOR,
    LAYER_BACKWARD,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    NLL,
    NLL_BACKWARD,
    PARAMS,
    POOL,
    POOL_BACKWARD,
    PRODUCT,
    REAL,
    SUM,
    UNIFORM,
    WEIGHT_GRADIENT,
    Place,
    Program,
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
def _view(w: Writer, target: Any, a: Place, *args: Any) -> Any:  # noqa: ARG001
    seen = target(a.like, *args)
    return a.seen(seen) if isinstance(seen, Tensor) else [a.seen(each) for each in seen]


@rule(aten.view.default, aten._unsafe_view.default)
def _shaped(w: Writer, target: Any, a: Place, shape: Sequence[int]) -> Place:  # noqa: ARG001
    try:
        return a.seen(a.like.view(list(shape)))
    except RuntimeError:  # its memory is in another order
        a = w.contiguous(a)
        return a.seen(a.like.view(list(shape)))


@rule(aten.clone.default)
def _clone(w: Writer, target: Any, a: Place, **_: Any) -> Place:  # noqa: ARG001
    return a  # nothing here is changed in place but the parameters, buffers and sums at the end


def _number(w: Writer, value: Any) -> Place:
    return value if isinstance(value, Place) else w.constant(float(value))


def _pointwise(name: str) -> Rule:
    def write(w: Writer, target: Any, *args: Any, **kwargs: Any) -> Place:  # noqa: ARG001
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
        return w.each("eq", w.new(torch.broadcast_shapes(a.shape, b.shape)), _as_real(w, a), _as_real(w, b))
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
def _threshold_backward(w: Writer, target: Any, gradient: Place, a: Place, threshold: float) -> Place:  # noqa: ARG001
    if threshold != 0:
        raise Unsupported("a threshold other than 0")
    return w.each("threshold_backward", w.like(a, a.shape), gradient, a)


@rule(aten.clamp.default)
def _clamp(w: Writer, target: Any, a: Place, least: float | None = None, most: float | None = None) -> Place:  # noqa: ARG001
    low, high = -math.inf if least is None else float(least), math.inf if most is None else float(most)
    return w.each("clamp", w.like(a, a.shape), a, w.constant(low), w.constant(high))


@rule(aten.pow.Tensor_Scalar)
def _pow(w: Writer, target: Any, a: Place, exponent: float) -> Place:  # noqa: ARG001
    if exponent == 2:
        return w.each("square", w.like(a, a.shape), a)
    return w.each("pow", w.like(a, a.shape), a, w.constant(float(exponent)))


@rule(aten._to_copy.default)
def _to_copy(w: Writer, target: Any, a: Place, dtype: torch.dtype | None = None, **_: Any) -> Place:  # noqa: ARG001
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
def _arange(w: Writer, target: Any, end: int, **_: Any) -> Place:  # noqa: ARG001
    return w.constant(torch.arange(end, dtype=w.dtype))


def _product(w: Writer, out: Place, a: Place, b: Place, keep: int, sign: int) -> Place:
    (m, k), n = a.shape, b.shape[1]
    space = w.scratch(w.product_space(m, n))
    if 1 not in out.like.stride() or any(place.whole for place in (out, a, b)):
        raise Unsupported("a product with scattered results")
    w.emit(PRODUCT, [out, a, b, space], extra=[m, n, k, *a.like.stride(), *b.like.stride(), *out.like.stride(), keep, sign])
    return out


@rule(aten.mm.default)
def _mm(w: Writer, target: Any, a: Place, b: Place) -> Place:  # noqa: ARG001
    return _product(w, w.new((a.shape[0], b.shape[1])), a, b, 0, 1)


@rule(aten.addmm.default)
def _addmm(w: Writer, target: Any, bias: Place, a: Place, b: Place) -> Place:  # noqa: ARG001
    return _product(w, w.each("copy", w.new((a.shape[0], b.shape[1])), bias), a, b, 1, 1)


@rule(torch.Tensor.addmm_)
def _addmm_(w: Writer, target: Any, c: Place, a: Place, b: Place, alpha: int = 1) -> Place:  # noqa: ARG001
    return _product(w, c, a, b, 1, alpha)


@rule(torch.Tensor.add_)
def _add_(w: Writer, target: Any, c: Place, a: Place) -> Place:  # noqa: ARG001
    return w.each("add", c, c, a)


@rule(torch.Tensor.sub_)
def _sub_(w: Writer, target: Any, c: Place, a: Place) -> Place:  # noqa: ARG001
    return w.each("sub", c, c, a)


@rule(torch.Tensor.copy_)
def _copy_(w: Writer, target: Any, c: Place, a: Place) -> Place:  # noqa: ARG001
    return w.each("copy", c, a)


def _summed(w: Writer, a: Place, dims: Sequence[int], keep: bool) -> Place:
    if a.whole:
        raise Unsupported("a sum of integers")
    gone = {d % a.like.dim() for d in dims}
    kept = w.new([1 if d in gone else n for d, n in enumerate(a.shape)])
    w.emit(FILL, [kept, w.constant(0.0)], [kept.like.numel()])
    moves = tuple(0 if d in gone else s for d, s in enumerate(kept.like.stride()))
    shape, (of_input, of_sum) = merged(a.shape, [a.like.stride(), moves])
    w.emit(SUM, [kept, a], shape, [of_sum, of_input])
    return kept if keep else kept.seen(kept.like.view([n for d, n in enumerate(a.shape) if d not in gone]))


@rule(aten.sum.dim_IntList)
def _sum(w: Writer, target: Any, a: Place, dims: Sequence[int], keep: bool = False) -> Place:  # noqa: ARG001
    return _summed(w, a, dims or range(a.like.dim()), keep)


@rule(aten.sum.default)
def _sum_all(w: Writer, target: Any, a: Place) -> Place:  # noqa: ARG001
    return _summed(w, a, range(a.like.dim()), False)


@rule(aten.mean.dim)
def _mean(w: Writer, target: Any, a: Place, dims: Sequence[int], keep: bool = False) -> Place:  # noqa: ARG001
    total = _summed(w, a, dims, keep)
    return w.each("mul", w.new(total.shape), total, w.constant(1 / math.prod(a.shape[d] for d in dims)))


@rule(aten._log_softmax.default)
def _log_softmax(w: Writer, target: Any, a: Place, dim: int, half: bool) -> Place:  # noqa: ARG001
    if dim % a.like.dim() != a.like.dim() - 1:
        raise Unsupported("a softmax over another axis than the last")
    out = w.new(a.shape)
    w.emit(LOG_SOFTMAX, [out, w.contiguous(a)], [a.like.numel() // a.shape[-1], a.shape[-1]])
    return out


@rule(aten._log_softmax_backward_data.default)
def _log_softmax_backward(w: Writer, target: Any, gradient: Place, out: Place, dim: int, dtype: Any) -> Place:  # noqa: ARG001
    done = w.new(out.shape)
    w.emit(LOG_SOFTMAX_BACKWARD, [done, w.contiguous(gradient), out], [out.like.numel() // out.shape[-1], out.shape[-1]])
    return done


def _plain_nll(log_p: Place, weight: Any, reduction: int) -> None:
    if weight is not None or reduction != 0 or log_p.like.dim() != 2:
        raise Unsupported("a loss with class weights or over several places")


@rule(aten.nll_loss_forward.default)
def _nll(w: Writer, target: Any, log_p: Place, y: Place, weight: Any, reduction: int, ignore: int) -> list[Place]:  # noqa: ARG001
    _plain_nll(log_p, weight, reduction)
    out = w.new(y.shape)
    w.emit(NLL, [out, log_p, y], log_p.shape)
    return [out, out]


@rule(aten.nll_loss_backward.default)
def _nll_backward(
    w: Writer, target: Any, gradient: Place, log_p: Place, y: Place, weight: Any, reduction: int, ignore: int, total: Place  # noqa: ARG001
) -> Place:  # fmt: skip
    _plain_nll(log_p, weight, reduction)
    out = w.new(log_p.shape)
    w.emit(NLL_BACKWARD, [out, gradient, y], log_p.shape, [(), gradient.like.stride()])
    return out


def _image_shape(x: Place, weight: Place, stride: Any, padding: Any, dilation: Any, transposed: bool, groups: int) -> list[int]:
    if x.like.dim() != 4 or groups != 1 or transposed or any(d != 1 for d in dilation) or not weight.like.is_contiguous():
        raise Unsupported("a convolution that is grouped, dilated, transposed or not over images")
    (b, c, h, wide), (o, _, kh, kw) = x.shape, weight.shape
    out = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip((h, wide), (kh, kw), stride, padding, strict=True)]
    return [b, c, h, wide, o, *out, kh, kw, *stride, *padding]


def _images(w: Writer, *shape: int) -> Place:
    like = torch.empty(shape, device="meta").to(memory_format=torch.channels_last)
    return w.new(shape, like.stride())


@rule(aten.convolution.default)
def _convolution(
    w: Writer, target: Any, x: Place, weight: Place, bias: Place | None, stride: Any, padding: Any, dilation: Any, transposed: bool,  # noqa: ARG001
    output_padding: Any, groups: int,  # noqa: ARG001
) -> Place:  # fmt: skip
    shape = _image_shape(x, weight, stride, padding, dilation, transposed, groups)
    x = w.channels_last(x)
    out = _images(w, shape[0], shape[4], shape[5], shape[6])
    scratch = w.scratch(w.space(shape))
    w.emit(CONVOLUTION, [out, x, weight, bias, scratch], extra=[*shape, 0, int(bias is not None)])
    return out


@rule(aten.convolution_backward.default)
def _convolution_backward(
    w: Writer, target: Any, gradient: Place, x: Place, weight: Place, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,  # noqa: ARG001
    transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool],  # noqa: ARG001
) -> list[Place | None]:  # fmt: skip
    shape = _image_shape(x, weight, stride, padding, dilation, transposed, groups)
    gradient = w.channels_last(gradient)
    d_input = d_weight = d_bias = None
    if wanted[0]:
        d_input, scratch = _images(w, *x.shape), w.scratch(w.space(shape))
        w.emit(INPUT_GRADIENT, [d_input, gradient, weight, scratch], extra=shape)
    if wanted[1]:
        x, d_weight = w.channels_last(x), w.new(weight.shape)
        scratch = w.scratch(w.space(shape))
        w.emit(WEIGHT_GRADIENT, [d_weight, x, gradient, scratch], extra=shape)
    if wanted[2]:
        d_bias = _summed(w, gradient, [0, 2, 3], False)
    return [d_input, d_weight, d_bias]


def _pool_shape(x: Place, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> list[int]:
    if x.like.dim() != 4 or any(d != 1 for d in dilation) or ceil:
        raise Unsupported("a max-pool that is dilated, rounds up or is not over images")
    pairs = [[v[0], v[-1]] if v else [size[0], size[-1]] for v in (size, stride, padding)]
    (kernel, step, pad), (b, c, h, wide) = pairs, x.shape
    out = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip((h, wide), kernel, step, pad, strict=True)]
    return [b, c, h, wide, *out, *kernel, *step, *pad]


@rule(aten.max_pool2d_with_indices.default)
def _pool(
    w: Writer, target: Any, x: Place, size: Any, stride: Any = (), padding: Any = (0, 0), dilation: Any = (1, 1), ceil: bool = False  # noqa: ARG001
) -> list[Place]:  # fmt: skip
    shape = _pool_shape(x, size, stride, padding, dilation, ceil)
    x = w.channels_last(x)
    out = _images(w, shape[0], shape[1], shape[4], shape[5])
    taps = w.new([out.like.numel()])
    w.emit(POOL, [out, x, taps], extra=shape)
    return [out, taps]


@rule(aten.max_pool2d_with_indices_backward.default)
def _pool_backward(
    w: Writer, target: Any, gradient: Place, x: Place, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, taps: Place  # noqa: ARG001
) -> Place:  # fmt: skip
    shape = _pool_shape(x, size, stride, padding, dilation, ceil)
    gradient, out = w.channels_last(gradient), _images(w, *x.shape)
    w.emit(POOL_BACKWARD, [out, gradient, taps], extra=shape)
    return out


@rule(aten.embedding.default)
def _embedding(w: Writer, target: Any, table: Place, words: Place, *_: Any) -> Place:  # noqa: ARG001
    if not words.like.is_contiguous():
        raise Unsupported("an embedding of scattered words")
    out = w.new([*words.shape, table.shape[1]])
    w.emit(EMBEDDING, [out, table, words], [words.like.numel(), table.shape[1]])
    return out


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(w: Writer, target: Any, gradient: Place, words: Place, number: int, padding: int, scaled: bool) -> Place:  # noqa: ARG001
    if scaled or not words.like.is_contiguous():
        raise Unsupported("an embedding scaled by frequency")
    wide = gradient.shape[-1]
    out = w.new([number, wide])
    w.emit(EMBEDDING_BACKWARD, [out, w.contiguous(gradient), words], [words.like.numel(), wide], extra=[number, padding])
    return out


@rule(local.uniform._opoverload)
def _uniform(w: Writer, target: Any, key: Place, n: int) -> Place:  # noqa: ARG001
    out = w.new([*key.shape, n])
    w.emit(UNIFORM, [out, key], [n])
    return out


def _filled(w: Writer, shape: Sequence[int], value: float) -> Place:
    out = w.new(shape)
    w.emit(FILL, [out, w.constant(value)], [out.like.numel()])
    return out


@rule(aten.new_zeros.default)
def _new_zeros(w: Writer, target: Any, a: Place, shape: Sequence[int], **_: Any) -> Place:  # noqa: ARG001
    return _filled(w, shape, 0.0)


@rule(aten.ones_like.default)
def _ones_like(w: Writer, target: Any, a: Place, **_: Any) -> Place:  # noqa: ARG001
    return _filled(w, a.shape, 1.0)


@rule(aten.zeros_like.default)
def _zeros_like(w: Writer, target: Any, a: Place, **_: Any) -> Place:  # noqa: ARG001
    return _filled(w, a.shape, 0.0)


@rule(aten.select_backward.default)
def _select_backward(w: Writer, target: Any, gradient: Place, sizes: Sequence[int], dim: int, index: int) -> Place:  # noqa: ARG001
    out = _filled(w, sizes, 0.0)
    w.each("copy", out.seen(out.like.select(dim, index)), gradient)
    return out


@rule(aten.cat.default)
def _cat(w: Writer, target: Any, pieces: Sequence[Place], dim: int = 0) -> Place:  # noqa: ARG001
    out = w.new(torch.cat([piece.like for piece in pieces], dim).shape)
    at = 0
    for piece in pieces:
        w.each("copy", out.seen(out.like.narrow(dim, at, piece.shape[dim])), piece)
        at += piece.shape[dim]
    return out


@rule(aten.stack.default)
def _stack(w: Writer, target: Any, pieces: Sequence[Place], dim: int = 0) -> Place:  # noqa: ARG001
    out = w.new(torch.stack([piece.like for piece in pieces], dim).shape)
    for i, piece in enumerate(pieces):
        w.each("copy", out.seen(out.like.select(dim, i)), piece)
    return out


def translate(graph: fx.Graph, inputs: list[Place], writer: Writer) -> Program:
    """The instructions of a step that works in place (trace.fuse), whose inputs lie at these places."""
    held: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            held[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), held.__getitem__)
            if node.target is operator.getitem:
                held[node] = args[0][args[1]]
                continue
            if node.target not in RULES:
                raise Unsupported(str(node.target))
            try:
                held[node] = RULES[node.target](writer, node.target, *args, **kwargs)
            except TypeError as error:  # an argument that its rule does not have
                raise Unsupported(f"{node.target}: {error}") from error
        elif node.op == "get_attr":
            held[node] = writer.constant(getattr(graph.owning_module, str(node.target)))
    _join_updates(writer)
    return writer.finish()


def _join_updates(w: Writer) -> None:
    """Where a layer's weights W are read for its input's gradient dy W, and next changed by dy^T x: both in one pass over them."""
    for later in reversed(range(len(w.code))):
        update, places = w.code[later]
        if update.code != PRODUCT or places[0] is None or places[0].space != PARAMS:
            continue
        changed, dy_turned, x, _ = places
        earlier = next((i for i in reversed(range(later)) if any(p is not None and _same(p, changed) for p in w.code[i][1])), None)
        if earlier is None or w.code[earlier][0].code != PRODUCT:
            continue
        back, (dx, dy, read, space) = w.code[earlier][0], w.code[earlier][1]
        of_back, of_update = list(back.extra), list(update.extra)  # m n k, strides of a, b and c, keep, sign
        turned = [of_back[2], of_back[0], of_back[4], of_back[3]] == [of_update[0], of_update[2], of_update[3], of_update[4]]
        in_rows = of_back[5:7] == of_update[7:9] and of_back[6] == of_back[8] == of_update[6] == 1
        if _same(read, changed) and _same(dy, dy_turned) and turned and in_rows and of_back[9:11] == [0, 1] and of_update[9:11] == [1, -1]:
            back.code, back.extra[9] = LAYER_BACKWARD, of_update[5]
            w.code[earlier] = (back, [dx, dy, read, x, space])
            del w.code[later]


def _same(one: Place | None, other: Place | None) -> bool:
    """Whether two tensors begin at the same place."""
    return one is not None and other is not None and (one.space, one.start, one.block) == (other.space, other.start, other.block)
