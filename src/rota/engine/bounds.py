"""Whether the data stay inside the tables that a model looks them up in.

A token beyond the embedding or a label beyond the classes may fail its own client's row, but must
not harm any other row. In a stack the tables of all rows lie side by side, so such an index would
read the next row's table; on a GPU it would end all work on the device. `strays` finds the clients
that hold one before anything is trained. `Guarded` raises an error where the device itself would
not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

from rota.arrays import Array
from rota.engine.rules import Rows, Unbatchable

aten = torch.ops.aten
NUMBERS = 1 << 24
"""The most numbers of the data that are checked at once."""
DIMENSION_GIVEN = {
    aten.index_select.default,
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
}
LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


class Lookup(NamedTuple):
    """Indices into a table, the least and largest inside it, and one that is ignored."""

    index: Any
    low: int
    high: int
    ignored: int

    def outside(self, index: Tensor) -> Tensor:
        """Which indices are outside of the table."""
        return ((index < self.low) | (index > self.high)) & (index != self.ignored)


def lookups(operator: Any, args: tuple[Any, ...]) -> Iterator[Lookup]:
    """What an operator looks up; `args` are tensors, or nodes of a traced graph."""
    if operator is aten.embedding.default:
        yield Lookup(args[1], 0, _meta(args[0]).shape[0] - 1, 0)
    elif operator in DIMENSION_GIVEN:
        yield Lookup(args[2], 0, _meta(args[0]).shape[args[1]] - 1, 0)
    elif operator in LOSSES:
        shape = _meta(args[0]).shape
        yield Lookup(args[1], 0, shape[1 if len(shape) > 1 else 0] - 1, args[4])
    elif operator is aten.index.Tensor:
        for size, index in zip(_meta(args[0]).shape, args[1], strict=False):
            if index is not None and _meta(index).dtype in (torch.int64, torch.int32):
                yield Lookup(index, -size, size - 1, 0)


def _meta(value: Any) -> Any:
    """What knows a value's shape and type: the tensor itself, or what the tracer noted of it."""
    return value.meta["tensor_meta"] if isinstance(value, fx.Node) else value


def guarded(device: torch.device) -> AbstractContextManager[Any]:
    """Raise IndexError for an index outside of a table; a GPU would stop for good."""
    if device.type != "cuda":
        return nullcontext()  # torch raises it
    return Guarded()  # type: ignore[no-untyped-call]


class Guarded(TorchDispatchMode):
    """Raise IndexError before an operator looks up anything outside of a table.

    Every lookup then waits for the device.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for lookup in lookups(func, args):
            with disable_proxy_modes_tracing():  # a tracer must not see the check
                wrong = lookup.index[lookup.outside(lookup.index)].tolist()
            if wrong:
                raise IndexError(f"index {wrong[0]} is outside of {lookup.low} to {lookup.high}")
        return func(*args, **(kwargs or {}))


def strays(one: fx.GraphModule, x: Tensor, y: Tensor, offsets: Array, width: int) -> Array:
    """Which owners hold an index outside of a table; owner i has examples offsets[i]:offsets[i+1].

    `one` is a client's step on mini-batches of `width`, as `trace` makes it. Only the part of it
    that leads from the data to the indices is computed. Mostly that is nothing: the data are the
    indices.
    """
    part, found = _indices(one)
    sizes = np.diff(offsets)
    wrong = np.zeros(len(sizes), bool)
    if not found:
        return wrong
    pieces = -(-sizes // width)  # each has `width` examples of one owner, the last one repeated
    owner = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first, last = offsets[owner] + width * number, offsets[owner + 1] - 1
    inputs: list[Tensor | None] = [None] * len(part.graph.find_nodes(op="placeholder"))
    used = [bool(node.users) for node in part.graph.find_nodes(op="placeholder")]
    at_once = max(1, NUMBERS // (width * max(1, x[:1].numel())))
    for start in range(0, len(owner), at_once):
        some = slice(start, start + at_once)
        places = np.minimum(first[some, None] + np.arange(width), last[some, None])
        index = torch.from_numpy(places).to(x.device)
        for at, values in ((-5, x), (-4, y)):
            inputs[at] = values[index] if used[at] else None
        for lookup, indices in zip(found, Rows(part).run_rows(len(places), *inputs), strict=True):
            outside = lookup.outside(indices).flatten(1).any(1).cpu().numpy()
            wrong[owner[some][outside]] = True
    return wrong


def _indices(one: fx.GraphModule) -> tuple[fx.GraphModule, list[Lookup]]:
    """The part of a step that computes indices from the data alone, and the lookups of these."""
    part = copy.deepcopy(one)
    *_, x, y, _, _, _ = part.graph.find_nodes(op="placeholder")
    made_of: dict[fx.Node, set[fx.Node]] = {}
    found = []
    for node in part.graph.nodes:
        inputs = [made_of[each] for each in node.all_input_nodes]
        made_of[node] = {node} if node.op == "placeholder" else set().union(*inputs)
        for lookup in lookups(node.target, node.args):
            sources = made_of[lookup.index] if isinstance(lookup.index, fx.Node) else set()
            if node.target is aten.embedding.default and not sources <= {x, y}:
                raise Unbatchable("computes which rows of a table it looks up from its parameters")
            if sources and sources <= {x, y}:
                plain = node.target is aten.nll_loss_forward.default  # whose rule ignores nothing
                found.append(lookup._replace(ignored=0) if plain else lookup)
    part.graph.output_node().args = (tuple(lookup.index for lookup in found),)
    part.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return part, found
