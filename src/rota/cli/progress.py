"""What a person sees on standard error while something is running.

On a terminal it is a live line; elsewhere it is a line of text every few seconds.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.segment import ControlType
from rich.text import Text

if TYPE_CHECKING:
    from rota.running.record import Record  # which loads torch

LINE_SECONDS = 2.0
"""Time between two lines where there is no terminal."""


def console() -> Console:
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a line on standard error. If nobody reads it (a closed pipe), carry on."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def messages() -> Iterator[None]:
    """Show what rota logs as lines on standard error."""
    handler = logging.Handler()
    handler.emit = lambda record: say(f"rota: {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("rota")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def waiting(what: str, still: bool = False) -> Iterator[None]:
    """Show that something without countable steps is running.

    On a terminal it shows at once, elsewhere only when it takes long. `still` is for work that may
    show a progress of its own (a download): two moving lines would overwrite each other.
    """
    screen = console()
    if not screen.is_terminal:
        notice = threading.Timer(LINE_SECONDS, say, [f"{what} ..."])
        notice.start()
        try:
            yield
        finally:
            notice.cancel()
    elif still:
        screen.print(f"{what} ...", end="\r")
        try:
            yield
        finally:
            screen.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))
    else:
        with screen.status(what):
            yield


@contextmanager
def rounds(title: str, total: int, word: str = "accuracy") -> Iterator[Callable[[Record], None]]:
    """Show the rounds of one run. Call what this yields with each record.

    `word` is the name of the tasks' score.
    """
    screen = console()
    if not screen.is_terminal:
        yield _by_line(title, total, word)
        return
    # the numbers leave this much of the line to the title
    room = max(8, screen.width - 54 - len(f"round {total}/{total}"))
    name = TextColumn("{task.description}", markup=False)
    count = TextColumn("round {task.completed:.0f}/{task.total:.0f}", markup=False)
    news = TextColumn("{task.fields[news]}", markup=False)
    bars = [BarColumn(20)] if screen.width >= 100 else []
    with Progress(name, *bars, count, news, TimeLeft(), console=screen) as bar:
        short = title if len(title) <= room else f"{title[: room - 1]}…"
        task = bar.add_task(short, total=total, news="", start=False)
        last = ""

        def show(record: Record) -> None:
            nonlocal last
            if not bar.tasks[0].started:
                # a resumed run does not begin at round 1, and its earlier rounds took no time now
                bar.reset(task, completed=record["round"] - 1)
            last = scores(record, word) or last
            bar.update(task, completed=record["round"], news=f"{last}  {clients(record)}")

        yield show


@contextmanager
def together(runs: int) -> Iterator[Callable[[str, int, Record | None], None]]:
    """Show several runs that go on at once.

    Call what this yields with a run's name, its number of rounds, and each record; None is its end.
    """
    screen = console()
    if not screen.is_terminal:
        shown: dict[str, Callable[[Record], None]] = {}

        def tell(name: str, total: int, record: Record | None) -> None:
            if record is not None:
                shown.setdefault(name, _by_line(name, total))(record)

        yield tell
        return
    columns = (
        TextColumn(f"{{task.{each}}}", markup=False) for each in ("description", "fields[of]")
    )
    with Progress(*columns, TimeLeft(), console=screen) as bar:
        whole, ended = bar.add_task("all runs", total=runs, of=f"0/{runs}"), 0
        tasks, last = dict[str, TaskID](), dict[str, str]()

        def show(name: str, total: int, record: Record | None) -> None:
            nonlocal ended
            if record is None:
                ended += 1
                bar.update(whole, completed=ended, of=f"{ended}/{runs}")
                if name in tasks:
                    bar.remove_task(tasks.pop(name))
                return
            now = record["round"]
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total, completed=now - 1, of="")
            last[name] = scores(record) or last.get(name, "")
            bar.update(tasks[name], completed=now, of=f"round {now}/{total} {last[name]}")

        yield show


class TimeLeft(ProgressColumn):
    """The time until the last round, once it can be estimated."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        return Text(f"{duration(left)} left" if left and not task.finished else "")


def _by_line(title: str, total: int, word: str = "score") -> Callable[[Record], None]:
    """Progress without a terminal: a line every few seconds."""
    began = shown = time.monotonic()
    first, last = None, ""

    def show(record: Record) -> None:
        nonlocal began, shown, first, last
        now, done = time.monotonic(), record["round"]
        last = scores(record, word) or last
        if first is None:  # the first round also warms up: estimate the time left from its end
            first, began = done, now
        if now - shown < LINE_SECONDS and done < total:
            return
        shown = now
        left = ""
        if first < done < total:
            left = f"{duration((now - began) / (done - first) * (total - done))} left"
        words = [f"{title}: round {done}/{total}", last, clients(record), left]
        say("  ".join(filter(None, words)))

    return show


def scores(record: Record, word: str = "score") -> str:
    """The round's score and loss, or each model's score where the scores are not alike.

    It is empty for a round without a test.
    """
    if record["accuracy"] is not None:
        return f"{word} {score(record['accuracy'], word)}  loss {loss(record['loss'])}"
    tested = [
        f"{name} {score(model['accuracy'], word)}"
        for name, model in record["models"].items()
        if "accuracy" in model
    ]
    return "  ".join(tested)


def score(value: float | None, word: str = "accuracy") -> str:
    """An accuracy as a percentage, or another score as a number."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.2%}" if word == "accuracy" and 0 <= value <= 1 else f"{value:.4g}"


def loss(value: float | None) -> str:
    """A loss in a few digits. None stands for one that has overflowed."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def clients(record: Record) -> str:
    """5 clients, 1 failed; with several models a client may train more than one."""
    drawn = sum(len(clients) for clients in record["cohort"].values())
    failed = len(record["failures"])
    what = "client" if len(record["cohort"]) == 1 else "training"
    return f"{drawn} {what}{'s' * (drawn != 1)}" + (f", {failed} failed" if failed else "")


def duration(seconds: float) -> str:
    """Seconds in words, as precise as an estimate can be."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
