"""FLuID, Figures 2a, 4a and 4b: the time of rounds with FLuID, without it, and with one choice.

The clients are FLuID's five phones, by the device profile. In the "stable" condition nothing
changes; in the "changing" one, phones have work in the background in some quarters of the run, and
their times are noisy. The clock is virtual, and FLuID sees only the times that rows report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from rota import data, loop, models
from rota.arrays import Array
from rota.data.partition import iid
from rota.engine import Engine, Score, make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.plan import Chunk, Job, Model, Plan, Seen, State, Task
from rota.sampling import Full
from rota.submodel import Capacity, Invariant, Stragglers, Whole
from rota.world.devices import PHONES, Phones
from rota_lab.reproduce.fluid_settings import grouped, writers
from rota_lab.reproduce.fluid_time_page import report
from rota_lab.reproduce.parts import Found, chosen, in_time, results, run_parts, start
from rota_lab.reproduce.result import Result

NAME = "fluid-time"
SEEDS = {"small": 170, "writers": 20}
ROUNDS, QUICK_ROUNDS = 48, 8
LOADS, NOISE = (0.25, 0.5, 0.75), 0.03
"""The shares of a phone that work in the background takes, and the noise of times."""
MBPS = 100.0
"""FLuID's phones and its server are in one wireless network."""
GFLOPS = {"digits": 0.1, "small": 0.1, "writers": 5.0}
"""The speed of the phone in the middle, by setting: slow enough that computing takes longer than
the link, as in FLuID."""
CLIENTS = len(PHONES)


@dataclass(frozen=True)
class Static(Stragglers):
    """FLuID's stragglers as they are found first, for the whole run."""

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        if (state["width"] < 1).any() or state["rounds"] >= 2 * self.warmup:
            return state
        return super().observe(state, shares, plan, seen)


METHODS: dict[str, Capacity] = {
    "baseline": Whole(),
    "fluid": Stragglers(share=1 / CLIENTS),
    "several": Stragglers(share=2 / CLIENTS),
    "exact": Stragglers(share=1 / CLIENTS, sizes=()),
    "static": Static(share=1 / CLIENTS),
}
"""FLuID has one straggler of five and the paper's widths. "several" has up to two, "exact" has
widths of any size, and "static" keeps the first choice."""


def conditions(setting: str, name: str, rounds: int) -> Phones:
    """A setting's phones in a condition."""
    phones = Phones(gflops=GFLOPS[setting], mbps=MBPS)
    if name == "stable":
        return phones
    return replace(phones, load=LOADS, spell=rounds // 4, noise=NOISE)


@dataclass(frozen=True)
class Part:
    """A setting, a condition, a method and a seed."""

    setting: str
    condition: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.condition}-{self.method}-seed{self.seed}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call the part."""
        seed = f"seed{self.seed}"
        pairs = {f"{self.setting}-{self.condition}", f"{self.setting}-{seed}"}
        return {self.name, self.setting, self.condition, self.method, seed} | pairs


SETTINGS = ("small", "writers")
"""The 2NN on few digits for two cores, and FLuID's network on many digits."""


def parts(quick: bool = False) -> list[Part]:
    """All parts, in the order in which they run."""
    if quick:
        return [Part("digits", "changing", method, seed) for seed in (0, 1) for method in METHODS]
    out = []
    for setting in SETTINGS:
        for seed, condition, method in product(
            range(SEEDS[setting]), ("changing", "stable"), METHODS
        ):
            out.append(Part(setting, condition, method, seed))
    return out


def estimate(only: str | None = None) -> list[str]:
    """How much work the parts are, as lines."""
    some = chosen(only, parts())
    return [
        f"{setting}: {sum(part.setting == setting for part in some)} runs of {ROUNDS} rounds"
        for setting in SETTINGS
    ]


def fluid_time(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Stragglers' times before and after, changes at run time, overhead (FLuID, Figures 2 and 4).

    Finished parts are kept in `out`, and are not run again.
    """
    everything = parts(quick)
    files = [] if quick else results(out, NAME)
    runner = start(files, [part.name for part in everything], minutes, device, precision, say)
    rounds = QUICK_ROUNDS if quick else ROUNDS

    def run(task: Task, part: Part) -> tuple[Found, str]:
        devices = conditions(part.setting, part.condition, rounds)
        experiment = Experiment(
            [task],
            Full(),
            FedAvg(),
            rounds=rounds,
            seed=part.seed,
            evaluate=rounds + 1,
            capacity=METHODS[part.method],
            submodel=Invariant(),
            devices=devices,
        )
        engine = make("auto", experiment, runner.device, precision)
        numbers = played(experiment, engine, lambda: in_time(runner.deadline))
        return numbers, f"{numbers['virtual_seconds']:.0f} virtual seconds"

    def load(kind: tuple[str, int]) -> Task:
        say(f"{kind[0]}, seed {kind[1]}: loading")
        return task_of(*kind)

    wanted = everything if quick else chosen(only, everything)
    run_parts(runner, wanted, lambda part: (part.setting, part.seed), load, run)
    cells: dict[tuple[str, str, str], dict[int, Found]] = {}
    for part in everything:
        if part.name in runner.found:
            place = part.setting, part.condition, part.method
            cells.setdefault(place, {})[part.seed] = runner.found[part.name]
    return report(cells, len(everything), rounds, quick)


def task_of(setting: str, seed: int) -> Task:
    """A setting's task for one seed."""
    if setting == "digits":
        return Task(models.two_nn, data.digits(iid(CLIENTS), seed=seed), batch=20)
    if setting == "small":
        return Task(models.two_nn, writers(grouped(CLIENTS, 1), 500)(seed), lr=0.05, batch=10)
    federation = writers(grouped(CLIENTS, 100))(seed)
    return Task(models.fluid_femnist, federation, lr=0.004, batch=10)


@dataclass
class Watched:
    """An engine that counts its own processor time, and notes what rows report."""

    engine: Engine
    spent: float = 0.0
    seconds: Array = field(default_factory=lambda: np.zeros(0))
    """The last round's seconds per client."""
    width: Array = field(default_factory=lambda: np.zeros(0))

    def initial(self) -> list[Model]:
        return self.engine.initial()

    def train(self, job: Job) -> Iterator[Chunk]:
        self.seconds, self.width = np.zeros(CLIENTS), np.ones(CLIENTS)
        for row, client in enumerate(job.plan.client.tolist()):
            part = job.plan.held(row)
            self.width[client] = 1.0 if part is None else part.width
        chunks = self.engine.train(job)
        while True:
            began = time.process_time()
            chunk = next(chunks, None)
            self.spent += time.process_time() - began
            if chunk is None:
                return
            self.seconds[job.plan.client[chunk.rows]] = chunk.costs.seconds
            yield chunk

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        return self.engine.evaluate(models, which)

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        return self.engine.losses(job, examples)


def played(experiment: Experiment, engine: Engine, watch: Callable[[], None]) -> Found:
    """One run in numbers.

    For each round: the clients' seconds and widths. `server` and `training` are processor seconds
    per round of this machine, of all that is not the engine's, and of the engine.
    """
    watched = Watched(engine)
    state = loop.begin(experiment, watched)
    seconds, widths = [], []
    spent = 0.0
    while state.round < experiment.rounds:
        watch()
        began = time.process_time()
        state, _ = loop.play(experiment, watched, state)
        spent += time.process_time() - began
        seconds.append([float(f"{each:.6g}") for each in watched.seconds])
        widths.append(watched.width.tolist())
    (score,) = engine.evaluate(state.models)
    return {
        "seconds_by_round": seconds,
        "widths": widths,
        "virtual_seconds": state.seconds,
        "accuracy": score.accuracy,
        "server": (spent - watched.spent) / experiment.rounds,
        "training": watched.spent / experiment.rounds,
    }
