"""The one exception that means "the user can fix this"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """A mistake in what the user gave: one sentence that names what to change. The command line exits with status 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to put behind an "unknown ..." sentence: the nearest known word, or the list of them."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
