"""What the commands print on standard output, and how the command line reports an early end."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def print_line(text: str) -> None:
    """Print a line of results. A reader that leaves early (`rota list | head -1`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, with null for numbers that are not finite."""
    from rota.running.record import finite

    print_line(json.dumps(finite(value), allow_nan=False))


def print_names(known: dict[str, str], as_json: bool) -> None:
    """Print the names that a command accepts, with their summaries."""
    if as_json:
        print_json([{"name": name, "summary": summary} for name, summary in known.items()])
        return
    width = max(map(len, known))
    for name, summary in known.items():
        print_line(f"{name:{width}}  {summary}")


class Stopped(Exception):
    """A run ended before its last round.

    It has the exit status, what happened, and the command that resumes the run if it had begun.
    """

    def __init__(self, status: int, what: str, again: str | None) -> None:
        super().__init__(what)
        self.status = status
        self.again = again


def interrupted(error: BaseException | None) -> bool:
    """Whether an error comes from a Ctrl-C. Libraries that are being imported may hide it."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return interrupted(error.__cause__ or error.__context__)
