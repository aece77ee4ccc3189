"""A process of `rota compare --jobs N`: it trains the runs that it is given, one after the other.

Its argument is the list of its cores, such as 0,1; empty where it need not stay on some. It reads
one job per line from standard input, and writes what happens as lines of JSON to standard output.
It ends when its input ends; a run that is going on then keeps its checkpoint. SIGTERM ends it in
the same way.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rota.cli.output import Stopped

Tell = Callable[[dict[str, Any]], None]
PAUSE = 0.2
"""Seconds between two records of a run that are passed on."""


def main() -> None:
    """Train what comes in, until the input ends."""
    if sys.argv[1] and hasattr(os, "sched_setaffinity"):  # engines take as many threads as cores
        os.sched_setaffinity(0, set(map(int, sys.argv[1].split(","))))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's own code prints goes where messages go

    def tell(news: dict[str, Any]) -> None:
        out.write(json.dumps(news) + "\n")
        out.flush()

    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, jobs), daemon=True).start()
    _load()
    from rota.cli.progress import messages

    with messages():
        while True:
            job = jobs.get()
            try:
                signal.signal(signal.SIGTERM, _stop)
                tell(_train(job, tell))
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            except KeyboardInterrupt:
                sys.exit(130)


def _listen(lines: IO[str], jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Pass the jobs on; when nobody is left to send any, end this process."""
    for line in lines:
        jobs.put(json.loads(line))
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(*_: object) -> None:
    """End the run as Ctrl-C does, once: what is then written must not be interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _load() -> None:
    """Load what takes long before there is anything that an interruption could damage."""
    import rota.recipe
    import rota.running.run  # noqa: F401


def _train(job: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Train one run; its summary, or why there is none."""
    from rota import recipe
    from rota.cli.run import train
    from rota.errors import BadInput, what_and_where
    from rota.running.record import finite

    @contextmanager
    def rounds(title: str, total: int, word: str) -> Iterator[Callable[[Any], None]]:
        told = -PAUSE

        def show(record: Any) -> None:
            nonlocal told
            if record["round"] == total or time.monotonic() - told > PAUSE:
                told = time.monotonic()
                tell({"total": total, "record": finite(record)})

        yield show

    try:
        recipe.read(job["recipe"], job["allow"])  # it imports the modules that lie beside it
        out, again = Path(job["out"]), job["again"]
        how, track = job["how"], job["track"]
        done = train(
            job["config"], job["name"], out, how, job["resume"], again, track=track, rounds=rounds
        )
        return {"summary": finite(done)}
    except Stopped as end:
        if end.status == 130:
            raise KeyboardInterrupt from end
        return {"failed": str(end), "again": end.again is not None}
    except BadInput as mistake:
        return {"failed": str(mistake), "again": False}
    except Exception as error:
        return {"failed": f"the run failed: {what_and_where(error)}", "again": False}


if __name__ == "__main__":
    main()
