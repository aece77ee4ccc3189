"""One run's folder on disk: what is in it, and how it is written so that a crash loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.torch import save_file

from rota import weights
from rota.errors import BadInput
from rota.loop import Experiment, State
from rota.record import Record
from rota.store import checkpoint

LISTED_CLIENTS = 2000
"""Up to this many clients data.json lists each one; beyond, an evenly spread selection of that many, by size."""


class Folder:
    """A run folder. `create` and `reopen` are the two ways to one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: dict[str, Any]) -> Folder:
        """A new run's folder; it must be empty or not there yet."""
        refuse_used(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write(path / "config.toml", tomli_w.dumps(config))
        except OSError as error:
            raise BadInput(f"cannot write to the output folder {path} ({error.strerror}): choose another --out") from error
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, config: dict[str, Any]) -> Folder:
        """An earlier run's folder, to go on with: it must have been made with the same configuration."""
        if not (path / "config.toml").exists():
            raise BadInput(f"there is no run to resume in {path}: leave --resume out to start one there")
        if (path / "config.toml").read_text() != tomli_w.dumps(config):
            raise BadInput(f"the run in {path} was made with another configuration: resume it with its own, {path / 'config.toml'}")
        return cls(path)

    def read_state(self, like: State) -> tuple[State, float]:
        """The last good checkpoint (or the beginning); rounds.jsonl is cut back to it."""
        state, wall = checkpoint.load(self.path / "checkpoint", like) or (like, 0.0)
        kept = [line for line in self._lines() if json.loads(line)["round"] <= state.round]
        if len(kept) != state.round:
            raise BadInput(f"{self.path}/rounds.jsonl has {len(kept)} rounds and the checkpoint {state.round}: the run cannot be resumed")
        write(self.path / "rounds.jsonl", "".join(line + "\n" for line in kept))
        return state, wall

    def records(self) -> list[Record]:
        """The rounds written so far."""
        return [json.loads(line) for line in self._lines()]

    def _lines(self) -> list[str]:
        """The whole lines of rounds.jsonl: a crash may have left half of a last one."""
        path = self.path / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def append(self, record: Record) -> None:
        """Add a round's line."""
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, state: State, wall_seconds: float) -> None:
        """Write a checkpoint. The lines up to it reach the disk first, so that a checkpoint never runs ahead of them."""
        rounds = self.path / "rounds.jsonl"
        if rounds.exists():
            checkpoint._sync(rounds)
        checkpoint.save(self.path / "checkpoint", state, wall_seconds)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def write_data(self, experiment: Experiment) -> None:
        """data.json: who holds how much of what, for the report."""
        write(self.path / "data.json", json.dumps({name: describe(experiment, s) for s, name in enumerate(experiment.names)}) + "\n")

    def write_models(self, experiment: Experiment, state: State) -> None:
        """models/NAME.safetensors: the models by their modules' own tensor names."""
        (self.path / "models").mkdir(exist_ok=True)
        for name, task, model in zip(experiment.names, experiment.tasks, state.models, strict=True):
            tensors = {key: value.cpu().clone() for key, value in weights.named(task.build(), model).items()}
            save_file(tensors, self.path / "models" / f"{name}.safetensors.part")
            os.replace(self.path / "models" / f"{name}.safetensors.part", self.path / "models" / f"{name}.safetensors")


def refuse_used(path: Path) -> None:
    """A new run may only go into a folder that is empty or not there yet."""
    if path.is_dir() and any(path.iterdir()):
        resume = "add --resume to go on with it, or " if (path / "config.toml").exists() else ""
        raise BadInput(f"the output folder {path} is already in use: {resume}choose another --out")


def write(path: Path, text: str) -> None:
    """Replace a file's text at once: a reader or a crash sees the old one or the new one."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    os.replace(aside, path)


def describe(experiment: Experiment, task: int) -> dict[str, Any]:
    """One task's clients: sizes, and label counts where the targets are classes."""
    data = experiment.tasks[task].data
    sizes = data.train.sizes
    shown = np.arange(data.clients)
    if data.clients > LISTED_CLIENTS:
        by_size = np.argsort(sizes, kind="stable")
        shown = np.sort(by_size[np.linspace(0, data.clients - 1, LISTED_CLIENTS).astype(int)])
    out: dict[str, Any] = {
        "data": data.name,
        "clients": data.clients,
        "examples": int(sizes.sum()),
        "test_examples": len(data.test.y),
        "shown": shown.tolist(),
        "sizes": sizes[shown].tolist(),
    }
    if data.classes and data.clients * data.classes <= 50_000_000:
        out["labels"] = data.train.label_counts(data.classes)[shown].tolist()
    return out
