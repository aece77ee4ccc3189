"""One pass of a network as a list of operators, with their tensors and the module that ran them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rota.errors import BadInput, first_line


@dataclass(frozen=True)
class Op:
    """One executed operator: the function, its arguments, and its tensor results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    shapes: list[tuple[int, ...]]
    """The shapes of the results when they were computed; in-place operators change them later."""
    part: str
    """The innermost module that was running, for messages."""
    whole: bool
    """Whether the module's units are never dropped."""

    @property
    def name(self) -> str:
        """The operator's name; an in-place variant has the name of the plain one."""
        return str(self.func.overloadpacket.__name__).removesuffix("_")

    @property
    def changed(self) -> list[Tensor]:
        """The results that are arguments, changed in place."""
        return self.results if self.func._schema.is_mutable else []


@dataclass(frozen=True)
class Recording:
    """The operators of a pass in their order, the network's own tensors, and its results."""

    ops: list[Op]
    tensors: dict[str, Tensor]
    outputs: list[Tensor]

    def used(self) -> list[Op]:
        """The operators that the results depend on."""
        wanted, memory, used = set[int](), set[int](), []

        def want(values: list[Tensor]) -> None:
            wanted.update(map(id, values))
            memory.update(map(storage, values))

        want(self.outputs)
        for op in reversed(self.ops):
            new, written = map(id, op.results), map(storage, op.changed)
            if not op.results or not wanted.isdisjoint(new) or not memory.isdisjoint(written):
                want(tensors((op.args, op.kwargs)))
                used.append(op)
        return used[::-1]


def storage(tensor: Tensor) -> int:
    """What a tensor and its views have in common."""
    return int(tensor.untyped_storage()._cdata)


class Stopped(BadInput):
    """A module whose forward pass raised an error, and the part of it that was running."""

    def __init__(self, part: str, error: Exception) -> None:
        super().__init__(f"{part} cannot run: {first_line(error)}")
        self.part, self.error = part, error


def record(module: nn.Module, x: Tensor, train: bool, whole: Collection[str] = ()) -> Recording:
    """Run a module and record its operators. Training may change its running statistics.

    `whole` names modules whose units are never dropped.
    """
    module.train(train)
    own = dict[str, Tensor](module.named_parameters()) | dict(module.named_buffers())
    running = _Running(module, whole)
    recorder = _Recorder(running)
    try:
        with (
            running,
            _plain_kernels(),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            recorder,
        ):
            outputs = module(x)
    except Exception as error:
        raise Stopped(running.part, error) from error
    return Recording(recorder.ops, own, tensors(outputs))


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Running:
    """Which modules of a network are running; the innermost one is the last."""

    def __init__(self, module: nn.Module, whole: Collection[str]) -> None:
        self.names = {part: name for name, part in module.named_modules()}
        self.kept = {
            part
            for part, name in self.names.items()
            if isinstance(part, nn.MultiheadAttention)  # its code fixes the size of its heads
            or any(name == each or name.startswith(f"{each}.") for each in whole)
        }
        self.stack: list[nn.Module] = [module]

    def __enter__(self) -> None:
        self.hooks = ExitStack()
        for handle in (
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave),
        ):
            self.hooks.callback(handle.remove)

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def enter(self, part: nn.Module, _: object) -> None:
        self.stack.append(part)

    def leave(self, *_: object) -> None:
        self.stack.pop()

    @property
    def part(self) -> str:
        name, kind = self.names.get(self.stack[-1], ""), type(self.stack[-1]).__name__
        return f"'{name}' ({kind})" if name else kind

    @property
    def whole(self) -> bool:
        return any(part in self.kept for part in self.stack)


class _Recorder(TorchDispatchMode):
    def __init__(self, running: _Running) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = tensors(out)
        shapes = [tuple(each.shape) for each in results]
        self.ops.append(
            Op(func, args, kwargs or {}, results, shapes, self.running.part, self.running.whole)
        )
        return out


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without fused kernels, so that nn.LSTM and nn.TransformerEncoder show their operators."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # switching oneDNN off warns about another setting
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
