"""FLuID's accuracy studies: who drops which units, and what that costs in accuracy.

A study has settings (data, a network and local work), columns (which clients are stragglers, and
the width of their parts) and methods (which units a part keeps). A part is one run. Its numbers are
kept as soon as it is finished.

Who is a straggler is dealt out by the seed, so all methods with one seed have the same stragglers,
data, first weights and mini-batches, and are compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from rota.arrays import Array
from rota.plan import State
from rota.submodel import Capacity, Choice, Fixed, Invariant, Ordered, Random, Whole
from rota.submodel.choice import Wanted
from rota_lab.reproduce.fluid_page import About, Cells, Compared, report
from rota_lab.reproduce.fluid_settings import QUICK, Setting
from rota_lab.reproduce.fluid_track import Track
from rota_lab.reproduce.parts import Found, chosen, read, results, run_parts, start
from rota_lab.reproduce.result import Result

WHOLE = "whole"
"""The column and the method in which everybody trains whole models."""


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
    over_costs: bool = False
    """Whether charts show accuracy against costs; for studies of one column."""
    extra: dict[str, Choice] = field(default_factory=dict)
    """Methods that are run at the last column only, to find out why others are as they are."""

    def parts(self, quick: bool = False) -> list[Part]:
        """All parts, in the order in which they run: all methods with one seed, then the next.

        Where the seeds are models of one run: all seeds of one method, then the next.
        """
        out = []
        for setting in (QUICK,) if quick else self.settings:
            columns = list(self.columns)[: 2 if quick else None]
            methods = [*self.methods, *["exclude"] * self.exclude]
            cells = [(WHOLE, WHOLE), *product(columns, methods), *product(columns[-1:], self.extra)]
            seeds = range(setting.seeds)
            pairs = [(cell, seed) for cell in cells for seed in seeds]
            if not setting.joint:
                pairs = [(cell, seed) for seed in seeds for cell in cells]
            out += [Part(setting.name, column, method, seed) for (column, method), seed in pairs]
        return out

    def setting(self, name: str) -> Setting:
        return next(each for each in (*self.settings, QUICK) if each.name == name)

    def together(self, part: Part) -> tuple[int, ...]:
        """The seeds that are models of one run with this part."""
        setting = self.setting(part.setting)
        return tuple(range(setting.seeds)) if setting.joint else (part.seed,)

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

    ready: dict[tuple[str, str, str], dict[int, Found]] = {}  # the other seeds of the last run

    def load(kind: tuple[str, tuple[int, ...]]) -> Track:
        name, seeds = kind
        say(f"{name}, seed {', '.join(map(str, seeds))}: loading")
        return Track(study.setting(name), seeds, runner)

    def run(track: Track, part: Part) -> tuple[Found, str]:
        cell = part.setting, part.method, part.column
        if part.seed not in ready.get(cell, {}):
            ready.clear()
            found = track.run(*study.policies(part))
            ready[cell] = dict(zip(track.seeds, found, strict=True))
        numbers = ready[cell].pop(part.seed)
        return numbers, f"accuracy {numbers['accuracy']:.3f}"

    wanted = everything if quick else chosen(only, everything)
    run_parts(runner, wanted, lambda part: (part.setting, study.together(part)), load, run)
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
        cells=list(dict.fromkeys((part.method, part.column) for part in everything)),
        seeds={each.name: each.seeds for each in settings},
        rounds={each.name: each.rounds for each in settings},
        over_costs=study.over_costs,
        exclude=study.exclude,
        runs=len(everything),
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
