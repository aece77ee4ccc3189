"""The API page, from the docstrings of what is public: python -m rota_lab.api > docs/api.md."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

WIDTH = 100
MODULES = (
    "rota",
    "rota.plan",
    "rota.data",
    "rota.data.partition",
    "rota.models",
    "rota.sampling",
    "rota.sampling.draw",
    "rota.metrics.variance",
    "rota.channel",
    "rota.estimate",
    "rota.grouping",
    "rota.personal",
    "rota.policies",
    "rota.world.devices",
    "rota.engine",
    "rota.spread",
    "rota.running.watch",
    "rota.track",
    "rota.scores",
    "rota.recipe",
    "rota.report",
    "rota.testing",
)
"""The public modules. The `__all__` of each says which of its names are public."""
TOP = """# API

All that is public, by module. `python -m rota_lab.api > docs/api.md` writes this page from the
docstrings. Everything else may change without notice.
"""


def page() -> str:
    """The whole page."""
    parts = [TOP]
    known: dict[int, str] = {}
    for name in MODULES:
        parts += section(importlib.import_module(name), known)
    return "\n".join(parts)


def section(module: ModuleType, known: dict[int, str]) -> Iterator[str]:
    """A module's part of the page. `known` is where each object was first described."""
    summary = _text(module).partition("\n\n")[0]
    yield f"## {module.__name__}\n\n{summary}\n"
    elsewhere, values, entries = [], [], []
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, ModuleType):
            elsewhere.append(f"`{name}` (module `{thing.__name__}`)")
        elif not (inspect.isclass(thing) or inspect.isroutine(thing)):
            values.append(value(name, thing))
        elif id(thing) in known:
            elsewhere.append(f"`{name}` (`{known[id(thing)]}`)")
        else:
            known[id(thing)] = f"{module.__name__}.{name}"
            entries.append(entry(module.__name__, name, thing))
    if elsewhere:
        yield _wrapped(f"Described elsewhere: {', '.join(elsewhere)}.", "") + "\n"
    if values:
        yield "\n".join(values) + "\n"
    yield from entries


def value(name: str, thing: Any) -> str:
    """A line about a table, or about what a type stands for."""
    if isinstance(thing, Mapping | set | frozenset):
        names = thing if isinstance(thing, Mapping) else sorted(thing)
        return _wrapped(f"- `{name}`: {', '.join(f'`{each}`' for each in names)}")
    return _wrapped(f"- `{name}`: `{_hint(thing)}`")


def entry(module: str, name: str, thing: Any) -> str:
    """A class or a function: its signature, its docstring, and its methods."""
    kind = "class " if inspect.isclass(thing) else ""
    if getattr(thing, "_is_protocol", False):
        head = f"class {name}(Protocol)"
    else:
        head = f"{kind}{_call(name, thing)}"
    body = f"### {module}.{name}\n\n```python\n{head}\n```\n\n{_text(thing)}\n"
    if inspect.isclass(thing) and (lines := list(members(thing))):
        body += "\n" + "\n".join(lines) + "\n"
    return body


def members(thing: type) -> Iterator[str]:
    """The methods and properties of a class that have docstrings of their own."""
    for name, member in vars(thing).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property | cached_property):
            head = name
        elif inspect.isroutine(member) or isinstance(member, classmethod | staticmethod):
            head = _call(name, getattr(thing, name), WIDTH**2)
        else:
            continue
        if text := inspect.cleandoc(member.__doc__ or ""):
            yield _wrapped(f"- `{head}`: {' '.join(text.split())}")


def _call(name: str, thing: Callable[..., Any], width: int = WIDTH) -> str:
    """A signature in one line, or with one line per parameter if that is too long."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # a class that has none, such as an exception
        return name
    parameters, result, star = [], "", False
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            parameters.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        parameters.append(_parameter(each))
    if signature.return_annotation is not inspect.Signature.empty and not inspect.isclass(thing):
        result = f" -> {_hint(signature.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) + len("class ") <= width:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    text: str = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL:
        text = f"*{text}"
    if parameter.kind is parameter.VAR_KEYWORD:
        text = f"**{text}"
    if parameter.annotation is not parameter.empty:
        text += f": {_hint(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text


def _default(default: Any) -> str:
    """A default; functions and classes by their names, which are the same on every machine."""
    if repr(default) == "<factory>":  # of a dataclass
        return "..."
    return str(getattr(default, "__name__", repr(default)))


def _hint(hint: Any) -> str:
    """A type as its module would write it, without the names of modules."""
    if isinstance(hint, str):
        return hint
    return re.sub(r"(?:[a-z_]+\.)+", "", inspect.formatannotation(hint))


def _text(thing: Any) -> str:
    """A docstring, with formulas and tables in blocks of their own."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return re.sub(r"(?<!\n)\n(?=    )", "\n\n", text)


def _wrapped(text: str, indent: str = "  ") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(page(), end="")
