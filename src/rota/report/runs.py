"""What is read of a run folder: its rounds without the long lists in them, which are counted here."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.errors import BadInput
from rota.running.record import at, tested

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it; it may still be going on, or have crashed."""

    folder: Path
    config: dict[str, Any]
    text: str
    """config.toml as written."""
    rounds: list[Record]
    """The lines of rounds.jsonl, less `cohort` and `failures`."""
    sampled: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """For each model, how often each client was drawn for it."""
    failures: Counter[str] = field(default_factory=Counter)
    """How many rows failed, by reason."""
    data: dict[str, Any] = field(default_factory=dict)
    """data.json: for each model, who holds how much of what."""
    finished: bool = True
    wall_seconds: float | None = None

    @cached_property
    def tested(self) -> list[Record]:
        """The rounds whose models were tested."""
        return [line for line in self.rounds if tested(line)]

    @cached_property
    def averaged(self) -> bool:
        """Whether something is said of the models together: not where their scores are of different kinds."""
        return (
            len(self.models) < 2
            or not self.tested
            or any(line["accuracy"] is not None for line in self.tested)
        )

    @cached_property
    def shares(self) -> set[str]:
        """The models whose accuracies are shares, from 0 to 1: a score of the user's own may be any number."""
        every = {
            name: [line["models"][name].get("accuracy") for line in self.tested]
            for name in self.models
        }
        return {
            name
            for name, values in every.items()
            if all(0 <= value <= 1 for value in values if value is not None)
        }

    @property
    def models(self) -> list[str]:
        return list(self.rounds[0]["models"]) if self.rounds else list(self.data)

    @property
    def clients(self) -> int:
        return max((entry["clients"] for entry in self.data.values()), default=0)

    def last(self, name: str, model: str | None = None) -> float | None:
        """What was last tested: a plain value of the round, or one of a model's; None where there is none."""
        line = self.tested[-1] if self.tested else {}
        return (line if model is None else line.get("models", {}).get(model, {})).get(name)

    @property
    def accuracy(self) -> float | None:
        """The last tested accuracy, the mean over models."""
        return self.last("accuracy")

    @property
    def best(self) -> float | None:
        return max(
            (line["accuracy"] for line in self.tested if line["accuracy"] is not None), default=None
        )

    @property
    def target(self) -> float | None:
        target = self.config.get("target")
        return target if isinstance(target, int | float) else None

    @property
    def rounds_to_target(self) -> int | None:
        """The first round at which every model was at the target."""
        return self.rounds_to(self.models)

    def rounds_to(self, models: list[str]) -> int | None:
        """The first round at which all of these were at the target."""
        if self.target is None or not set(models) <= set(self.models):
            return None
        return next(
            (
                line["round"]
                for line in self.tested
                if all(at(line["models"][model], self.target) for model in models)
            ),
            None,
        )

    @property
    def client_seconds(self) -> float:
        return float(sum(line["client_seconds"] for line in self.rounds))

    @property
    def rows(self) -> int:
        """How many times a client was asked to train a model."""
        return int(sum(counts.sum() for counts in self.sampled.values()))

    def total(self, name: str) -> float | None:
        """What a running total (seconds, bytes_up, bytes_down) came to."""
        return self.rounds[-1][name] if self.rounds else None

    @property
    def server_bytes(self) -> float | None:
        """The most that the server held between rounds."""
        return max((line["server_bytes"] for line in self.rounds), default=None)


def averaged(runs: list[Run]) -> bool:
    """Whether some run has means over its models."""
    return any(run.averaged for run in runs)


def shares(runs: list[Run], model: str | None = None) -> bool:
    """Whether all accuracies of these runs, or of one model in them, are shares."""
    return all(name in run.shares for run in runs for name in run.models if model in (None, name))


def find(folder: Path) -> list[Path]:
    """The run folders that a folder is or holds."""
    folder = folder.resolve()
    if (folder / "config.toml").exists():
        return [folder]
    inside = sorted((path.parent for path in folder.glob("*/config.toml")), key=_natural)
    if not inside:
        raise BadInput(
            f"{folder} is not a run folder and holds none: name a folder that has a config.toml in it"
        )
    return inside


def read(folder: Path) -> Run:
    """A run folder's content; a half-written last line is left out, as it is on resuming."""
    lines, sampled, failures = [], dict[str, Counter[int]](), Counter[str]()
    path = folder / "config.toml"
    try:
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text)
        data = _json(path := folder / "data.json")
        summary = _json(path := folder / "summary.json")
        path = folder / "rounds.jsonl"
        for line in _whole_lines(path):
            record = json.loads(line)
            for model, clients in record.pop("cohort").items():
                sampled.setdefault(model, Counter()).update(clients)
            whose = len(record["models"]) > 1
            failures.update(
                f"{failure['model']}: " * whose + str(failure["reason"])
                for failure in record.pop("failures")
            )
            lines.append(record)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"cannot read {path} ({error}): leave {folder.name} out of the report, or run it again"
        ) from error
    if lines and not data:
        raise BadInput(f"{folder} has no data.json: leave it out of the report, or run it again")
    return Run(
        folder=folder,
        config=config,
        text=text,
        rounds=lines,
        sampled={
            model: _by_client(counts, data[model]["clients"]) for model, counts in sampled.items()
        },
        failures=failures,
        data=data,
        finished=bool(summary),
        wall_seconds=summary.get("wall_seconds"),
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    """budget2 before budget10."""
    return [(int(word or 0), rest) for word, rest in re.findall(r"(\d*)(\D*)", path.name)]


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _by_client(counts: Counter[int], clients: int) -> NDArray[np.int64]:
    out = np.zeros(clients, np.int64)
    out[list(counts)] = list(counts.values())
    return out
