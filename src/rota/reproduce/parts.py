"""The parts of a long reproduction: which are asked for, how long they may take, and a file for each that is finished."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rota.errors import BadInput, did_you_mean

Found = dict[str, Any]
"""A part, as its file has it."""


class Named(Protocol):
    """A part by its names."""

    @property
    def words(self) -> set[str]:
        """What `--only` may call it, alone or with others."""


Part = TypeVar("Part", bound=Named)


class TimeUp(Exception):
    """The time that was given is over."""


def until(minutes: float | None) -> float:
    """When so many minutes from now are over, on the monotonic clock; None: never."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def in_time(deadline: float) -> None:
    """Raise TimeUp from the deadline on."""
    if time.monotonic() >= deadline:
        raise TimeUp


def chosen(only: str | None, parts: list[Part]) -> list[Part]:
    """The parts that a list of words, separated by commas, names; all of them where there is none."""
    if not only:
        return parts
    wanted = {word.strip() for word in only.split(",")}
    known = set().union(*(part.words for part in parts))
    for word in sorted(wanted - known):
        raise BadInput(f"--only names '{word}', which is no part: {did_you_mean(word, known)}")
    return [part for part in parts if part.words & wanted]


def read(folder: Path, names: Iterable[str]) -> dict[str, Found]:
    """Those of the named parts that the folder has."""
    out = {}
    for name in names:
        path = folder / f"{name}.json"
        try:
            out[name] = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} is not a part's file ({error}): remove it to have the part run again") from error
    return out


def write(folder: Path, name: str, found: Found) -> None:
    """Keep a part: whole, or as it was before."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}.{os.getpid()}"
    draft.write_text(json.dumps(found, allow_nan=False) + "\n")
    draft.replace(folder / f"{name}.json")
