"""The one exception that means "the user can fix this", and how the others are told."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class BadInput(ValueError):
    """A mistake in what the user gave: one sentence that names what to change. The command line exits with status 2."""


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put a place ("task.1.model") before the sentence of a mistake that is found inside; "" leaves it as it is."""
    try:
        yield
    except BadInput as mistake:
        raise BadInput(f"{place}: {mistake}" if place else str(mistake)) from mistake


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A hint to put behind an "unknown ..." sentence: the known words that are nearest, or the list of them.

    Nearest are those that have the word as a part between dashes ("gvr": mmfl-gvr), then one that is spelt much like it, then those that
    begin with its first part ("mmfl-best": mmfl-gvr, mmfl-kvib ...), then one that is spelt a little like it.
    """
    word, known = str(word), sorted(known)
    first = word.partition("-")[0]
    near = (
        [each for each in known if word in each.split("-")]
        or difflib.get_close_matches(word, known, n=1, cutoff=0.7)
        or [each for each in known if first and each.startswith(f"{first}-")]
        or difflib.get_close_matches(word, known, n=1)
    )
    *others, last = [f"'{each}'" for each in near] or [""]
    return (
        f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
        if near
        else f"known: {', '.join(known)}"
    )


def first_line(error: BaseException) -> str:
    """An error's first line, or its kind where it has no words."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def what_and_where(error: BaseException) -> str:
    """An unforeseen error in one line, with the place in the code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' * bool(words)}{words} ({Path(place.filename).name}, line {place.lineno})"


def not_a_clients(error: Exception) -> bool:
    """Whether an error in a client's work is to end the run: this machine has no memory left (torch has a class for it on a GPU, and words
    on a CPU), or ROTA_DEBUG asks for the traceback.
    """
    full = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
    return full or bool(os.environ.get("ROTA_DEBUG"))
