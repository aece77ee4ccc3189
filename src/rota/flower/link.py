"""Letters over a SuperLink, by the server's side of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rota.flower import inside
from rota.flower.letter import Letter, LinkCut, LinkLost
from rota.flower.records import read
from rota.flower.superlink import Door

APP = {
    "pyproject.toml": b"""[project]
name = "rota"
version = "1.0.0"
description = "rota's own processes play both parts"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "rota"
[tool.flwr.app.components]
serverapp = "nothing.app:server"
clientapp = "nothing.app:client"
""",
    "nothing/__init__.py": b"",
    "nothing/app.py": (
        b"from flwr.clientapp import ClientApp\nfrom flwr.serverapp import ServerApp\n"
        b"client, server = ClientApp(), ServerApp()\n"
    ),
}
"""A SuperLink wants an app for each run. This one is never executed."""
PATIENCE = 60.0
"""Seconds that a SuperLink may be away before the run ends."""


class Link:
    """A run on a SuperLink, as a wire of letters. `known` are the public keys of its nodes."""

    pause = 0.02

    def __init__(self, door: Door, known: Sequence[bytes] = (), patience: float = PATIENCE) -> None:
        self.door, self.known, self.patience = door, known, patience
        self.session = self._begin()

    def _begin(self) -> inside.Session:
        door = self.door
        session = inside.Session(door.address, door.root, door.secret, self.patience, APP)
        for key in self.known:
            session.register(key)
        return session

    def nodes(self) -> list[int]:
        return self.session.nodes()

    def send(self, letters: list[tuple[int, Letter]], seconds: float) -> list[str]:
        return self.session.send(letters, seconds)

    def replies(self, keys: list[str]) -> Iterator[tuple[str, Letter | str]]:
        for key, message in self.session.replies(keys):
            yield key, message if isinstance(message, str) else read(message)
        if self.session.cut:
            self.session.cut = False
            raise LinkCut

    def renew(self) -> None:
        logging.getLogger("rota").warning("the SuperLink was restarted: a new run begins on it")
        with suppress(Exception):
            self.session.close()
        end = time.monotonic() + self.patience
        while True:
            try:
                self.session = self._begin()
                return
            except LinkLost:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def close(self) -> None:
        self.session.close()
