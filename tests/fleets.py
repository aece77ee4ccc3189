"""Fleets for tests: nodes in this process, and real ones in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rota.engine import Options
from rota.experiment import Experiment
from rota.flower import store
from rota.flower.engine import Remote
from rota.flower.fleet import Fleet, Rules
from rota.flower.letter import Letter, Refused, read_head
from rota.flower.worker import Work

Spoil = Callable[[int, Letter], Letter | str | None]


class Post:
    """A wire whose nodes are workers in this process: all but Flower is real."""

    def __init__(self, works: list[Work], spoil: Spoil | None = None) -> None:
        self.works, self.spoil = works, spoil
        self.box: dict[str, Letter | str] = {}
        self.sent: list[Letter] = []

    def nodes(self) -> list[int]:
        return list(range(len(self.works)))

    def send(self, letters: list[tuple[int, Letter]], seconds: float) -> list[str]:
        keys = []
        for node, letter in letters:
            keys.append(str(len(self.sent)))
            self.sent.append(letter)
            try:
                same = Letter(letter.kind, read_head(letter.text), letter.parts)
                reply = self.works[node].answer(same)
                reply = Letter("reply", read_head(reply.text), reply.parts)
            except Refused as why:
                self.box[keys[-1]] = str(why)
                continue
            spoilt = self.spoil(node, reply) if self.spoil and letter.kind != "query" else reply
            if spoilt is not None:
                self.box[keys[-1]] = spoilt
        return keys

    def replies(self, keys: list[str]) -> Iterator[tuple[str, Letter | str]]:
        for key in keys:
            if key in self.box:
                yield key, self.box.pop(key)

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass


def dealt(experiment: Experiment, root: Path, nodes: int) -> list[Path]:
    """Write an experiment's data to folders of nodes."""
    several = len(experiment.tasks) > 1
    for task, name in zip(experiment.tasks, experiment.names, strict=True):
        folders = store.write(task.federation, root, nodes, name if several else "")
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return folders


def posted(
    experiment: Experiment,
    root: Path,
    nodes: int = 2,
    rules: Rules | None = None,
    spoil: Spoil | None = None,
    allow: tuple[str, ...] = ("rota", "conftest"),
) -> Remote:
    """The engine for an experiment whose nodes are in this process."""

    folders = dealt(experiment, root, nodes)
    wire: Any = Post([Work(folder, allow) for folder in folders], spoil)
    fleet = Fleet(wire, rules or Rules(), experiment.names)
    fleet.wait(lambda: len(fleet.members) == nodes, 10)
    return Remote(experiment, fleet, Options(torch.device("cpu")), ())


class Nodes:
    """Real nodes of a server on this machine, as processes. End them with `close`."""

    def __init__(self, address: str, folders: list[Path], keys: Path | None = None) -> None:
        self.address, self.folders, self.keys = address, folders, keys
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        for node in range(len(folders)):
            self.start(node)

    def start(self, node: int, *more: str) -> None:
        words = [sys.executable, "-m", "rota", "client", "--data", str(self.folders[node])]
        words += ["--server", self.address, "--threads", "1", "--allow", "conftest"]
        if self.keys is not None:
            words += ["--root", str(self.keys / "ca.crt")]
            words += ["--key", str(self.keys / "nodes" / str(node))]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self.log(node).open("ab") as log:
            self.running[node] = subprocess.Popen(
                [*words, *more], env=environment, stdout=log, stderr=log
            )

    def log(self, node: int) -> Path:
        return self.folders[node].with_suffix(".log")

    def end(self, node: int, how: signal.Signals = signal.SIGKILL) -> None:
        process = self.running.pop(node)
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for node in list(self.running):
            self.end(node, signal.SIGTERM)


class Without:
    """The reference engine, with the rows of some clients failed."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.failed = engine, set[int]()
        self.initial, self.evaluate, self.losses = engine.initial, engine.evaluate, engine.losses

    def train(self, job: Any) -> Iterator[Any]:
        for chunk in self.engine.train(job):
            lost = int(job.plan.client[chunk.rows[0]]) in self.failed
            yield replace(chunk, reason=["gone"], steps=np.zeros(1)) if lost else chunk
