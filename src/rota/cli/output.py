"""What the commands print: results to standard output; and how an end before the end is told."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def print_line(text: str) -> None:
    """A line of results. A reader that has seen enough (`rota list | head -1`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    from rota.running.record import finite

    print_line(json.dumps(finite(value), allow_nan=False))


class Stopped(Exception):
    """A run ended before its last round: the exit status, what happened, and the command that goes on with it, if it had begun."""

    def __init__(self, status: int, what: str, again: str | None) -> None:
        super().__init__(what)
        self.status = status
        self.again = again


def interrupted(error: BaseException | None) -> bool:
    """Whether a Ctrl-C is what an error comes from: libraries that are loaded in the middle of it make an ImportError of one."""
    return isinstance(error, KeyboardInterrupt) or (
        error is not None and interrupted(error.__cause__ or error.__context__)
    )
