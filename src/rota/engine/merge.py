"""A traced step for a GPU: operators that belong together become one kernel each.

`merge` rewrites one client's step before it is stacked. Forward, it merges convolution, ReLU and
pooling; linear layer and ReLU; dropout; and the loss with its gradient. Backward, it merges the
gradients of a layer with the mask of the ReLU before it. `in_place` then lets these kernels update
the weights themselves. Operators that match no pattern stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from rota.engine import kernels, rules

Node = Any  # fx.Node, whose arguments may be anything
aten = torch.ops.aten
rota = torch.ops.rota
LINEAR, LINEAR_BACKWARD = rota.linear_rows.default, rota.linear_rows_backward.default
CONVOLUTION, CONVOLUTION_BACKWARD = (
    rota.convolution_rows.default,
    rota.convolution_rows_backward.default,
)
NORM, NORM_BACKWARD = rota.batch_norm_rows.default, rota.batch_norm_rows_backward.default
UNPOOL, DROP, LOSS = (
    rota.unpool_rows.default,
    rota.drop_rows.default,
    rota.cross_entropy_rows.default,
)
RECURRENT, RECURRENT_BACKWARD = rota.recurrent_rows.default, rota.recurrent_rows_backward.default
CASTS = {aten._to_copy.default}
VIEWS = {aten.view.default, aten._unsafe_view.default}
TURNS = {aten.t.default, aten.detach.default}
ALIASES = (
    VIEWS
    | TURNS
    | {
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
        aten.unfold.default,
    }
)


def gate(g: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    """g * scale where x > 0, else 0: the gradient of a ReLU (and dropout) with output x."""
    masked: torch.Tensor = aten.threshold_backward(g, x, 0)
    return masked if scale == 1 else masked * scale


for op in (
    gate,
    LINEAR,
    LINEAR_BACKWARD,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    NORM,
    NORM_BACKWARD,
    RECURRENT,
    RECURRENT_BACKWARD,
    UNPOOL,
    DROP,
    LOSS,
):
    rules.RULES[op] = op  # all take stacked tensors as they are


def merge(graph: fx.Graph) -> None:
    """Rewrite one client's step (as `trace` made it), in place."""
    _simplify(graph)
    for change in (
        _losses,
        _gates,
        _dropouts,
        _layers,
        _pools,
        _linear_gradients,
        _convolution_gradients,
        _layouts,
    ):
        change(graph)
        graph.eliminate_dead_code()
    graph.lint()


def _calls(graph: fx.Graph, *targets: Any) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["tensor_meta"].shape)


def _only(node: Node, user: Node) -> bool:
    return list(node.users) == [user]


def _insert(
    graph: fx.Graph,
    before: Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    like: Node | None = None,
) -> Node:
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    if like is not None:
        node.meta = dict(like.meta)
    return node


def _through(node: Any, targets: set[Any]) -> Any:
    """The node behind casts or transposes."""
    while _is(node, *targets):
        node = node.args[0]
    return node


def _simplify(graph: fx.Graph) -> None:
    """Remove double transposes, and the gradient of one that the backward pass begins with."""
    for node in _calls(graph, aten.t.default):
        inner = node.args[0]
        if _is(inner, aten.t.default):
            node.replace_all_uses_with(inner.args[0])
    for node in _calls(graph, aten.mul.Tensor):
        one = _through(
            node.args[0], {aten.expand.default, aten.view.default, aten.unsqueeze.default}
        )
        if (
            _is(one, aten.ones_like.default)
            and _is_node(node.args[1])
            and _shape(node.args[1]) == _shape(node)
        ):
            node.replace_all_uses_with(node.args[1])


def _losses(graph: fx.Graph) -> None:
    """Softmax, cross-entropy, their weighted sum and its gradient."""
    for back in _calls(graph, aten._log_softmax_backward_data.default):
        inner, soft = back.args[0], back.args[1]
        if not (
            _is(inner, aten.nll_loss_backward.default)
            and _is(soft, aten._log_softmax.default)
            and inner.args[1] is soft
        ):
            continue
        weight, _, target = inner.args[:3]
        logits = soft.args[0]
        if (
            len(_shape(soft)) != 2
            or inner.args[3:6] != (None, 0, -100)
            or _shape(soft)[1] > kernels.CLASSES
        ):
            continue
        for losses in [
            node
            for node in soft.users
            if _is(node, aten.nll_loss_forward.default) and node.args[1] is target
        ]:
            for each in _items(losses, 0):
                total = [
                    whole
                    for product in each.users
                    if _is(product, aten.mul.Tensor) and product.args == (each, weight)
                    for whole in product.users
                    if _is(whole, aten.sum.default)
                ]
                if len(total) == 1 and len(each.users) == 1:
                    both = _insert(graph, losses, LOSS, (logits, target, weight))
                    loss, gradient = (
                        _insert(graph, losses, operator.getitem, (both, i)) for i in range(2)
                    )
                    gradient.meta = dict(back.meta)
                    total[0].replace_all_uses_with(loss)
                    back.replace_all_uses_with(gradient)


def _items(node: Node, place: int) -> list[Node]:
    return [user for user in node.users if _is(user, operator.getitem) and user.args[1] == place]


def _gates(graph: fx.Graph) -> None:
    """Move the masks of ReLUs as early as possible in the backward pass.

    That is right after the product or convolution that made the gradient.
    """
    for node in _calls(graph, aten.threshold_backward.default):
        if node.args[2] == 0:
            node.target, node.args = gate, (*node.args[:2], 1.0)
    moved = True
    while moved:
        moved = any(_move(graph, node) for node in _calls(graph, gate))


def _move(graph: fx.Graph, node: Node) -> bool:
    """Move a mask one step towards the origin of its gradient."""
    g, x, scale = node.args
    if not (_is_node(g) and _is_node(x) and _only(g, node)):
        return False
    if _is(g, aten.max_pool2d_with_indices_backward.default) and g.args[1] is x:
        pooled = [
            item
            for pool in x.users
            if _is(pool, aten.max_pool2d_with_indices.default)
            for item in _items(pool, 0)
        ]
        if len(pooled) == 1:
            earlier = _insert(graph, g, gate, (g.args[0], pooled[0], scale), g.args[0])
            g.args = (earlier, *g.args[1:])
            node.replace_all_uses_with(g)
            graph.erase_node(node)
            return True
    if _is(g, aten.mul.Tensor) and _is(
        g.args[0], aten.div.Tensor
    ):  # dropout: x * mask / kept forward, g / kept * mask backward
        inner, mask = g.args
        for product in x.users:
            if _is(product, aten.mul.Tensor) and product.args == (x, mask):
                for dropped in product.users:
                    if (
                        _is(dropped, aten.div.Tensor)
                        and dropped.args[1] == inner.args[1]
                        and isinstance(dropped.args[1], float)
                    ):
                        node.args = (inner.args[0], dropped, scale / inner.args[1])
                        for old in (g, inner):
                            if not old.users:
                                graph.erase_node(old)
                        return True
    if _is(g, *VIEWS):
        for other in x.users:
            if _is(other, *VIEWS) and _shape(other) == _shape(g.args[0]) and other < node:
                earlier = _insert(graph, g, gate, (g.args[0], other, scale), g.args[0])
                g.args = (earlier, *g.args[1:])
                node.replace_all_uses_with(g)
                graph.erase_node(node)
                return True
    return False


def _dropouts(graph: fx.Graph) -> None:
    """x * mask / (1 - p), with its mask."""
    for node in _calls(graph, aten.div.Tensor):
        product = node.args[0]
        if not (_is(product, aten.mul.Tensor) and isinstance(node.args[1], float)):
            continue
        mask = _through(product.args[1], CASTS | VIEWS)
        if not _is(mask, aten.ge.Scalar) or not _is(mask.args[0], rota.uniform_at.default):
            continue
        key, number, call, n = mask.args[0].args
        if n == torch.Size(_shape(node)).numel() and abs(1 - mask.args[1] - node.args[1]) < 1e-12:
            dropped = _insert(
                graph, node, DROP, (product.args[0], key, number, call, mask.args[1]), node
            )
            node.replace_all_uses_with(dropped)


def _relu(node: Node) -> Node | None:
    """The ReLU of a result, if nothing else uses the result."""
    users = list(node.users)
    return users[0] if len(users) == 1 and _is(users[0], aten.relu.default) else None


def _layers(graph: fx.Graph) -> None:
    """Linear layers, convolutions and BatchNorm, with their ReLU."""
    for node in _calls(graph, aten.addmm.default, aten.mm.default):
        bias, x, turned = node.args if node.target is aten.addmm.default else (None, *node.args)
        behind = _through(turned, CASTS)
        weight = _through(behind.args[0], CASTS) if _is(behind, aten.t.default) else None
        if weight is None or weight.op != "placeholder" or node.kwargs:
            continue
        bias = _through(bias, CASTS)
        if bias is None or len(_shape(bias)) == 1:
            _replace(graph, node, LINEAR, (x, weight, bias))
    for node in _calls(graph, aten.convolution.default):
        x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
        if len(_shape(node)) == 4 and groups == 1 and not transposed and set(dilation) == {1}:
            whole = (_through(weight, CASTS), _through(bias, CASTS), stride, padding)
            _replace(graph, node, CONVOLUTION, (x, *whole), (False, False), item=0)
    for node in _calls(graph, NORM):
        outs = _items(node, 0)
        relu = _relu(outs[0]) if len(outs) == 1 else None
        if relu is not None:
            node.args = (*node.args[:-1], True)
            relu.replace_all_uses_with(outs[0])


def _replace(
    graph: fx.Graph,
    node: Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    more: tuple[Any, ...] = (),
    item: int | None = None,
) -> None:
    relu = _relu(node)
    last = relu or node
    made = _insert(graph, last, target, (*args, relu is not None, *more), last)
    out = made if item is None else _insert(graph, last, operator.getitem, (made, item), last)
    last.replace_all_uses_with(out)


def _pools(graph: fx.Graph) -> None:
    """2x2 pooling after a convolution."""
    for node in _calls(graph, aten.max_pool2d_with_indices.default):
        image = node.args[0]
        usual: tuple[Any, ...] = ([2, 2], [2, 2], [0, 0], [1, 1], False)
        kernel, stride, padding, dilation, whole = node.args[1:] + usual[len(node.args) - 1 :]
        if not (_is(image, operator.getitem) and _is(image.args[0], CONVOLUTION)):
            continue
        backs = [
            user for user in image.users if _is(user, aten.max_pool2d_with_indices_backward.default)
        ]
        if (kernel, stride or kernel, padding, dilation, whole) != usual:
            continue
        if set(image.users) != {node, *backs} or any(
            back.args[0] is image or back.args[7] not in _items(node, 1) for back in backs
        ):
            continue
        made = image.args[0]
        pooled = _insert(graph, made, CONVOLUTION, (*made.args[:-2], True, False))
        items = [_insert(graph, made, operator.getitem, (pooled, i)) for i in range(2)]
        items[0].meta = dict(_items(node, 0)[0].meta)
        for back in backs:
            back.replace_all_uses_with(
                _insert(graph, back, UNPOOL, (back.args[0], items[1], *_shape(image)[2:]), back)
            )
        for item in _items(node, 0):
            item.replace_all_uses_with(items[0])


def _results(graph: fx.Graph) -> Iterator[tuple[int, Node]]:
    """The results of the step."""
    output = next(node for node in graph.nodes if node.op == "output")
    yield from enumerate(output.args[0])


def _linear_gradients(graph: fx.Graph) -> None:
    """The gradients of a linear layer for its input, its weights and its bias."""
    params = [node for node in graph.nodes if node.op == "placeholder"]
    results = dict(_results(graph))
    sums = {at: _summed(result) for at, result in results.items()}
    for at, result in results.items():
        product = _through(result, CASTS | TURNS)
        turns = sum(_is(step, aten.t.default) for step in _way(result, product))
        if (
            not _is(product, aten.mm.default)
            or turns % 2
            or len(product.users) != 1
            or not _is(product.args[0], aten.t.default)
        ):
            continue
        weight, dy, x = params[at], product.args[0].args[0], product.args[1]
        if _shape(weight) != _shape(product) or any(
            len(step.users) != 1 for step in _way(result, product)
        ):
            continue
        backs = [
            user
            for user in dy.users
            if _is(user, aten.mm.default)
            and user.args[0] is dy
            and _same(user.args[1], weight)
            and user is not product
        ]
        bias = [b for b, summed in sums.items() if summed is dy]
        if (
            len(backs) > 1
            or len(bias) > 1
            or any(len(step.users) != 1 for b in bias for step in _way(results[b], dy))
        ):
            continue
        first = min([product, *backs])
        masked = (
            [
                user
                for user in backs[0].users
                if _is(user, gate) and user.args[1] is x and _only(backs[0], user)
            ]
            if backs
            else []
        )
        scale = masked[0].args[2] if masked else 0.0
        made = _insert(
            graph, first, LINEAR_BACKWARD, (dy, x, weight, scale, bool(backs), bool(bias))
        )
        for place, old in (
            (0, (masked or backs or [None])[0]),
            (1, result),
            (2, results[bias[0]] if bias else None),
        ):
            if old is not None:
                old.replace_all_uses_with(
                    _insert(graph, first, operator.getitem, (made, place), old)
                )


def _way(node: Any, end: Any) -> list[Node]:
    """The nodes from the first back to the last, without the last."""
    out = []
    while isinstance(node, fx.Node) and node is not end and node.args:
        out.append(node)
        node = node.args[0]
    return out


def _same(node: Any, weight: Node) -> bool:
    """Whether a node is the weights, perhaps cast and transposed twice."""
    turns = 0
    while _is(node, *CASTS, aten.t.default):
        turns += node.target is aten.t.default
        node = node.args[0]
    return node is weight and turns % 2 == 0


def _summed(node: Any) -> Any:
    """The value of which a result is the sum over the examples."""
    node = _through(node, CASTS | VIEWS)
    if (
        _is(node, aten.sum.dim_IntList)
        and list(node.args[1]) == [0]
        and len(_shape(node.args[0])) == 2
    ):
        return node.args[0]
    return None


def _convolution_gradients(graph: fx.Graph) -> None:
    """The gradients of a convolution for its input, its weights and its bias."""
    for node in _calls(graph, aten.convolution_backward.default):
        dy, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        if (
            len(_shape(dy)) != 4
            or groups != 1
            or transposed
            or set(dilation) != {1}
            or not wanted[1]
        ):
            continue
        inputs, weights, biases = (_items(node, place) for place in range(3))
        if wanted[0] and len(inputs) != 1:
            continue
        masked = (
            [
                user
                for user in inputs[0].users
                if _is(user, gate) and user.args[1] is x and _only(inputs[0], user)
            ]
            if wanted[0]
            else []
        )
        scale = masked[0].args[2] if masked else 0.0
        g, which = dy.args[:2] if _is(dy, UNPOOL) else (dy, None)
        args = (g, x, _through(weight, CASTS), which, stride, padding, scale, wanted[0], wanted[2])
        made = _insert(graph, node, CONVOLUTION_BACKWARD, args)
        for place, olds in enumerate((masked or (inputs if wanted[0] else []), weights, biases)):
            for old in olds:
                new = _insert(graph, node, operator.getitem, (made, place), old)
                for user in list(old.users):  # the gradients have the parameters' type already
                    if place and _is(user, *CASTS):
                        user.replace_all_uses_with(new)
                old.replace_all_uses_with(new)


def _layouts(graph: fx.Graph) -> None:
    """Let an image that is flattened next have its channels first, so that nothing is copied."""
    for node in _calls(graph, CONVOLUTION):
        users = [user for item in _items(node, 0) for user in item.users]
        users += [user for drop in users if _is(drop, DROP) for user in drop.users]
        if any(_is(user, *VIEWS) for user in users):
            node.args = (*node.args[:-1], True)


IN_PLACE: dict[Any, tuple[Callable[..., Any], int]] = {
    LINEAR_BACKWARD: (kernels.linear_backward_, 5),
    CONVOLUTION_BACKWARD: (kernels.convolution_backward_, 8),
}
ENDS: dict[Any, bool] = {torch.Tensor.sub_: True, torch.Tensor.copy_: False}


def in_place(graph: fx.Graph) -> None:
    """Let the kernels of layers write their gradients where a stacked step wants them.

    The step, as `fuse` made it, subtracts them from the weights, or has a place for them.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in _calls(graph, *IN_PLACE):
        ends = {
            place: [end for item in _items(node, place) for end in item.users] for place in (1, 2)
        }
        if any(
            len(users) > 1
            or not all(_is(end, *ENDS) and end.args[1].args[0] is node for end in users)
            for users in ends.values()
        ):
            continue
        if not ends[1]:
            continue
        subtract = ENDS[ends[1][0].target]
        places = [users[0].args[0] if users else None for users in ends.values()]
        if subtract and any(
            _read_after(place, order, order[node], node, ends)
            for place in places
            if place is not None
        ):
            continue
        made, kept = IN_PLACE[node.target]
        new = _insert(graph, node, made, (*node.args[:kept], *places, subtract))
        for item in _items(node, 0):
            item.replace_all_uses_with(new)
        for end in [*ends[1], *ends[2]]:
            graph.erase_node(end)
    for node in reversed(list(graph.nodes)):
        if not node.users and _is(node, operator.getitem, *IN_PLACE):
            graph.erase_node(node)


def _read_after(
    value: Node, order: dict[Node, int], when: int, node: Node, ends: dict[int, list[Node]]
) -> bool:
    """Whether something uses a parameter, or a view of it, after its gradient is known.

    The step itself does not count.
    """
    for user in value.users:
        if user is node or any(user in users for users in ends.values()):
            continue
        if order.get(user, when) > when or (
            user.target in ALIASES and _read_after(user, order, when, node, ends)
        ):
            return True
    return False
