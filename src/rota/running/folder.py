"""One run's folder on disk: what is in it, and how it is written so that a crash loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save_file

from rota import weights
from rota.data.describe import describe
from rota.errors import BadInput
from rota.experiment import Experiment, State
from rota.files import filename, read_json, replacing, sync, write
from rota.recipe.differences import differences
from rota.running import checkpoint
from rota.running.record import Record, finite, is_record

CHANGEABLE = ("rounds", "target", "evaluate")
"""What may change when a run is resumed; everything else must be as it was."""


class Gone(RuntimeError):
    """The run's folder was moved or deleted while the run was in it."""


class Folder:
    """A run's folder; `create` and `reopen` are contexts that keep other processes out of it."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config, self.rounds = path, config, path / "rounds.jsonl"

    @classmethod
    @contextmanager
    def create(cls, path: Path, config: dict[str, Any]) -> Iterator[Folder]:
        """The folder of a new run; it must be empty or not exist yet."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(path, error) from error
        with locked(path):
            refuse_used(path)
            try:
                write(path / "config.toml", tomli_w.dumps(config))
            except OSError as error:
                raise _cannot_write(path, error) from error
            yield cls(path, config)

    @classmethod
    @contextmanager
    def reopen(cls, path: Path, config: dict[str, Any]) -> Iterator[Folder]:
        """The folder of an earlier run, to resume it; only the keys in CHANGEABLE may differ."""
        if not (path / "config.toml").exists():
            raise BadInput(
                f"there is no run to resume in {path}: leave --resume out to start one there"
            )
        _refuse_other(path, _read_config(path), config)
        with locked(path):
            yield cls(path, config)

    def read_state(self, like: State) -> tuple[State, float]:
        """The last good checkpoint of this configuration, or the beginning; cuts rounds.jsonl."""
        check = partial(_refuse_other, self.path, now=self.config)
        found = checkpoint.load(self.path / "checkpoint", like, check)
        state, wall = found or (like, 0.0)
        lines = self._lines()
        if len(lines) < state.round:
            raise BadInput(
                f"{self.rounds} has {len(lines)} lines, but the checkpoint is of round "
                f"{state.round}: put the missing lines back, or start with another --out"
            )
        if self.rounds.exists():
            os.truncate(self.rounds, sum(len(line) + 1 for line in lines[: state.round]))
        return state, wall

    def begin(self, ended: bool) -> None:
        """Write the present configuration; remove the summary of a run that now has more rounds."""
        if _plain(_read_config(self.path)) != _plain(self.config):
            write(self.path / "config.toml", tomli_w.dumps(self.config))
        if not ended:
            (self.path / "summary.json").unlink(missing_ok=True)

    def records(self) -> list[Record]:
        """The rounds written so far."""
        out: list[Record] = []
        for number, line in enumerate(self._lines(), start=1):
            try:
                out.append(json.loads(line))
                if not is_record(out[-1], number):
                    raise ValueError(f"it is not the record of round {number}")
            except (ValueError, RecursionError) as error:
                raise BadInput(
                    f"line {number} of {self.rounds} is damaged ({error}): fix it, or start again "
                    "with another --out"
                ) from error
        return out

    def _lines(self) -> list[bytes]:
        """The complete lines of rounds.jsonl: a crash may have left half a line at the end."""
        return self.rounds.read_bytes().split(b"\n")[:-1] if self.rounds.exists() else []

    def append(self, record: Record) -> None:
        """Add a round's line, unbuffered: an interrupted write must not leave a part for later."""
        self._here()
        line = json.dumps(finite(record)).encode() + b"\n"
        with self.rounds.open("ab", buffering=0) as file:
            while line:
                line = line[file.write(line) :]

    def save(self, state: State, wall_seconds: float) -> None:
        """Write a checkpoint, after the lines up to it have reached the disk."""
        self._here()
        if self.rounds.exists():
            sync(self.rounds)
        checkpoint.save(self.path / "checkpoint", state, wall_seconds, self.config)
        sync(self.path)

    def _here(self) -> None:
        """Refuse to write if the folder is gone: a new one would hold only a part of the run."""
        if not (self.path / "config.toml").exists():
            raise Gone(
                f"the folder {self.path} is no longer there: it was moved or deleted during the "
                "run, so resume the moved one or start again"
            )

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._here()
        write(self.path / "summary.json", json.dumps(finite(summary), indent=2) + "\n")

    def write_data(self, experiment: Experiment) -> None:
        """data.json: who holds how much of what. A resumed run must use the same data."""
        path, names = self.path / "data.json", experiment.names
        found = {n: describe(task.data) for n, task in zip(names, experiment.tasks, strict=True)}
        if not path.exists():
            write(path, json.dumps(found) + "\n")
            return
        before = read_json(path, "fix it, or start again with another --out")
        for name, data in found.items():
            if before.get(name) != data:
                raise BadInput(
                    f"the data of '{name}' are not the data that the run in {self.path} started "
                    "with: use the same data, or another --out"
                )

    def write_models(self, experiment: Experiment, state: State) -> None:
        """models/NAME.safetensors: the models by their modules' own tensor names."""
        self._here()
        (self.path / "models").mkdir(exist_ok=True)
        names = experiment.models(state.models)
        for name, model in zip(names, state.models, strict=True):
            module = experiment.tasks[model.task].build()
            path = self.path / "models" / f"{filename(name)}.safetensors"
            with replacing(path) as aside:
                named = weights.named(module, model.weights)
                save_file({key: value.cpu().clone() for key, value in named.items()}, aside)


def _read_config(path: Path) -> dict[str, Any]:
    """What config.toml says."""
    file = path / "config.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(
            f"{file} cannot be read ({error}): fix it, or choose another --out"
        ) from error


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as JSON has it: TOML knows dates, and Python knows tuples."""
    return dict(json.loads(json.dumps(config, default=str)))


def _refuse_other(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume with another configuration, and say what differs."""
    fixed = [{k: v for k, v in _plain(c).items() if k not in CHANGEABLE} for c in (before, now)]
    if differs := differences(*fixed):
        raise BadInput(
            f"the run in {folder} was made with another configuration ({differs}): resume it "
            f"with the one it was made with (only {', '.join(CHANGEABLE)} may change)"
        )


def refuse_used(path: Path) -> None:
    """Refuse a folder for a new run unless it is empty or does not exist yet."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"the output folder {path} is a file: choose another --out")
    # config.toml.part alone is a run that was killed before it began
    if path.is_dir() and {inside.name for inside in path.iterdir()} - {"config.toml.part"}:
        resume = "add --resume to resume its run, or " if (path / "config.toml").exists() else ""
        raise BadInput(f"the output folder {path} is already in use: {resume}choose another --out")


def _cannot_write(path: Path, error: OSError) -> BadInput:
    return BadInput(
        f"cannot write to the output folder {path} ({error.strerror}): choose another --out"
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out of a folder until the block ends, or until this process ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(
                f"another process is running in {path}: wait until it ends, or choose another --out"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
