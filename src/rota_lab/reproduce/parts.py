"""The parts of a long reproduction, and the file that keeps the finished ones.

The file has one line of JSON per finished part, in the order in which they finished: the part's
name under "part", then its numbers. Several processes may append to one file. If a part has
several lines, the last one counts.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import rota
from rota.engine import where
from rota.errors import BadInput, did_you_mean
from rota_lab.machine import described

Found = dict[str, Any]
"""The numbers of a finished part."""


class Piece(Protocol):
    """A part of a reproduction, which runs and is kept by itself."""

    @property
    def name(self) -> str:
        """The name under which the part is kept."""


class Choice(Piece, Protocol):
    """A part that `--only` can choose."""

    @property
    def words(self) -> set[str]:
        """What `--only` may call the part, alone or together with others."""


P = TypeVar("P", bound=Piece)
C = TypeVar("C", bound=Choice)
Group = TypeVar("Group")
Track = TypeVar("Track")


class TimeUp(Exception):
    """The given time is over."""


def until(minutes: float | None) -> float:
    """The deadline in this many minutes, on the monotonic clock; infinite for None."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def in_time(deadline: float) -> None:
    """Raise TimeUp if the deadline has passed."""
    if time.monotonic() >= deadline:
        raise TimeUp


def chosen(only: str | None, parts: list[C]) -> list[C]:
    """The parts that a comma-separated list of words names; all of them without a list."""
    if not only:
        return parts
    wanted = {word.strip() for word in only.split(",")}
    known = set().union(*(part.words for part in parts))
    for word in sorted(wanted - known):
        raise BadInput(f"--only names '{word}', which is no part: {did_you_mean(word, known)}")
    return [part for part in parts if part.words & wanted]


def results(out: Path | None, *names: str) -> list[Path]:
    """The files of these reproductions' finished parts; none without a folder for results."""
    return [] if out is None else [out / f"{name}.jsonl" for name in names]


def read(path: Path) -> dict[str, Found]:
    """All finished parts in a file, by name.

    A last line without a line end does not count: its writer was stopped while it wrote.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadInput(
            f"cannot read {path} ({error.strerror}): it must be a file of finished parts"
        ) from error
    found = {}
    for number, line in enumerate(lines, start=1):
        try:
            part = json.loads(line)
            found[str(part["part"])] = part
        except (ValueError, TypeError, KeyError) as error:
            raise BadInput(
                f"line {number} of {path} is not a finished part ({error}): "
                "remove the line, and the part will run again"
            ) from error
    return found


def append(path: Path, found: Found) -> None:
    """Add a finished part to a file: a whole line or nothing."""
    line = json.dumps(found, allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # cuts off the half line of a stopped writer
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def left(files: list[Path], parts: Iterable[P]) -> list[P]:
    """The parts that are not finished in any of the files."""
    finished = {name for path in files for name in read(path)}
    return [part for part in parts if part.name not in finished]


@dataclass(frozen=True)
class Runner:
    """How a reproduction runs its parts, and the numbers of those that are finished."""

    file: Path | None
    found: dict[str, Found]
    deadline: float
    device: str
    precision: str
    say: Callable[[str], None]


def start(
    files: list[Path],
    names: Collection[str],
    minutes: float | None,
    device: str,
    precision: str,
    say: Callable[[str], None],
) -> Runner:
    """A runner that knows the finished parts in `files`, and appends to the first of these files.

    Without files it keeps nothing.
    """
    kept: dict[str, Found] = {}
    for path in reversed(files):
        kept |= read(path)
    found = {name: kept[name] for name in names if name in kept}
    return Runner(files[0] if files else None, found, until(minutes), where(device), precision, say)


def run_parts(
    runner: Runner,
    wanted: Iterable[P],
    group: Callable[[P], Group],
    load: Callable[[Group], Track],
    run: Callable[[Track, P], tuple[Found, str]],
) -> None:
    """Run the unfinished parts until the time is up, and keep each one as soon as it is finished.

    `run` returns a part's numbers and a few words on them. Consecutive parts of one `group` share
    what `load` returns for it.
    """
    unfinished = [part for part in wanted if part.name not in runner.found]
    try:
        for same, parts in groupby(unfinished, key=group):
            in_time(runner.deadline)
            track = load(same)
            for part in parts:
                began = time.monotonic()
                numbers, words = run(track, part)
                seconds = round(time.monotonic() - began, 1)
                runner.found[part.name] = {
                    "part": part.name,
                    **numbers,
                    "seconds": seconds,
                    "precision": runner.precision,
                    "machine": described(runner.device),
                    "rota": rota.__version__,
                }
                if runner.file:
                    append(runner.file, runner.found[part.name])
                runner.say(f"{part.name}: {words}, {seconds:.0f} s")
            del track  # the next group needs the memory
            gc.collect()
            torch.cuda.empty_cache()
    except TimeUp:
        runner.say("the time is up: finished parts are kept")
