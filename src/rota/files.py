"""Write files so that a reader or a crash sees the old file or the new one, never half of one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rota.errors import BadInput


def filename(name: str) -> str:
    """A model's name as a file's name."""
    return quote(name, safe=" ", errors="replace")


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """Replace a file in one step: write to the path that this yields.

    After an exception the old file stays as it is. `shared` is for files that several processes may
    replace at the same time: each then writes to a name of its own.
    """
    name = f".{path.name}.{secrets.token_hex(4)}.part" if shared else f"{path.name}.part"
    aside = path.with_name(name)
    try:
        yield aside
        sync(aside)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def write(path: Path, text: str) -> None:
    """Replace a file's text in one step; characters that UTF-8 cannot hold become "?"."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="replace")


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Read a file that holds one JSON object. If it does not, the sentence ends with the advice."""
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{path} is damaged ({reason}): {advice}") from error
    return found
