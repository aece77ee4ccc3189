"""The parts of a long reproduction: which are asked for, how long they may take, and a file for each that is finished."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import rota
from rota.engine import where
from rota.errors import BadInput, did_you_mean
from rota_lab.reproduce.result import machine

Found = dict[str, Any]
"""A part, as its file has it."""


class Named(Protocol):
    """A part has a name, which is that of its file."""

    @property
    def name(self) -> str: ...


class Worded(Protocol):
    """A part by its names."""

    @property
    def words(self) -> set[str]:
        """What `--only` may call it, alone or with others."""


Part = TypeVar("Part", bound=Named)
Choice = TypeVar("Choice", bound=Worded)
Kind = TypeVar("Kind")
Track = TypeVar("Track")


class TimeUp(Exception):
    """The time that was given is over."""


def until(minutes: float | None) -> float:
    """When so many minutes from now are over, on the monotonic clock; None: never."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def in_time(deadline: float) -> None:
    """Raise TimeUp from the deadline on."""
    if time.monotonic() >= deadline:
        raise TimeUp


def chosen(only: str | None, parts: list[Choice]) -> list[Choice]:
    """The parts that a list of words, separated by commas, names; all of them where there is none."""
    if not only:
        return parts
    wanted = {word.strip() for word in only.split(",")}
    known = set().union(*(part.words for part in parts))
    for word in sorted(wanted - known):
        raise BadInput(f"--only names '{word}', which is no part: {did_you_mean(word, known)}")
    return [part for part in parts if part.words & wanted]


def read(folder: Path, names: Iterable[str]) -> dict[str, Found]:
    """Those of the named parts that the folder has."""
    out = {}
    for name in names:
        path = folder / f"{name}.json"
        try:
            out[name] = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{path} is not a part's file ({error}): remove it to have the part run again"
            ) from error
    return out


def left(folder: Path | None, parts: Iterable[Part]) -> list[Part]:
    """Those that the folder does not have yet."""
    return [part for part in parts if folder is None or not (folder / f"{part.name}.json").exists()]


def write(folder: Path, name: str, found: Found) -> None:
    """Keep a part: whole, or as it was before."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}.{os.getpid()}"
    draft.write_text(json.dumps(found, allow_nan=False) + "\n")
    draft.replace(folder / f"{name}.json")


@dataclass(frozen=True)
class Job:
    """How a reproduction's parts are run, and those that are finished."""

    folder: Path | None
    found: dict[str, Found]
    deadline: float
    device: str
    precision: str
    say: Callable[[str], None]


def start(
    folder: Path | None,
    names: Iterable[str],
    minutes: float | None,
    device: str,
    precision: str,
    say: Callable[[str], None],
) -> Job:
    """A job that goes on from what the folder has; without one nothing is kept."""
    return Job(
        folder, read(folder, names) if folder else {}, until(minutes), where(device), precision, say
    )


def work(
    job: Job,
    wanted: Iterable[Part],
    kind: Callable[[Part], Kind],
    load: Callable[[Kind], Track],
    run: Callable[[Track, Part], tuple[Found, str]],
) -> None:
    """Run the parts that are not found yet, until the time is up, and keep each as soon as it is finished.

    `run` gives a part's numbers and a few words on them. Parts of one `kind` that follow one another share what is loaded for it.
    """
    try:
        for same, parts in groupby(
            (part for part in wanted if part.name not in job.found), key=kind
        ):
            in_time(job.deadline)
            track = load(same)
            for part in parts:
                began = time.monotonic()
                numbers, words = run(track, part)
                how = {
                    "seconds": round(time.monotonic() - began, 1),
                    "precision": job.precision,
                    "machine": machine(job.device),
                }
                job.found[part.name] = numbers | how | {"rota": rota.__version__}
                job.say(f"{part.name}: {words}, {how['seconds']:.0f} s")
                if job.folder:
                    write(job.folder, part.name, job.found[part.name])
            del track  # the next one needs the room
            gc.collect()
            torch.cuda.empty_cache()
    except TimeUp:
        job.say("the time is up: what is finished is kept")
