"""Everything that can be named in a recipe, by kind. Each kind's table stands beside its members; here they only meet."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rota.data import SOURCES
from rota.data.partition import PARTITIONS
from rota.errors import BadInput, did_you_mean
from rota.estimate import ESTIMATORS, SERVERS
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
FILLED = {"shape", "classes", "partition", "seed"}
"""Parameters that rota fills itself (from the data, from the recipe's other parts): not options of a recipe."""


def find(kind: str, name: str) -> Callable[..., Any]:
    """A member of a kind by its name, or your own as "module:attribute"."""
    if ":" in name:
        return _own(name)
    if name not in KINDS[kind]:
        raise BadInput(f"unknown {kind.removesuffix('s')} '{name}': {did_you_mean(name, KINDS[kind])}")
    return KINDS[kind][name]


def _own(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")  # a module in the folder where rota was started
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"cannot import '{name}': {error}") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise BadInput(f"'{name}' is not a class or function")
    return found


def summary(member: Callable[..., Any]) -> str:
    """The first line of a member's docstring."""
    return (inspect.getdoc(member) or "").partition("\n")[0]


def options(member: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """What a member can be given in a recipe: name -> (type, default); a default of `inspect.Parameter.empty` means required."""
    hints = typing.get_type_hints(member.__init__ if inspect.isclass(member) else member)
    parameters = inspect.signature(member).parameters.values()
    return {p.name: (hints.get(p.name, Any), p.default) for p in parameters if p.name not in FILLED}


def fill(where: str, member: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Check the given options and add the defaults. `where` names the place in messages: "sampler", "task.model"."""
    known = options(member)
    for key in given:
        if key not in known:
            raise BadInput(f"unknown key '{where}.{key}': {did_you_mean(key, known)}")
    filled = {}
    for key, (kind, default) in known.items():
        if key in given:
            filled[key] = convert(f"{where}.{key}", kind, given[key])
        elif default is inspect.Parameter.empty:
            raise BadInput(f"'{where}.{key}' is missing: it takes {describe(kind)}")
        else:
            filled[key] = default
    return filled


def convert(where: str, kind: Any, value: Any) -> Any:
    """A value from TOML as the type that is asked for."""
    try:
        return TypeAdapter(kind).validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
    except ValidationError as error:
        raise BadInput(f"'{where}' is {value!r}, but it takes {describe(kind)}") from error


def describe(kind: Any) -> str:
    """A type in a user's words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if kind in words:
        return words[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(f"'{choice}'" for choice in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(part) for part in inner if part is not type(None))
    if origin in (tuple, list):
        return f"a list of {len(inner)} values" if origin is tuple else "a list"
    return str(kind)
