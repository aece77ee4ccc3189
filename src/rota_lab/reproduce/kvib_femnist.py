"""K-Vib on digits by writer, in three degrees of imbalance (its section 4, Figure 5).

Test loss and accuracy of all samplers. A part is one degree of imbalance and one sampler, with the
first seed or with the others; the seeds of a part are models of one experiment, which the engine
trains in the same stacks. A finished part is not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from rota import data, models
from rota.data.federation import Federation
from rota.data.partition import UNBALANCED, unbalanced
from rota.engine import make
from rota.estimate import Estimator, FedAvg, Unbiased
from rota.experiment import Experiment
from rota.loop import begin, play
from rota.plan import Task
from rota.running.record import finite
from rota.sampling import (
    Avare,
    ClusteredSimilarity,
    ClusteredSize,
    CpowD,
    DivFl,
    KVib,
    Mabs,
    Ocs,
    Optimal,
    Osmd,
    OsmdAdaptive,
    PowD,
    Proportional,
    RpowD,
    Sampler,
    Uniform,
    Vrb,
)
from rota_lab.reproduce.kvib_femnist_page import report
from rota_lab.reproduce.parts import Found, chosen, in_time, results, run_parts, start
from rota_lab.reproduce.result import Result

ROUNDS, EVERY, FRACTION = 500, 10, 0.05
"""The rounds, the rounds between tests, and the fraction of clients that trains per round."""
LR, BATCH, EPOCHS = 0.01, 20, 3
BOUND = 0.1
"""K-Vib's G, as far as it is known: the text has lost its number."""
SEEDS = ((0,), (1, 2, 3, 4))
"""The seeds of a sampler's first part, and of its second."""
SPLIT = 0
"""The seed of the split into unequal clients, the same for all runs, as in K-Vib's paper."""
QUICK_ROUNDS, QUICK_EVERY, QUICK_TESTS, QUICK_METHODS = 6, 2, 1000, ("uniform", "kvib", "vrb")
PAUSE = 15.0
"""Seconds between two lines of progress."""

METHODS: dict[str, Callable[[int], tuple[Sampler, Estimator]]] = {
    "uniform": lambda budget: (Uniform(budget), Unbiased()),
    "kvib": lambda budget: (KVib(budget), Unbiased()),
    "vrb": lambda budget: (Vrb(budget), Unbiased()),
    "mabs": lambda budget: (Mabs(budget), Unbiased()),
    "avare": lambda budget: (Avare(budget), Unbiased()),
    "proportional": lambda budget: (Proportional(budget), Unbiased()),
    "fedavg": lambda budget: (Uniform(budget), FedAvg()),
    "osmd-independent": lambda budget: (Osmd(budget, "independent"), Unbiased()),
    "osmd": lambda budget: (Osmd(budget), Unbiased()),
    "osmd-adaptive": lambda budget: (OsmdAdaptive(budget), Unbiased()),
    "clustered-size": lambda budget: (ClusteredSize(budget), Unbiased()),
    "kvib-G": lambda budget: (KVib(budget, bound=BOUND), Unbiased()),
    "pow-d": lambda budget: (PowD(budget, 2 * budget), Unbiased()),
    "rpow-d": lambda budget: (RpowD(budget, 2 * budget), Unbiased()),
    "cpow-d": lambda budget: (CpowD(budget, 2 * budget), Unbiased()),
    "clustered-similarity": lambda budget: (ClusteredSimilarity(budget), Unbiased()),
    "divfl": lambda budget: (DivFl(budget), Unbiased()),
    "ocs": lambda budget: (Ocs(budget, round(budget * 32 / 3)), Unbiased()),
    "optimal": lambda budget: (Optimal(budget), Unbiased()),
}
"""Samplers with their estimators, as functions of the budget: the most telling first, the dearest
last. OCS has the cohort of Chen et al.: 32 clients for a budget of 3."""
FIRST = ("uniform", "kvib", "vrb", "mabs", "avare")
"""The samplers that its paper compares; they run before all others."""


@dataclass(frozen=True)
class Piece:
    """A degree of imbalance (K-Vib's v1, v2, v3), a sampler, and seeds."""

    version: int
    method: str
    seeds: tuple[int, ...]
    rounds: int = ROUNDS
    every: int = EVERY

    @property
    def name(self) -> str:
        return f"v{self.version}-{self.method}-{self.when}"

    @property
    def when(self) -> str:
        """The seeds as a word."""
        if len(self.seeds) == 1:
            return f"seed{self.seeds[0]}"
        return f"seeds{self.seeds[0]}-{self.seeds[-1]}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call the part."""
        version = f"v{self.version}"
        pairs = {f"{version}-{self.method}", f"{version}-{self.when}"}
        return {self.name, version, self.method, self.when} | pairs


def parts(quick: bool = False) -> list[Piece]:
    """All parts, in the order in which they run.

    The first seed comes before the others; for the same seeds, the samplers that its paper compares
    come before the others.
    """
    out = []
    if quick:
        for seed in range(2):
            for method in QUICK_METHODS:
                out.append(Piece(1, method, (seed,), QUICK_ROUNDS, QUICK_EVERY))
        return out
    others = tuple(method for method in METHODS if method not in FIRST)
    for seeds, methods in product(SEEDS, (FIRST, others)):
        for version, method in product(UNBALANCED, methods):
            out.append(Piece(version, method, seeds))
    return out


WRITERS, IMAGES = 539, 111.3
"""The writers of MNIST, and the mean number of images per writer."""
SECONDS = {"cuda": (6e-7, 9e-3, 0.006), "cpu": (2.5e-4, 0.0, 4.5)}
"""Rough costs on one H200 (in tf32) and on two cores: the seconds of training on one image, of the
shortest round, and of a test."""


def images(part: Piece) -> float:
    """Roughly the largest number of images that one run of a part trains on in a round."""
    whole, small = UNBALANCED[part.version]
    everybody = WRITERS * (whole * IMAGES + (1 - whole) * small)
    budget = FRACTION * WRITERS
    asked = {"ocs": 32 / 3 * FRACTION, "optimal": 1.0}.get(part.method, 0.0) * everybody
    drawn = FRACTION * everybody if part.method in ("uniform", "fedavg") else budget * IMAGES
    return EPOCHS * (asked + drawn)


def seconds(part: Piece, device: str) -> float:
    """The rough time of a part. The shortest round takes as long for several seeds as for one."""
    image, least, test = SECONDS[device]
    runs, tests = len(part.seeds), part.rounds / part.every
    return part.rounds * (least + runs * image * images(part)) + tests * runs * test


def estimate(only: str | None = None) -> list[str]:
    """How much work the parts are, as lines."""
    some = chosen(only, parts())
    head = f"{'part':32}{'runs':>5}{'images per round':>18}"
    lines = [f"{head}{'s, one H200':>13}{'min, two cores':>16}"]
    for part in some:
        gpu, cpu = seconds(part, "cuda"), seconds(part, "cpu") / 60
        line = f"{part.name:32}{len(part.seeds):5}{images(part):18,.0f}"
        lines.append(f"{line}{gpu:13,.0f}{cpu:16,.0f}")
    runs = sum(len(part.seeds) for part in some)
    gpu, cpu = (sum(seconds(part, device) for part in some) for device in ("cuda", "cpu"))
    total = f"roughly {gpu / 60:.0f} minutes of one H200, or {cpu / 3600:.0f} hours of two cores"
    return [*lines, "", f"{runs} runs of {ROUNDS} rounds: {total}"]


def kvib_femnist(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """K-Vib against 18 rivals on digits by writer, in three degrees of imbalance (its Figure 5).

    Finished parts are kept in `out`, and are not run again. `minutes` limits the time; 0 runs
    nothing and returns what is finished.
    """
    wanted = parts(quick=True) if quick else chosen(only, parts())
    files = [] if quick else results(out, "kvib-femnist")
    runner = start(files, [part.name for part in parts()], minutes, device, precision, say)

    def load(kind: tuple[int, tuple[int, ...]]) -> Track:
        version, seeds = kind
        say(f"v{version}: loading")
        data = federation(version, QUICK_TESTS if quick else None)
        return Track(data, seeds, runner.device, precision)

    def run(track: Track, part: Piece) -> tuple[Found, str]:
        runs = track.run(part, runner.deadline, news(part, say))
        accuracy = np.mean([numbers["accuracy"][-1] for numbers in runs])
        return outcome(part, track, runs), f"accuracy {accuracy:.2%}"

    run_parts(runner, wanted, lambda part: (part.version, part.seeds), load, run)
    everything = [part.name for part in parts(quick)]
    found = {name: runner.found[name] for name in everything if name in runner.found}
    return report(found, everything, quick)


@cache
def federation(version: int, tests: int | None = None) -> Federation:
    """MNIST by writer with K-Vib's imbalance, and all test images or the first `tests` of them."""
    whole = data.mnist_writers(unbalanced(version), seed=SPLIT)
    if tests is None:
        return whole
    x, y = whole.test.x[:tests], whole.test.y[:tests]
    return replace(whole, test=replace(whole.test, x=x, y=y, offsets=np.array([0, tests])))


class Track:
    """The engine of one degree of imbalance, with a model per seed. All samplers run on it."""

    def __init__(
        self, federation: Federation, seeds: tuple[int, ...], device: str, precision: str
    ) -> None:
        self.seeds = seeds
        self.budget = max(1, round(FRACTION * federation.clients))
        task = Task(models.kvib_cnn, federation, lr=LR, batch=BATCH, epochs=EPOCHS)
        self.tasks = [replace(task, name=f"seed {seed}") for seed in seeds]
        self.engine = make("auto", Experiment(self.tasks, seed=seeds[0]), device, precision)

    def run(
        self,
        part: Piece,
        deadline: float = math.inf,
        watch: Callable[[int, float], None] = lambda *_: None,
    ) -> list[dict[str, Any]]:
        """The runs of the seeds in numbers, each with a curve of tests.

        A test has the loss, the accuracy, and the bytes until then (the mean over the seeds).
        `clients` is the mean number of clients per round. A model has no loss from the first round
        in which none of its clients' updates is finite.
        """
        sampler, estimator = METHODS[part.method](self.budget)
        experiment = Experiment(
            self.tasks,
            sampler,
            estimator,
            rounds=part.rounds,
            seed=self.seeds[0],
            evaluate=part.rounds + 1,
        )
        runs: list[dict[str, Any]] = []
        for seed in self.seeds:
            runs.append({"seed": seed, "loss": [], "accuracy": [], "bytes": []})
        names, state = experiment.names, begin(experiment, self.engine)
        drawn, broken = np.zeros(len(names)), np.zeros(len(names), bool)
        for now in range(1, part.rounds + 1):
            in_time(deadline)
            if not broken.all():
                state, line = play(experiment, self.engine, state)
                cohort = np.array([len(line["cohort"][name]) for name in names])
                trained = np.array([line["models"][name]["trained"] for name in names])
                drawn += cohort
                broken |= (cohort > 0) & (trained == 0)
            if now % part.every == 0:
                scores = self.engine.evaluate(state.models)
                total = state.bytes_up + state.bytes_down
                for run, score, gone in zip(runs, scores, broken.tolist(), strict=True):
                    run["loss"].append(None if gone else finite(_short(score.loss)))
                    run["accuracy"].append(_short(score.accuracy))
                    run["bytes"].append(round(total / len(self.seeds)))
                watch(now, float(np.mean([score.accuracy for score in scores])))
        for run, clients in zip(runs, drawn.tolist(), strict=True):
            run["clients"] = _short(clients / max(state.round, 1))
        return runs


def _short(value: float) -> float:
    """A number to five significant digits."""
    return float(f"{value:.5g}")


def news(part: Piece, say: Callable[[str], None]) -> Callable[[int, float], None]:
    """A function that reports progress now and then."""
    last = time.monotonic()

    def watch(now: int, accuracy: float) -> None:
        nonlocal last
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            say(f"{part.name}: round {now} of {part.rounds}, accuracy {accuracy:.2%}")

    return watch


def outcome(part: Piece, track: Track, runs: list[dict[str, Any]]) -> Found:
    """A finished part in numbers."""
    sizes = np.sort(track.tasks[0].roster.sizes)[::-1]
    large = round(UNBALANCED[part.version][0] * len(sizes))
    split = {
        "clients": len(sizes),
        "images": int(sizes.sum()),
        "large": large,
        "share": float(sizes[:large].sum() / sizes.sum()),
    }
    return {
        "version": part.version,
        "method": part.method,
        "rounds": part.rounds,
        "every": part.every,
        "budget": track.budget,
        "split": split,
        "runs": runs,
    }
