"""K-Vib on digits by writer, in three degrees of unbalance (S1, section 4, Figure 5): test loss and accuracy of all samplers.

A part is one unbalance and one sampler, from the first seed or from the others; seeds are models of one experiment, which the engine
trains in the same stacks. A finished part is kept, and is not run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
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
    OsmdIndependent,
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
"""Rounds; a test every so many; the part of the clients that trains in each (S1)."""
LR, BATCH, EPOCHS = 0.01, 20, 3
BOUND = 0.1
"""S1's G, as far as it is known: its number is lost in the text."""
SEEDS = ((0,), (1, 2, 3, 4))
"""Those of a sampler's first part, and of its second."""
SPLIT = 0
"""The seed of the split into unequal clients: one for all runs, as S1 has one."""
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
    "osmd-independent": lambda budget: (OsmdIndependent(budget), Unbiased()),
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
"""Samplers by name, from the budget, with their estimators; the most telling first, the dearest last. OCS's cohort is Chen's 32 for 3."""
FIRST = ("uniform", "kvib", "vrb", "mabs", "avare")
"""What S1 compares: run before all others."""


@dataclass(frozen=True)
class Part:
    """A part: an unbalance (S1's v1, v2, v3), a sampler, and seeds."""

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
        """Its seeds in a word."""
        return (
            f"seed{self.seeds[0]}"
            if len(self.seeds) == 1
            else f"seeds{self.seeds[0]}-{self.seeds[-1]}"
        )

    @property
    def words(self) -> set[str]:
        """What `--only` may call it."""
        version = f"v{self.version}"
        return {
            self.name,
            version,
            self.method,
            self.when,
            f"{version}-{self.method}",
            f"{version}-{self.when}",
        }


def parts(quick: bool = False) -> list[Part]:
    """All parts, in the order they are run in: one seed of what S1 compares, of the others, then their other seeds."""
    if quick:
        return [
            Part(1, method, (seed,), QUICK_ROUNDS, QUICK_EVERY)
            for seed in range(2)
            for method in QUICK_METHODS
        ]
    others = [method for method in METHODS if method not in FIRST]
    waves = [(seeds, methods) for seeds in SEEDS for methods in (FIRST, others)]
    return [
        Part(version, method, seeds)
        for seeds, methods in waves
        for version in UNBALANCED
        for method in methods
    ]


WRITERS, IMAGES = 539, 111.3
"""Of MNIST by writer, and how many each has in the mean."""
SECONDS = {"cuda": (6e-7, 9e-3, 0.006), "cpu": (2.5e-4, 0.0, 4.5)}
"""To plan by, measured on one H200 (in tf32) and on two cores: seconds to train on one image, of a round at least, and of a test."""


def images(part: Part) -> float:
    """The images that one run of a part trains on in a round, at most and roughly."""
    whole, small = UNBALANCED[part.version]
    everybody = WRITERS * (whole * IMAGES + (1 - whole) * small)
    budget = FRACTION * WRITERS
    asked = {"ocs": 32 / 3 * FRACTION, "optimal": 1.0}.get(part.method, 0.0) * everybody
    drawn = FRACTION * everybody if part.method in ("uniform", "fedavg") else budget * IMAGES
    return EPOCHS * (asked + drawn)


def seconds(part: Part, device: str) -> float:
    """What a part takes, roughly. A GPU's rounds and tests take the same for several seeds together."""
    image, least, test = SECONDS[device]
    runs = len(part.seeds)
    return (
        part.rounds * (least + runs * image * images(part)) + part.rounds / part.every * runs * test
    )


def estimate(only: str | None = None) -> list[str]:
    """How much work the parts are, as lines."""
    some = chosen(only, parts())
    lines = [
        f"{'part':32}{'runs':>5}{'images a round':>16}{'s, one H200':>13}{'min, two cores':>16}"
    ]
    for part in some:
        gpu, cpu = seconds(part, "cuda"), seconds(part, "cpu") / 60
        lines.append(
            f"{part.name:32}{len(part.seeds):5}{images(part):16,.0f}{gpu:13,.0f}{cpu:16,.0f}"
        )
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
    """K-Vib against 18 rivals on digits by writer, in three degrees of unbalance: test loss and accuracy (S1 Figure 5).

    With `out` every finished part is kept there, and not run again. `minutes` stops the work; 0 does none, and gives what is there
    already.
    """
    wanted = parts(quick=True) if quick else chosen(only, parts())
    files = [] if quick else results(out, "kvib-femnist")
    runner = start(files, [part.name for part in parts()], minutes, device, precision, say)

    def load(kind: tuple[int, tuple[int, ...]]) -> Track:
        version, seeds = kind
        say(f"v{version}: loading")
        return Track(
            federation(version, QUICK_TESTS if quick else None), seeds, runner.device, precision
        )

    def run(track: Track, part: Part) -> tuple[Found, str]:
        runs = track.run(part, runner.deadline, news(part, say))
        return outcome(
            part, track, runs
        ), f"accuracy {np.mean([run['accuracy'][-1] for run in runs]):.2%}"

    run_parts(runner, wanted, lambda part: (part.version, part.seeds), load, run)
    everything = [part.name for part in parts(quick)]
    return report(
        {name: runner.found[name] for name in everything if name in runner.found}, everything, quick
    )


@cache
def federation(version: int, tests: int | None = None) -> Federation:
    """MNIST by writer with S1's unbalance; tested on the first so many test images, or on all."""
    whole = data.mnist_writers(unbalanced(version), seed=SPLIT)
    if tests is None:
        return whole
    x, y = whole.test.x[:tests], whole.test.y[:tests]
    return replace(whole, test=replace(whole.test, x=x, y=y, offsets=np.array([0, tests])))


class Track:
    """An unbalance's engine, with a model for each of some seeds: all samplers run on it."""

    def __init__(
        self, federation: Federation, seeds: tuple[int, ...], device: str, precision: str
    ) -> None:
        self.seeds = seeds
        self.budget = max(1, round(FRACTION * federation.clients))
        self.tasks = [
            Task(
                models.kvib_cnn, federation, lr=LR, batch=BATCH, epochs=EPOCHS, name=f"seed {seed}"
            )
            for seed in seeds
        ]
        self.engine = make("auto", Experiment(self.tasks, seed=seeds[0]), device, precision)

    def run(
        self,
        part: Part,
        deadline: float = math.inf,
        watch: Callable[[int, float], None] = lambda *_: None,
    ) -> list[dict[str, Any]]:
        """The seeds' runs: loss and accuracy of every test, bytes until then (the mean of the seeds), clients a round.

        From the round on in which none of its clients' updates is finite, a model has no loss.
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
        names, state = experiment.names, begin(experiment, self.engine)
        trained, broken = np.zeros(len(names)), np.zeros(len(names), bool)
        tests = []
        for now in range(1, part.rounds + 1):
            in_time(deadline)
            if not broken.all():
                state, line = play(experiment, self.engine, state)
                drawn = np.array([len(line["cohort"][name]) for name in names])
                trained += drawn
                broken |= (drawn > 0) & (
                    np.array([line["models"][name]["trained"] for name in names]) == 0
                )
            if now % part.every == 0:
                tests.append(
                    (
                        self.engine.evaluate(state.models),
                        broken.copy(),
                        state.bytes_up + state.bytes_down,
                    )
                )
                watch(now, float(np.mean([score.accuracy for score in tests[-1][0]])))
        return [
            {
                "seed": seed,
                "loss": [
                    None if gone[place] else finite(_short(scores[place].loss))
                    for scores, gone, _ in tests
                ],
                "accuracy": [_short(scores[place].accuracy) for scores, _, _ in tests],
                "bytes": [round(total / len(self.seeds)) for _, _, total in tests],
                "clients": _short(trained[place] / max(state.round, 1)),
            }
            for place, seed in enumerate(self.seeds)
        ]


def _short(value: float) -> float:
    """Five digits of a number."""
    return float(f"{value:.5g}")


def news(part: Part, say: Callable[[str], None]) -> Callable[[int, float], None]:
    """A line of progress now and then."""
    last = time.monotonic()

    def watch(now: int, accuracy: float) -> None:
        nonlocal last
        if time.monotonic() - last > PAUSE:
            last = time.monotonic()
            say(f"{part.name}: round {now} of {part.rounds}, accuracy {accuracy:.2%}")

    return watch


def outcome(part: Part, track: Track, runs: list[dict[str, Any]]) -> Found:
    """A finished part in numbers, but for how it was run."""
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
