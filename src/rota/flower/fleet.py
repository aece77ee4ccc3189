"""Who is in the fleet, and one exchange of letters with some of its nodes.

An exchange ends by itself: when all have replied, when enough have, or at its deadline. The
deadline comes from what was measured: nobody has to guess it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.flower.letter import VERSION, Letter, LinkCut, LinkLost, Lost, Wire, number

SHARE, LONG = 0.02, 0.5
"""Seconds between two looks for replies: as a share of the time without any, and at most. Each look
takes time of the SuperLink, which has better things to do while clients train."""
LOOK = 2.0
"""Seconds between two looks at who is online."""
AWAY = 5.0
"""A node has left when it has been offline for more than this many seconds."""
MEET = 30.0
"""Seconds that nodes have to come back after the SuperLink was restarted."""
QUERY = 60.0
"""Seconds that a node has to say who it is."""
FIRST = 600.0
"""The longest time to wait for a node whose speed is not known, in seconds."""
SLACK = 20.0
"""Seconds that a worker may take to start again."""
LOT = 8
"""How many letters are made and sent at once, so that memory does not grow with the cohort."""
TRIES = 3
"""How often a node that loses its letter is asked."""
LONGEST = 255
"""The most letters of a client's name, which is that of a file."""
KEPT = 5
"""How many of its last times are remembered of a node."""
say = logging.getLogger("rota")


@dataclass(frozen=True)
class Rules:
    """When a round ends, and who is left out.

    `deadline` is in seconds. Without it, a round waits `patience` times the slowest drawn node's
    usual time, and 20 seconds more, in which a worker may be restarted. With a `quantile` it waits
    that many times this quantile of the drawn nodes' usual times. A round also ends when the share
    `enough` of its rows is there. A client that fails `strikes` times in a row is put aside for
    `rest` rounds. With `ordered`, updates are added up in the order of the plan, so that a run
    repeats bit for bit.
    """

    deadline: float | None = None
    patience: float = 3.0
    quantile: float = 1.0
    enough: float = 1.0
    strikes: int = 3
    rest: int = 10
    ordered: bool = False

    def check(self) -> None:
        """Refuse rules by which no round could succeed."""
        if self.deadline is not None and not self.deadline > 0:
            raise BadInput(f"deadline is {self.deadline:g}: it must be above 0 seconds")
        if not self.patience >= 1:
            raise BadInput(f"patience is {self.patience:g}: it must be at least 1")
        for key in ("quantile", "enough"):
            if not 0 < getattr(self, key) <= 1:
                raise BadInput(f"{key} is {getattr(self, key):g}: it must be above 0, up to 1")
        if self.strikes < 1 or self.rest < 0:
            raise BadInput("strikes must be at least 1, and rest at least 0")

    def limit(self, usual: Sequence[float | None]) -> float:
        """How many seconds a round may take, given its nodes' usual times (None: unknown)."""
        if self.deadline is not None:
            return self.deadline
        known = [each for each in usual if each is not None]
        if not known or (len(known) < len(usual) and self.quantile == 1):
            return FIRST
        return min(FIRST, self.patience * float(np.quantile(known, self.quantile)) + SLACK)


@dataclass(eq=False)
class Ask:
    """What one node is asked in an exchange: some rows, and how its letter is made."""

    node: int
    rows: Array
    clients: list[str]
    make: Callable[[int], Letter]
    job: Any = None
    """What the rows are rows of; a reply that comes too late may still be of use with it."""
    nbytes: int = 0
    begun: float = 0.0
    sent: float = 0.0
    tries: int = 0


@dataclass
class Answer:
    """What came of it: a letter, or why there is none; and after how many seconds."""

    ask: Ask
    reply: Letter | str
    seconds: float


@dataclass
class Fleet:
    """The nodes of a wire, and which clients each of them holds."""

    wire: Wire
    rules: Rules = field(default_factory=Rules)
    tasks: list[str] = field(default_factory=list)
    """The names of the run's tasks; nodes say how many examples of each their clients have."""
    members: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    """Node -> its clients' numbers of examples of each task."""
    machines: dict[int, dict[str, float]] = field(default_factory=dict)
    home: dict[str, int] = field(default_factory=dict)
    """Client -> its node."""
    offline: dict[int, float] = field(default_factory=dict)
    """Nodes that are offline -> since when. A node that restarts is offline for a moment."""
    queries: dict[str, tuple[int, float]] = field(default_factory=dict)
    rivals: dict[int, int] = field(default_factory=dict)
    """Node -> the node that holds a client of which it said that it holds it."""
    late: dict[str, tuple[Ask, float]] = field(default_factory=dict)
    """Questions whose replies a round did not wait for, and until when these may come."""
    overdue: list[Answer] = field(default_factory=list)
    """Replies that came after their round, if the engine has a use for them."""
    times: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT))
    )
    failed: Counter[str] = field(default_factory=Counter)
    aside: dict[str, int] = field(default_factory=dict)
    """Client -> the last round that it is put aside for."""
    counts: Counter[str] = field(default_factory=Counter)
    looked: float = -1e9

    # --- who is there

    def look(self) -> None:
        """See who is online, and ask new nodes who they are."""
        self.looked = time.monotonic()
        online, asked = set(self.wire.nodes()), {node for node, _ in self.queries.values()}
        lost = self.members.keys() - online
        self.offline = {node: self.offline.get(node, self.looked) for node in lost}
        for node in [node for node, holder in self.rivals.items() if holder in lost]:
            del self.rivals[node]
            self.members.pop(node, None)  # it is asked again who it is
        new = sorted(online - self.members.keys() - asked)
        if new:
            head = {"version": VERSION, "tasks": self.tasks, "limit": QUERY}
            keys = self.wire.send([(node, Letter("query", head)) for node in new], QUERY)
            end = time.monotonic() + QUERY
            self.queries |= {key: (node, end) for key, node in zip(keys, new, strict=True)}
        for key in [k for k, (_, end) in self.queries.items() if time.monotonic() > end]:
            del self.queries[key]

    def refresh(self) -> None:
        """Look before a round, also at a SuperLink that was restarted since the last one."""
        try:
            self.look()
        except LinkLost:
            held = set(self.home)
            self._again([])
            self.wait(lambda: held <= self.home.keys(), MEET)

    def met(self, key: str, reply: Letter | str) -> None:
        """A node says who it is."""
        node, _ = self.queries.pop(key)
        if isinstance(reply, str):
            say.warning("node %d does not say who it is: %s", node, reply)
            self.members[node] = {}
            return
        told = reply.head.get("clients")
        found: dict[str, list[int]] = {}
        for name, sizes in told.items() if isinstance(told, dict) else ():
            fine = isinstance(sizes, list) and len(sizes) == len(self.tasks)
            fine = fine and name.isprintable() and len(name) <= LONGEST
            if not fine or not all(type(n) is int and 0 <= n < 1 << 40 for n in sizes):
                say.warning("node %d: what it says of client %.40r is wrong", node, name)
                continue
            before = self.home.get(name)
            if before is not None and before != node and before not in self.offline:
                say.warning(
                    "node %d says that it holds client %r: node %d does", node, name, before
                )
                self.rivals[node] = before
                continue
            found[name], self.home[name] = sizes, node
        self.members[node] = found
        numbers = {k: reply.head.get(k) for k in ("memory", "cores", "gflops")}
        self.machines[node] = {
            k: number(v) for k, v in numbers.items() if isinstance(v, int | float)
        }

    def wait(self, wanted: Callable[[], bool], seconds: float) -> bool:
        """Wait until enough nodes have said who they are."""
        end = time.monotonic() + seconds
        while True:
            try:
                self.look()
                pause = time.monotonic() + LOOK / 4
                while self.queries and time.monotonic() < pause:
                    for _ in self._replies({}):
                        pass
                    time.sleep(self.wire.pause)
            except LinkCut:
                self.queries.clear()
            except LinkLost:
                self._renew()
            if wanted():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(self.wire.pause)

    def sizes(self, task: int) -> dict[str, int]:
        """How many examples of a task each client has."""
        every = {name: n for held in self.members.values() for name, n in held.items()}
        return {name: every[name][task] for name in self.home if name in every}

    # --- an exchange

    def usual(self, node: int) -> float | None:
        """How long a node usually takes; None if that is not known.

        A node that has not replied yet is judged by the speed that it told, and by the others.
        """
        times, mine = self.times.get(node), self._speed(node)
        if times:
            return float(np.median(times))
        known = [(np.median(t), self._speed(other)) for other, t in self.times.items() if t]
        scaled = [float(t * speed / mine) for t, speed in known if speed and mine]
        return max(scaled, default=None)

    def _speed(self, node: int) -> float:
        """The speed that a node told; 0 if it told none."""
        told = self.machines.get(node, {}).get("gflops", 0.0)
        return told if 0 < told < np.inf else 0.0

    def exchange(self, asks: list[Ask]) -> Iterator[Answer]:
        """Send each node its letters, one at a time, and give what comes back.

        A node that lost its letter, because it was restarted, is asked again when it is back.
        """
        waiting: dict[str, Ask] = {}
        letters = Counter(ask.node for ask in asks)
        usual = [(self.usual(node), number) for node, number in letters.items()]
        limit = self.rules.limit([t if t is None else t * number for t, number in usual])
        end, todo, lost = time.monotonic() + limit, [*asks], list[Ask]()
        news = time.monotonic()
        rows, done = sum(len(ask.rows) for ask in asks), 0
        wanted = math.ceil(self.rules.enough * rows - 1e-9)
        while (todo or waiting or lost) and time.monotonic() < end:
            lot = first_of(todo, waiting.values())
            if done >= wanted and not lot:
                break
            try:
                if lot:
                    waiting |= self._send(lot, limit)
                    todo = [ask for ask in todo if ask not in lot]
                for answer in self._replies(waiting):
                    news = time.monotonic()
                    if isinstance(answer.reply, Lost) and answer.ask.tries < TRIES:
                        lost.append(answer.ask)
                        continue
                    done += 0 if isinstance(answer.reply, str) else len(answer.ask.rows)
                    yield answer
                if time.monotonic() > self.looked + LOOK:
                    self.look()
                    for key in [key for key, ask in waiting.items() if self.away(ask.node)]:
                        yield self._end(waiting.pop(key), "its node went offline")
                    todo += [ask for ask in lost if ask.node not in self.offline]
                    lost = [ask for ask in lost if ask.node in self.offline]
                    for ask in [ask for ask in lost if self.away(ask.node)]:
                        lost.remove(ask)
                        yield self._end(ask, "its node went offline")
            except LinkCut:  # a reply to the first question counts as late
                self._leave(waiting, limit)
                todo += waiting.values()
                waiting = {}
                self.queries.clear()
            except LinkLost:
                todo = self._again([*waiting.values(), *lost, *todo])
                waiting, lost, end = {}, [], time.monotonic() + limit
            if not lot:
                time.sleep(max(self.wire.pause, min(LONG, SHARE * (time.monotonic() - news))))
        rest = "the round did not wait for it"
        if done < wanted:
            rest = f"no reply within {limit:.1f} seconds"
        for ask in [*lost, *todo]:
            yield self._end(ask, rest)
        self._leave(waiting, limit)
        for ask in waiting.values():
            yield self._end(ask, rest)

    def _leave(self, waiting: dict[str, Ask], limit: float) -> None:
        """Stop waiting for these; replies that still come are late."""
        end = time.monotonic() + 2 * limit
        self.late |= {key: (replace(ask), end) for key, ask in waiting.items()}

    def _end(self, ask: Ask, why: str) -> Answer:
        return Answer(ask, why, time.monotonic() - ask.sent)

    def _send(self, lot: list[Ask], limit: float) -> dict[str, Ask]:
        begun = time.monotonic()
        letters = [(ask.node, ask.make(ask.node)) for ask in lot]
        for _, letter in letters:
            letter.head["limit"] = limit
        keys = self.wire.send(letters, 3 * limit + 60)
        for ask, (_, letter) in zip(lot, letters, strict=True):
            ask.nbytes, ask.begun, ask.sent = letter.nbytes, begun, time.monotonic()
            ask.tries += 1
        return dict(zip(keys, lot, strict=True))

    def _replies(self, waiting: dict[str, Ask]) -> Iterator[Answer]:
        """The replies that have come. Queries and late replies are handled here."""
        keys = [*waiting, *self.queries, *self.late]
        for key, reply in self.wire.replies(keys) if keys else ():
            if key in self.queries:
                self.met(key, reply)
            elif key in self.late:
                ask, _ = self.late.pop(key)
                seconds = time.monotonic() - ask.sent
                if not isinstance(reply, str):
                    self.counts["late"] += 1
                    self.times[ask.node].append(seconds)
                    self.overdue += [Answer(ask, reply, seconds)] if ask.job is not None else []
                    say.warning("node %d: a reply came after %.1f s: too late", ask.node, seconds)
            elif key in waiting:
                ask = waiting.pop(key)
                seconds = time.monotonic() - ask.sent
                if not isinstance(reply, str):
                    self.times[ask.node].append(seconds)
                yield Answer(ask, reply, seconds)
        for key in [k for k, (_, end) in self.late.items() if time.monotonic() > end]:
            del self.late[key]

    def _renew(self) -> None:
        """Begin a new run after the SuperLink has forgotten ours."""
        self.wire.renew()
        self.counts["restarts"] += 1
        held = (self.members, self.home, self.offline, self.queries, self.late, self.times)
        for known in (*held, self.rivals):
            known.clear()

    def _again(self, asks: list[Ask]) -> list[Ask]:
        """Ask the same questions in a new run, when the SuperLink has forgotten ours."""
        self._renew()
        names = {name for ask in asks for name in ask.clients}
        self.wait(lambda: names <= self.home.keys(), MEET)
        for ask in asks:
            ask.node = self.home.get(ask.clients[0], ask.node)
        return asks

    # --- who keeps failing

    def judge(self, client: str, good: bool, now: int) -> None:
        """Count a client's failures in a row, and put it aside if there are too many."""
        if good:
            self.failed.pop(client, None)
            return
        self.failed[client] += 1
        if self.failed[client] >= self.rules.strikes:
            self.aside[client] = now + self.rules.rest
            del self.failed[client]
            say.warning(
                "client '%s' failed %d times in a row: it is put aside until round %d",
                client,
                self.rules.strikes,
                now + self.rules.rest,
            )

    def absent(self, client: str, now: int) -> str:
        """Why a client is not asked in a round; empty if it is."""
        if now <= self.aside.get(client, 0):
            return f"put aside until round {self.aside[client]}, because it kept failing"
        node = self.home.get(client)
        if node is None:
            return "no node holds this client"
        return "its node is offline" if self.away(node) else ""

    def away(self, node: int) -> bool:
        """Whether a node has left."""
        return self.looked - self.offline.get(node, np.inf) > AWAY

    def close(self) -> None:
        """End the run."""
        self.wire.close()


def first_of(todo: Sequence[Ask], waiting: Iterable[Ask]) -> list[Ask]:
    """The next letters to send: to each node that is not at work, the first of its own."""
    busy, lot = {ask.node for ask in waiting}, list[Ask]()
    for ask in todo:
        if ask.node not in busy and len(lot) < LOT:
            busy.add(ask.node)
            lot.append(ask)
    return lot
