"""Watchers are told about a run as it happens: the progress display, a tracker, a live page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from rota.errors import BadInput
from rota.running.record import Record

__all__ = ["Watch", "Watcher"]

News = TypeVar("News")


class Watcher(Protocol):
    """Something that is told how a run begins, every round's record, and how the run ends."""

    def begin(self, config: dict[str, Any]) -> None:
        """The run begins or resumes; `config` is what config.toml says."""

    def round(self, record: Record) -> None:
        """A round is over."""

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        """The run is over: its summary, or what ended it early."""


Watch = Watcher | Callable[[Record], object] | Sequence[Watcher | Callable[[Record], object]] | None


def watchers(watch: Watch) -> list[Watcher]:
    """One watcher or several; a plain function is called with every record."""
    given: Any = watch if isinstance(watch, list | tuple) else [] if watch is None else [watch]
    out: list[Watcher] = []
    for each in given:
        if isinstance(each, type) or not (_watches(each) or callable(each)):
            raise BadInput(
                f"watch has a {type(each).__name__}: give functions of a round's record, or "
                "objects with begin, round and end"
            )
        out.append(each if _watches(each) else _calling(each))
    return out


def _calling(function: Callable[[Record], object]) -> Any:
    """A watcher that calls a function with every round's record."""
    return SimpleNamespace(begin=lambda _: None, round=function, end=lambda _: None)


def _watches(thing: Any) -> bool:
    return all(hasattr(thing, method) for method in ("begin", "round", "end"))


def tell(calls: Sequence[Callable[[News], object]], news: News) -> None:
    """Make all of the calls in order, even if one of them fails."""
    with ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call, news)
