"""What a person sees while a run goes on, on standard error: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rota.record import Record

PLAIN_SECONDS = 2.0


def console() -> Console:
    return Console(stderr=True, highlight=False)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that something is being done that has no steps to count."""
    screen = console()
    if screen.is_terminal:
        with screen.status(what):
            yield
    else:
        yield


@contextmanager
def rounds(title: str, total: int, done: int = 0) -> Iterator[Callable[[Record], None]]:
    """Show the rounds of one run; call what this yields with every record."""
    screen = console()
    if not screen.is_terminal:
        yield _plain(title, total, done)
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"), TimeRemainingColumn())
    with Progress(*columns, console=screen) as bar:
        task = bar.add_task(title, total=total, completed=done, news="")
        last = ""

        def show(record: Record) -> None:
            nonlocal last
            if record["accuracy"] is not None:
                last = scores(record)
            bar.update(task, completed=record["round"], news=f"{last}  {clients(record)}")

        yield show


def _plain(title: str, total: int, done: int) -> Callable[[Record], None]:
    began = shown = time.monotonic()

    def show(record: Record) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < PLAIN_SECONDS and record["round"] < total:
            return
        shown = now
        left = (now - began) / (record["round"] - done) * (total - record["round"])
        news = scores(record) if record["accuracy"] is not None else ""
        print(f"{title}: round {record['round']}/{total}  {news}  {clients(record)}  {duration(left)} left", file=sys.stderr, flush=True)

    return show


def scores(record: Record) -> str:
    return f"accuracy {record['accuracy']:.2%}  loss {record['loss']:.4f}"


def clients(record: Record) -> str:
    failed = f", {len(record['failures'])} failed" if record["failures"] else ""
    return f"{sum(len(drawn) for drawn in record['cohort'].values())} clients{failed}"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
