"""MMFL's Table I: several models trained at once, relative to full participation.

A part is one run: a setting, a method and a seed. A finished part is not run again. All methods run
with one seed before the next seed starts, so that finished runs can be compared at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
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
"""The fraction of the test examples that MMFL keeps for validation, and the fraction of the others
that the short version leaves out."""
HIGH, LABELS = 0.1, 0.3
"""MMFL's split: the fraction of clients with much data, and of labels that a client has."""
LAST = 21
"""MMFL's accuracies are means over this many last rounds."""
EVERY = 5
"""The rounds between two tests before that."""
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
"""Each method's sampler and estimator, as a function of the clients' processors."""


@dataclass(frozen=True)
class TaskSpec:
    """What a task trains, as far as it is known without the data's files."""

    data: str
    source: Callable[..., Federation]
    network: str
    model: Callable[..., nn.Module]
    lr: float
    sizes: tuple[tuple[int, int], tuple[int, int]] | None = None
    """MMFL's split: the range of examples of most clients, and of the few with much data."""
    owners: str = ""
    """Who the clients are, where the data have natural clients."""
    batch: int | None = None
    epochs: int = 5
    held_out: float = HELD_OUT

    def partition(self, clients: int) -> Partition:
        if self.sizes:
            return high_low(clients, HIGH, *self.sizes, LABELS)
        return natural(limit=clients)

    def task(self, clients: int, name: str, seed: int) -> Task:
        federation = held_out(self.source(self.partition(clients), seed=seed), self.held_out)
        return Task(
            self.model,
            federation,
            lr=self.lr,
            batch=self.batch,
            epochs=self.epochs,
            name=name,
        )

    def words(self, clients: int, quick: bool) -> list[str]:
        """The task's row on the page: see TASKS in mmfl_page.py."""
        with torch.device("meta"):  # no weights are drawn
            parameters = sum(weight.numel() for weight in self.model().parameters())
        if self.sizes:
            (low, some), (many, most) = self.sizes
            sizes = f"{many} to {most} examples, the others {low} to {some}"
            labels = f"{LABELS:.0%} of the labels each"
            split = f"{HIGH:.0%} of the clients have {sizes}; {labels}"
        else:
            split = f"the data's own: the first {clients} {self.owners}"
        work = f"{self.epochs} steps on all examples"
        if self.batch:
            work += f" (batches of {self.batch}, and no client has more)"
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
"""The tasks of each setting. Tasks with one specification differ in who has which labels."""


def made(specs: dict[str, TaskSpec], clients: int, seed: int) -> list[Task]:
    """A setting's tasks with their data; see `lacking`."""
    tasks = []
    for number, (name, spec) in enumerate(specs.items()):
        tasks.append(spec.task(clients, name, 100 * seed + number))
    return lacking(tasks, seed)


def held_out(federation: Federation, out: float = HELD_OUT) -> Federation:
    """A federation without the first test examples, which MMFL keeps for validation."""
    test, first = federation.test, int(out * len(federation.test.y))
    x, y = test.x[first:], test.y[first:]
    return replace(federation, test=replace(test, x=x, y=y, offsets=np.array([0, len(y)])))


def lacking(tasks: list[Task], seed: int) -> list[Task]:
    """The tasks, where each client lacks the data of a random one with a chance of 10 %."""
    generator = rng.generator(rng.key(seed, "lacking"))
    clients = tasks[0].data.clients
    chosen = generator.random(clients) < 0.1
    lacks = np.where(chosen, generator.integers(len(tasks), size=clients), -1)
    out = []
    for number, task in enumerate(tasks):
        kept = without(task.federation, np.flatnonzero(lacks == number))
        out.append(replace(task, data=kept))
    return out


def without(federation: Federation, clients: Array) -> Federation:
    """A federation in which some clients have no training examples."""
    train, sizes = federation.train, federation.train.sizes
    kept = torch.from_numpy(~np.isin(np.repeat(np.arange(train.clients), sizes), clients))
    sizes = np.where(np.isin(np.arange(train.clients), clients), 0, sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    x, y = train.x[kept], train.y[kept]
    return replace(federation, train=replace(train, x=x, y=y, offsets=offsets))


@dataclass(frozen=True)
class Piece:
    """A setting, a method and a seed."""

    setting: str
    method: str
    seed: int

    @property
    def cell(self) -> str:
        """The part's place in the table."""
        return f"{self.setting}-{self.method}"

    @property
    def name(self) -> str:
        return f"{self.cell}-seed{self.seed}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call the part."""
        seed = f"seed{self.seed}"
        return {self.name, self.cell, self.setting, self.method, seed, f"{self.setting}-{seed}"}


def parts(quick: bool = False) -> list[Piece]:
    """All parts, in the order in which they run."""
    if quick:
        return [Piece("3", method, 0) for method in QUICK_METHODS]
    return in_order(dict.fromkeys(SETTINGS, METHODS))


def in_order(settings: Mapping[str, Iterable[str]]) -> list[Piece]:
    """The parts of each setting's methods: all methods with one seed, then with the next."""
    out = []
    for setting, methods in settings.items():
        for seed, method in product(range(SEEDS), methods):
            out.append(Piece(setting, method, seed))
    return out


SECONDS = {
    "cuda": {"3": (13.0, 6.0), "5": (125.0, 20.0)},
    "cpu": {"3": (650.0, 300.0), "5": (15600.0, 2500.0)},
}
"""The rough time of a run in which all clients train, and of another one, on one H200 that several
runs share, and on two cores; for five tasks on two cores it is a guess."""


def seconds(part: Piece, method: Method, device: str) -> float:
    """The rough time of a part."""
    sampler, _ = method((1,) * CLIENTS)
    all_train, others = SECONDS[device]["5" if part.setting == "5" else "3"]
    return all_train if isinstance(sampler, Full | Gvr) else others


def lines(some: list[Piece], method_of: Callable[[Piece], Method]) -> list[str]:
    """How much work some parts are: a line per setting and method, and their sum."""
    if not some:
        return ["all runs are finished"]
    took: dict[str, list[float]] = {}
    hours = 0.0
    for part in some:
        method = method_of(part)
        took.setdefault(part.cell, []).append(seconds(part, method, "cuda"))
        hours += seconds(part, method, "cpu") / 3600
    out = []
    for cell, mine in took.items():
        runs = f"{len(mine):3} run{'s' if len(mine) > 1 else ' '}"
        out.append(f"{cell:24}{runs}{sum(mine):8,.0f} s of one H200")
    minutes = sum(map(sum, took.values())) / 60
    cost = f"roughly {minutes:.0f} minutes of one H200, or {hours:.0f} hours of two cores"
    return [*out, "", f"{len(some)} runs of {ROUNDS} rounds are not finished yet: {cost}"]


def method_of(part: Piece) -> Method:
    """How a part's sampler and estimator are made."""
    return METHODS[part.method]


def estimate(only: str | None = None, out: Path | None = None) -> list[str]:
    """How much work the unfinished parts are, as lines."""
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
    """Several models at once: 15 ways to share 12 clients among 3 and 5 tasks (Table I).

    Finished parts are kept in `out`, and are not run again. `minutes` limits the time; 0 runs
    nothing and returns what is finished.
    """
    everything = parts(quick)
    files = [] if quick else results(out, NAME)
    runner = start(files, [part.name for part in everything], minutes, device, precision, say)
    return report(played(runner, everything, only, SETTINGS, method_of, quick), about(quick))


def played(
    runner: Runner,
    everything: list[Piece],
    only: str | None,
    settings: Settings,
    method_of: Callable[[Piece], Method],
    quick: bool,
) -> Cells:
    """Run the wanted parts, and return all finished ones by cell and seed."""

    def load(kind: tuple[str, int]) -> Track:
        setting, seed = kind
        runner.say(f"{setting}, seed {seed}: loading")
        return Track(settings[setting], seed, runner, quick)

    def run(track: Track, part: Piece) -> tuple[Found, str]:
        sampler, estimator = method_of(part)(track.processors)
        numbers = track.run(sampler, estimator)
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
    runs = [(part.setting, part.method, part.seed) for part in parts(quick)]
    described, theta = {}, {}
    for setting in dict.fromkeys(setting for setting, _, _ in runs):
        described[setting] = tasks(setting, clients, quick)
        shares = np.ones((len(SETTINGS[setting]), clients))
        theta[setting] = float(KVibPairs(BUDGET).init(shares, rounds)["theta"][0])
    methods, drawn, single = {}, [], []
    for method in dict.fromkeys(method for _, method, _ in runs):
        sampler, estimator = METHODS[method]((1,) * clients)
        methods[method] = (options(sampler, SAMPLERS), options(estimator, ESTIMATORS))
        if isinstance(sampler, Assigning):
            drawn.append(method)
        if isinstance(sampler, RoundRobin | RoundRobinServer | FedFair):
            single.append(method)
    return About(
        clients=clients,
        budget=BUDGET,
        rounds=rounds,
        last=last(rounds),
        server=Sgd().lr,
        tasks=described,
        methods=methods,
        theta=theta,
        drawn=drawn,
        single=single,
        runs=runs,
        quick=quick,
    )


def tasks(setting: str, clients: int, quick: bool) -> list[list[str]]:
    """A setting's tasks in words; tasks with one specification share a row."""
    names: dict[TaskSpec, list[str]] = {}
    for name, spec in SETTINGS[setting].items():
        names.setdefault(spec, []).append(name)
    return [[", ".join(mine), *spec.words(clients, quick)] for spec, mine in names.items()]


SHARED = {field.name for field in fields(Assigning)} | {"memory"}
"""Options that are the same for all methods, or that change no number."""


def options(policy: Sampler | Estimator, table: dict[str, Any]) -> str:
    """The name of a sampler or estimator, and its own options."""
    words = []
    for field in fields(policy):  # type: ignore[arg-type]
        if field.name not in SHARED:
            words.append(f"{field.name} {_value(getattr(policy, field.name))}")
    name = f"`{called(policy, table)}`"
    return f"{name}: {', '.join(words)}" if words else name


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "by its rule" if value is None else f"{value}"


def last(rounds: int) -> int:
    """The number of rounds at the end over which accuracies are averaged."""
    return min(LAST, rounds // 2)


class Track:
    """A setting's tasks and engine for one seed. All methods run on it."""

    def __init__(
        self, specs: dict[str, TaskSpec], seed: int, runner: Runner, quick: bool = False
    ) -> None:
        clients, self.rounds = (QUICK_CLIENTS, QUICK_ROUNDS) if quick else (CLIENTS, ROUNDS)
        self.seed, self.last, self.deadline = seed, last(self.rounds), runner.deadline
        self.tasks = []
        for task in made(specs, clients, seed):
            if quick:
                task = replace(task, data=held_out(task.federation, QUICK_HELD_OUT))
            self.tasks.append(task)
        self.processors = tuple(assign.mixed(plan.shares(self.tasks), seed).tolist())
        experiment = Experiment(self.tasks, seed=seed)
        self.engine: Engine = make("auto", experiment, runner.device, runner.precision)

    def run(self, sampler: Sampler, estimator: Estimator) -> Found:
        """One run in numbers: accuracies at the end, their curve, and costs."""
        experiment = Experiment(
            self.tasks,
            sampler,
            estimator,
            rounds=self.rounds,
            seed=self.seed,
            evaluate=self.rounds + 1,
        )
        state, client_seconds, server_bytes = loop.begin(experiment, self.engine), 0.0, 0
        end: list[list[float]] = []
        curve: dict[int, float] = {}
        failures: Counter[str] = Counter()
        while state.round < self.rounds:
            in_time(self.deadline)
            state, line = loop.play(experiment, self.engine, state)
            client_seconds += line["client_seconds"]
            server_bytes = max(server_bytes, line["server_bytes"])
            failures.update(failure["model"] for failure in line["failures"])
            counts = state.round > self.rounds - self.last
            if counts or state.round % EVERY == 0:
                scores = self.engine.evaluate(state.models)
                accuracies = [score.accuracy for score in scores]
                if counts:
                    end.append(accuracies)
                if state.round % EVERY == 0:
                    curve[state.round] = float(f"{np.mean(accuracies):.5g}")
        means = np.mean(end, axis=0).tolist()
        return {
            "accuracy": float(np.mean(end)),
            "models": dict(zip(experiment.names, means, strict=True)),
            "curve": {"rounds": list(curve), "accuracy": list(curve.values())},
            "bytes": state.bytes_up + state.bytes_down,
            "client_seconds": client_seconds,
            "server_bytes": server_bytes,
            "failures": dict(failures),
        }
