"""Optimisers that do not load torch's compiler.

Those of torch load it when they are made and at each step, to say that neither is to be compiled.
That takes a second and a lot of memory, in a process that compiles nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def optimisers() -> None:
    """Free torch's optimisers from its compiler, in a process that has not loaded it."""
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        inner = getattr(method, "__wrapped__", None)
        if inner is not None:  # where torch looks for the method that is not to be compiled
            setattr(inner, "__dynamo_disable", inner)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            step: Any = vars(kind).get("step")
            if hasattr(step, "__wrapped__"):
                kind.step = eager(inspect.unwrap(step))  # type: ignore[method-assign]


def eager(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that records gradients only if its optimiser is asked to, as torch's own does."""

    @functools.wraps(step)
    def stepping(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            return step(self, *args, **options)

    return stepping
