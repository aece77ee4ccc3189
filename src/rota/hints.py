"""Type hints: whether a value is what a hint asks for, and what that is in a user's words."""

from __future__ import annotations

import datetime
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rota.errors import BadInput

LISTS = (list, tuple, Sequence)
UNIONS = (typing.Union, types.UnionType)
DATES = (datetime.date, datetime.time)
MOST = 100
"""A value is cut off after this many characters in a sentence."""
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    Any: "any finite value",
}


def check_fields(prefix: str, thing: object) -> None:
    """Raise BadInput if a field of a dataclass is not what its type hint asks for.

    `prefix` goes before the field's name in the message. A field with its default value is
    accepted, and so is every object that is not a dataclass or whose hints cannot be read.
    """
    if not is_dataclass(thing) or isinstance(thing, type):
        return
    try:
        hints = typing.get_type_hints(type(thing))
    except Exception:  # a user's own class, with names that only a type checker imports
        return
    for each in fields(thing):
        value, hint = getattr(thing, each.name, each.default), hints[each.name]
        if value is not each.default and not fits(value, hint):
            wanted = _wanted(value, hint)
            raise BadInput(f"{prefix}{each.name} is {shown(value)}, but it takes {wanted}")


def fits(value: object, hint: Any) -> bool:
    """Whether a value is what a type hint asks for. A hint that is not understood takes anything.

    Numpy's numbers are numbers, a whole number is a number, but true and false are not. Any list
    or array may stand for a tuple.
    """
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is typing.Literal:
        return any(_same(value, choice) for choice in inner)
    if kind in UNIONS:
        return any(fits(value, part) for part in inner)
    if kind is Callable:
        return callable(value)
    if kind in LISTS:
        return _fits_list(value, (inner[0], ...) if inner and kind is not tuple else inner)
    try:
        return bool(inner) or isinstance(value, kind)
    except TypeError:  # a protocol, a type variable ...
        return True


def _same(value: object, choice: object) -> bool:
    """Equality that tells True from 1."""
    if isinstance(value, bool) != isinstance(choice, bool):
        return False
    return isinstance(value, type(choice)) and value == choice


def _fits_list(value: object, inner: tuple[Any, ...]) -> bool:
    """Whether a value is a list of these types; (type, ...) is any length, () any items."""
    if isinstance(value, str | bytes | Mapping):
        return False
    if not (isinstance(value, Iterable) and isinstance(value, Sized)):
        return False
    # an array or a tensor as Python's own numbers
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    if not inner or not isinstance(items, list):
        return isinstance(items, list)
    wanted = [inner[0]] * len(items) if inner[1:] == (...,) else inner
    return len(wanted) == len(items) and all(map(fits, items, wanted))


def convert(where: str, hint: Any, value: Any) -> Any:
    """A value of a TOML file as what a type hint asks for; raise BadInput if it is not that.

    A list becomes a tuple, a whole number a number, and a string a path where the hint asks for it.
    A date is a string. Numbers must be finite, and fit in 64 bits as TOML says.
    """
    value = _without_dates(value)
    try:
        if _finite(value):
            return _converted(value, hint)
    except _Misfit:
        pass
    raise BadInput(f"'{where}' is {shown(value)}, but it takes {describe(hint)}")


class _Misfit(Exception):
    """A value is not what a hint asks for."""


def _without_dates(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_dates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_dates(item) for item in value]
    return str(value) if isinstance(value, DATES) else value


def _converted(value: Any, hint: Any) -> Any:
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in UNIONS:
        return _first(value, inner)
    if kind in LISTS and isinstance(value, list | tuple):
        hints = inner or (Any, ...)
        if kind is not tuple or hints[1:] == (...,):
            hints = hints[:1] * len(value)
        if len(hints) != len(value):
            raise _Misfit
        items = [_converted(item, each) for item, each in zip(value, hints, strict=True)]
        return items if kind is list else tuple(items)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if not fits(value, hint):
        raise _Misfit
    return float(value) if kind is float else value


def _first(value: Any, hints: tuple[Any, ...]) -> Any:
    """The value as the first of these hints that takes it."""
    for hint in hints:
        try:
            return _converted(value, hint)
        except _Misfit:
            continue
    raise _Misfit


def _finite(value: Any) -> bool:
    """Whether all numbers in a value are finite and fit in 64 bits."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return not isinstance(value, float) or math.isfinite(value)


def _wanted(value: object, hint: Any) -> str:
    """What a hint asks for, with an example where one item is given instead of a list."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in LISTS and fits(value, inner[0]):
        return f"a list, such as [{shown(value)}]"
    return describe(hint) + (" or None" if type(None) in inner else "")


def shown(value: object) -> str:
    """A value roughly as the user wrote it, in one line."""
    try:
        text = " ".join((str(value).lower() if isinstance(value, bool) else f"{value!r}").split())
    except (ValueError, RecursionError):  # a number of thousands of digits, a list in itself
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= MOST else f"{text[:MOST]}..."


def called(policy: object, known: Mapping[str, type]) -> str:
    """A policy's name in recipes; for a user's own policy, its class's name."""
    for name, kind in known.items():
        if kind is type(policy):
            return name
    return type(policy).__name__


def describe(hint: Any) -> str:
    """What a type hint asks for, in a user's words."""
    if hint in WORDS:
        return WORDS[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        choices = ", ".join(f"'{choice}'" for choice in inner)
        return choices if len(inner) == 1 else f"one of {choices}"
    if origin in UNIONS:
        *others, last = [describe(part) for part in inner if part is not type(None)]
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple and Ellipsis not in inner:
        each = " or ".join(dict.fromkeys(map(describe, inner)))
        return f"a list of {len(inner)} values, each {each}"
    if origin is Callable:
        return "a function"
    if origin:
        return "a list"
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
