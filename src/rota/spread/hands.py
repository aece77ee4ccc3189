"""Who trains: this process and the others of a run, and how rows are dealt out to them.

A hand does one piece of work after the other. Rows are dealt out so that all hands should finish at
the same time, by the speeds of each hand and of its connection in the pieces so far. Who trains a
row changes no number, so neither does a wrong guess.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rota.arrays import Array
from rota.spread.wire import Wire

logger = logging.getLogger(__name__)

WAIT = 60.0
"""A line says who is waited for, after so many seconds."""
SLOW, PIECES = 3.0, 20
"""A hand is slow if others are this many times faster, after so many pieces of work."""
FLOPS, BYTES = 1e10, 1e9
"""A thread's FLOPs and a connection's bytes per second, until they are measured."""
FORGET = 1.05
"""How much faster a hand may have become, each time that it was given nothing."""
FIRST, CHANGE = 100.0, 2.0
"""The most by which the first measurement and any later one change a speed, as factors."""


class Lost(RuntimeError):
    """A process of the run has ended or failed: the run ends, and can be resumed."""


class Hello(NamedTuple):
    """What a process says of itself when it is ready."""

    threads: int
    place: str
    """Its machine and process id."""
    digest: str
    """What it is about to run."""


class Answer(NamedTuple):
    """What came of a piece of work and how many seconds it took, or why it failed."""

    value: Any
    seconds: float
    failed: str = ""
    final: bool = False
    """Whether the failure must end the run."""


@dataclass
class Hand:
    """A process that trains; `speed` is in FLOPs, `rate` in bytes of results, per second."""

    rank: int
    place: str
    threads: int
    speed: float
    rate: float = BYTES
    pieces: int = 0
    """How many pieces of work it has done."""
    given: list[tuple[Future[Any], float]] = field(default_factory=list)
    """What it has to do, each with the expected seconds."""
    todo: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def seconds(self, flops: Array, nbytes: float) -> Array:
        """How long work is expected to take, and its results to come."""
        return flops / self.speed + nbytes / self.rate

    def busy(self) -> float:
        """How many seconds it still needs for what it has been given."""
        self.given = [each for each in self.given if not each[0].done()]
        return sum(seconds for _, seconds in self.given)

    def forget(self) -> None:
        """Trust the measured speeds a little less, or one bad piece of work would be the last."""
        self.speed *= FORGET
        self.rate *= FORGET

    def learn(self, flops: float, nbytes: float, computing: float, travelling: float) -> None:
        """Take in how long a piece of work took there, and on its way there and back."""
        change = FIRST if self.pieces == 0 else CHANGE
        if flops:
            self.speed = nearer(self.speed, flops / max(computing, 1e-9), change)
        if self.rank:
            self.rate = nearer(self.rate, nbytes / max(travelling, 1e-9), change)
        self.pieces += 1


def nearer(known: float, measured: float, change: float) -> float:
    """A speed after a new measurement, which counts as much as all earlier ones together.

    No measurement may change it by more than a factor: on a busy machine anything may be measured.
    """
    return known * min(max(math.sqrt(measured / known), 1 / change), change)


class Hands:
    """All processes of a run, as process 0 sees them; it is the first of them."""

    def __init__(
        self, wire: Wire, hellos: list[Hello], ended: Callable[[int], bool] = lambda rank: False
    ) -> None:
        """`ended` says whether a process is known to have ended; others show it when asked."""
        self.wire, self.ended, self.told = wire, ended, set[int]()
        self.hands = [
            Hand(rank, hello.place, hello.threads, hello.threads * FLOPS)
            for rank, hello in enumerate(hellos)
        ]
        self.hands[0].rate = np.inf
        self.threads = [
            threading.Thread(target=self._work, args=(hand,), daemon=True) for hand in self.hands
        ]
        for thread in self.threads:
            thread.start()

    def owners(self, flops: Array, nbytes: float) -> Array:
        """Who is to train each row, whose results have `nbytes`. Large rows are dealt first."""
        owner = np.zeros(len(flops), np.int64)
        ends = [hand.busy() for hand in self.hands]
        each = np.stack([hand.seconds(flops, nbytes) for hand in self.hands]).T.tolist()
        ranks = range(len(ends))
        for row in np.argsort(-flops, kind="stable").tolist():
            best = min(ranks, key=lambda rank: ends[rank] + each[row][rank])
            ends[best] += each[row][best]
            owner[row] = best
        for rank in set(ranks) - set(owner.tolist()):
            self.hands[rank].forget()
        return owner

    def ask(self, rank: int, work: Any, flops: float, nbytes: float) -> Future[Any]:
        """Give a hand some work: a message, or for this process a function."""
        hand, future = self.hands[rank], Future[Any]()
        hand.given.append((future, float(hand.seconds(np.asarray(flops), nbytes))))
        hand.todo.put((work, flops, nbytes, future, time.perf_counter()))
        return future

    def wait(self, rank: int, future: Future[Any]) -> Any:
        """What came of a piece of work. A line says for whom it waits, if it waits for long."""
        while True:
            try:
                return future.result(WAIT)
            except TimeoutError:
                if future.done():
                    raise
                logger.warning("waiting for %s, for %g s now", self.name(rank), WAIT)

    def look(self) -> None:
        """End the run if a process has ended, and say once of a slow process that it is slow."""
        for hand in self.hands:
            if self.ended(hand.rank):
                raise self._lost(hand.rank)
        speeds = [hand.speed / hand.threads for hand in self.hands]
        usual = float(np.sort(speeds)[len(speeds) // 2])
        for hand, speed in zip(self.hands, speeds, strict=True):
            known = min(hand.pieces for hand in self.hands) >= PIECES
            if known and hand.rank not in self.told and usual > SLOW * speed:
                self.told.add(hand.rank)
                name = self.name(hand.rank)
                logger.warning(
                    "%s trains %.1f times more slowly than the others, and gets fewer rows",
                    name,
                    usual / speed,
                )

    def name(self, rank: int) -> str:
        """A process as messages name it."""
        return f"process {rank} of {len(self.hands)} ({self.hands[rank].place})"

    def close(self, seconds: float) -> bool:
        """Let the other processes go. Returns whether all of them had done what they were asked."""
        idle = not any(hand.busy() for hand in self.hands)
        for hand in self.hands:
            hand.todo.put(None)
        for thread in self.threads if idle else []:
            thread.join(seconds)
        return idle

    def _work(self, hand: Hand) -> None:
        """Let a hand do what it is asked, one piece after the other."""
        torch.set_num_threads(1)
        ended = 0.0
        while (asked := hand.todo.get()) is not None:
            work, flops, nbytes, future, given = asked
            began = max(given, ended)
            try:
                answer = self._exchange(hand.rank, work) if hand.rank else timed(work)
            except BaseException as error:  # it belongs to whoever waits for the work
                future.set_exception(error)
                continue
            ended = time.perf_counter()
            computing = answer.seconds if hand.rank else ended - began
            hand.learn(flops, nbytes, computing, ended - began - computing)
            future.set_result(answer.value)
        if hand.rank:
            with suppress(RuntimeError):  # it may be gone already
                self.wire.send(hand.rank, None)

    def _lost(self, rank: int) -> Lost:
        return Lost(f"{self.name(rank)} has ended, or cannot be reached any more")

    def _exchange(self, rank: int, work: Any) -> Answer:
        """Send work to another process, and wait for what comes of it."""
        try:
            self.wire.send(rank, work)
            answer: Answer = self.wire.receive(rank)
        except RuntimeError as error:
            logger.debug("why a process is lost:", exc_info=error)
            raise self._lost(rank) from error
        if answer.failed:
            kind = Lost if answer.final else RuntimeError
            raise kind(f"{self.name(rank)} failed: {answer.failed}")
        return answer


def timed(work: Any) -> Answer:
    """What a function returns, and how long it took."""
    began = time.perf_counter()
    return Answer(work(), time.perf_counter() - began)
