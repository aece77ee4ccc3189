"""Finding a data set's files: on this machine first, then from its official mirrors, and never without a checksum.

Each file is looked for in `$ROTA_DATA/<folder>`, in the cache (`$XDG_CACHE_HOME` or `~/.cache`, then `rota/<folder>`) and in
`/usr/share/datasets/<folder>` (where Debian's dataset packages go), and is downloaded into the cache where none has it.
Checking every file on every run costs a fraction of a second, so there is no note of earlier checks to go stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rota.errors import BadInput

TIMEOUT = 10.0  # seconds without an answer, or without a byte
TRIES = 3  # on each mirror, once it has answered
PAUSE = 0.5  # seconds before the second try; doubles with each
SYSTEM = Path("/usr/share/datasets")


@dataclass(frozen=True)
class Remote:
    """A file of a data set: its name, the MD5 sums it may have (the official one first), its mirrors, and other names it goes by."""

    name: str
    md5: tuple[str, ...]
    urls: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def cache(folder: str) -> Path:
    """Where a data set's downloads go."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rota" / folder


def places(folder: str) -> list[Path]:
    """The folders a data set is looked for in, in order."""
    own = os.environ.get("ROTA_DATA")
    if own and not Path(own).expanduser().is_dir():
        raise BadInput(
            f"ROTA_DATA is {own}, which is not a folder: set it to the folder that holds {folder}/, or unset it"
        )
    return ([Path(own).expanduser() / folder] if own else []) + [cache(folder), SYSTEM / folder]


def at_hand(folder: str, files: tuple[Remote, ...]) -> bool:
    """Whether all files are on this machine (they are not checked)."""
    return len(_look(folder, files)) == len(files)


def on_disk(folder: str, files: tuple[Remote, ...]) -> dict[str, Path]:
    """Those of the files that are on this machine, checked, by name."""
    found = _look(folder, files)
    for file in files:
        if file.name in found:
            _check(found[file.name], file)
    return found


def find(folder: str, files: tuple[Remote, ...]) -> dict[str, Path]:
    """The path of each file by its name; what is not on this machine is downloaded into the cache."""
    found = on_disk(folder, files)
    for file in files:
        if file.name not in found:
            target = cache(folder) / file.name
            why = _download(file, target)
            if why:
                raise BadInput(
                    _missing(folder, [f.name for f in files if f.name not in found], why)
                )
            found[file.name] = target
    return found


def _look(folder: str, files: tuple[Remote, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        candidates = (
            place / name for place in places(folder) for name in (file.name, *file.aliases)
        )
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
            f"{path} is damaged (its MD5 is {md5}, not {file.md5[0]}): replace it by a good copy{again}"
        )


def _md5() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)


def _missing(folder: str, names: list[str], why: str) -> str:
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more files" if len(names) > 4 else "")
    return (
        f"{folder} is not on this machine and could not be downloaded ({why}): put {listed} into $ROTA_DATA/{folder} or "
        f"{cache(folder)}, or use the data 'digits' or 'synthetic', which need no files"
    )


def _download(file: Remote, target: Path) -> str:
    """Bring a file into the cache, from the first mirror that delivers it whole. Returns why not, or nothing.

    A mirror that cannot be reached is not tried twice, so that without a network this fails at once; one that answers and
    then breaks off, sends damaged bytes or is overloaded (HTTP 5xx, 429) gets TRIES tries, with growing pauses.
    """
    why = "it has no mirror"
    for url in file.urls:
        host = urlsplit(url).hostname
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                md5 = _fetch(url, file, target)
            except HTTPError as error:
                error.close()
                why = f"{host} answered HTTP {error.code} for {file.name}"
                if error.code < 500 and error.code != 429:
                    break
            except URLError as error:
                why = f"{host} cannot be reached: {error.reason}"
                if (
                    isinstance(error.reason, socket.gaierror)
                    and error.reason.errno == socket.EAI_AGAIN
                ):
                    return why  # no name server answers: the other mirrors' names would only wait for it again
                break
            except (OSError, HTTPException) as error:
                why = f"{host} broke off {file.name}: {error}"
            else:
                if md5 in file.md5:
                    return ""
                why = f"{host} sent {file.name} damaged: its MD5 is {md5}, not {file.md5[0]}"
    return why


def _fetch(url: str, file: Remote, target: Path) -> str:
    """Download one URL and return its MD5; only if that is right does the file appear at `target`, whole."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        reply = urlopen(Request(url, headers={"User-Agent": "rota"}), timeout=TIMEOUT)
    except TimeoutError as error:
        raise URLError("it does not answer") from error
    md5 = _md5()
    with reply:
        try:
            with _writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                out = part.open("wb")
            with (
                out,
                _progress(file.name, int(reply.headers.get("Content-Length") or 0)) as advance,
            ):
                while block := reply.read(1 << 16):
                    md5.update(block)
                    with _writing(target):
                        out.write(block)
                    advance(len(block))
            if md5.hexdigest() in file.md5:
                with _writing(target):
                    os.replace(part, target)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
    return md5.hexdigest()


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Trouble with the disk is not the mirror's fault, and another mirror would not help."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write {target} ({error.strerror}): make room, or set XDG_CACHE_HOME to another folder"
        ) from error


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, where that is a terminal."""
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
