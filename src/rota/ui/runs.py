"""The runs in a folder, read as they grow.

A damaged run does not keep the others from being shown, nor its own sound lines.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rota.recipe.differences import flat
from rota.scores import of_all, title

DEEPEST = 4
"""Runs are looked for in this many levels of folders."""
RECENT = 60.0
"""Without a list of locks, a run whose files changed in the last seconds is thought to run."""
CHECKED = 2.0
"""Seconds between two searches for new runs."""
RECENT_ROUNDS = 50
"""So many rounds are in a run's log."""
COSTS = ("seconds", "client_seconds", "bytes_up", "bytes_down", "server_bytes")
COLUMNS = ("round", "seconds", "client_seconds", "bytes_up", "bytes_down", "accuracy", "loss")


@dataclass
class Run:
    """A run's folder, and how far it has been read."""

    folder: Path
    config: dict[str, Any]
    text: str
    """config.toml as written."""
    rows: list[list[float | None]] = field(default_factory=list)
    """The rounds that were tested, as COLUMNS; for several models, then each one's scores."""
    models: list[str] = field(default_factory=list)
    round: int = 0
    read: int = 0
    """Bytes of rounds.jsonl that were read."""
    client_seconds: float = 0.0
    sampled: dict[str, Counter[int]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    last_failures: list[dict[str, Any]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    """The last rounds, in words and numbers."""
    costs: dict[str, float | None] = field(default_factory=dict)
    state: str = "stopped"
    problem: str = ""
    """What is wrong with its files; `wrong` is what was wrong when the run was found."""
    wrong: str = ""
    changed: float = 0.0

    def update(self, locked: set[int] | None) -> None:
        """Read what is new; `locked` are the files that processes have locked, if that is known."""
        rounds = self.folder / "rounds.jsonl"
        try:
            size = rounds.stat().st_size if rounds.is_file() else 0
            if size < self.read:  # a resumed run has cut its file
                self._forget()
            if size > self.read:
                self._read(rounds)
            self.state = "damaged" if self.problem else self._state(locked)
        except Exception as error:  # what a damaged file holds may raise nearly anything
            self.state, self.problem = "damaged", _problem(error)

    def _forget(self) -> None:
        self.problem = self.wrong
        self.rows, self.round, self.read, self.client_seconds = [], 0, 0, 0.0
        self.sampled, self.failures, self.last_failures = {}, Counter(), []
        self.log, self.costs = [], {}

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self.read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.read += len(whole)  # whatever becomes of the lines, they are read once
        for line in whole.split(b"\n")[:-1]:
            try:
                self._add(json.loads(line))
            except Exception as error:  # as above
                self.problem = self.problem or _problem(error)
        if whole:
            self.changed = path.stat().st_mtime

    def _add(self, record: dict[str, Any]) -> None:
        self.round = int(record["round"])
        self.client_seconds += float(record["client_seconds"])
        for model, clients in record["cohort"].items():
            self.sampled.setdefault(model, Counter()).update(clients)
        for failure in record["failures"]:
            self.failures[str(failure["reason"])] += 1
        mine = [
            {"round": self.round, **{k: str(each.get(k)) for k in ("model", "client", "reason")}}
            for each in record["failures"][-20:]
        ]
        self.last_failures = [*self.last_failures, *mine][-20:]
        self.costs = {key: _number(record.get(key)) for key in COSTS}
        self.costs["client_seconds"] = _number(self.client_seconds)
        models = record["models"]
        line = {
            "round": self.round,
            "score": _number(record.get("accuracy")),
            "loss": _number(record.get("loss")),
            "drawn": sum(map(len, record["cohort"].values())),
            "failed": len(record["failures"]),
            "seconds": _number(record.get("seconds")),
        }
        self.log = [*self.log, line][-RECENT_ROUNDS:]
        if not any("accuracy" in model for model in models.values()):
            return
        row = [_number(record.get(key)) for key in COLUMNS]
        row[COLUMNS.index("client_seconds")] = _number(self.client_seconds)
        self.models = list(models)
        if len(models) > 1:
            for model in models.values():
                row += [_number(model.get("accuracy")), _number(model.get("loss"))]
        self.rows.append(row)

    def _state(self, locked: set[int] | None) -> str:
        summary = self.folder / "summary.json"
        if summary.is_file():
            told = json.loads(summary.read_text(encoding="utf-8"))
            losses = [model["loss"] for model in told["models"].values()]
            return "diverged" if any(_number(loss) is None for loss in losses) else "finished"
        if locked is not None:
            return "running" if self.folder.stat().st_ino in locked else "stopped"
        return "running" if time.time() - self.changed < RECENT else "stopped"

    def _measure(self) -> str:
        """What the tasks are scored by, if it is the same for all."""
        places = (key.split(".") for key in self.config)
        scores = [".".join(each) for each in places if each[0] == "task" and each[-1] == "score"]
        return title(of_all(str(self.config[key]) for key in scores))

    def told(self, name: str) -> dict[str, Any]:
        """What the list of runs shows."""
        scored = self.rows[-1] if self.rows else [None] * len(COLUMNS)
        return {
            "name": name,
            "state": self.state,
            "problem": self.problem,
            "round": self.round,
            "rounds": self.config.get("rounds"),
            "measure": self._measure(),
            "tests": len(self.rows),
            "changed": self.changed,
            "failures": sum(self.failures.values()),
            "last": dict(zip(COLUMNS, scored, strict=False)),
        }


class Runs:
    """All runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs, self.looked = root.resolve(), dict[str, Run](), 0.0
        self.lock = threading.Lock()

    def update(self) -> None:
        """Read what is new."""
        with self.lock:  # requests come in several threads
            self._update(_locked())

    def _update(self, locked: set[int] | None) -> None:
        if time.monotonic() - self.looked > CHECKED or not self.runs:
            self.looked = time.monotonic()
            found = {_name(path, self.root): path for path in _folders(self.root)}
            known = self.runs
            self.runs = {name: known.get(name) or _open(path) for name, path in found.items()}
        for run in self.runs.values():
            run.update(locked)


def _open(folder: Path) -> Run:
    try:
        text = (folder / "config.toml").read_text(encoding="utf-8")
        config = {key: _plain(value) for key, value in flat(tomllib.loads(text)).items()}
        return Run(folder, config, text)
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"config.toml cannot be read ({error})"[:200]
        return Run(folder, {}, "", problem=wrong, wrong=wrong)


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _plain(value: Any) -> Any:
    """A value of TOML as one of JSON."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str | bool) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if isinstance(value, int):
        return "a number of more than 64 bits"
    return value if isinstance(value, float) and _number(value) is not None else str(value)


def text_of(path: str) -> str:
    """A path in letters that every page can show."""
    return os.fsencode(path).decode("utf-8", "replace")


def _name(path: Path, root: Path) -> str:
    return text_of(path.name if path == root else path.relative_to(root).as_posix())


def _folders(root: Path) -> list[Path]:
    """The run folders below a folder, or itself; links are not followed."""
    found, level = [], [root]
    for _ in range(DEEPEST + 1):
        below: list[Path] = []
        for folder in level:
            try:
                entries = list(os.scandir(folder))
            except OSError:
                continue
            if any(
                entry.name == "config.toml" and entry.is_file(follow_symlinks=False)
                for entry in entries
            ):
                found.append(folder)
                continue
            below += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        level = below
    return sorted(found)


def _locked() -> set[int] | None:
    """The numbers of the files that some process has locked; None where the system does not say.

    A run locks its folder. To try the lock would get in the way of a run that begins.
    """
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = [line.replace(" -> ", " ").split() for line in lines]
    return {int(each[5].rpartition(":")[2]) for each in words if len(each) > 5}


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if fine and abs(value) <= sys.float_info.max else None
