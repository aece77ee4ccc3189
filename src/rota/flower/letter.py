"""What travels between a server and a node: a kind, a JSON text, and named bytes.

The bytes are tensors as safetensors writes them (codec.py). Nothing else travels: no code, no
pickle. Parts that several letters share, such as a model, are stored by the SuperLink once.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

VERSION = 1
"""A node and a server must speak the same version."""
LARGEST = 64 << 20
"""The most characters of a letter's JSON text."""
LOSSES = "query.losses"
"""The kind of letter that asks for losses; Flower wants such a name."""
OWN = "own"
"""The part that belongs to one letter alone."""


class Refused(Exception):
    """Work that a node does not do, or a letter that cannot be read; the text says why."""


class LinkLost(Exception):
    """The SuperLink does not know our run any more, because it was restarted."""


class LinkCut(Exception):
    """The SuperLink was away for a moment: letters on their way may be lost."""


class Lost(str):
    """Why there is no reply, where the node has lost the letter and may be asked again."""


@dataclass(frozen=True)
class Letter:
    """One message. `head` is a JSON object; `parts` are bytes by name.

    A reply with more than `most` bytes is refused before all of it is in memory.
    """

    kind: str
    head: dict[str, Any]
    parts: dict[str, bytes] = field(default_factory=dict)
    most: int = LARGEST

    @property
    def text(self) -> str:
        return json.dumps(self.head, separators=(",", ":"))

    @property
    def nbytes(self) -> int:
        """The letter's size in bytes."""
        return len(self.text) + sum(map(len, self.parts.values()))


def read_head(text: object) -> dict[str, Any]:
    """The JSON object in a text that may come from anybody."""
    if not isinstance(text, str) or len(text) > LARGEST:
        raise Refused("the letter has no readable text")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the letter's text is not JSON ({error})") from error
    if not isinstance(head, dict):
        raise Refused("the letter's text is not a JSON object")
    if head.get("version") != VERSION:
        raise Refused(
            f"the letter has version {head.get('version')!r:.20}, and this is version {VERSION}: "
            "install the same version of rota on both sides"
        )
    return head


def plain(text: object) -> str:
    """A text that may come from anybody, as one line that a terminal and a page can show."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:1000])


def number(value: Any, low: float = -math.inf) -> float:
    """A number that may come from anybody; NaN if it is none, infinite, or below `low`."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    most = sys.float_info.max
    return float(value) if known and max(low, -most) <= value <= most else float("nan")


class Wire(Protocol):
    """How letters travel; a node is a number."""

    pause: float
    """The shortest time between two looks for replies, in seconds."""

    def nodes(self) -> list[int]:
        """The nodes that are online."""

    def send(self, letters: list[tuple[int, Letter]], seconds: float) -> list[str]:
        """Send letters that live for some seconds, and return a key for each one's reply."""

    def replies(self, keys: list[str]) -> Iterator[tuple[str, Letter | str]]:
        """The replies that have come, or why there is none.

        LinkLost: no reply will come. LinkCut: some may not come.
        """

    def renew(self) -> None:
        """Begin again after LinkLost."""

    def close(self) -> None:
        """End the run."""
