"""What the shell completes: names, and the keys and values of --set and --vary.

Nothing here loads torch: words.json has what recipes can say. `python -m rota_lab.words` writes it,
and a test says when it is out of date.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

READY = ("recipe", "ready")


@functools.cache
def known() -> dict[str, Any]:
    """The words of words.json."""
    text = resources.files("rota.cli").joinpath("words.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def recipes() -> list[str]:
    """The ready recipes."""
    files = resources.files("rota").joinpath(*READY).iterdir()
    return sorted(each.name.removesuffix(".toml") for each in files if each.name.endswith(".toml"))


def members() -> list[str]:
    """What `rota list` takes."""
    tables = known()["members"].values()
    return list(dict.fromkeys([*known()["kinds"], *recipes(), *(n for t in tables for n in t)]))


def starting(words: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Completion from a list that is made only when it is needed."""
    return lambda incomplete: [word for word in words() if word.startswith(incomplete)]


def setting(incomplete: str) -> list[str]:
    """`KEY=VALUE`, for --set."""
    config = _config()
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={each}" for each in _values(key, config) if each.startswith(value)]
    return _keys(key, config)


def varying(incomplete: str) -> list[str]:
    """`KEY=A,B,...`, for --vary."""
    config = _config()
    key, equals, given = incomplete.partition("=")
    if not equals:
        return _keys(key, config)
    done, comma, value = given.rpartition(",")
    taken = done.split(",")
    return [
        f"{key}={done}{comma}{each}"
        for each in _values(key, config)
        if each.startswith(value) and each not in taken
    ]


def _words() -> list[str]:
    """The command line so far, as bash or another shell gives it."""
    text = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    try:
        return shlex.split(text)
    except ValueError:  # a quotation mark without its other half
        return text.split()


def _config() -> dict[str, Any]:
    """The recipe that the command names, with the settings before this one; empty if unreadable."""
    words, config = _words(), dict[str, Any]()
    name = next((word for word in words if word in recipes() or word.endswith(".toml")), "")
    with contextlib.suppress(OSError, ValueError):
        ready = resources.files("rota").joinpath(*READY, f"{name}.toml")
        text = ready if name in recipes() else Path(name)
        config = tomllib.loads(text.read_text(encoding="utf-8"))
    tasks = config.get("task", [])
    first = (tasks[0] if tasks else {}) if isinstance(tasks, list) else tasks
    flat = _flat({**config, "task": first}, "")
    for given in (after for word, after in pairwise(words[:-1]) if word == "--set"):
        key, _, value = given.partition("=")
        flat[re.sub(r"^task\.\d+\.", "task.", key)] = value
    return flat


def _flat(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
            out[prefix + key] = value.get("name")
        else:
            out[prefix + key] = value
    return out


def _options(config: dict[str, Any]) -> dict[str, list[str]]:
    """All keys and the values that they take, for the members that the recipe names."""
    words = known()
    found: dict[str, list[str]] = dict(words["keys"])
    for place, table in words["members"].items():
        found[place] = list(table)
        name = config.get(place) or words["defaults"].get(place)
        for option, values in table.get(name, {}).items():
            found[f"{place}.{option}"] = values
    return found


def _keys(start: str, config: dict[str, Any]) -> list[str]:
    """Keys with "="; of a single one also the values, so that the shell adds no space to it."""
    numbered = re.match(r"task\.\d+\.", start)
    task = numbered[0] if numbered else "task."
    names = [re.sub(r"^task\.", task, key) for key in _options(config)]
    fitting = [name for name in names if name.startswith(start)]
    if len(fitting) != 1:
        return [f"{name}=" for name in fitting]
    (key,) = fitting
    now = config.get(re.sub(r"^task\.\d+\.", "task.", key))
    values = _values(key, config) or ([] if now is None else [str(now)])
    return [f"{key}=", *(f"{key}={value}" for value in values)]


def _values(key: str, config: dict[str, Any]) -> list[str]:
    return _options(config).get(re.sub(r"^task\.\d+\.", "task.", key), [])


@contextlib.contextmanager
def in_bash() -> Iterator[None]:
    """Let bash complete words with "=", which it splits into three.

    The parts become one word again for the completion, and what stands before the last "=" is left
    out of the replies, because bash replaces only the part after it.
    """
    if os.environ.get("_ROTA_COMPLETE") != "complete_bash":
        yield
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")
    place = int(os.environ.get("COMP_CWORD", "0"))
    if len(words) < 2:  # words that are not one per line have not been split
        yield
        return
    words = words[: place + 1] + [""] * (place + 1 - len(words))
    joined: list[str] = []
    for number, word in enumerate(words):
        glued = number > 1 and (word == "=" or words[number - 1] == "=")
        if glued and not (word == "" and words[number - 1] != "="):
            joined[-1] += word
        else:
            joined.append(word)
    cut = joined[-1].rpartition("=")[0] + "=" if "=" in joined[-1] else ""
    before = {name: os.environ.get(name, "") for name in ("COMP_WORDS", "COMP_CWORD")}
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
    replies = io.StringIO()
    try:
        with contextlib.redirect_stdout(replies):
            yield
    finally:
        os.environ |= before
        for line in replies.getvalue().splitlines():
            print(line.removeprefix(cut))
