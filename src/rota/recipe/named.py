"""What Python is given by name: "kvib", or {"name": "kvib", "budget": 5}, as in a recipe."""

from __future__ import annotations

import functools
from typing import Any

from rota.errors import BadInput, did_you_mean
from rota.plan import Task
from rota.policies import KINDS
from rota.recipe import registry
from rota.recipe.config import _call, _make, _named, toml
from rota.scores import MEASURES


def policy(kind: str, given: Any, tasks: Any) -> Any:
    """A policy of this kind by its name, or what was given."""
    if not isinstance(given, str | dict):
        return given
    if KINDS[kind].single:
        raise BadInput(f"{kind} is {given!r:.60}, but it has no names: give an object")
    table = toml(_named(kind, registry.listed(kind), given, KINDS[kind].default))
    few = isinstance(tasks, list | tuple) and tasks and isinstance(tasks[0], Task)
    clients = tasks[0].roster.clients if few else 0
    if "budget" in table and not (isinstance(given, dict) and "budget" in given) and few:
        table["budget"] = min(table["budget"], float(clients))
    return _make(registry.listed(kind), table, clients)


def part(key: str, given: str | dict[str, Any]) -> Any:
    """A task's model, data, loss or score by its name."""
    if key in MEASURES:
        known = MEASURES[key]
        if not isinstance(given, str) or (given not in known and ":" not in given):
            raise BadInput(f"unknown {key} '{given}': {did_you_mean(str(given), known)}")
        return known[given] if given in known else registry.own(given)
    kind = registry.FIELDS[key]
    table = toml(_named(key, kind, given))
    arguments = registry.arguments(kind, table)
    if kind == "data":
        arguments.pop("split", None)
        return _call(kind, table["name"], arguments)
    return functools.partial(registry.find(kind, table["name"]), **arguments)
