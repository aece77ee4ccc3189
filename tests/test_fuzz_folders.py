"""Run folders that are damaged or forged at random: one sentence, or the run that was there.

A checkpoint has a digest of its own, and lines have none: a line that was changed into another
valid line is what the run remembers, as docs/runs.md says. So models and checkpoints must come out
as those of an unbroken run, or not at all.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import federation, linear
from safetensors import safe_open
from test_damaged import flipped
from test_ui import Page

from rota import report
from rota.errors import BadInput
from rota.estimate import Yogi
from rota.experiment import Experiment
from rota.plan import Task
from rota.running import run as running
from rota.running.run import execute
from rota.running.summary import Stuck
from rota.sampling import SAMPLERS

FILES = [
    "config.toml",
    "rounds.jsonl",
    "data.json",
    "summary.json",
    "checkpoint/00000003/state.json",
    "checkpoint/00000003/state.safetensors",
    "checkpoint/00000002/state.json",
    "checkpoint/00000002/state.safetensors",
]
FORGED: list[Any] = [None, True, 0, -1, 1e400, 10**30, "x", "", [], {}, [[]], [1], {"round": 1}]
ROUNDS = 4
CASES = int(os.environ.get("ROTA_CASES", "2000"))
"""How many folders `make test-faults` tries."""


def make(rounds: int = ROUNDS) -> Experiment:
    task = Task(linear, federation([5, 12, 7, 9]), name="line", batch=5)
    return Experiment([task], SAMPLERS["kvib"](2), server=Yogi(), rounds=rounds, seed=3)


def forged(data: bytes, chance: random.Random) -> bytes:
    """JSON, or a line of JSON, with one value changed into another; other files are damaged."""
    data = data or b"{}"
    try:
        value = json.loads(data)
    except ValueError:
        lines = data.split(b"\n")
        number = chance.randrange(len(lines))
        if not lines[number].startswith(b"{") or len(lines) == 1:
            return flipped(data, chance)
        lines[number] = forged(lines[number], chance)
        return b"\n".join(lines)
    places, waiting = [(None, None)], [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            for key in each if isinstance(each, dict) else range(len(each)):
                places.append((each, key))
                waiting.append(each[key])
    inside, key = chance.choice(places)
    new = chance.choice(FORGED)
    if inside is None:
        value = new
    elif chance.random() < 0.3:
        del inside[key]
    else:
        inside[key] = new
    return json.dumps(value).encode()


def damage(folder: Path, chance: random.Random) -> str:
    """Do something bad to one or two files; returns what."""
    done = []
    for _ in range(chance.choice((1, 1, 2))):
        name, other = chance.choice(FILES), chance.choice(FILES)
        path = folder / name
        if not path.is_file():
            continue
        data = path.read_bytes()
        what = chance.choice(("flip", "flip", "cut", "swap", "forge", "forge", "empty", "remove"))
        match what:
            case "flip":
                path.write_bytes(flipped(data or b"x", chance))
            case "cut":
                path.write_bytes(data[: chance.randrange(len(data) + 1)])
            case "swap" if (folder / other).is_file():
                path.write_bytes((folder / other).read_bytes())
                (folder / other).write_bytes(data)
            case "forge":
                path.write_bytes(forged(data, chance))
            case "empty":
                path.write_bytes(b"")
            case _:
                path.unlink()
        done.append(f"{what} {name} {other}")
    return ", ".join(done)


def tensors(path: Path) -> dict[str, bytes]:
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def stop(record: dict[str, Any]) -> None:
    if record["round"] == 3:
        raise EOFError


class Folders:
    """A run of three rounds out of four, again and again damaged."""

    def __init__(self, place: Path) -> None:
        self.start, self.folder = place / "start", place / "run"
        execute(make(), engine="sequential", device="cpu", out=place / "whole")
        self.models = tensors(place / "whole/models/line.safetensors")
        with (
            mock.patch.object(running, "CHECKPOINT_SECONDS", -1.0),
            mock.patch.object(running, "CHECKPOINT_COSTS", -1.0),
            pytest.raises(EOFError),
        ):
            execute(make(), engine="sequential", device="cpu", out=self.start, watch=stop)
        self.sentences: list[str] = []
        self.refused = self.resumed = self.reported = self.unreported = 0

    def one(self, chance: random.Random) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.start, self.folder)
        what = damage(self.folder, chance)
        try:
            self.page()
            self.report()
            self.resume()
        except BaseException as error:
            error.add_note(what)
            raise

    def page(self) -> None:
        """The live page shows it, or says that there is no such run."""
        page = Page(self.folder)
        assert page.get("/api/runs").status_code == 200
        for path in ("/api/rows", "/api/details"):
            assert page.get(path, params={"run": "run"}).status_code in (200, 404)

    def report(self) -> None:
        if not (self.folder / "config.toml").exists():
            return
        try:
            report.write([self.folder], self.folder.parent / "page.html")
            self.reported += 1
        except BadInput as mistake:
            self.sentences.append(str(mistake))
            self.unreported += 1

    def resume(self) -> None:
        try:
            execute(make(), engine="sequential", device="cpu", out=self.folder, resume=True)
        except (BadInput, Stuck) as mistake:
            self.sentences.append(str(mistake))
            self.refused += 1
            return
        self.resumed += 1
        assert tensors(self.folder / "models/line.safetensors") == self.models


def fuzz(place: Path, number: int) -> Folders:
    seed = int(os.environ.get("ROTA_FUZZ", random.randrange(2**32)))
    print(f"seed {seed}: to repeat it, set ROTA_FUZZ={seed}")
    chance, folders = random.Random(seed), Folders(place)
    for _ in range(number):
        folders.one(chance)
    assert not any("\n" in sentence for sentence in folders.sentences)
    return folders


def test_folders_damaged_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folders = fuzz(tmp_path, 40)
    assert folders.refused + folders.resumed == 40


@pytest.mark.faults
def test_many_folders_damaged_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folders = fuzz(tmp_path, CASES)
    assert min(folders.refused, folders.resumed, folders.reported, folders.unreported) > CASES / 20
