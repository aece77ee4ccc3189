"""Turns a traced step into instructions for rota.c, by the rules in operators.py and layers.py.

An operator that has no rule raises `Unsupported`, and the step then runs as torch operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from rota.engine.native import activations, layers, norms  # noqa: F401  their rules
from rota.engine.native.operators import RULES
from rota.engine.native.program import Block, Code, Place, Unsupported, Writer, layout
from rota.engine.native.structures import EACH, LAYER_BACKWARD, PARAMS, PRODUCT


def translate(graph: fx.Graph, inputs: list[Place], writer: Writer) -> Code:
    """The instructions of a step that works in place (trace.fuse), whose inputs lie there."""
    held: dict[fx.Node, Any] = {}
    given = iter(inputs)
    writer.changes = any(map(_changes, graph.nodes))
    for node in graph.nodes:
        try:
            held[node] = _translated(node, held, given, writer)
        except Unsupported:
            raise
        except Exception as error:  # a form of the operator that its rule does not know
            raise Unsupported(f"{node.target}: {error}") from error
    _join_sums(writer)
    _join_updates(writer)
    return writer.finish()


def _translated(node: fx.Node, held: dict[fx.Node, Any], given: Any, writer: Writer) -> Any:
    """The place or places of a node's result, or a tensor that is the same in every step."""
    if node.op == "placeholder":
        return next(given)
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target)).clone()
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return held[node.args[0]][node.args[1]]  # type: ignore[index]
    if isinstance(node.target, torch._ops.OpOverload) and not _varies(node, held):
        args, kwargs = _given(node, held.__getitem__)
        return node.target(*args, **kwargs)
    if node.target not in RULES:
        raise Unsupported(str(node.target))

    def place(node: fx.Node) -> Any:
        value = held[node]
        return writer.constant(value) if isinstance(value, Tensor) else value

    args, kwargs = _given(node, place)
    return RULES[node.target](writer, node.target, *args, **kwargs)


def _given(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a node, with a value in place of each node."""
    args: Any = fx.node.map_arg(node.args, value)
    kwargs: Any = fx.node.map_arg(node.kwargs, value)
    return args, kwargs


def _varies(node: fx.Node, held: dict[fx.Node, Any]) -> bool:
    """Whether a node depends on a place, so that it is not the same in every step."""
    values = [held[each] for each in node.all_input_nodes]
    return not all(isinstance(each, Tensor) for each in values)


def _changes(node: fx.Node) -> bool:
    """Whether a node of the trace changes numbers in place; updates (trace.fuse) come later."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.inplace_view in target.tags:
        return False
    return target._schema.is_mutable


def _join_sums(w: Writer) -> None:
    """Let a product whose result is only added to an earlier one be added there itself.

    The gradient of a recurrent layer's weights is such a sum, with a product per time step.
    """
    lives, gone = w.lives(), set()
    for at in reversed(range(len(w.code))):
        instruction, places = w.code[at]
        if instruction.code != EACH["add"]:
            continue
        out, one, two = places[:3]
        if out is None or out.piece is None:
            continue
        for term, other in ((one, two), (two, one)):
            made = _made_for(w, at, term, other, out, lives)
            if made is None or other is None or other.piece is None:
                continue
            product, (c, *factors) = w.code[made]
            assert c is not None
            lives[other.piece][1] = lives.pop(out.piece)[1]
            out.piece.merged = other.piece
            w.code[made] = product, [other.seen(c.like), *factors]
            product.extra[9] = 1  # keep what is there
            gone.add(at)
            break
    w.code = [each for at, each in enumerate(w.code) if at not in gone]


def _made_for(
    w: Writer,
    at: int,
    term: Place | None,
    other: Place | None,
    out: Place,
    lives: dict[Block, list[int]],
) -> int | None:
    """The product that makes `term` for the sum with `other` alone, if it can add to `other`."""
    places = [term, other, out]
    pieces = [place.piece for place in places if place is not None and place.piece is not None]
    if len(set(pieces)) < 3 or term is None or other is None:
        return None
    (made, last), (first, until), (begun, _) = (lives[piece] for piece in pieces)
    product, (c, *_) = w.code[made]
    if not (product.code == PRODUCT and not product.extra[9] and last == until == at == begun):
        return None
    full = all(_fills(place) for place in (c, *places))
    alike = layout(term) == layout(other) == layout(out)
    between = range(made, at)
    waits = first < made and not any(_uses(w.code[i][1], other) for i in between)
    apart = not any(_uses(w.code[i][1], term) for i in between[1:])
    return made if full and alike and waits and apart else None


def _fills(place: Place | None) -> bool:
    """Whether a tensor is all of its piece of the arena."""
    if place is None or place.piece is None:
        return False
    return place.like.numel() * place.like.itemsize == place.piece.size


def _join_updates(w: Writer) -> None:
    """Join the two uses of a layer's weights W in the backward pass: dy W, and W -= dy^T x.

    Then W is read from memory once. The update moves forward to the product for this; it may do so
    if nothing in between reads W or writes x.
    """
    for later in reversed(range(len(w.code))):
        update, places = w.code[later]
        alone = update.code == PRODUCT and not update.dims
        if not alone or places[0] is None or places[0].space != PARAMS:
            continue
        changed, dy_turned, x, _ = places
        users = (i for i in reversed(range(later)) if _uses(w.code[i][1], changed))
        earlier = next(users, None)
        if earlier is None or w.code[earlier][0].code != PRODUCT or w.code[earlier][0].dims:
            continue
        back, (dx, dy, read, space) = w.code[earlier]
        fits = _same(read, changed) and _same(dy, dy_turned) and _fit(back.extra, update.extra)
        if fits and not any(_uses(w.code[i][1][:1], x) for i in range(earlier, later)):
            back.code, back.extra[9] = LAYER_BACKWARD, update.extra[5]
            w.code[earlier] = (back, [dx, dy, read, x, space])
            del w.code[later]


def _fit(back: Any, update: Any) -> bool:
    """Whether dx = dy W and W -= dy^T x are of the same W and dy, and of rows in memory."""
    m, n, k, a_m, a_k, b_k, b_n, _, c_n, *how = back[:11]
    same = [k, n, m, a_k, a_m, b_k, b_n] == [*update[:5], *update[7:9]]
    in_rows = b_n == c_n == update[6] == 1
    return bool(same and in_rows and [*how, *update[9:11]] == [0, 1, 1, -1])


def _same(one: Place | None, other: Place | None) -> bool:
    """Whether two tensors begin at the same place."""
    if one is None or other is None:
        return False
    return (one.space, one.start, one.block) == (other.space, other.start, other.block)


def _uses(operands: list[Place | None], tensor: Place | None) -> bool:
    """Whether one of the operands shares memory with a tensor."""
    return any(place and tensor and _meet(place, tensor) for place in operands)


def _meet(one: Place, other: Place) -> bool:
    if (one.space, one.piece) != (other.space, other.piece):
        return False
    return one.extent[0] < other.extent[1] and other.extent[0] < one.extent[1]
