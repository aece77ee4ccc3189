"""FLuID's accuracy studies: who drops which units, and what that costs in accuracy.

A study has settings (data, a network and local work), columns (which clients are stragglers, and
the width of their parts) and methods (which units a part keeps). A part is one run. Its numbers are
kept as soon as it is finished. "small" settings are for two cores; the others have FLuID's networks
and numbers of rounds, and are for a GPU.

Who is a straggler is dealt out by the seed, so all methods with one seed have the same stragglers,
data, first weights and mini-batches, and are compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from rota import data, loop, models
from rota.arrays import Array
from rota.data.federation import Examples, Federation, Partition
from rota.data.partition import iid
from rota.engine import make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.experiment import State as RunState
from rota.plan import State, Task
from rota.sampling import Full, Sampler, Uniform
from rota.submodel import Capacity, Choice, Fixed, Invariant, Ordered, Random, Whole
from rota.submodel.choice import Wanted
from rota_lab.reproduce.fluid_page import About, Cells, Compared, report
from rota_lab.reproduce.parts import (
    Found,
    Runner,
    chosen,
    in_time,
    read,
    results,
    run_parts,
    start,
)
from rota_lab.reproduce.result import Result

WHOLE = "whole"
"""The column and the method in which everybody trains whole models."""
EVERY = 5
"""The rounds between two points of a curve."""


@dataclass(frozen=True)
class Setting:
    """Data, a network, and the clients' local work. `words` is the setting's row on the page.

    An accuracy is the mean over the last `last` rounds. `cohort` clients train in each round
    (None: all).
    """

    name: str
    words: str
    load: Callable[[int], Federation]
    model: Callable[..., nn.Module]
    rounds: int
    lr: float
    batch: int
    optimizer: Literal["sgd", "adam"] = "sgd"
    seeds: int = 5
    cohort: int | None = None
    last: int = 5

    @property
    def sampler(self) -> Sampler:
        return Full() if self.cohort is None else Uniform(self.cohort)

    def task(self, seed: int) -> Task:
        return Task(
            self.model,
            self.load(seed),
            lr=self.lr,
            batch=self.batch,
            optimizer=self.optimizer,
            name=self.name,
        )


@dataclass(frozen=True)
class Frozen(Ordered):
    """Random units that are the same in every round, as Ordered's are the same in every round."""

    def keep(self, state: State, wanted: Wanted, generator: np.random.Generator) -> list[Array]:
        kept = []
        for at, (layer, count) in enumerate(zip(wanted.units.layers, wanted.counts, strict=True)):
            order = np.random.default_rng([at, layer.size]).permutation(layer.size)
            kept.append(np.sort(order[:count]))
        return kept


METHODS: dict[str, Choice] = {"random": Random(), "ordered": Ordered(), "invariant": Invariant()}
"""The methods that FLuID compares."""


@dataclass(frozen=True)
class Study:
    """A table or figure of FLuID. `paper` has its accuracies by setting, method and column."""

    name: str
    summary: str
    """One sentence for the list of reproductions."""
    title: str
    first: str
    """The page's first paragraph."""
    settings: tuple[Setting, ...]
    columns: dict[str, Fixed]
    methods: dict[str, Choice] = field(default_factory=lambda: METHODS)
    paper: dict[tuple[str, str, str], float] = field(default_factory=dict)
    invariant: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """FLuID's percentages of invariant units."""
    why: str = ""
    """How to find the reason where the truth differs from FLuID's paper."""
    compared: tuple[Compared, ...] = ()
    """Claims besides the order of the methods."""
    exclude: bool = False
    """Whether there is also a method that leaves stragglers out."""
    extra: dict[str, Choice] = field(default_factory=dict)
    """Methods that are run at the last column only, to find out why others are as they are."""

    def parts(self, quick: bool = False) -> list[Part]:
        """All parts, in the order in which they run: all methods with one seed, then the next."""
        out = []
        for setting in (QUICK,) if quick else self.settings:
            columns = list(self.columns)[: 2 if quick else None]
            methods = [*self.methods, *["exclude"] * self.exclude]
            for seed in range(setting.seeds):
                out.append(Part(setting.name, WHOLE, WHOLE, seed))
                cells = [*product(columns, methods), *product(columns[-1:], self.extra)]
                out += [Part(setting.name, column, method, seed) for column, method in cells]
        return out

    def setting(self, name: str) -> Setting:
        return next(each for each in (*self.settings, QUICK) if each.name == name)

    def policies(self, part: Part) -> tuple[Capacity, Choice]:
        """A part's capacity, and which units its sub-models keep."""
        if part.method == WHOLE:
            return Whole(), Ordered()
        capacity = self.columns[part.column]
        if part.method == "exclude":
            sizes = tuple(size * (size == 1) for size in capacity.sizes)
            return replace(capacity, sizes=sizes), Ordered()
        return capacity, (self.methods | self.extra)[part.method]


@dataclass(frozen=True)
class Part:
    """A run: a setting, a column of the table, a method, and a seed."""

    setting: str
    column: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        if self.method == WHOLE:
            return f"{self.setting}-{WHOLE}-seed{self.seed}"
        return f"{self.setting}-{self.column}-{self.method}-seed{self.seed}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call the part."""
        seed = f"seed{self.seed}"
        pairs = {f"{self.setting}-{other}" for other in (self.column, self.method, seed)}
        return {self.name, self.setting, self.column, self.method, seed} | pairs


def run_study(
    study: Study,
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run the unfinished parts of a study that are wanted, and report on all finished ones."""
    everything = study.parts(quick)
    files = [] if quick else results(out, study.name)
    runner = start(files, [part.name for part in everything], minutes, device, precision, say)

    def load(kind: tuple[str, int]) -> Track:
        name, seed = kind
        say(f"{name}, seed {seed}: loading")
        return Track(study, study.setting(name), seed, runner)

    def run(track: Track, part: Part) -> tuple[Found, str]:
        numbers = track.run(*study.policies(part))
        return numbers, f"accuracy {numbers['accuracy']:.3f}"

    wanted = everything if quick else chosen(only, everything)
    run_parts(runner, wanted, lambda part: (part.setting, part.seed), load, run)
    cells: Cells = {}
    for part in everything:
        if part.name in runner.found:
            place = (part.setting, part.method, part.column)
            cells.setdefault(place, {})[part.seed] = runner.found[part.name]
    return report(about(study, everything, quick), cells)


def about(study: Study, everything: list[Part], quick: bool) -> About:
    """What the page says of a study."""
    settings = (QUICK,) if quick else study.settings
    return About(
        name=study.name,
        title=study.title,
        first=study.first,
        settings={each.name: _row(each) for each in settings},
        columns=list(dict.fromkeys(part.column for part in everything if part.column != WHOLE)),
        methods=list(dict.fromkeys(part.method for part in everything if part.method != WHOLE)),
        paper={} if quick else study.paper,
        invariant={} if quick else study.invariant,
        why=study.why,
        compared=() if quick else study.compared,
        runs=len(everything),
        last={each.name: each.last for each in settings},
        quick=quick,
    )


def _row(setting: Setting) -> list[str]:
    """A setting in words, for the page's table of settings."""
    adam = "Adam, " if setting.optimizer == "adam" else ""
    work = f"{adam}learning rate {setting.lr:g}, batches of {setting.batch}"
    who = "all" if setting.cohort is None else f"{setting.cohort}"
    return [
        setting.name,
        setting.words,
        f"`{setting.model.__name__}`",
        work,
        who,
        f"{setting.rounds}",
        f"{setting.seeds}",
    ]


def estimate_study(study: Study, only: str | None = None, out: Path | None = None) -> list[str]:
    """How many runs are left, and how long they take if they are like the finished ones."""
    finished: dict[str, Found] = {}
    for file in results(out, study.name):
        finished |= read(file)
    wanted = chosen(only, study.parts())
    lines = []
    for setting in study.settings:
        mine = [part for part in wanted if part.setting == setting.name]
        rest = [part for part in mine if part.name not in finished]
        took = [finished[part.name]["seconds"] for part in mine if part.name in finished]
        line = f"{setting.name:14}{len(rest):5} runs of {setting.rounds} rounds"
        if rest and took:
            minutes = len(rest) * float(np.mean(took)) / 60
            line += f", about {minutes:.0f} minutes on the machine of the finished runs"
        lines += [line] if mine else []
    return lines


class Track:
    """A setting's task and engine for one seed. All methods run on it."""

    def __init__(self, study: Study, setting: Setting, seed: int, runner: Runner) -> None:
        self.setting, self.seed, self.deadline = setting, seed, runner.deadline
        self.task = setting.task(seed)
        capacity = next(iter(study.columns.values()))
        experiment = self.experiment(capacity, Ordered())
        self.engine = make("auto", experiment, runner.device, runner.precision)

    def experiment(self, capacity: Capacity, choice: Choice) -> Experiment:
        return Experiment(
            [self.task],
            self.setting.sampler,
            FedAvg(),
            rounds=self.setting.rounds,
            seed=self.seed,
            evaluate=self.setting.rounds + 1,
            capacity=capacity,
            submodel=choice,
        )

    def run(self, capacity: Capacity, choice: Choice) -> Found:
        """One run in numbers: the accuracy at the end, its curve, costs, and invariant units."""
        experiment, setting = self.experiment(capacity, choice), self.setting
        state, client_seconds = loop.begin(experiment, self.engine), 0.0
        end: list[float] = []
        curve: dict[int, float] = {}
        invariant: list[tuple[float, float]] = []
        while state.round < setting.rounds:
            in_time(self.deadline)
            if isinstance(choice, Invariant):
                invariant.append(invariance(experiment, state))
            state, line = loop.play(experiment, self.engine, state)
            client_seconds += line["client_seconds"]
            counts = state.round > setting.rounds - setting.last
            if counts or state.round % EVERY == 0:
                (score,) = self.engine.evaluate(state.models)
                end += [score.accuracy] * counts
                if state.round % EVERY == 0:
                    curve[state.round] = float(f"{score.accuracy:.5g}")
        numbers: Found = {
            "accuracy": float(np.mean(end)),
            "curve": {"rounds": list(curve), "accuracy": list(curve.values())},
            "bytes": state.bytes_up + state.bytes_down,
            "virtual_seconds": state.seconds,
            "client_seconds": client_seconds,
        }
        if invariant:
            share, filled = np.mean(invariant[setting.rounds // 2 :], axis=0).tolist()
            numbers |= {"invariant": share, "filled": filled}
            numbers["invariant_curve"] = [round(share, 4) for share, _ in invariant]
        return numbers


def invariance(experiment: Experiment, state: RunState) -> tuple[float, float]:
    """The share of invariant units, and of the units to be dropped the share that is invariant.

    The second is over the layers of the narrowest part.
    """
    known, units = state.policies["submodel"], experiment.units[0]
    widths = experiment.capacity.widths(state.policies["capacity"])
    assert widths is not None
    number, filled = 0, []
    for at, (layer, kept) in enumerate(
        zip(units.layers, units.counts(float(widths[widths > 0].min())), strict=True)
    ):
        invariant, gone = int(known[f"invariant.0.{at}"].sum()), layer.size - kept
        number += invariant
        if gone:
            filled.append(min(1.0, invariant / gone))
    return number / sum(layer.size for layer in units.layers), float(np.mean(filled or [1.0]))


def grouped(clients: int, writers: int) -> Partition:
    """Each client has the images of some writers, who are chosen at random."""

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        known, writer = np.unique(np.asarray(examples.groups), return_inverse=True)
        place = generator.permutation(len(known))
        owner = place[writer] // writers
        return np.where(owner < clients, owner, -1), clients

    return deal


def halved(clients: int) -> Partition:
    """Each client has one half of a writer's images; writers are chosen at random."""

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        known, writer = np.unique(np.asarray(examples.groups), return_inverse=True)
        place = generator.permutation(len(known))
        half = generator.integers(2, size=len(writer))
        owner = 2 * place[writer] + half
        return np.where(owner < clients, owner, -1), clients

    return deal


def writers(partition: Partition, tests: int | None = None) -> Callable[[int], Federation]:
    """Digits by writer, and all test images or the first `tests` of them."""

    def load(seed: int) -> Federation:
        whole = data.mnist_writers(partition, seed=seed)
        if tests is None:
            return whole
        x, y = whole.test.x[:tests], whole.test.y[:tests]
        return replace(whole, test=replace(whole.test, x=x, y=y, offsets=np.array([0, tests])))

    return load


def small_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """FLuID's FEMNIST network at half its width: 5x5 convolutions with 8 and 32 channels."""
    colours, height, width = shape
    return nn.Sequential(
        nn.Conv2d(colours, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 60),
        nn.ReLU(),
        nn.Linear(60, classes),
    )


QUICK = Setting(
    name="digits",
    words="handwritten digits of 8x8 pixels, 10 clients",
    load=lambda seed: data.digits(iid(10), seed=seed),
    model=models.two_nn,
    rounds=3,
    lr=0.1,
    batch=20,
    seeds=2,
    last=1,
)
"""The setting of the short versions; its data are at hand everywhere."""
