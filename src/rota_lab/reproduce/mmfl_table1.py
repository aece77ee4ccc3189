"""Multi-model FL's Table I (S0): the accuracy of several models trained at once, by method, relative to full participation.

A part is one run: a setting, a method and a seed. A finished one is kept, and is not run again. Seeds are run one after the other
through all methods, so that what is there can be compared at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rota import data, loop, models, plan, rng
from rota.arrays import Array
from rota.data.federation import Federation, Partition
from rota.data.partition import high_low, natural
from rota.engine import Engine, make
from rota.estimate import (
    ESTIMATORS,
    Estimator,
    FedStale,
    FedVarp,
    Mifa,
    Scaffold,
    StaleVr,
    StaleVre,
    Unbiased,
)
from rota.estimate.server import Sgd
from rota.experiment import Experiment
from rota.hints import called
from rota.plan import Task
from rota.sampling import (
    SAMPLERS,
    FedFair,
    Full,
    Gvr,
    KVibPairs,
    Lvr,
    Random,
    RoundRobin,
    RoundRobinServer,
    Sampler,
    Vre,
    assign,
)
from rota.sampling.mmfl import Assigning
from rota_lab.reproduce.mmfl_cells import Cells
from rota_lab.reproduce.mmfl_page import About, report
from rota_lab.reproduce.parts import Found, Runner, chosen, in_time, left, results, run_parts, start
from rota_lab.reproduce.result import Result

CLIENTS, BUDGET, ROUNDS, SEEDS = 120, 12, 150, 5
NAME = "mmfl-table1"
HELD_OUT, QUICK_HELD_OUT = 0.3, 0.9
"""The part of the test examples that S0 keeps for validation, and the part of the rest that the short version leaves away."""
HIGH, LABELS = 0.1, 0.3
"""The part of the clients that has much data, and of the labels that a client has, where S0 splits the data."""
LAST = 21
"""The rounds at the end over which S0 takes the mean of the accuracy."""
EVERY = 5
"""Before that, models are tested every so many rounds."""
QUICK_ROUNDS, QUICK_CLIENTS, QUICK_METHODS = 6, 24, ("full", "random", "gvr-star", "kvib")

Method = Callable[[tuple[int, ...]], tuple[Sampler, Estimator]]
METHODS: dict[str, Method] = {
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


@dataclass(frozen=True)
class TaskSpec:
    """What a task trains, as far as that is known without its data's files."""

    data: str
    source: Callable[..., Federation]
    network: str
    model: Callable[..., nn.Module]
    lr: float
    sizes: tuple[tuple[int, int], tuple[int, int]] | None = None
    """The least and the most examples of most clients, and of the few that have much data (S0's split)."""
    owners: str = ""
    """Or who the clients are in the data."""
    batch: int | None = None
    epochs: int = 5
    held_out: float = HELD_OUT

    def partition(self, clients: int) -> Partition:
        return (
            high_low(clients, HIGH, *self.sizes, LABELS) if self.sizes else natural(limit=clients)
        )

    def task(self, clients: int, name: str, seed: int) -> Task:
        federation = held_out(self.source(self.partition(clients), seed=seed), self.held_out)
        return Task(
            self.model, federation, lr=self.lr, batch=self.batch, epochs=self.epochs, name=name
        )

    def words(self, clients: int, quick: bool) -> list[str]:
        """Data, split, network, parameters, learning rate, local work, and what it is tested on."""
        with torch.device("meta"):  # no weights are drawn
            parameters = sum(weight.numel() for weight in self.model().parameters())
        if self.sizes:
            (low, some), (many, most) = self.sizes
            split = f"{HIGH:.0%} of the clients have {many} to {most} examples, the others {low} to {some}; {LABELS:.0%} of the labels each"
        else:
            split = f"the data's own: the first {clients} {self.owners}"
        work = f"{self.epochs} steps on all examples" + (
            f" (batches of {self.batch}, and nobody has more)" if self.batch else ""
        )
        tested = (1 - self.held_out) * (1 - QUICK_HELD_OUT if quick else 1)
        test = "all test examples" if tested == 1 else f"the last {tested:.0%} of the test examples"
        return [
            self.data,
            split,
            f"{self.network} (`{self.model.__name__}`)",
            f"{parameters:,}",
            f"{self.lr:g}",
            work,
            test,
        ]


FASHION = TaskSpec(
    "Fashion-MNIST", data.fashion_mnist, "CNN", models.mmfl_cnn, lr=0.01, sizes=((9, 15), (90, 150))
)
CIFAR = TaskSpec(
    "CIFAR-10",
    data.cifar10,
    "pre-activation ResNet-18",
    models.preact_resnet18,
    lr=0.1,
    sizes=((12, 15), (120, 150)),
)
WRITERS = TaskSpec(
    "MNIST by writer", data.mnist_writers, "CNN", models.mmfl_cnn, lr=0.01, owners="writers"
)
ROLES = TaskSpec(
    "Shakespeare by role",
    data.shakespeare,
    "LSTM, two layers",
    models.mmfl_lstm,
    lr=1.4,
    owners="roles",
    batch=500,
    held_out=0.0,
)
Settings = dict[str, dict[str, TaskSpec]]
SETTINGS: Settings = {
    "3": {"fashion-1": FASHION, "fashion-2": FASHION, "fashion-3": FASHION},
    "5": {
        "fashion-1": FASHION,
        "fashion-2": FASHION,
        "cifar10": CIFAR,
        "mnist-writers": WRITERS,
        "shakespeare": ROLES,
    },
}
"""The tasks of each setting. Those of a kind differ by who has which labels."""


def made(kinds: dict[str, TaskSpec], clients: int, seed: int) -> list[Task]:
    """A setting's tasks with their data, of which every client lacks one's, at random, with a chance of 10 %."""
    return lacking(
        [kind.task(clients, name, 100 * seed + s) for s, (name, kind) in enumerate(kinds.items())],
        seed,
    )


def held_out(federation: Federation, out: float = HELD_OUT) -> Federation:
    """The test examples without the first ones, which S0 keeps for validation."""
    test, first = federation.test, int(out * len(federation.test.y))
    x, y = test.x[first:], test.y[first:]
    return replace(federation, test=replace(test, x=x, y=y, offsets=np.array([0, len(y)])))


def lacking(tasks: list[Task], seed: int) -> list[Task]:
    """The tasks, where every client lacks the data of one of them, at random, with a chance of 10 %."""
    generator = rng.generator(rng.key(seed, "lacking"))
    clients = tasks[0].data.clients
    lacks = np.where(
        generator.random(clients) < 0.1, generator.integers(len(tasks), size=clients), -1
    )
    return [
        replace(task, data=without(task.federation, np.flatnonzero(lacks == s)))
        for s, task in enumerate(tasks)
    ]


def without(federation: Federation, clients: Array) -> Federation:
    """A federation in which some clients have no training examples."""
    train, sizes = federation.train, federation.train.sizes
    kept = torch.from_numpy(~np.isin(np.repeat(np.arange(train.clients), sizes), clients))
    sizes = np.where(np.isin(np.arange(train.clients), clients), 0, sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    x, y = train.x[kept], train.y[kept]
    return replace(federation, train=replace(train, x=x, y=y, offsets=offsets))


@dataclass(frozen=True)
class Part:
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


def parts(quick: bool = False) -> list[Part]:
    """All parts, in the order they are run in."""
    if quick:
        return [Part("3", method, 0) for method in QUICK_METHODS]
    return [
        Part(setting, method, seed)
        for setting in SETTINGS
        for seed in range(SEEDS)
        for method in METHODS
    ]


SECONDS = {
    "cuda": {"3": (13.0, 6.0), "5": (125.0, 20.0)},
    "cpu": {"3": (650.0, 300.0), "5": (15600.0, 2500.0)},
}
"""What a run takes, roughly, if all clients train and if not, on one H200 that several runs share and on two cores, to plan by; for five
tasks on two cores it is a guess."""


def seconds(part: Part, method: Method, device: str) -> float:
    """What a part takes, roughly."""
    sampler, _ = method((1,) * CLIENTS)
    return SECONDS[device]["5" if part.setting == "5" else "3"][
        not isinstance(sampler, Full | Gvr)
    ]  # in these every client trains


def lines(some: list[Part], method_of: Callable[[Part], Method]) -> list[str]:
    """How much work some parts are: a line for a setting and method."""
    gpu, cpu = (
        {part: seconds(part, method_of(part), device) for part in some}
        for device in ("cuda", "cpu")
    )
    each = []
    for cell, number in Counter(part.cell for part in some).items():
        took = sum(value for part, value in gpu.items() if part.cell == cell)
        each.append(
            f"{cell:24}{number:3} run{'s' if number > 1 else ' '}{took:8,.0f} s of one H200"
        )
    hours = f"roughly {sum(gpu.values()) / 60:.0f} minutes of one H200, or {sum(cpu.values()) / 3600:.0f} hours of two cores"
    total = (
        f"{len(some)} runs of {ROUNDS} rounds are not finished yet: {hours}"
        if some
        else "all runs are finished"
    )
    return [*each, *([""] if each else []), total]


def method_of(part: Part) -> Method:
    """A part's sampler and estimator."""
    return METHODS[part.method]


def estimate(only: str | None = None, out: Path | None = None) -> list[str]:
    """How much work the parts are that `out` does not have yet, as lines: one for a setting and method."""
    return lines(left(results(out, NAME), chosen(only, parts())), method_of)


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

    With `out` every finished part is kept there, and not run again. `minutes` stops the work; 0 does none, and gives what is there
    already.
    """
    everything = parts(quick)
    files = [] if quick else results(out, NAME)
    runner = start(files, [part.name for part in everything], minutes, device, precision, say)
    return report(played(runner, everything, only, SETTINGS, method_of, quick), about(quick))


def played(
    runner: Runner,
    everything: list[Part],
    only: str | None,
    settings: Settings,
    method_of: Callable[[Part], Method],
    quick: bool,
) -> Cells:
    """Run what is wanted and not finished yet: all that is finished then, by its place in the table and by seed."""

    def load(kind: tuple[str, int]) -> Track:
        setting, seed = kind
        runner.say(f"{setting}, seed {seed}: loading")
        return Track(settings[setting], seed, runner, quick)

    def run(track: Track, part: Part) -> tuple[Found, str]:
        numbers = track.run(*method_of(part)(track.processors))
        return numbers, f"accuracy {numbers['accuracy']:.3f}"

    wanted = everything if quick else chosen(only, everything)
    run_parts(runner, wanted, lambda part: (part.setting, part.seed), load, run)
    cells: Cells = {}
    for part in everything:
        if part.name in runner.found:
            cells.setdefault(part.cell, {})[part.seed] = runner.found[part.name]
    return cells


def about(quick: bool = False) -> About:
    """What is run, for the page to say."""
    clients, rounds = (QUICK_CLIENTS, QUICK_ROUNDS) if quick else (CLIENTS, ROUNDS)
    everything = parts(quick)
    settings, methods = (
        dict.fromkeys(words)
        for words in zip(*((part.setting, part.method) for part in everything), strict=True)
    )
    policies = {method: METHODS[method]((1,) * clients) for method in methods}
    return About(
        clients=clients,
        budget=BUDGET,
        rounds=rounds,
        last=last(rounds),
        server=Sgd().lr,
        tasks={setting: tasks(setting, clients, quick) for setting in settings},
        methods={
            method: (options(sampler, SAMPLERS), options(estimator, ESTIMATORS))
            for method, (sampler, estimator) in policies.items()
        },
        theta={
            setting: float(
                KVibPairs(BUDGET).init(np.ones((len(SETTINGS[setting]), clients)), rounds)["theta"][
                    0
                ]
            )
            for setting in settings
        },
        drawn=[
            method for method, (sampler, _) in policies.items() if isinstance(sampler, Assigning)
        ],
        single=[
            method
            for method, (sampler, _) in policies.items()
            if isinstance(sampler, RoundRobin | RoundRobinServer | FedFair)
        ],
        runs=[(part.setting, part.method, part.seed) for part in everything],
        quick=quick,
    )


def tasks(setting: str, clients: int, quick: bool) -> list[list[str]]:
    """A setting's tasks in words, those of a kind together."""
    kinds: dict[TaskSpec, list[str]] = {}
    for name, kind in SETTINGS[setting].items():
        kinds.setdefault(kind, []).append(name)
    return [[", ".join(names), *kind.words(clients, quick)] for kind, names in kinds.items()]


SHARED = {field.name for field in fields(Assigning)} | {"memory"}
"""Options that are the same for all methods, or change no number."""


def options(policy: Sampler | Estimator, table: dict[str, Any]) -> str:
    """A sampler's or estimator's name and its own options."""
    name = called(policy, table)
    own = [field.name for field in fields(policy) if field.name not in SHARED]  # type: ignore[arg-type]
    words = [f"{key} {_value(getattr(policy, key))}" for key in own]
    return f"`{name}`" + (f": {', '.join(words)}" if words else "")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "by its rule" if value is None else f"{value}"


def last(rounds: int) -> int:
    """The rounds at the end over which the mean is taken."""
    return min(LAST, rounds // 2)


class Track:
    """A setting's tasks and engine for one seed: all methods run on it."""

    def __init__(
        self, kinds: dict[str, TaskSpec], seed: int, runner: Runner, quick: bool = False
    ) -> None:
        clients, self.rounds = (QUICK_CLIENTS, QUICK_ROUNDS) if quick else (CLIENTS, ROUNDS)
        self.seed, self.last, self.deadline = seed, last(self.rounds), runner.deadline
        self.tasks = made(kinds, clients, seed)
        if quick:
            self.tasks = [
                replace(task, data=held_out(task.federation, QUICK_HELD_OUT)) for task in self.tasks
            ]
        self.processors = tuple(assign.mixed(plan.shares(self.tasks), seed).tolist())
        self.engine: Engine = make(
            "auto", Experiment(self.tasks, seed=seed), runner.device, runner.precision
        )

    def run(self, sampler: Sampler, estimator: Estimator) -> Found:
        """One run in numbers: accuracies at the end, their curve, and what it cost."""
        experiment = Experiment(
            self.tasks,
            sampler,
            estimator,
            rounds=self.rounds,
            seed=self.seed,
            evaluate=self.rounds + 1,
        )
        state, client_seconds, server_bytes = loop.begin(experiment, self.engine), 0.0, 0
        curve: dict[int, list[float]] = {}
        failures: Counter[str] = Counter()
        while state.round < self.rounds:
            in_time(self.deadline)
            state, line = loop.play(experiment, self.engine, state)
            client_seconds += line["client_seconds"]
            server_bytes = max(server_bytes, line["server_bytes"])
            failures.update(failure["model"] for failure in line["failures"])
            if state.round > self.rounds - self.last or state.round % EVERY == 0:
                curve[state.round] = [
                    score.accuracy for score in self.engine.evaluate(state.models)
                ]
        end = np.array(
            [accuracies for t, accuracies in curve.items() if t > self.rounds - self.last]
        )
        kept = {t: each for t, each in curve.items() if t % EVERY == 0}
        return {
            "accuracy": float(end.mean()),
            "models": {
                name: float(value)
                for name, value in zip(experiment.names, end.mean(axis=0), strict=True)
            },
            "curve": {
                "rounds": list(kept),
                "accuracy": [float(f"{np.mean(each):.5g}") for each in kept.values()],
            },
            "bytes": state.bytes_up + state.bytes_down,
            "client_seconds": client_seconds,
            "server_bytes": server_bytes,
            "failures": dict(failures),
        }
