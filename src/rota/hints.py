"""Types in a user's words, and whether the fields of a dataclass hold what their type hints say."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rota.errors import BadInput

LISTS = (list, tuple, Sequence)
MOST = 100
"""The most characters of a value that go into a sentence."""


def check_fields(prefix: str, thing: object) -> None:
    """Refuse a dataclass with a field of another type than its hint says; `prefix` goes before the field's name.

    A field that is left at its default is as its author wants it. Of an object without fields, or with hints that say nothing here,
    nothing is known, and nothing is refused.
    """
    if not is_dataclass(thing) or isinstance(thing, type):
        return
    try:
        hints = typing.get_type_hints(type(thing))
    except Exception:  # a user's own, with types that are only there for a type checker
        return
    for each in fields(thing):
        value, hint = getattr(thing, each.name, each.default), hints[each.name]
        if value is not each.default and not fits(value, hint):
            raise BadInput(
                f"{prefix}{each.name} is {shown(value)}, but it takes {_wanted(value, hint)}"
            )


def fits(value: object, hint: Any) -> bool:
    """Whether a value is what a type hint asks for; one that is not understood asks for nothing.

    Numpy's numbers are numbers, a whole number is one too, and true is none; any list will do in the place of a tuple.
    """
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is typing.Literal:
        return any(isinstance(value, type(choice)) and value == choice for choice in inner)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in inner)
    if kind is Callable:
        return callable(value)
    if kind in LISTS:
        return _fits_list(value, (inner[0], ...) if inner and kind is not tuple else inner)
    try:
        return bool(inner) or isinstance(value, kind)
    except TypeError:  # a protocol, a type variable ...
        return True


def _fits_list(value: object, inner: tuple[Any, ...]) -> bool:
    """Whether a value is a list of these types, where (type, ...) is one of any length, and () of anything."""
    if isinstance(value, str | bytes | Mapping) or not (
        isinstance(value, Iterable) and isinstance(value, Sized)
    ):
        return False
    items = (
        value.tolist() if hasattr(value, "tolist") else list(value)
    )  # an array's, or a tensor's, as plain numbers
    if not inner or not isinstance(items, list):
        return isinstance(items, list)
    wanted = [inner[0]] * len(items) if inner[1:] == (...,) else inner
    return len(wanted) == len(items) and all(map(fits, items, wanted))


def _wanted(value: object, hint: Any) -> str:
    """What a hint asks for, with an example where one thing is given in the place of a list."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in LISTS and fits(value, inner[0]):
        return f"a list, such as [{shown(value)}]"
    return describe(hint) + (" or None" if type(None) in inner else "")


def shown(value: object) -> str:
    """A value as the user wrote it, near enough, in one line."""
    text = " ".join((str(value).lower() if isinstance(value, bool) else f"{value!r}").split())
    return text if len(text) <= MOST else f"{text[:MOST]}..."


def called(policy: object, known: Mapping[str, type]) -> str:
    """What a recipe calls a sampler, an estimator or a server; one of the user's own has its class's name."""
    return next(
        (name for name, kind in known.items() if kind is type(policy)), type(policy).__name__
    )


def describe(kind: Any) -> str:
    """A type in a user's words."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path: "a path",
        Any: "a value",
    }
    if kind in words:
        return words[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(f"'{choice}'" for choice in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(part) for part in inner if part is not type(None))
    if origin is tuple and Ellipsis not in inner:
        return f"a list of {len(inner)} values, each {' or '.join(dict.fromkeys(map(describe, inner)))}"
    if origin is Callable:
        return "a function"
    name = getattr(kind, "__name__", str(kind))
    return "a list" if origin else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
