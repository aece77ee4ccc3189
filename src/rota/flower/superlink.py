"""Start a SuperLink, and let only its fleet interface be reached from outside.

The SuperLink itself listens on loopback. Its other interfaces ask for no login: whoever reaches
them may register nodes, and run code on Flower's own nodes. Where clients have keys, or come from
other machines, a gate (gate.py) listens for them, and passes on what goes to the fleet interface
alone. The gate also turns away keys that were removed: a SuperLink's database keeps them for good.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rota.errors import BadInput

say = logging.getLogger("rota")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_LOG_LEVEL": "ERROR",
}
"""What keeps flwr from reporting to its makers, and from asking for newer versions."""


@dataclass(frozen=True)
class Door:
    """How this machine reaches its SuperLink."""

    address: str
    root: bytes | None = None
    secret: bytes | None = None


def split(address: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(f"'{address}' is no address: give HOST:PORT, such as 127.0.0.1:9092")
    return host.strip("[]"), int(port)


def free_port() -> int:
    """A port of loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def installed() -> None:
    """Refuse to continue without flwr."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise BadInput(
            "Flower is not installed: install it with pip install 'rota[flower]'"
        ) from error


def quiet() -> None:
    """Set what keeps flwr quiet, in this process and in those that it starts."""
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)


@contextmanager
def started(
    listen: str,
    keys: Path | None = None,
    insecure: bool = False,
    database: Path | None = None,
) -> Iterator[Door]:
    """A SuperLink that nodes reach at `listen`, until the end of the block.

    `keys` is a folder by `rota keys`: then the SuperLink speaks TLS, and lets in only nodes that
    are registered. Without keys it listens on loopback alone, unless `insecure` is set.
    """
    host, port = split(listen)
    if keys is None and host not in LOOPBACK and not insecure:
        raise BadInput(
            f"{listen} can be reached from other machines: give --keys, or --insecure to send "
            "models as plain text to whoever asks"
        )
    quiet()
    gated = keys is not None or host not in LOOPBACK
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-flwr-"))
        inner = free_port() if gated else port
        words = [sys.executable, "-m", "rota.flower.superlink", "--host", "127.0.0.1"]
        words += ["--port", str(inner), "--isolation", "process"]
        words += ["--disable-runtime-dependency-installation"]
        door = Door(f"127.0.0.1:{inner}")
        if keys is None:
            words += ["--insecure"]
        else:
            root, secret = keys / "ca.crt", keys / "secret"
            for file in (root, secret, keys / "server.crt", keys / "server.key"):
                if not file.is_file():
                    raise BadInput(f"{file} is missing: make it with `rota keys {keys}`")
            words += ["--ssl-ca-certfile", str(root), "--ssl-certfile", str(keys / "server.crt")]
            words += ["--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"]
            words += ["--superexec-auth-secret-file", str(secret)]
            door = Door(door.address, root.read_bytes(), secret.read_bytes())
        if database is not None:
            words += ["--database", str(database)]
        stack.enter_context(running(words, home, inner))
        if gated:
            gate = [sys.executable, "-m", "rota.flower.gate", host, str(port), door.address]
            gate += [str(keys)] if keys is not None else []
            stack.enter_context(running(gate, home, port, host))
        yield door


@contextmanager
def running(words: list[str], home: str, port: int, host: str = "127.0.0.1") -> Iterator[Kept]:
    """A process that listens on a port, until the end of the block; it is started again if it dies.

    What it knew in memory is lost then, and the server's run begins anew on it.
    """
    near = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    if answers(near, port):
        raise BadInput(f"port {port} is in use: stop what uses it, or choose another port")
    kept = Kept(words, home)
    try:
        end = time.monotonic() + 60
        while not answers(near, port):
            if kept.process.poll() is not None or time.monotonic() > end:
                last = kept.log.read_text(errors="replace").strip().splitlines()[-3:]
                raise BadInput(f"Flower's SuperLink did not start: {' '.join(last) or 'no reason'}")
            time.sleep(0.05)
        threading.Thread(target=kept.watch, daemon=True).start()
        yield kept
    finally:
        kept.close()


class Kept:
    """A process that is started again when it dies."""

    def __init__(self, words: list[str], home: str) -> None:
        self.words, self.home, self.log = words, home, Path(home) / "log"
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.start()

    def start(self) -> None:
        """Start it."""
        environment = {**os.environ, "FLWR_HOME": self.home, "ROTA_PARENT": str(os.getpid())}
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self.words, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def watch(self) -> None:
        """Start it again whenever it is gone."""
        while not self.ended.wait(0.5):
            with self.lock:
                if self.process.poll() is not None and not self.ended.is_set():
                    say.warning("%s died and is started again", self.words[2])
                    self.start()

    def close(self) -> None:
        """End it."""
        self.ended.set()
        with self.lock:
            stop(self.process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process of a session of its own, and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


def answers(host: str, port: int) -> bool:
    """Whether somebody listens."""
    try:
        with socket.create_connection((host, port), 1.0):
            return True
    except OSError:
        return False


def ends_with_parent() -> None:
    """End this process when the one that started it has ended, even by kill -9."""
    parent = int(os.environ.get("ROTA_PARENT", "0"))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)
        os._exit(1)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Flower's own SuperLink, which ends with the process that started it."""
    from flwr.superlink.cli import flower_superlink

    ends_with_parent()
    flower_superlink()


if __name__ == "__main__":
    main()
