"""A user's own measures of the models: functions that are called when models are tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rota import weights
from rota.errors import BadInput
from rota.plan import Model

if TYPE_CHECKING:
    from rota.experiment import Experiment

Measure = Callable[[int, dict[str, Any], dict[str, Any]], Mapping[str, Any]]
"""(round, models by name, federations by name) -> numbers by name."""
KNOWN = {"round", "accuracy", "loss", "models", "cohort", "probability", "seconds", "failures"}
KNOWN |= {"client_seconds", "bytes_up", "bytes_down", "server_bytes", "groups_of_clients"}
"""Names that a round's record has already."""


def own(experiment: Experiment, models: list[Model], now: int) -> dict[str, float | None]:
    """What the experiment's own measures say of the models after a round."""
    functions = [each for each in experiment.metrics if callable(each)]
    if not functions:
        return {}
    modules, data = {}, {}
    for name, model in zip(experiment.models(models), models, strict=True):
        task = experiment.tasks[model.task]
        modules[name] = task.build().to(model.params.device).eval()
        weights.load(modules[name], model.weights)
        data[name] = task.data
    found: dict[str, float | None] = {}
    for function in functions:
        what = f"the measure '{getattr(function, '__name__', type(function).__name__)}'"
        with torch.no_grad():
            gave = function(now, modules, data)
        if not isinstance(gave, Mapping):
            raise BadInput(f"{what} gives a {type(gave).__name__}: return a dict of numbers")
        for key, value in gave.items():
            if key in KNOWN or key in found or not isinstance(key, str):
                raise BadInput(f"{what} gives {key!r}, which a round has already: rename it")
            found[key] = _number(what, key, value)
    return found


def _number(what: str, key: str, value: Any) -> float | None:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1:
        value = value.item()
    if value is not None and not isinstance(value, Real):
        raise BadInput(f"{what} gives {value!r:.60} as {key}: give a number")
    return None if value is None else float(value)
