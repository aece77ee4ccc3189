"""BadInput, the exception that means "the user can fix this", and sentences about other errors."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class BadInput(ValueError):
    """A mistake in the input: one sentence that names what to change.

    The command line exits with status 2. What cannot be printed, such as a line's end in a name
    that the sentence quotes, becomes a space.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__("".join(c if c.isprintable() else " " for c in sentence))


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put a place ("task.1.model") before the sentence of a mistake inside; "" adds nothing."""
    try:
        yield
    except BadInput as mistake:
        raise BadInput(f"{place}: {mistake}" if place else str(mistake)) from mistake


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A hint for the end of an "unknown ..." sentence: the nearest known words, or all of them.

    The nearest words are, in this order: words that have the given one as a part between dashes
    ("gvr": mmfl-gvr); one with a very similar spelling; words with the same first part
    ("mmfl-best": mmfl-gvr, mmfl-kvib ...); one with a somewhat similar spelling.
    """
    word, known = str(word), sorted(known)
    first = word.partition("-")[0]
    near = (
        [each for each in known if word in each.split("-")]
        or difflib.get_close_matches(word, known, n=1, cutoff=0.7)
        or [each for each in known if first and each.startswith(f"{first}-")]
        or difflib.get_close_matches(word, known, n=1)
    )
    if not near:
        return f"known: {', '.join(known)}"
    *others, last = [f"'{each}'" for each in near]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def what_and_where(error: BaseException) -> str:
    """An unforeseen error in one line, with the line of code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    what = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return f"{what} ({Path(place.filename).name}, line {place.lineno})"


def not_a_clients(error: Exception) -> bool:
    """Whether an error must end the run: this machine has no memory left, or ROTA_DEBUG is set."""
    kinds = type(error).__name__ in ("MemoryError", "OutOfMemoryError", "Lost")  # on a GPU; spread
    full = kinds or isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return full or bool(os.environ.get("ROTA_DEBUG"))
