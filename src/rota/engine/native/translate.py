"""Turns a traced step into instructions for rota.c, by the rules in operators.py and layers.py.

An operator that has no rule raises `Unsupported`, and the step then runs as torch operators.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from rota.engine.native import layers  # noqa: F401  its rules
from rota.engine.native.operators import RULES
from rota.engine.native.program import Code, Place, Unsupported, Writer
from rota.engine.native.structures import LAYER_BACKWARD, PARAMS, PRODUCT


def translate(graph: fx.Graph, inputs: list[Place], writer: Writer) -> Code:
    """The instructions of a step that works in place (trace.fuse), whose inputs lie there."""
    held: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        try:
            held[node] = _translated(node, held, given, writer)
        except Unsupported:
            raise
        except Exception as error:  # a form of the operator that its rule does not know
            raise Unsupported(f"{node.target}: {error}") from error
    _join_updates(writer)
    return writer.finish()


def _translated(node: fx.Node, held: dict[fx.Node, Any], given: Any, writer: Writer) -> Any:
    """The place or places of a node's result."""
    if node.op == "placeholder":
        return next(given)
    if node.op == "get_attr":
        return writer.constant(getattr(node.graph.owning_module, str(node.target)))
    if node.op != "call_function":
        return None
    args: Any = fx.node.map_arg(node.args, held.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, held.__getitem__)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target not in RULES:
        raise Unsupported(str(node.target))
    return RULES[node.target](writer, node.target, *args, **kwargs)


def _join_updates(w: Writer) -> None:
    """Join the two uses of a layer's weights W in the backward pass: dy W, and W -= dy^T x.

    Then W is read from memory once. The update moves forward to the product for this; it may do so
    if nothing in between reads W or writes x.
    """
    for later in reversed(range(len(w.code))):
        update, places = w.code[later]
        if update.code != PRODUCT or places[0] is None or places[0].space != PARAMS:
            continue
        changed, dy_turned, x, _ = places
        users = (i for i in reversed(range(later)) if _uses(w.code[i][1], changed))
        earlier = next(users, None)
        if earlier is None or w.code[earlier][0].code != PRODUCT:
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
