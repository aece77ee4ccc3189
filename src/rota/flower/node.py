"""A node: the process that talks to the server, and the worker that it keeps.

The transport has no torch and no data, so nothing in a model can end it. The worker has both. If
the worker dies, hangs or takes too much memory, the server hears of it at once, and the next
request starts another one. The node's key, its number and what it was working on are kept on its
disk: a node that was killed is the same node when it comes back, and says what it has lost.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rota.errors import BadInput, first_line
from rota.flower.letter import OWN, Letter, Refused, read_head
from rota.flower.limits import Limits

PERIOD = 0.05
"""Seconds of one turn of stop and go, for a node that plays a slow device."""
PUSHES = 240
"""How often a reply is sent again, half a second apart, before the node gives up."""
STARTING = 300.0
"""Seconds that a worker may take to import torch, before another one is started."""
ADMITTED = 20.0
"""Seconds in which a server that has just started may still refuse a client that it will know."""
say = logging.getLogger("rota").info


@dataclass(frozen=True)
class Settings:
    """Where a node's server and its data are, and what its owner allows."""

    server: str
    data: Path
    state: Path
    root: bytes | None = None
    """The certificate of the authority that the server's was made by; None: plain text."""
    key: bytes | None = None
    """The node's secret key; None: the node makes one, which any server without keys takes."""
    allow: tuple[str, ...] = ()
    """Modules whose networks and losses may be trained."""
    threads: int = 0
    """How many threads torch takes; 0 leaves it to torch."""
    memory: float = 0.0
    """The most bytes that training may take; 0 is all of the machine's."""
    limits: Limits = field(default_factory=Limits)
    slow: float = 1.0
    """Play a device that is so many times slower, by stopping the worker again and again."""
    beat: float = 10.0
    """Seconds between signs of life; the SuperLink takes no fewer than 10."""
    poll: float = 0.03
    idle: float = 1.0
    """The shortest and the longest pause between two questions for work, in seconds."""


class Worker:
    """The process with torch and the data."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None
        self.started: float | None = None
        """When the process was started; None once it is ready for work."""

    def start(self) -> None:
        """Start the process, if it is not there."""
        if self.process is not None and self.process.poll() is None:
            return
        self.stop()
        ours, theirs = socket.socketpair()
        fd, s = theirs.fileno(), self.settings
        options = {
            "parent": os.getpid(),
            "pipe": fd,
            "folder": str(s.data),
            "allow": s.allow,
            "threads": s.threads,
            "memory": s.memory,
        }
        words = [sys.executable, "-m", "rota.flower.worker", json.dumps(options)]
        self.process = subprocess.Popen(words, pass_fds=[fd], start_new_session=True)
        theirs.close()
        self.pipe, self.started = Connection(ours.detach()), time.monotonic()

    def ask(self, letter: Letter, limit: float) -> Letter:
        """Let the worker answer a letter within some seconds."""
        try:
            self.start()
        except OSError as error:  # a machine without memory may start nothing
            raise Refused(f"the client cannot start its worker ({first_line(error)})") from error
        assert self.pipe is not None
        assert self.process is not None
        end = time.monotonic() + limit
        try:
            if self.started is not None:
                self._ready(self.started, limit)
            # a worker that hangs does not even read what we send: it is killed at the limit
            late = threading.Timer(max(0.0, end - time.monotonic()), self.process.kill)
            late.start()
            try:
                for each in (letter.kind.encode(), letter.text.encode()):
                    self.pipe.send_bytes(each)
                self.pipe.send_bytes(json.dumps(list(letter.parts)).encode())
                for part in letter.parts.values():
                    self.pipe.send_bytes(part)
                good, text, body = (self.pipe.recv_bytes() for _ in range(3))
            finally:
                late.cancel()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            status = self.stop()
            if time.monotonic() > end:
                raise Refused(f"the client had no result after {limit:.0f} seconds") from error
            raise Refused(f"the client's worker died ({how(status)})") from error
        if good != b"1":
            raise Refused(text.decode())
        return Letter("reply", read_head(text.decode()), {OWN: body} if body else {})

    def _ready(self, started: float, limit: float) -> None:
        """Wait until the process that was started has imported torch."""
        assert self.pipe is not None
        assert self.process is not None
        if not self.pipe.poll(limit):
            if time.monotonic() > started + STARTING:
                self.stop()
            raise Refused(f"the client's worker was not ready after {limit:.0f} seconds")
        self.pipe.recv_bytes()
        self.started, slow = None, self.settings.slow
        if slow > 1:
            threading.Thread(target=hold_back, args=(self.process, slow), daemon=True).start()

    def stop(self) -> int:
        """End the process: its exit status."""
        status = 0
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            status = self.process.wait()
            self.process = None
        return status


def how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}" + (
        ", perhaps because memory was full" if status == -signal.SIGKILL else ""
    )


def hold_back(process: subprocess.Popen[bytes], times: float) -> None:
    """Stop a process again and again, so that it is `times` as slow."""
    with suppress(ProcessLookupError):
        while process.poll() is None:
            time.sleep(PERIOD / times)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(PERIOD * (1 - 1 / times))
            os.kill(process.pid, signal.SIGCONT)


class Transport:
    """Pulls letters, lets the worker answer them, and pushes the replies."""

    def __init__(self, settings: Settings) -> None:
        from rota.flower import inside

        self.inside, self.settings, self.worker = inside, settings, Worker(settings)
        self.pending = settings.state / "pending"
        self.ended = threading.Event()
        try:
            settings.state.mkdir(parents=True, exist_ok=True)
            self.member = inside.Member(
                settings.server, settings.state, settings.root, settings.key, settings.beat
            )
            lock(settings.state)
        except BadInput:
            raise
        except (ssl.SSLError, ValueError) as error:
            raise BadInput("--root is no certificate: give the server's ca.crt") from error
        except OSError as error:
            raise BadInput(
                f"{settings.state} cannot be used ({error.strerror}): choose another --state"
            ) from error

    def run(self) -> None:
        """Work until `ended` is set."""
        import httpx

        try:
            self.worker.start()
            self._join()
            threading.Thread(target=self._live, daemon=True).start()
            self._confess()
            quiet, away = time.monotonic(), False
            while not self.ended.is_set():
                try:
                    message = self.member.pull()
                    away = False
                except httpx.HTTPStatusError as error:
                    say("the server says %d", error.response.status_code)
                    if error.response.status_code == 401:  # it has forgotten us
                        self._join()
                    self.ended.wait(0.5)
                    continue
                except Exception as error:
                    if not away:
                        say("the server cannot be reached (%s)", first_line(error))
                    away = True
                    self.ended.wait(0.5)
                    continue
                if message is None:
                    rest = max(self.settings.poll, 0.05 * (time.monotonic() - quiet))
                    self.ended.wait(min(self.settings.idle, rest) * random.uniform(0.8, 1.2))
                    continue
                self._work(message)
                quiet = time.monotonic()
        finally:
            self.worker.stop()
            self.member.leave()

    def _join(self) -> None:
        """Join the fleet; wait for a server that cannot be reached."""
        import httpx

        wait, told, end = 0.2, False, time.monotonic() + ADMITTED
        while not self.ended.is_set():
            try:
                number = self.member.join()
            except httpx.HTTPStatusError as error:
                away = error.response.status_code in self.inside.AWAY
                if self.member.heed(error.response):
                    say("this machine's clock is off by %s: the server's is used", self.member.off)
                    continue
                if not away and time.monotonic() > end:  # a new server may not know us yet
                    raise BadInput(
                        f"the server at {self.settings.server} does not let this client in "
                        f"({error.response.text:.200}): give it a --key that the server knows"
                    ) from error
            except httpx.TransportError as error:
                if "CERTIFICATE" in str(error).upper():
                    raise BadInput(
                        f"the server at {self.settings.server} has no certificate by our "
                        "authority: give the right --root, and a name that the certificate has"
                    ) from error
                end = time.monotonic() + ADMITTED
                if not told:
                    say("waiting for the server at %s", self.settings.server)
                told = True
            else:
                say("joined %s as node %d", self.settings.server, number)
                return
            self.ended.wait(wait)
            wait = min(2 * wait, 5.0)

    def _live(self) -> None:
        while not self.ended.wait(0.4 * self.settings.beat):
            with suppress(Exception):  # the pulls see what is wrong
                self.member.live()

    def _confess(self) -> None:
        """Say that we were killed at work, because the server believes that we still work."""
        from rota.flower import records

        if not self.pending.exists():
            return
        with suppress(Exception):  # half a file, or a run that is over
            old = self.inside.recall(self.pending.read_bytes())
            reason = "the client was killed at work and has restarted"
            self.member.push(records.error(reason, old), 0.0)
        self.pending.unlink(missing_ok=True)

    def _work(self, message: Any) -> None:
        """Answer one message."""
        from rota.flower import records

        began = time.monotonic()
        with suppress(OSError):  # a full disk must not keep us from working
            self.pending.write_bytes(self.inside.remember(message))
        try:
            letter = records.from_message(message)
            limit = letter.head.get("limit")
            if not isinstance(limit, int | float) or not 0 < limit <= 1e6:
                raise Refused("the letter has no sound limit of time")
            self.settings.limits.count(letter.nbytes)
            self.settings.limits.check(letter.kind, letter.nbytes)  # a reply is about as large
            found = self.worker.ask(letter, float(limit))
            self.settings.limits.count(found.nbytes)
            reply = records.answer(found, message)
        except Refused as why:
            say("refused: %s", why)
            reply = records.answer(records.refusal(why), message)
        self._push(lambda: self.member.push(reply, time.monotonic() - began))
        self.pending.unlink(missing_ok=True)

    def _push(self, push: Callable[[], None]) -> None:
        import httpx

        for _ in range(PUSHES):
            try:
                return push()
            except httpx.TransportError:
                if self.ended.wait(0.5):
                    return None
            except Exception as error:  # the run is over, or the reply came too late
                say("a reply was not taken (%s)", first_line(error))
                return None
        return None


def lock(folder: Path) -> None:
    """Let only one node use a folder; the lock ends with the process."""
    import fcntl

    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise BadInput(
            f"another client uses {folder}: stop it, or choose another --state"
        ) from error
