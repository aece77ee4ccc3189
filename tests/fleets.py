"""Fleets for tests: nodes in this process, and real ones in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import federation, linear

from rota import loop
from rota.engine import Options, make
from rota.experiment import Experiment
from rota.flower import store, superlink
from rota.flower.engine import Remote, await_clients
from rota.flower.fleet import Fleet, Rules
from rota.flower.letter import Letter, Refused, read_head
from rota.flower.worker import Work
from rota.plan import Task
from rota.sampling import Full

Spoil = Callable[[int, Letter], Letter | str | None]
PATIENT = Rules(deadline=90, ordered=True, strikes=100)
HASTY = Rules(deadline=8, ordered=True, strikes=100)


class Post:
    """A wire whose nodes are workers in this process: all but Flower is real."""

    pause = 0.01

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
        self.more: dict[str, str] = {}
        """What is in the environment of those that are started."""
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        for node in range(len(folders)):
            self.start(node)

    def start(
        self, node: int, program: Sequence[str] = ("-m", "rota"), prefix: Sequence[str] = ()
    ) -> None:
        """Start a node's program, by the words of `prefix`."""
        words = [*prefix, sys.executable, *program, "client"]
        words += ["--data", str(self.folders[node]), "--server", self.address]
        words += ["--threads", "1", "--allow", "conftest", "--insecure"]
        if self.keys is not None:
            words += ["--root", str(self.keys / "ca.crt")]
            words += ["--key", str(self.keys / "nodes" / str(node))]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= self.more
        with self.log(node).open("ab") as log:
            self.running[node] = subprocess.Popen(words, env=environment, stdout=log, stderr=log)

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


class Bench:
    """A fleet of three nodes with six clients, and the reference run beside it."""

    def __init__(self, fleet: Any, nodes: Nodes, experiment: Experiment) -> None:
        self.fleet, self.nodes, self.experiment = fleet, nodes, experiment
        self.plain = Without(make("sequential", experiment, "cpu"))
        self.engine = Remote(experiment, fleet, Options(torch.device("cpu")), ())
        self.mine = loop.begin(experiment, self.engine)
        self.other = loop.begin(experiment, self.plain)

    def play(self, failed: set[int] | None = None) -> dict[int, str]:
        """A round, in which these clients fail; the model is that of the reference run."""
        self.mine, line = loop.play(self.experiment, self.engine, self.mine)
        reasons = {each["client"]: each["reason"] for each in line["failures"]}
        self.plain.failed = set(reasons)
        self.other, _ = loop.play(self.experiment, self.plain, self.other)
        for one, two in zip(self.mine.models, self.other.models, strict=True):
            assert torch.equal(one.params, two.params), reasons
        if failed is not None:
            assert set(reasons) == failed, reasons
        return reasons

    def back(self, node: int, **how: Any) -> None:
        """Start a node again, and wait until it has joined."""
        if node in self.nodes.running:
            self.nodes.end(node)
        log = self.nodes.log(node)
        before = log.read_text(errors="replace").count("joined")
        self.nodes.start(node, **how)
        until(lambda: log.read_text(errors="replace").count("joined") > before, 240)

    def worker(self, node: int) -> int:
        """The process with torch of a node."""
        parent = self.nodes.running[node].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(children[0])


@contextmanager
def bench(
    root: Path,
    kept: list[superlink.Kept] | None = None,
    database: Path | None = None,
    host: str = "127.0.0.1",
    keys: Path | None = None,
    task: Task | None = None,
) -> Iterator[Bench]:
    """A fleet that listens at an address, and the reference run beside it."""
    from rota.flower.serve import fleet_at

    task = task or Task(linear, federation([9, 12, 20, 31, 8, 17]), batch=4, name="a")
    experiment = Experiment([task], sampler=Full(), seed=3, rounds=50)
    port = superlink.free_port()
    near = "127.0.0.1" if host == "0.0.0.0" else host
    nodes = Nodes(f"{near}:{port}", dealt(experiment, root, 3), keys)
    begin = superlink.Kept.start
    if kept is not None:  # to know the SuperLink's process

        def start(self: superlink.Kept) -> None:
            begin(self)
            kept.append(self)

        superlink.Kept.start = start  # type: ignore[method-assign]
    try:
        with fleet_at(f"{host}:{port}", keys, keys is None, PATIENT, database) as fleet:
            fleet.tasks = ["a"]
            await_clients(fleet, [str(client) for client in range(6)], 240)
            one = Bench(fleet, nodes, experiment)
            one.play(set())
            yield one
    finally:
        superlink.Kept.start = begin  # type: ignore[method-assign]
        nodes.close()


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)
