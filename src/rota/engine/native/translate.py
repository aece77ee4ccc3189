"""A traced step as instructions for rota.c: every operator one instruction or a few, by the rules in operators.py and layers.py.

What has no rule raises `Unsupported`, and the step then runs as torch operators.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from rota.engine.native import layers  # noqa: F401  its rules
from rota.engine.native.operators import RULES
from rota.engine.native.program import (
    LAYER_BACKWARD,
    PARAMS,
    PRODUCT,
    Place,
    Program,
    Unsupported,
    Writer,
)


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
        earlier = next(
            (
                i
                for i in reversed(range(later))
                if any(p is not None and _same(p, changed) for p in w.code[i][1])
            ),
            None,
        )
        if earlier is None or w.code[earlier][0].code != PRODUCT:
            continue
        back, (dx, dy, read, space) = w.code[earlier][0], w.code[earlier][1]
        of_back, of_update = (
            list(back.extra),
            list(update.extra),
        )  # m n k, strides of a, b and c, keep, sign
        turned = [of_back[2], of_back[0], of_back[4], of_back[3]] == [
            of_update[0],
            of_update[2],
            of_update[3],
            of_update[4],
        ]
        in_rows = of_back[5:7] == of_update[7:9] and of_back[6] == of_back[8] == of_update[6] == 1
        if (
            _same(read, changed)
            and _same(dy, dy_turned)
            and turned
            and in_rows
            and of_back[9:11] == [0, 1]
            and of_update[9:11] == [1, -1]
        ):
            back.code, back.extra[9] = LAYER_BACKWARD, of_update[5]
            w.code[earlier] = (back, [dx, dy, read, x, space])
            del w.code[later]


def _same(one: Place | None, other: Place | None) -> bool:
    """Whether two tensors begin at the same place."""
    return (
        one is not None
        and other is not None
        and (one.space, one.start, one.block) == (other.space, other.start, other.block)
    )
