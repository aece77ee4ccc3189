"""What a person sees while something goes on, on standard error: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.segment import ControlType
from rich.text import Text

if TYPE_CHECKING:
    from rota.running.record import Record  # which loads torch

PLAIN_SECONDS = 2.0


def console() -> Console:
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """A line on standard error. That nobody reads it any more (a closed pipe) is no reason to stop."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str, still: bool = False) -> Iterator[None]:
    """Show that something is being done that has no steps to count: at once on a terminal, elsewhere once it takes long.

    `still` does without motion, for what may show a progress of its own (a download): two on one line would fight for it.
    """
    screen = console()
    if not screen.is_terminal:
        notice = threading.Timer(PLAIN_SECONDS, say, [f"{what} ..."])
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
def rounds(title: str, total: int) -> Iterator[Callable[[Record], None]]:
    """Show the rounds of one run; call what this yields with every record."""
    screen = console()
    if not screen.is_terminal:
        yield _plain(title, total)
        return
    room = max(
        8, screen.width - 54 - len(f"round {total}/{total}")
    )  # what the numbers leave of a line
    texts = (
        "{task.description}",
        "round {task.completed:.0f}/{task.total:.0f}",
        "{task.fields[news]}",
    )
    name, count, news = (TextColumn(text, markup=False) for text in texts)
    bars = [BarColumn(20)] if screen.width >= 100 else []
    with Progress(name, *bars, count, news, TimeLeft(), console=screen) as bar:
        task = bar.add_task(
            title if len(title) <= room else f"{title[: room - 1]}…",
            total=total,
            news="",
            start=False,
        )
        last = ""

        def show(record: Record) -> None:
            nonlocal last
            if (
                not bar.tasks[0].started
            ):  # a resumed run does not begin at round 1, and its earlier rounds took no time
                bar.reset(task, completed=record["round"] - 1)
            last = scores(record) or last
            bar.update(task, completed=record["round"], news=f"{last}  {clients(record)}")

        yield show


class TimeLeft(ProgressColumn):
    """The time until the last round, once it can be told."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        return Text(f"{duration(left)} left" if left and not task.finished else "")


def _plain(title: str, total: int) -> Callable[[Record], None]:
    began = shown = time.monotonic()
    first, last = None, ""

    def show(record: Record) -> None:
        nonlocal began, shown, first, last
        now, done = time.monotonic(), record["round"]
        last = scores(record) or last
        if first is None:  # the first round also warms up: the time left is counted from its end
            first, began = done, now
        if now - shown < PLAIN_SECONDS and done < total:
            return
        shown = now
        left = (
            f"{duration((now - began) / (done - first) * (total - done))} left"
            if first < done < total
            else ""
        )
        say(
            "  ".join(filter(None, (f"{title}: round {done}/{total}", last, clients(record), left)))
        )

    return show


def scores(record: Record) -> str:
    """The round's accuracy and loss, or each model's own score where these are not alike; nothing where the models were not tested."""
    if record["accuracy"] is not None:
        return f"accuracy {score(record['accuracy'])}  loss {loss(record['loss'])}"
    return "  ".join(
        f"{name} {score(model['accuracy'])}"
        for name, model in record["models"].items()
        if "accuracy" in model
    )


def score(value: float | None) -> str:
    """An accuracy as a percentage; a score that is no share as it is."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.2%}" if 0 <= value <= 1 else f"{value:.4g}"


def loss(value: float | None) -> str:
    """A loss in few digits; one that has overflowed is kept as null, and said."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def clients(record: Record) -> str:
    drawn, failed = (
        sum(len(clients) for clients in record["cohort"].values()),
        len(record["failures"]),
    )
    what = "client" if len(record["cohort"]) == 1 else "training"
    return f"{drawn} {what}{'s' * (drawn != 1)}" + (f", {failed} failed" if failed else "")


def duration(seconds: float) -> str:
    """Seconds as a person says them, as far as an estimate goes."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
