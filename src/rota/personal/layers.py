"""A network in two parts: its last layers, the head, and all before them, the body."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rota import weights
from rota.errors import BadInput
from rota.plan import Task
from rota.weights import Weights

Part = Literal["head", "body"]


def last(module: nn.Module, layers: int) -> Collection[str]:
    """The names of the parameters of the last layers that have some."""
    named = [
        [f"{name}.{own}".lstrip(".") for own, _ in part.named_parameters(recurse=False)]
        for name, part in module.named_modules()
    ]
    having = [names for names in named if names]
    if layers >= len(having):
        raise BadInput(
            f"personal.layers is {layers}, but the model has {len(having)} layers with parameters: "
            "leave at least one of them to the shared body"
        )
    return {name for names in having[-layers:] for name in names}


def freeze(module: nn.Module, layers: int, part: Part) -> nn.Module:
    """Make buffers of all parameters but those of a part, so that nothing else trains.

    Then every engine leaves them alone, whatever the optimiser, weight decay and clipping are.
    """
    head = last(module, layers)
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if (name in head) != (part == "head"):
            place, _, own = name.rpartition(".")
            owner = module.get_submodule(place)
            delattr(owner, own)
            owner.register_buffer(own, parameter.detach())
    return module


@dataclass(frozen=True)
class Only:
    """A function that makes a task's network of which only a part trains."""

    task: Task
    layers: int
    part: Part

    def __call__(self) -> nn.Module:
        return freeze(self.task.build(), self.layers, self.part)


def places(task: Task, layers: int, part: Part) -> Weights:
    """Where the numbers of such a network are among the whole one's parameters and buffers.

    The places are those in both vectors, one after the other.
    """
    module = task.build().double()  # it is numbered, and its parts are read: exact up to 2^53
    params, buffers = (len(each) for each in weights.read(module))
    numbers = torch.arange(params + buffers, dtype=torch.float64)
    weights.load(module, Weights(numbers[:params], numbers[params:]))
    return Weights(*(each.long() for each in weights.read(freeze(module, layers, part))))
