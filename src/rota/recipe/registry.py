"""Everything that a recipe can name, by kind. Each kind's table is kept with its members."""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rota.data import SOURCES
from rota.data.partition import PARTITIONS
from rota.errors import BadInput, did_you_mean
from rota.hints import convert, describe, shown
from rota.models import MODELS
from rota.policies import KINDS
from rota.scores import LOSSES, SCORES

Options = dict[str, tuple[Any, Any]]
"""Name -> (type hint, default); the default `REQUIRED` means that there is none."""
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Alternative:
    """Another way to give an option: a recipe has either the one or the other."""

    option: str
    hint: Any
    allows: Callable[[Any], bool]
    takes: str
    """What it takes, for the message about a value that it does not allow."""
    value: Callable[[Any, int], Any]
    """The option's value, from this one's and the number of clients."""


PARTS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "models": MODELS,
    "data": SOURCES,
    "partitions": PARTITIONS,
}
"""The kinds of a task's parts."""
MEASURES: dict[str, Mapping[str, Callable[..., Any]]] = {"losses": LOSSES, "scores": SCORES}
"""What a task is trained and tested by; these have no options."""
FIELDS = {"data": "data", "partition": "partitions", "model": "models"}
"""Key of a task -> the kind of what it names."""
ALTERNATIVES: dict[str, dict[str, Alternative]] = {
    "samplers": {
        "fraction": Alternative(
            option="budget",
            hint=float,
            allows=lambda share: 0 <= share <= 1,
            takes="a share of the clients from 0 (one client) to 1 (all)",
            value=lambda share, clients: max(1, round(share * clients)),
        )
    }
}
"""Kind -> name -> what it stands for. It is an option of all members that have the other one."""
FILLED = {
    "models": {"shape", "classes"},
    "data": {"partition", "seed"},
    **{key: {"outputs", "targets"} for key in MEASURES},
}
"""Parameters that are no options: rota takes them from the data or another part of a recipe."""
SPLIT: Options = {"seed": (int | None, None), "split": (int | None, None)}
"""Options of all data with a parameter `seed`: a seed instead of the run's, and which of several
splits by that seed."""


def kinds() -> dict[str, Mapping[str, Callable[..., Any]]]:
    """All kinds and their members: policies first, then the parts of tasks."""
    return {**{listed(key): kind.members for key, kind in KINDS.items()}, **PARTS, **MEASURES}


def listed(key: str) -> str:
    """A kind of policy as `rota list` calls it: samplers; admission has one member."""
    if key.endswith("y") and not KINDS[key].single:
        return f"{key[:-1]}ies"
    return key if KINDS[key].single or key.endswith("s") else f"{key}s"


def members(kind: str) -> Mapping[str, Callable[..., Any]]:
    """The members of a kind by name."""
    return kinds()[kind]


def find(kind: str, name: str) -> Callable[..., Any]:
    """A member of a kind by its name, or the user's own as "module:attribute"."""
    if ":" in name:
        return own(name)
    known = members(kind)
    if name not in known:
        hint = did_you_mean(name, known)
        raise BadInput(f"unknown {kind.removesuffix('s')} '{name}': {hint}")
    return known[name]


def own(name: str, folder: str = "") -> Callable[..., Any]:
    """The class or function "module:attribute"; `folder`, or the current one, is searched first."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, folder)
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(
            f"cannot import {shown(name)} ({why:.200}): give it as module:attribute"
        ) from error
    finally:
        sys.path.remove(folder)
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        raise BadInput(f"'{name}' is not a class or function, but {found!r:.60}")
    try:
        inspect.signature(found)
    except (TypeError, ValueError) as error:  # such as dict
        raise BadInput(
            f"'{name}' does not say which parameters it takes: give a class or function of your own"
        ) from error
    return found


def naming() -> set[str]:
    """The keys of a recipe that name something: kinds of policy, and the parts of a task."""
    return {*(key for key, kind in KINDS.items() if not kind.single), *FIELDS}


def summary(member: Callable[..., Any]) -> str:
    """The first line of a member's docstring."""
    return (inspect.getdoc(member) or "").partition("\n")[0]


def table(kind: str) -> list[dict[str, Any]]:
    """The members of a kind as `rota list` shows them.

    Some also say whether they are unbiased, what they need and cost, and what they see of single
    rows.
    """
    rows = []
    for name, member in members(kind).items():
        row = {"name": name, "summary": summary(member), "options": list(options(kind, member))}
        for fact in ("unbiased", "needs", "costs"):
            if hasattr(member, fact):
                row[fact] = getattr(member, fact)
        if hasattr(member, "sees"):
            row["sees"] = sorted(member.sees)
        rows.append(row)
    return rows


def entry(kind: str, name: str) -> dict[str, Any]:
    """A member as `rota list NAME` shows it: its docstring, facts and options."""
    member = members(kind)[name]
    found: dict[str, Any] = {"kind": kind, "name": name, "text": inspect.getdoc(member) or ""}
    for fact in ("unbiased", "needs", "costs"):
        if hasattr(member, fact):
            found[fact] = getattr(member, fact)
    others = alternatives(kind, member)
    found["options"] = [
        {
            "name": option,
            "takes": others[option].takes if option in others else describe(hint),
            "required": default is REQUIRED,
            "default": None if default is REQUIRED else _plain(default),
            "instead_of": others[option].option if option in others else None,
        }
        for option, (hint, default) in options(kind, member).items()
    ]
    return found


def _plain(value: Any) -> Any:
    """A default as JSON can hold it."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def has(kind: str, name: str, parameter: str) -> bool:
    """Whether a member has this parameter, as an option or not."""
    return parameter in inspect.signature(find(kind, name)).parameters


def options(kind: str, member: Callable[..., Any]) -> Options:
    """What a recipe can set of a member."""
    try:
        hints = typing.get_type_hints(member.__init__ if inspect.isclass(member) else member)
    except (NameError, TypeError):  # a user's own, with names that only a type checker imports
        hints = {}
    found: Options = {}
    named = inspect.signature(member).parameters
    for name, parameter in named.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and name not in FILLED.get(kind, ()):
            found[name] = hints.get(name, Any), parameter.default
    if kind == "data" and "seed" in named:
        found |= SPLIT
    for name, other in alternatives(kind, member).items():
        found[name] = other.hint, None
    return found


def alternatives(kind: str, member: Callable[..., Any]) -> dict[str, Alternative]:
    """The alternatives to a member's options, by name."""
    named = inspect.signature(member).parameters
    return {
        name: other
        for name, other in ALTERNATIVES.get(kind, {}).items()
        if other.option in named and name not in named
    }


def rivals(kind: str, member: Callable[..., Any], option: str) -> set[str]:
    """The options of a member that cannot be given together with this one."""
    names: set[str] = set()
    for name, other in alternatives(kind, member).items():
        if option in (name, other.option):
            names |= {name, other.option}
    return names - {option}


def fill(
    where: str, kind: str, member: Callable[..., Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Check the given options and add the defaults.

    `where` is the place that messages name, such as "sampler" or "task.model". An option for which
    an alternative is given is left out.
    """
    known, others = options(kind, member), alternatives(kind, member)
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) if known else f"{where} has no options"
            raise BadInput(f"unknown key '{where}.{key}': {hint}")
    left_out = {other.option for name, other in others.items() if name in given}
    for name, other in others.items():
        if name in given and other.option in given:
            both = f"'{where}.{name}' and '{where}.{other.option}'"
            raise BadInput(f"the recipe has {both}: leave one of them out")
    filled = {}
    for key, (hint, default) in known.items():
        if key in given:
            filled[key] = convert(f"{where}.{key}", hint, given[key])
        elif key not in left_out and default is REQUIRED:
            raise BadInput(f"'{where}.{key}' is missing: it takes {describe(hint)}")
        elif key not in left_out:
            filled[key] = _default(hint, default)
    for name in others.keys() & given.keys():
        if not others[name].allows(filled[name]):
            takes = f"but it takes {others[name].takes}"
            raise BadInput(f"'{where}.{name}' is {shown(filled[name])}, {takes}")
    return filled


def _default(hint: Any, value: Any) -> Any:
    """A default as the hint says: 10 is 10.0 where a number is asked for, as if it were given."""
    try:
        return convert("", hint, value)
    except BadInput:  # a user's own default may be of another type
        return value


def arguments(kind: str, table: dict[str, Any], clients: int = 0) -> dict[str, Any]:
    """The arguments for the member that a filled table names, for this number of clients."""
    member = find(kind, table["name"])
    given = {key: value for key, value in table.items() if key != "name"}
    for name, other in alternatives(kind, member).items():
        if name in given:
            given[other.option] = other.value(given.pop(name), clients)
    known = options(kind, member)
    return {key: convert(key, known[key][0], value) for key, value in given.items()}
