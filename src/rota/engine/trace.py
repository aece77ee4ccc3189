"""One local step as a flat list of operators, traced from the user's module.

`trace` records the operators of a step (forward, loss, backward) of one client with torch's tracer.
`stack` turns that into the same step for many rows. `fuse` lets the step update its parameters in
place: where a gradient is a matrix product a @ b, the product is added straight into the weights
(addmm_), and no gradient is ever written or read. The learning rate is a part of the examples'
weights, so it can differ between rows.
"""

from __future__ import annotations

import copy
import importlib.util
import operator
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, grad
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from rota.engine.bounds import guarded
from rota.engine.functional import Functional
from rota.engine.rules import Rows, Unbatchable, on_gpu
from rota.plan import Task

aten = torch.ops.aten


@dataclass(frozen=True)
class Layout:
    """How a module's tensors lie in the flat vectors of `Weights`."""

    names: list[list[str]]
    """Every place that a tensor has in the module: tied weights have several."""
    shapes: list[torch.Size]

    @classmethod
    def params(cls, module: nn.Module) -> Layout:
        return cls._of(module, "_parameters", module.parameters())

    @classmethod
    def buffers(cls, module: nn.Module) -> Layout:
        return cls._of(module, "_buffers", (b for b in module.buffers() if b.is_floating_point()))

    @classmethod
    def _of(cls, module: nn.Module, kind: str, tensors: Iterable[Tensor]) -> Layout:
        places: dict[Tensor, list[str]] = {tensor: [] for tensor in tensors}
        for part_name, part in module.named_modules():  # a part with two names comes up once
            for name, tensor in getattr(part, kind).items():
                if tensor in places:
                    places[tensor].append(f"{part_name}.{name}".lstrip("."))
        return cls([*places.values()], [tensor.shape for tensor in places])

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of a flat vector, or of a matrix with one such vector a row."""
        pieces = flat.split([shape.numel() for shape in self.shapes], dim=-1)
        return [
            piece.view((*flat.shape[:-1], *shape))
            for piece, shape in zip(pieces, self.shapes, strict=True)
        ]


@contextmanager
def _naming_the_part(module: nn.Module) -> Iterator[None]:
    """Turn any error into an Unbatchable that names the part of the module that was running."""
    running: list[str] = []
    names = {part: name for name, part in module.named_modules()}

    def leave(*_: object) -> None:
        running.pop()

    begin = nn.modules.module.register_module_forward_pre_hook(
        lambda part, _: running.append(names.get(part, ""))
    )
    end = nn.modules.module.register_module_forward_hook(leave)
    try:
        yield
    except Exception as error:
        inner = running[-1] if running else ""
        if not inner:
            raise Unbatchable(_why(error)) from error
        part = f"'{inner}' ({type(module.get_submodule(inner)).__name__})"
        raise Unbatchable(f"has a part, {part}, that {_why(error)}") from error
    finally:
        begin.remove()
        end.remove()


REASONS = {
    "_local_scalar_dense": "decides by its values what to compute",
    "dynamic shape": "decides by its values how much to compute",
    "index out of range": "is asked for entries that its table does not have",
    "is outside of": "is asked for entries that its table does not have",
    "random": "draws random numbers in other ways than dropout",
}


def _why(error: Exception) -> str:
    """What kept a module from being traced or stacked, in plain words."""
    text = str(error)
    return next((why for sign, why in REASONS.items() if sign in text), UNKNOWN)


UNKNOWN = "has an operation that is only known for one client at a time"


def trace(
    task: Task, module: nn.Module, x: Tensor, y: Tensor, autocast: torch.dtype | None = None
) -> fx.GraphModule:
    """One client's step on a mini-batch like x, y.

    It maps (*params, *buffers, x, y, weight, key, step) to (*gradients, *new buffers, loss).
    `weight` [batch] is learning rate / batch size for an example, and 0 for padding. The gradients
    are those of the weighted sum of the losses. `key` addresses the row's dropout masks.
    """
    params, buffers = Layout.params(module), Layout.buffers(module)
    others = {n: b for n, b in module.named_buffers() if not b.is_floating_point()}
    module.train()

    def loss(
        values: list[Tensor],
        held: list[Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        key: Tensor,
        step: Tensor,
    ) -> Any:
        given = {name: value.clone() for name, value in others.items()}
        for names, value in zip([*params.names, *buffers.names], [*values, *held], strict=True):
            given |= dict.fromkeys(names, value)
        mode = Functional(key, step, weight != 0)
        with mode, torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            outputs = functional_call(module, given, (x,), tie_weights=False)
        losses = task.loss(outputs.float() if autocast else outputs, y)
        total = (losses * weight).sum()
        return total, ([mode.changed.get(old, old) for old in held], total.detach())

    def step(*flat: Tensor) -> list[Tensor]:
        n, m = len(params.names), len(params.names) + len(buffers.names)
        gradients, (new, total) = grad(loss, has_aux=True)([*flat[:n]], [*flat[n:m]], *flat[m:])
        return [*gradients, *new, total]

    weight = torch.ones(len(y), device=x.device, dtype=next(module.parameters()).dtype)
    # two tensors, because the tracer tells inputs apart by identity
    key, number = torch.zeros(2, dtype=torch.int64, device=x.device)
    values = [p.detach() for p in module.parameters()]
    held = [b.detach() for b in module.buffers() if b.is_floating_point()]
    with (
        _naming_the_part(module),
        _without_onednn(),
        _shapes_alone(),
        sdpa_kernel(SDPBackend.MATH),  # attention in operators that stacks know
        guarded(x.device),
    ):
        traced = make_fx(step)(*values, *held, x, y, weight, key, number)
    for node in traced.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Unbatchable(REASONS["random"])
    return traced


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Switch oneDNN off: with it nn.LSTM and nn.GRU hide their products.

    The switch warns about an unrelated setting.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextmanager
def _shapes_alone() -> Iterator[None]:
    """Let the tracer note shapes, but no fake copies of values: nobody reads them here.

    Copies double the time.
    """
    copies = getattr(proxy_tensor, "extract_val", None)
    if copies is None:  # another version of torch: slower, and just as right
        yield
        return
    proxy_tensor.extract_val = lambda *_, **__: None
    try:
        yield
    finally:
        proxy_tensor.extract_val = copies


def stack(one: fx.GraphModule, rows: int, inputs: list[Tensor]) -> fx.GraphModule:
    """The same step for many rows. Every input has an axis of rows in front, as `inputs` do."""
    try:
        if on_gpu(inputs[0]):
            from rota.engine.merge import merge

            one = copy.deepcopy(one)
            merge(one.graph)
        with _shapes_alone():
            return make_fx(lambda *flat: Rows(one).run_rows(rows, *flat))(*inputs)
    except Exception as error:
        raise Unbatchable(_why(error)) from error


SAME_PLACE = {aten.t.default, aten.transpose.int, aten.view.default, aten._unsafe_view.default}


def fuse(
    graph_module: fx.GraphModule, params: list[Tensor], buffers: int, fused: bool
) -> fx.GraphModule:
    """The step as a graph that works in place.

    It takes (*params, *buffers, x, y, weight, key, step, loss, *gradients) and returns nothing. It
    adds the loss to `loss` and replaces the buffers. With `fused` it subtracts the gradients from
    the parameters, and takes no `gradients`. Otherwise it writes the gradients there.
    """
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    count = len(params)
    with graph.inserting_after(nodes[-1]):
        total = graph.placeholder("loss_sum")
    changing = nodes[: count + buffers]
    places = nodes[:count]
    if not fused:
        with graph.inserting_after(total):
            places = [graph.placeholder(f"gradient_{i}") for i in reversed(range(count))][::-1]
    with graph.inserting_before(output):
        graph.call_function(torch.Tensor.add_, (total, results[-1]))
        for place, result in zip(
            nodes[count : count + buffers], results[count : count + buffers], strict=True
        ):
            if result is not place:
                graph.call_function(torch.Tensor.copy_, (place, result))
        for at, result in enumerate(results[:count]):
            if fused and _shares_memory(result, changing):
                results[at] = graph.call_function(aten.clone.default, (result,))
        for place, like, result in zip(places, params, results[:count], strict=True):
            if not fused:
                graph.call_function(torch.Tensor.copy_, (place, result))
                continue
            product, target = _as_product(graph, result, place, like)
            if product is not None and any(_shares_memory(each, changing) for each in product.args):
                product = None  # a factor may have changed by the time it would be read
            if product is None:
                graph.call_function(torch.Tensor.sub_, (place, result))
            else:
                add = (
                    torch.Tensor.baddbmm_
                    if product.target is aten.bmm.default
                    else torch.Tensor.addmm_
                )
                graph.call_function(add, (target, *product.args), {"alpha": -1})
    output.args = ((),)
    _tidy(graph)
    return graph_module


def directly(graph_module: fx.GraphModule, cuda: bool) -> fx.GraphModule:
    """The same step with faster calls: torch's direct bindings, and on a GPU rota's own kernels."""
    direct = {**DIRECT, **_gpu_products(graph_module.graph)} if cuda else DIRECT
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.target = direct.get(node.target, node.target)
    graph_module.graph.set_codegen(fx.graph.CodeGen())
    graph_module.recompile()
    return graph_module


def resize(one: fx.GraphModule, other: fx.GraphModule, far: Fraction) -> fx.GraphModule:
    """The step for another number of rows or another width, made from the steps for two of them.

    `far` 0 gives the first step, 1 the other one, and 2 the one as far again. Every size in a step
    is a + b * rows, or a + b * width, and two steps give a and b. That takes milliseconds, where
    tracing takes seconds for a large network. Raises Unbatchable if the two do not lie on such a
    line.
    """

    def between(p: Any, q: Any, own: Any) -> Any:
        if isinstance(own, fx.Node):
            return own
        if isinstance(own, list | tuple):
            return type(own)(between(*each) for each in zip(p, q, own, strict=True))
        if type(own) is int:
            at = p + (q - p) * far
            if at.denominator != 1:
                raise Unbatchable(f"has sizes, {p} and {q}, with nothing at {far}")
            return int(at)
        if repr(p) != repr(q):  # as text, because a NaN does not equal itself
            raise Unbatchable(f"computes with {p} at one size and with {q} at another")
        return own

    if len(one.graph.nodes) != len(other.graph.nodes):
        raise Unbatchable("computes differently at different sizes")
    sized = copy.deepcopy(other)
    for p, q, own in zip(one.graph.nodes, other.graph.nodes, sized.graph.nodes, strict=True):
        if p.target != q.target:
            raise Unbatchable(f"computes {p.target} at one size and {q.target} at another")
        if p.op == "get_attr" and not torch.equal(getattr(one, p.target), getattr(other, q.target)):
            raise Unbatchable(f"has a constant, {p.target}, that depends on the size")
        own.args = between(p.args, q.args, own.args)
        own.kwargs = {
            name: between(p.kwargs[name], q.kwargs[name], value)
            for name, value in own.kwargs.items()
        }
    sized.recompile()
    return sized


def _as_product(
    graph: fx.Graph, result: fx.Node, place: fx.Node, like: Tensor
) -> tuple[fx.Node | None, Any]:
    """The matrix product that a gradient is, and the parameter in the product's shape.

    The product may be behind transposes and views; (None, None) if there is none.
    """
    way, node = [], result
    while node.op == "call_function" and node.target in SAME_PLACE:
        way.append(node)
        node = node.args[0]  # type: ignore[assignment]
    product = node.op == "call_function" and node.target in (aten.mm.default, aten.bmm.default)
    if not product or len(node.users) > 1:
        return None, None
    seen, target = like, place
    for step in way:  # undo each view on the parameter's side; that must not need a copy
        shape = step.args[0].meta["tensor_meta"].shape  # type: ignore[union-attr]
        if step.target is aten.t.default:
            seen, target = seen.t(), graph.call_function(aten.t.default, (target,))
        elif step.target is aten.transpose.int:
            seen = seen.transpose(*step.args[1:])  # type: ignore[arg-type]
            target = graph.call_function(aten.transpose.int, (target, *step.args[1:]))
        else:
            try:
                seen = seen.view(shape)
            except RuntimeError:
                return None, None
            target = graph.call_function(aten.view.default, (target, list(shape)))
    return node, target


def _shares_memory(node: Any, inputs: list[fx.Node]) -> bool:
    """Whether a value is one of these inputs, or a view of one."""
    while isinstance(node, fx.Node) and node not in inputs:
        schema = getattr(node.target, "_schema", None)
        views = schema is not None and any(each.alias_info for each in schema.returns)
        if not (views or node.target in SAME_PLACE or node.target is operator.getitem):
            return False
        node = node.args[0]
    return isinstance(node, fx.Node)


CHANGES = {
    torch.Tensor.add_,
    torch.Tensor.sub_,
    torch.Tensor.copy_,
    torch.Tensor.baddbmm_,
    torch.Tensor.addmm_,
}
DIRECT = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.t.default: torch.t,
    aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.relu.default: torch.relu,
    aten.transpose.int: torch.transpose,
    aten.view.default: torch.Tensor.view,
    aten.mul.Tensor: torch.mul,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten._log_softmax.default: torch._log_softmax,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
}
"""The direct bindings of some operators, which cost a third of a call through torch.ops."""


def _tidy(graph: fx.Graph) -> None:
    """Cancel double transposes and products with one, compute nothing twice, drop unused values."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (aten.t.default, aten.transpose.int):
            inner = node.args[0]
            same = inner.op == "call_function" and inner.target is node.target
            if same and inner.args[1:] == node.args[1:]:
                node.replace_all_uses_with(inner.args[0])
        elif node.target is aten.mul.Tensor:
            one, other = node.args  # the backward pass begins with a gradient of one
            if _ones(one) and _kind(other) == _kind(node):
                node.replace_all_uses_with(other)
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in CHANGES:
            twin = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if twin is not node:
                node.replace_all_uses_with(twin)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target not in CHANGES:
            graph.erase_node(node)


def _ones(node: Any) -> bool:
    """Whether a value is ones everywhere."""
    shapes = (aten.expand.default, aten.view.default, aten.unsqueeze.default)
    while isinstance(node, fx.Node) and node.target in shapes:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target is aten.ones_like.default


def _kind(node: Any) -> object:
    """A value's shape and type, if the tracer has noted them."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return None if meta is None else (meta.shape, meta.dtype)


def _gpu_products(graph: fx.Graph) -> dict[Any, Any]:
    """Products by rota's own kernels."""
    if importlib.util.find_spec("triton") is None:
        return {}
    from rota.engine import kernels, merge

    merge.in_place(graph)
    return {
        aten.bmm.default: kernels.bmm,
        aten.baddbmm.default: kernels.baddbmm,
        torch.Tensor.baddbmm_: kernels.subtract_product_,
    }
