"""Tasks as tables of plain values: what a server says of a task, and what a node makes of it.

A network is a name of rota's own zoo with its options, or "module:function". A node trains the
former, and of the latter those of modules that its owner allows by name.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import nn

from rota.channel import CHANNELS, Channel
from rota.data.federation import Federation
from rota.errors import BadInput
from rota.flower.letter import Refused
from rota.hints import check_fields, convert, shown
from rota.models import MODELS
from rota.plan import Task
from rota.recipe import registry
from rota.running.check import check_numbers
from rota.scores import LOSSES

OPTIMIZERS = {
    f"torch.optim.{name}": each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
}
"""Optimisers that every node knows, besides those that have a word in recipes."""
OTHERS = ("model", "data", "loss", "score", "better", "name")
SIMPLE = ("sgd", "adam", "adamw")
"""Optimisers with a word in recipes."""
WORK = {key: hint for key, hint in typing.get_type_hints(Task).items() if key not in OTHERS}
"""A task's local work: its fields and their types."""
DTYPES = ("float32", "int64", "uint8", "int32", "int16", "bool")
"""What the examples may be made of."""


def tell(task: Task, name: str) -> dict[str, Any]:
    """A task as a node is told of it."""
    data = task.federation
    told = {
        "name": name,
        "model": _network(task.model, name),
        "loss": _function(task.loss, LOSSES, f"the loss of task '{name}'"),
        "shape": list(data.shape),
        "dtype": str(data.train.x.dtype).removeprefix("torch."),
        "classes": data.classes,
        **{key: getattr(task, key) for key in WORK},
    }
    if callable(task.optimizer):
        what = f"the optimizer of task '{name}'"
        told["optimizer"] = _function(task.optimizer, OPTIMIZERS, what)
    try:
        return dict(json.loads(json.dumps(told, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"task '{name}' cannot be sent to clients ({error}): give its network options that "
            "are numbers, texts or lists"
        ) from error


def _network(model: Any, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if isinstance(model, functools.partial) and not model.args:
        model, options = model.func, dict(model.keywords)
    if isinstance(model, nn.Module):
        raise BadInput(
            f"task '{name}' has a module as its model, which cannot be sent to clients: give the "
            "function that makes it"
        )
    return {"name": _function(model, MODELS, f"the model of task '{name}'"), **options}


def _function(function: Any, known: dict[str, Any], what: str) -> str:
    for name, each in known.items():
        if each is function:
            return name
    module, place = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if not module or not place.isidentifier() or module == "__main__":
        raise BadInput(
            f"{what} is {shown(function)}, which clients cannot import: give a function at the "
            "top of a module that they have too"
        )
    return f"{module}:{place}"


def rebuild(told: Any, data: Federation, allow: Sequence[str]) -> Task:
    """The task of which a node was told, with the node's data; Refused if it is not allowed."""
    if not isinstance(told, dict):
        raise Refused("a task is not a table")
    model, name = told.get("model"), told.get("name")
    if not isinstance(model, dict) or not isinstance(name, str):
        raise Refused("a task has no name or no model")
    try:
        network = _find(model.get("name"), MODELS, allow)
        options = {key: value for key, value in model.items() if key != "name"}
        filled = registry.fill("model", "models", network, options)
        filled = registry.arguments("models", {"name": model["name"], **filled})
        work = {k: convert(k, hint, told[k]) for k, hint in WORK.items() if k != "optimizer"}
        if told.get("optimizer") not in SIMPLE:
            work["optimizer"] = _find(told.get("optimizer"), OPTIMIZERS, allow)
        else:
            work["optimizer"] = told["optimizer"]
        task = Task(
            model=functools.partial(network, **filled),
            data=data,
            loss=_find(told.get("loss"), LOSSES, allow),
            name=name,
            **work,
        )
        check_fields(f"task '{name}': ", task)
        check_numbers(f"task '{name}': ", work)
    except KeyError as error:
        raise Refused(f"a task does not say its {error}") from error
    except BadInput as mistake:
        raise Refused(str(mistake)) from mistake
    return task


def tell_channel(channel: Channel | None) -> dict[str, Any] | None:
    """What updates go through, as a node is told of it."""
    if channel is None:
        return None
    name = _function(type(channel), CHANNELS, "the channel")
    return {"name": name, **(asdict(channel) if is_dataclass(channel) else {})}


def rebuild_channel(told: Any, allow: Sequence[str]) -> Channel | None:
    """What updates go through."""
    if told is None:
        return None
    if not isinstance(told, dict):
        raise Refused("the channel is not a table")
    kind = _find(told.get("name"), CHANNELS, allow)
    try:
        options = {key: value for key, value in told.items() if key != "name"}
        channel: Channel = kind(**registry.fill("channel", "channels", kind, options))
        channel.check()
    except BadInput as mistake:
        raise Refused(str(mistake)) from mistake
    return channel


def _find(name: object, known: dict[str, Any], allow: Sequence[str]) -> Callable[..., Any]:
    """A known function, or one of a module that is allowed."""
    if isinstance(name, str) and name in known:
        found: Callable[..., Any] = known[name]
        return found
    if not isinstance(name, str) or ":" not in name:
        raise Refused(f"this client does not know {shown(name)}")
    module = name.partition(":")[0]
    if not any(module == each or module.startswith(f"{each}.") for each in allow):
        raise Refused(
            f"this client does not run {name}: its owner has to allow it, with --allow {module}"
        )
    return registry.own(name)


def params_of(task: Task) -> tuple[int, int]:
    """How many parameters and buffers a task's network has, without allocating any."""
    with torch.device("meta"):
        module = task.build()
    floats = [b for b in module.buffers() if b.is_floating_point()]
    return sum(p.numel() for p in module.parameters()), sum(b.numel() for b in floats)
