"""What is read from a run folder: its rounds, with the long lists in them already counted."""

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

from rota.data.describe import LISTED_CLIENTS
from rota.data.memory import check_room
from rota.errors import BadInput, what_and_where
from rota.running.record import Record, at, tested
from rota.scores import title


@dataclass(frozen=True)
class History:
    """What a run's folder says about it. The run may still be going on, or have crashed."""

    folder: Path
    config: dict[str, Any]
    text: str
    """config.toml as written."""
    rounds: list[Record]
    """The lines of rounds.jsonl, without `cohort`, `failures` and `dropped`.

    `round_seconds` is the round's own time: what it adds to the virtual clock.
    """
    sampled: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """For each model, how often each client was drawn for it."""
    failures: Counter[str] = field(default_factory=Counter)
    """The number of failed rows, by reason."""
    widths: dict[int, dict[int, float]] = field(default_factory=dict)
    """For each round in which clients may hold parts: the width of each client that was drawn."""
    dropped: dict[str, dict[str, NDArray[np.float64]]] = field(default_factory=dict)
    """For each model and layer, how often parts left out each unit, or group of neighbours."""
    data: dict[str, Any] = field(default_factory=dict)
    """data.json: for each model, which client holds how much of what."""
    tasks: dict[str, str] = field(default_factory=dict)
    """For each model, its task: with groups, a task has several models."""
    scores: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For each model, its score's name and which is "better", higher or lower."""
    finished: bool = True
    wall_seconds: float | None = None

    @cached_property
    def tested(self) -> list[Record]:
        """The rounds in which the models were tested."""
        return [line for line in self.rounds if tested(line)]

    @cached_property
    def averaged(self) -> bool:
        """Whether there are means over the models: not if their scores are of different kinds."""
        if len(self.models) < 2 or not self.tested:
            return True
        return any(line["accuracy"] is not None for line in self.tested)

    @cached_property
    def shares(self) -> set[str]:
        """The models whose score is the accuracy, from 0 to 1. Others may be any number."""
        found = set()
        for name in self.models:
            if self.score(name)[0] == "accuracy" and self._from_0_to_1(name):
                found.add(name)
        return found

    @cached_property
    def models(self) -> list[str]:
        """The models of all rounds: new groups bring new ones."""
        return _names(self.rounds) if self.rounds else list(self.data)

    @property
    def clients(self) -> int:
        return max((entry["clients"] for entry in self.data.values()), default=0)

    def last(self, name: str, model: str | None = None) -> float | None:
        """A value of the last tested round, of the whole round or of one model."""
        if not self.tested:
            return None
        line = self.tested[-1]
        of = line if model is None else line["models"].get(model, {})
        value: float | None = of.get(name)
        return value

    @property
    def accuracy(self) -> float | None:
        """The last tested accuracy, as the mean over the models."""
        return self.last("accuracy")

    @property
    def best(self) -> float | None:
        known = [line["accuracy"] for line in self.tested if line["accuracy"] is not None]
        return (min if self.score()[1] == "lower" else max)(known, default=None)

    def score(self, model: str | None = None) -> tuple[str, str]:
        """What a model's score is called, and which is better; of the mean that of all models."""
        model = model or next(iter(self.models), "")
        if model in self.scores:
            return self.scores[model]
        return "accuracy" if self._from_0_to_1(model) else "score", "higher"

    def _from_0_to_1(self, model: str) -> bool:
        values = [line["models"].get(model, {}).get("accuracy") for line in self.tested]
        return all(0 <= value <= 1 for value in values if value is not None)

    @property
    def target(self) -> float | None:
        target = self.config.get("target")
        return target if isinstance(target, int | float) else None

    @property
    def rounds_to_target(self) -> int | None:
        """The first round in which every model was at the target."""
        return self.rounds_to(self.models)

    def rounds_to(self, models: list[str]) -> int | None:
        """The first round in which all of these models were at the target."""
        if self.target is None or not set(models) <= set(self.models):
            return None
        for line in self.tested:
            each = [(line["models"].get(model, {}), self.score(model)[1]) for model in models]
            if all(at(model, self.target, better) for model, better in each):
                return int(line["round"])
        return None

    @property
    def client_seconds(self) -> float:
        return float(sum(line["client_seconds"] for line in self.rounds))

    @property
    def rows(self) -> int:
        """How many times a client was drawn to train a model."""
        return int(sum(counts.sum() for counts in self.sampled.values()))

    def total(self, name: str) -> float | None:
        """The last value of a running total (seconds, bytes_up, bytes_down)."""
        return self.rounds[-1][name] if self.rounds else None

    @property
    def server_bytes(self) -> float | None:
        """The most that the server held between two rounds."""
        return max((line["server_bytes"] for line in self.rounds), default=None)


def measured(runs: list[History], model: str | None = None) -> tuple[str, str]:
    """What these runs' score is called, and which is better: "score" if they have several."""
    some = [run for run in runs if model is None or model in run.models]
    found = {run.score(model) for run in some}
    if model is None and not averaged(runs):
        found |= {run.score(name) for run in runs for name in run.models}
    return found.pop() if len(found) == 1 else ("score", "higher")


def averaged(runs: list[History]) -> bool:
    """Whether at least one run has means over its models."""
    return any(run.averaged for run in runs)


def shares(runs: list[History], model: str | None = None) -> bool:
    """Whether all accuracies of these runs, or of one model in them, are from 0 to 1."""
    return all(name in run.shares for run in runs for name in run.models if model in (None, name))


def find(folder: Path) -> list[Path]:
    """The run folder that a folder is, or the run folders that it holds."""
    folder = folder.resolve()
    if (folder / "config.toml").exists():
        return [folder]
    inside = sorted((path.parent for path in folder.glob("*/config.toml")), key=_natural)
    if not inside:
        hint = "name a folder that has a config.toml in it"
        raise BadInput(f"{folder} is not a run folder and holds none: {hint}")
    return inside


def read(folder: Path) -> History:
    """A run folder's content, without a half-written last line, as after a resume."""
    try:
        return _read(folder)
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise not_a_run(folder, error) from error


def not_a_run(folder: Path, error: Exception) -> BadInput:
    """What to say about files that can be read, but do not hold what a run writes."""
    return BadInput(
        f"the files in {folder} are not what a run writes ({what_and_where(error)}): leave "
        f"{folder.name} out of the report, or run it again"
    )


def _read(folder: Path) -> History:
    lines: list[Record] = []
    sampled: dict[str, Counter[int]] = {}
    failures: Counter[str] = Counter()
    widths: dict[int, dict[int, float]] = {}
    dropped: dict[str, dict[str, NDArray[np.float64]]] = {}
    path = folder / "config.toml"
    try:
        text = _text(path)
        config = tomllib.loads(text)
        data = _json(path := folder / "data.json")
        summary = _json(path := folder / "summary.json")
        path = folder / "rounds.jsonl"
        for line in _whole_lines(path):
            record = json.loads(line)
            cohort = record.pop("cohort")
            if "held" in record:
                widths[record["round"]] = _widths(cohort, record["held"])
                _add(dropped, record.pop("dropped"))
            for model, clients in cohort.items():
                sampled.setdefault(model, Counter()).update(clients)
            for failure in record.pop("failures"):
                model = f"{failure['model']}: " if len(record["models"]) > 1 else ""
                failures[f"{model}{failure['reason']}"] += 1
            before = lines[-1]["seconds"] if lines else 0.0
            lines.append(record | {"round_seconds": record["seconds"] - before})
        each = zip(data, config.get("task", []), strict=False)
        scores = {name: _score(task) for name, task in each if "score" in task}
        models = _names(lines) if lines and data else list(data)
        of = {model: _task(model, data) for model in models}
        data = {model: data[task] for model, task in of.items()}
    except (OSError, ValueError, KeyError) as error:
        hint = f"leave {folder.name} out of the report, or run it again"
        raise BadInput(f"cannot read {path} ({error}): {hint}") from error
    if lines and not data:
        raise BadInput(f"{folder} has no data.json: leave it out of the report, or run it again")
    return History(
        folder=folder,
        config=config,
        text=text,
        rounds=lines,
        sampled={name: _by_client(each, data[name]) for name, each in sampled.items()},
        failures=failures,
        widths=widths,
        dropped=dropped,
        data=data,
        tasks=of,
        scores={model: scores[task] for model, task in of.items() if task in scores},
        finished=bool(summary),
        wall_seconds=summary.get("wall_seconds"),
    )


def _names(lines: list[Record]) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line["models"]))


def _widths(cohort: dict[str, list[int]], held: Record) -> dict[int, float]:
    """Each drawn client's width; of a client with several models, that of its narrowest part."""
    out = dict.fromkeys((client for clients in cohort.values() for client in clients), 1.0)
    for part in held.values():
        for client, width in zip(part["client"], part["width"], strict=True):
            out[client] = min(out[client], width)
    return out


def _add(totals: dict[str, dict[str, NDArray[np.float64]]], dropped: Record) -> None:
    """Add a round's counts of dropped units to the totals."""
    for model, layers in dropped.items():
        for layer, counts in layers.items():
            mine = totals.setdefault(model, {})
            mine[layer] = mine.get(layer, 0) + np.array(counts, np.float64)


def _task(model: str, data: dict[str, Any]) -> str:
    """The name of a model's task: the models of one task are numbered."""
    return model if model in data else model.rpartition(".")[0]


def _score(task: dict[str, Any]) -> tuple[str, str]:
    return title(str(task["score"])), str(task.get("better", "higher"))


def _natural(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts budget2 before budget10."""
    return [(int(word or 0), rest) for word, rest in re.findall(r"(\d*)(\D*)", path.name)]


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(_text(path))) if path.exists() else {}


def _text(path: Path) -> str:
    """A file's text; a pipe in its place would be waited for."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")
    return path.read_text(encoding="utf-8")


def _whole_lines(path: Path) -> list[str]:
    text = _text(path) if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _by_client(counts: Counter[int], entry: dict[str, Any]) -> NDArray[np.int64]:
    clients = entry["clients"]
    if min(clients, LISTED_CLIENTS) != len(entry["sizes"]):
        raise LookupError(f"{len(entry['sizes'])} sizes for {clients} clients")
    check_room(100.0 * clients, f"a report on {clients:,} clients", "leave this run out")
    out = np.zeros(clients, np.int64)
    out[list(counts)] = list(counts.values())
    return out
