"""An experiment in a recipe's words: what config.toml holds for a run that was made in Python."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Any

import numpy as np

from rota.experiment import Experiment
from rota.hints import called
from rota.policies import KINDS
from rota.scores import MEASURES
from rota.scores import name as name_of


def describe(experiment: Experiment) -> dict[str, Any]:
    """The experiment as tables of plain values; what TOML cannot hold is left out."""
    out: dict[str, Any] = {"python": True}
    out |= _known({k: getattr(experiment, k) for k in ("rounds", "seed", "evaluate", "target")})
    out["metrics"] = [m if isinstance(m, str) else _name(m) for m in experiment.metrics]
    for key, kind in KINDS.items():
        policy = experiment.policies[key]
        own = is_dataclass(policy) and not isinstance(policy, type)
        options = _known(asdict(policy)) if own else {}
        out[key] = options if kind.single else {"name": called(policy, kind.members), **options}
    out["task"] = []
    for task, name in zip(experiment.tasks, experiment.names, strict=True):
        work = _known({each.name: getattr(task, each.name) for each in fields(task)})
        functions = {"model": _name(task.model)}
        functions |= {key: name_of(getattr(task, key), known) for key, known in MEASURES.items()}
        data = {"data": task.roster.name, "clients": task.roster.clients}
        out["task"].append({**work, "name": name, **functions, **data})
    return out


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """The values that TOML can hold."""
    told = {key: _told(value) for key, value in values.items()}
    return {key: value for key, value in told.items() if value is not None}


def _told(value: Any) -> Any:
    """A number, a text or a list of such; None for anything else."""
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(value, tuple | list):
        return [each for each in map(_told, value) if each is not None]
    return value if isinstance(value, str | int | float) else None


def _name(value: Any) -> str:
    """The name of a function or a class, or of an object's class."""
    return str(getattr(value, "__qualname__", type(value).__name__))
