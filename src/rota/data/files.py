"""Find a data set's files: on this machine first, then on its official mirrors.

Each file is looked for in `$ROTA_DATA/<folder>`, in the cache (`$XDG_CACHE_HOME` or `~/.cache`,
then `rota/<folder>`) and in `/usr/share/datasets/<folder>`, where Debian's dataset packages put
their files. If no place has it, it is downloaded into the cache. Every file is checked against its
MD5 sum on every run. That costs a fraction of a second, and no note of an earlier check can go
stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rota.errors import BadInput
from rota.files import replacing

TIMEOUT = 10.0  # seconds without an answer, or without a byte
TRIES = 3  # on each mirror, once it has answered
PAUSE = 0.5  # seconds before the second try; doubles with each further one
SYSTEM = Path("/usr/share/datasets")


@dataclass(frozen=True)
class Remote:
    """A file of a data set.

    `md5` are the sums it may have, the official one first; `urls` are its mirrors; `aliases` are
    other names under which some copies keep it.
    """

    name: str
    md5: tuple[str, ...]
    urls: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def cache(folder: str) -> Path:
    """The folder that a data set's downloads go into; a temporary one if there is no home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # this user has no home folder
        base = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return base / "rota" / folder


def places(folder: str) -> list[Path]:
    """The folders in which a data set is looked for, in order."""
    own = os.environ.get("ROTA_DATA")
    if own and not Path(own).expanduser().is_dir():
        raise BadInput(
            f"ROTA_DATA is {own}, which is not a folder: set it to the folder that holds "
            f"{folder}/, or unset it"
        )
    first = [Path(own).expanduser() / folder] if own else []
    return [*first, cache(folder), SYSTEM / folder]


def at_hand(folder: str, files: tuple[Remote, ...]) -> bool:
    """Whether all files are on this machine. They are not checked."""
    return len(_look(folder, files)) == len(files)


def on_disk(folder: str, files: tuple[Remote, ...]) -> dict[str, Path]:
    """The paths, by name, of the files that are on this machine. They are checked."""
    found = _look(folder, files)
    for file in files:
        if file.name in found:
            _check(found[file.name], file)
    return found


def find(folder: str, files: tuple[Remote, ...]) -> dict[str, Path]:
    """The path of each file by its name. Missing files are downloaded into the cache."""
    found = on_disk(folder, files)
    for file in files:
        if file.name not in found:
            target = cache(folder) / file.name
            why = _download(file, target)
            if why:
                missing = [each.name for each in files if each.name not in found]
                raise BadInput(_missing(folder, missing, why))
            found[file.name] = target
    return found


def _look(folder: str, files: tuple[Remote, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        names = (file.name, *file.aliases)
        candidates = (place / name for place in places(folder) for name in names)
        path = next((path for path in candidates if path.is_file()), None)
        if path:
            found[file.name] = path
    return found


def _check(path: Path, file: Remote) -> None:
    try:
        with path.open("rb") as stream:
            md5 = hashlib.file_digest(stream, _md5).hexdigest()
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror}): make it readable, or remove it"
        ) from error
    if md5 not in file.md5:
        again = ", or remove it to have it downloaded again" if file.urls else ""
        raise BadInput(
            f"{path} is damaged (its MD5 is {md5}, not {file.md5[0]}): replace it by a good copy"
            f"{again}"
        )


def _md5() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)


def _missing(folder: str, names: list[str], why: str) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more files" if len(names) > 4 else "")
    return (
        f"{folder} is not on this machine and could not be downloaded ({why}): put {listed} into "
        f"$ROTA_DATA/{folder} or {cache(folder)}, or use the data 'digits' or 'synthetic', "
        "which need no files"
    )


class _BrokenOff(Exception):
    """A mirror stopped in the middle of a file, or sent other bytes than it should."""


def _download(file: Remote, target: Path) -> str:
    """Download a file into the cache from the first mirror that delivers it whole.

    Returns an empty text, or the reason why no mirror did. A mirror that cannot be reached is not
    tried twice, so without a network this fails at once. A mirror that breaks off, sends damaged
    bytes or is overloaded (HTTP 5xx, 429) gets TRIES tries, with growing pauses.
    """
    why = "it has no mirror"
    for url in file.urls:
        host = urlsplit(url).hostname
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                _fetch(url, file, target)
                return ""
            except HTTPError as error:
                error.close()
                why = f"{host} answered HTTP {error.code} for {file.name}"
                if error.code < 500 and error.code != 429:
                    break
            except URLError as error:
                why = f"{host} cannot be reached: {error.reason}"
                reason = error.reason
                if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_AGAIN:
                    return (
                        why  # no name server answers, so other names would only wait for it again
                    )
                break
            except (OSError, HTTPException) as error:
                why = f"{host} broke off {file.name}: {error}"
            except _BrokenOff as error:
                why = f"{host} {error}"
    return why


def _fetch(url: str, file: Remote, target: Path) -> None:
    """Download one URL. The file appears at `target` only if it is whole and its MD5 is right."""
    try:
        reply = urlopen(Request(url, headers={"User-Agent": "rota"}), timeout=TIMEOUT)
    except TimeoutError as error:
        raise URLError("it does not answer") from error
    md5 = _md5()
    length = reply.headers.get("Content-Length") or ""
    with (
        reply,
        _writing(target),
        _progress(file.name, int(length) if length.isdecimal() else 0) as advance,
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, shared=True) as part:
            with part.open("wb") as out:
                while block := _read(reply, file):
                    md5.update(block)
                    out.write(block)
                    advance(len(block))
            found = md5.hexdigest()
            if found not in file.md5:
                raise _BrokenOff(f"sent {file.name} damaged: its MD5 is {found}, not {file.md5[0]}")


def _read(reply: HTTPResponse, file: Remote) -> bytes:
    try:
        return reply.read(1 << 16)
    except (OSError, HTTPException) as error:
        raise _BrokenOff(f"broke off {file.name}: {error}") from error


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Report trouble with the disk: no other mirror would help."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write {target} ({error.strerror}): make room, or set XDG_CACHE_HOME to "
            "another folder"
        ) from error


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total or None)
        yield lambda count: progress.advance(task, count)
