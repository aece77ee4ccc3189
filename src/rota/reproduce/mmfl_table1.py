"""Multi-model FL's Table I (S0): the accuracy of several models trained at once, by method, relative to full participation.

A part is one run: a setting, a method and a seed. A finished one is a file, and is not run again. Seeds are run one after the other
through all methods, so that what is there can be compared at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rota
from rota import data, models, plan, rng
from rota.data.federation import Array, Federation, Part
from rota.data.partition import high_low, natural
from rota.engine import Engine, make
from rota.estimate import Estimator, FedStale, FedVarp, Mifa, Scaffold, StaleVr, StaleVre, Unbiased
from rota.loop import Experiment, begin, play
from rota.plan import Task
from rota.reproduce.mmfl_page import report
from rota.reproduce.parts import Found, chosen, in_time, start, work
from rota.reproduce.result import Result
from rota.sampling import FedFair, Full, Gvr, KVibPairs, Lvr, Random, RoundRobin, RoundRobinServer, Sampler, Vre, assign

CLIENTS, BUDGET, ROUNDS, SEEDS = 120, 12, 150, 5
LAST = 21
"""The rounds at the end over which S0 takes the mean of the accuracy."""
EVERY = 5
"""Before that, models are tested every so many rounds."""
QUICK_ROUNDS, QUICK_CLIENTS, QUICK_METHODS = 6, 24, ("full", "random", "gvr-star", "kvib")

Policies = Callable[[tuple[int, ...]], tuple[Sampler, Estimator]]
METHODS: dict[str, Policies] = {
    "full": lambda _: (Full(), Unbiased()),
    "random": lambda b: (Random(BUDGET, b), Unbiased()),
    "gvr": lambda b: (Gvr(BUDGET, b), Unbiased()),
    "lvr": lambda b: (Lvr(BUDGET, b), Unbiased()),
    "gvr-star": lambda b: (Gvr(BUDGET, b), FedVarp()),
    "stale-vr": lambda b: (Gvr(BUDGET, b), StaleVr()),
    "stale-vre": lambda b: (Vre(BUDGET, b), StaleVre()),
    "kvib": lambda b: (KVibPairs(BUDGET, b), Unbiased()),
    "fedvarp": lambda b: (Random(BUDGET, b), FedVarp()),
    "mifa": lambda b: (Random(BUDGET, b), Mifa()),
    "scaffold": lambda b: (Random(BUDGET, b), Scaffold()),
    "fedstale": lambda b: (Random(BUDGET, b), FedStale()),
    "round-robin": lambda _: (RoundRobin(BUDGET), Unbiased()),
    "round-robin-server": lambda _: (RoundRobinServer(BUDGET), Unbiased()),
    "fedfair": lambda _: (FedFair(BUDGET), Unbiased()),
}
"""A sampler and an estimator each, from the clients' processors."""


def three(clients: int, seed: int) -> list[Task]:
    """Three times Fashion-MNIST, with other labels for the clients each time."""
    return [fashion(clients, seed, s) for s in range(3)]


def five(clients: int, seed: int) -> list[Task]:
    """Two times Fashion-MNIST, CIFAR-10, MNIST by writer (in the place of EMNIST) and Shakespeare by role."""
    cifar = data.cifar10(high_low(clients, low_size=(12, 15), high_size=(120, 150)), seed=100 * seed + 2)
    writers = data.mnist_writers(natural(limit=clients), seed=seed)
    roles = data.shakespeare(natural(limit=clients), seed=seed)
    return [
        *(fashion(clients, seed, s) for s in range(2)),
        Task(models.preact_resnet18, held_out(cifar), lr=0.1, batch=None, epochs=5, name="cifar10"),
        Task(models.mmfl_cnn, held_out(writers), lr=0.01, batch=None, epochs=5, name="mnist-writers"),
        Task(models.mmfl_lstm, roles, lr=1.4, batch=500, epochs=5, name="shakespeare"),
    ]


def fashion(clients: int, seed: int, s: int) -> Task:
    """The s-th Fashion-MNIST task: S0's data split, five steps on all of a client's examples."""
    federation = held_out(data.fashion_mnist(high_low(clients), seed=100 * seed + s))
    return Task(models.mmfl_cnn, federation, lr=0.01, batch=None, epochs=5, name=f"fashion-{s + 1}")


SETTINGS: dict[str, Callable[[int, int], list[Task]]] = {"3": three, "5": five}


def held_out(federation: Federation, out: float = 0.3) -> Federation:
    """The test examples without the first 30 %, which S0 keeps for validation."""
    test, first = federation.test, int(out * len(federation.test.y))
    return replace(federation, test=Part(test.x[first:], test.y[first:], np.array([0, len(test.y) - first])))


def lacking(tasks: list[Task], seed: int) -> list[Task]:
    """The tasks, where every client lacks the data of one of them, at random, with a chance of 10 %."""
    generator = rng.generator(rng.key(seed, "lacking"))
    clients = tasks[0].data.clients
    lacks = np.where(generator.random(clients) < 0.1, generator.integers(len(tasks), size=clients), -1)
    return [replace(task, data=without(task.data, np.flatnonzero(lacks == s))) for s, task in enumerate(tasks)]


def without(federation: Federation, clients: Array) -> Federation:
    """A federation in which some clients have no training examples."""
    train, sizes = federation.train, federation.train.sizes
    kept = torch.from_numpy(~np.isin(np.repeat(np.arange(train.clients), sizes), clients))
    sizes = np.where(np.isin(np.arange(train.clients), clients), 0, sizes)
    return replace(federation, train=Part(train.x[kept], train.y[kept], np.concatenate([[0], np.cumsum(sizes)])))


@dataclass(frozen=True)
class Work:
    """A part: a setting, a method and a seed."""

    setting: str
    method: str
    seed: int

    @property
    def cell(self) -> str:
        """Its place in the table."""
        return f"{self.setting}-{self.method}"

    @property
    def name(self) -> str:
        return f"{self.cell}-seed{self.seed}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call it."""
        seed = f"seed{self.seed}"
        return {self.name, self.cell, self.setting, self.method, seed, f"{self.setting}-{seed}"}


def parts(quick: bool = False) -> list[Work]:
    """All parts, in the order they are run in."""
    if quick:
        return [Work("3", method, 0) for method in QUICK_METHODS]
    return [Work(setting, method, seed) for setting in SETTINGS for seed in range(SEEDS) for method in METHODS]


SECONDS = {"3": {"cuda": 8.0, "cpu": 400.0}, "5": {"cuda": 48.0, "cpu": 6000.0}}
"""What a run takes, roughly, on one H200 and on two cores, to plan by; for five tasks the mean of methods in which all clients train, about
125, and of others, 20, of an H200 that several runs share, and on two cores a guess."""


def estimate(only: str | None = None) -> list[str]:
    """How much work the parts are, as lines."""
    some = chosen(only, parts())
    lines = [f"{part.name:32}{SECONDS[part.setting]['cuda']:6.0f} s of one H200" for part in some]
    gpu, cpu = (sum(SECONDS[part.setting][device] for part in some) for device in ("cuda", "cpu"))
    return [
        *lines,
        "",
        f"{len(some)} runs of {ROUNDS} rounds: roughly {gpu / 60:.0f} minutes of one H200, or {cpu / 3600:.0f} hours of two cores",
    ]


def mmfl_table1(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Several models at once: 15 ways to share 12 clients among 3 and 5 tasks, relative to full participation (S0, Table I).

    With `out` every finished part is kept in a file there, and not run again. `minutes` stops the work; 0 does none, and gives what is
    there already.
    """
    everything = parts(quick)
    wanted = everything if quick else chosen(only, everything)
    folder = None if out is None or quick else out / "mmfl-table1"
    job = start(folder, (part.name for part in everything), minutes, device, precision, say)

    def load(kind: tuple[str, int]) -> Track:
        say(f"{kind[0]} tasks, seed {kind[1]}: loading")
        return Track(*kind, job.device, precision, quick)

    def run(track: Track, part: Work) -> tuple[Found, str]:
        numbers = track.run(part.method, job.deadline)
        return {"part": part.name} | numbers, f"accuracy {numbers['accuracy']:.3f}"

    work(job, wanted, lambda part: (part.setting, part.seed), load, run)
    cells: dict[str, dict[int, Found]] = {}
    for part in everything:
        if part.name in job.found:
            cells.setdefault(part.cell, {})[part.seed] = job.found[part.name]
    return report(cells, len(everything), quick)


class Track:
    """A setting's tasks and engine for one seed: all methods run on it."""

    def __init__(self, setting: str, seed: int, device: str, precision: str, quick: bool = False) -> None:
        clients, self.rounds = (QUICK_CLIENTS, QUICK_ROUNDS) if quick else (CLIENTS, ROUNDS)
        self.seed, self.last = seed, min(LAST, self.rounds // 2)
        self.tasks = lacking(SETTINGS[setting](clients, seed), seed)
        if quick:
            self.tasks = [replace(task, data=held_out(task.data, 0.9)) for task in self.tasks]
        self.processors = tuple(assign.mixed(plan.shares(self.tasks), seed).tolist())
        self.engine: Engine = make("auto", self.tasks, rota.Devices(), seed, device, precision)

    def run(self, method: str, deadline: float = math.inf) -> dict[str, Any]:
        """One run in numbers: accuracies at the end, their curve, and what it cost."""
        sampler, estimator = METHODS[method](self.processors)
        experiment = Experiment(self.tasks, sampler, estimator, rounds=self.rounds, seed=self.seed, evaluate=self.rounds + 1)
        state, client_seconds, server_bytes = begin(experiment, self.engine), 0.0, 0
        curve: dict[int, list[float]] = {}
        while state.round < self.rounds:
            in_time(deadline)
            state, line = play(experiment, self.engine, state)
            client_seconds += line["client_seconds"]
            server_bytes = max(server_bytes, line["server_bytes"])
            if state.round > self.rounds - self.last or state.round % EVERY == 0:
                curve[state.round] = [score.accuracy for score in self.engine.evaluate(state.models)]
        last = np.array([accuracies for t, accuracies in curve.items() if t > self.rounds - self.last])
        kept = {t: each for t, each in curve.items() if t % EVERY == 0}
        return {
            "accuracy": float(last.mean()),
            "models": {name: float(value) for name, value in zip(experiment.names, last.mean(axis=0), strict=True)},
            "curve": {"rounds": list(kept), "accuracy": [float(f"{np.mean(each):.5g}") for each in kept.values()]},
            "bytes": state.bytes_up + state.bytes_down,
            "client_seconds": client_seconds,
            "server_bytes": server_bytes,
        }
