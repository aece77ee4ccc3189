"""Everything that can be named in a recipe, by kind. Each kind's table stands beside its members; here they only meet."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rota.data import SOURCES
from rota.data.partition import PARTITIONS
from rota.errors import BadInput, did_you_mean
from rota.estimate import ESTIMATORS, SERVERS
from rota.hints import describe, shown
from rota.models import MODELS
from rota.sampling import SAMPLERS

KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "samplers": SAMPLERS,
    "estimators": ESTIMATORS,
    "servers": SERVERS,
    "models": MODELS,
    "data": SOURCES,
    "partitions": PARTITIONS,
}
FILLED = {"models": {"shape", "classes"}, "data": {"partition", "seed"}}
"""Parameters that rota fills itself (from the data, from the recipe's other parts): not options of a recipe."""
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("seed", {"seed": int | None, "split": int | None}),
    "samplers": ("budget", {"fraction": float | None}),
}
"""Options that a recipe has for all members of a kind with a certain parameter: for data that take a seed, one in the place of the run's,
and which of several splits by it; for samplers with a budget, a share of the clients in its place."""


def find(kind: str, name: str) -> Callable[..., Any]:
    """A member of a kind by its name, or your own as "module:attribute"."""
    if ":" in name:
        return _own(name)
    if name not in KINDS[kind]:
        raise BadInput(
            f"unknown {kind.removesuffix('s')} '{name}': {did_you_mean(name, KINDS[kind])}"
        )
    return KINDS[kind][name]


def _own(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")  # a module in the folder where rota was started
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything while it is imported
        raise BadInput(
            f"cannot import '{name}' ({type(error).__name__}: {error}): give it as module:attribute"
        ) from error
    finally:
        sys.path.remove("")
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        raise BadInput(f"'{name}' is not a class or function, but {found!r:.60}")
    return found


def summary(member: Callable[..., Any]) -> str:
    """The first line of a member's docstring."""
    return (inspect.getdoc(member) or "").partition("\n")[0]


def table(kind: str) -> list[dict[str, Any]]:
    """The members of a kind as `rota list` shows them; samplers and estimators also say whether they are unbiased, and what
    they need and cost.
    """
    rows = []
    for name, member in KINDS[kind].items():
        says = {
            fact: getattr(member, fact)
            for fact in ("unbiased", "needs", "costs")
            if hasattr(member, fact)
        }
        rows.append(
            {
                "name": name,
                "summary": summary(member),
                "options": list(options(kind, member)),
                **says,
            }
        )
    return rows


def options(kind: str, member: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """What a member can be given in a recipe: name -> (type, default); a default of `inspect.Parameter.empty` means required."""
    try:
        hints = typing.get_type_hints(member.__init__ if inspect.isclass(member) else member)
    except (
        NameError,
        TypeError,
    ):  # a user's own, with types that are only there for a type checker
        hints = {}
    named = [
        p
        for p in inspect.signature(member).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    found = {
        p.name: (hints.get(p.name, Any), p.default)
        for p in named
        if p.name not in FILLED.get(kind, ())
    }
    wanted, more = MORE.get(kind, ("", {}))
    return found | {
        name: (type_, None) for name, type_ in more.items() if any(p.name == wanted for p in named)
    }


def fill(
    where: str, kind: str, member: Callable[..., Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Check the given options and add the defaults. `where` names the place in messages: "sampler", "task.model"."""
    known = options(kind, member)
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) if known else f"{where} has no options"
            raise BadInput(f"unknown key '{where}.{key}': {hint}")
    filled = {}
    for key, (type_, default) in known.items():
        if key in given:
            filled[key] = convert(f"{where}.{key}", type_, given[key])
        elif default is inspect.Parameter.empty:
            raise BadInput(f"'{where}.{key}' is missing: it takes {describe(type_)}")
        else:
            filled[key] = default
    return filled


def convert(where: str, kind: Any, value: Any) -> Any:
    """A value from TOML as the type that is asked for: by JSON's rules, in which a list may become a tuple and 1 a float."""
    rules = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    try:
        return TypeAdapter(kind, config=rules).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        raise BadInput(f"'{where}' is {shown(value)}, but it takes {describe(kind)}") from error
