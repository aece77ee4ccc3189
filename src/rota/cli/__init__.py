"""The command line's entry point: light, so that a Ctrl-C is one line and status 130 from the first moment on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """Run the command; the commands are in `app`, which takes some tenths of a second to load."""
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a cluster's stop is a Ctrl-C: checkpoint, then go
    with loading():
        from rota.cli.app import status
    sys.exit(status(sys.argv[1:] or ["--help"]))


@contextmanager
def loading() -> Iterator[None]:
    """While modules are loaded, a Ctrl-C ends the process at once: as an exception inside an import it may get lost, or abort torch."""
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


if __name__ == "__main__":
    main()
