"""The command line's entry point. It loads fast, so that Ctrl-C always ends it in one line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """Run the command line. The commands are in `app`, which takes a moment to load."""
    # a cluster stops a job with SIGTERM: treat it as Ctrl-C, so that a checkpoint is written
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with loading():
        from rota.cli.app import status
    sys.exit(status(sys.argv[1:] or ["--help"]))


@contextmanager
def loading() -> Iterator[None]:
    """End the process at once on Ctrl-C while modules are being imported.

    An exception inside an import may get lost, or abort torch.
    """
    stops = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is signal.default_int_handler
    ]
    for number in stops:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in stops:
            signal.signal(number, signal.default_int_handler)


def _leave(*_: object) -> None:
    os.write(2, b"rota: interrupted\n")
    os._exit(130)
