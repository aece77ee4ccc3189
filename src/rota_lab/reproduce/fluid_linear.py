"""FLuID, Figure 7: the time of training a part against its width.

Measured: processor time of the engines on this machine, where all clients train parts of one width.
Computed: the time of FLuID's five phones from the device profile, by the FLOPs and bytes of the
part. A repetition measures all widths in a random order, and a time is relative to the whole
model's in the same repetition.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rota import models, rng
from rota.data.federation import Examples, Federation, pack, shared
from rota.engine import Engine, make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.loop import begin
from rota.plan import Job, Task
from rota.probe import Setting
from rota.sampling import Full
from rota.submodel import Fixed, Ordered, Whole
from rota.submodel.parts import hold
from rota.world.devices import PHONES, Phones
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.fluid_page import made_on
from rota_lab.reproduce.fluid_settings import small_cnn
from rota_lab.reproduce.interval import Statement, interval, judged
from rota_lab.reproduce.mmfl_cells import grid
from rota_lab.reproduce.parts import Found, chosen, in_time, results, run_parts, start
from rota_lab.reproduce.result import Result, Row, over_seeds

NAME = "fluid-linear"
WIDTHS = (1.0, 0.95, 0.85, 0.75, 0.65, 0.5)
CLIENTS = len(PHONES)
REPEATS, QUICK_REPEATS = 8, 2
ENGINES = ("sequential", "batched")
NEAR = 0.1
"""FLuID's paper: times are within 10 % of the whole model's time of the line."""


@dataclass(frozen=True)
class Net:
    """A network, the shape of its examples, and how many of them a client has."""

    model: Callable[..., nn.Module]
    shape: tuple[int, ...]
    classes: int
    examples: int
    batch: int

    def federation(self) -> Federation:
        """Random examples: times do not depend on what is in them."""
        generator = torch.Generator().manual_seed(0)
        number = CLIENTS * self.examples
        if len(self.shape) == 1:
            x = torch.randint(self.classes, (number, *self.shape), generator=generator)
        else:
            x = torch.rand(number, *self.shape, generator=generator)
        y = torch.randint(self.classes, (number,), generator=generator)
        owner = np.repeat(np.arange(CLIENTS), self.examples)
        some = Examples(x[:1], y[:1])
        return Federation(
            "random", pack(Examples(x, y), owner, CLIENTS), shared(some), self.classes
        )


NETS = {
    "femnist": Net(models.fluid_femnist, (1, 28, 28), 62, 120, 10),
    "vgg9": Net(models.vgg9, (3, 32, 32), 10, 60, 20),
    "shakespeare": Net(models.lstm_shakespeare, (80,), 80, 64, 32),
}
"""FLuID's networks and batch sizes, but for the batch of the LSTM, which is 128 there."""
QUICK = {"small": Net(small_cnn, (1, 28, 28), 10, 10, 10)}


@dataclass(frozen=True)
class Part:
    """A network on an engine."""

    net: str
    engine: str

    @property
    def name(self) -> str:
        return f"{self.net}-{self.engine}"

    @property
    def words(self) -> set[str]:
        return {self.name, self.net, self.engine}


def parts(quick: bool = False) -> list[Part]:
    """All parts, in the order in which they run."""
    return [Part(net, engine) for net in (QUICK if quick else NETS) for engine in ENGINES]


def estimate(only: str | None = None) -> list[str]:
    """How much work the parts are, as lines."""
    some = chosen(only, parts())
    return [f"{part.name:24}{REPEATS} repetitions over {len(WIDTHS)} widths" for part in some]


def fluid_linear(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """The time of training a part against its width, on both engines and on phones (FLuID, Fig. 7).

    Finished parts are kept in `out`, and are not run again.
    """
    everything = parts(quick)
    files = [] if quick else results(out, NAME)
    runner = start(files, [part.name for part in everything], minutes, device, precision, say)
    nets, repeats = (QUICK, QUICK_REPEATS) if quick else (NETS, REPEATS)

    def run(bench: Bench, part: Part) -> tuple[Found, str]:
        numbers = bench.measure(part.engine, repeats, lambda: in_time(runner.deadline))
        half = float(np.mean(numbers["ratio"][-1]))
        return numbers, f"at width {WIDTHS[-1]:g} it takes {half:.0%} of the time"

    def load(net: str) -> Bench:
        return Bench(nets[net], runner.device, precision)

    wanted = everything if quick else chosen(only, everything)
    run_parts(runner, wanted, lambda part: part.net, load, run)
    names = [part.name for part in everything]
    return report({name: runner.found[name] for name in names if name in runner.found}, quick)


class Bench:
    """One network, to be trained at any width."""

    def __init__(self, net: Net, device: str, precision: str) -> None:
        self.device, self.precision = device, precision
        self.task = Task(net.model, net.federation(), lr=0.01, batch=net.batch, name="net")

    def measure(self, engine: str, repeats: int, watch: Callable[[], None]) -> Found:
        """Times at all widths relative to the whole model's, and the phones' times in seconds."""
        experiments = {width: self._experiment(width) for width in WIDTHS}
        trainer = make(engine, experiments[1.0], self.device, self.precision)
        jobs = {width: job(each, trainer) for width, each in experiments.items()}
        phones = {width: _train(trainer, each, self.device)[1] for width, each in jobs.items()}
        took: dict[float, list[float]] = {width: [] for width in WIDTHS}
        for repeat in range(repeats):
            for at in rng.generator(rng.key(repeat, "widths")).permutation(len(WIDTHS)):
                watch()
                took[WIDTHS[at]].append(_train(trainer, jobs[WIDTHS[at]], self.device)[0])
        whole = np.array(took[1.0])
        return {
            "ratio": [(np.array(took[width]) / whole).tolist() for width in WIDTHS],
            "whole_seconds": float(np.median(whole)),
            "phones": [phones[width] for width in WIDTHS],
        }

    def _experiment(self, width: float) -> Experiment:
        capacity = Whole() if width == 1 else Fixed(sizes=(width,))
        return Experiment(
            [self.task], Full(), FedAvg(), capacity=capacity, submodel=Ordered(), devices=Phones()
        )


def job(experiment: Experiment, engine: Engine) -> Job:
    """The first round's job in which all clients train parts of the experiment's width."""
    state = begin(experiment, engine)
    policies, units = experiment.policies, experiment.units
    held = hold(policies, units, state.models, state.shares, state.policies, experiment.seed, 1)
    setting = Setting(engine, experiment.estimator, state.models, 1, 0, np.ones(1), held)
    plan = experiment.sampler.draw({}, state.shares, np.random.default_rng(0))
    return setting.job(plan, state.policies["estimator"], None)


def _train(engine: Engine, work: Job, device: str) -> tuple[float, list[float]]:
    """The seconds of training all clients here, and what each phone reports.

    Processor time is counted on a processor, because others may use it, too.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    seconds = np.zeros(CLIENTS)
    for chunk in engine.train(work):
        seconds[work.plan.client[chunk.rows]] = chunk.costs.seconds
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began, seconds.tolist()


FIRST = f"""\
FLuID's Figure 7, whose numbers are in a picture only: the training time of a part falls linearly
with its width, and is within 10 % of the whole model's time of the width itself. Here it is
measured on both engines, where {CLIENTS} clients train parts of one width, and computed for FLuID's
five phones from the device profile. Times are relative to the whole model's in the same repetition;
brackets show 95 % intervals over the repetitions (Student's t).""".splitlines()
SHORT = """\
**This is the short version. It shows that the reproduction runs, and is not the result.**"""
WHY = """\
A part of width r keeps r of the units of every droppable layer. A layer between two such layers
shrinks on both sides, so its work falls with the square of the width; a layer beside the inputs or
the outputs falls with the width itself. Times that fall with the width alone are a sign of work per
step that does not depend on the width, as on small networks. A processor computes with vectors, and
15 channels take as many operations as 16: so the measured time falls in steps. FLuID's rule
r = target / time makes parts smaller than they need to be where times fall faster than the width;
rota's `stragglers` learns how they fall for each client."""


def report(found: dict[str, Found], quick: bool) -> Result:
    """Tables, charts and verdicts."""
    lines = [SHORT, ""] if quick else [*FIRST, ""]
    statements: list[Statement] = []
    rows: list[Row] = []
    charts = []
    for name, numbers in found.items():
        lines += [f"## {name}", ""]
        ratio, phones = np.array(numbers["ratio"]), np.array(numbers["phones"])
        relative = phones / phones[0]
        body = []
        for at, width in enumerate(WIDTHS[1:], start=1):
            between, spread = interval(ratio[at].tolist()), relative[at]
            here = f"{between.mean:.3f} ({between.low:.3f} to {between.high:.3f})"
            body.append([f"{width:g}", here, f"{spread.min():.3f} to {spread.max():.3f}"])
            rows.append(over_seeds(f"{name}: time at width {width:g}", None, ratio[at].tolist()))
        lines += [*grid(("width", "measured here", "five phones, computed"), body), ""]
        lines += [
            f"The whole model takes {1000 * numbers['whole_seconds']:.0f} ms here for "
            f"{CLIENTS} clients; on the phones "
            f"{phones[0].min():.2f} to {phones[0].max():.2f} s per client.",
            "",
        ]
        statements += _statements(name, ratio)
        lines_of = [
            Line("measured", WIDTHS, ratio.mean(axis=1).tolist(), 0),
            Line("phones", WIDTHS, relative.mean(axis=1).tolist(), 1),
            Line("linear", WIDTHS, list(WIDTHS), 6, 1),
            Line("square", WIDTHS, [width**2 for width in WIDTHS], 6, 2),
        ]
        charts.append(Chart(name, f"{name}: time by width", "width", "relative time", lines_of))
    lines += ["## Why it is not the width itself", "", *WHY.splitlines(), ""]
    lines += made_on({(name, "", ""): {0: run} for name, run in found.items()})
    lines += ["", "## Claims", "", JUDGED] if statements else []
    title = "FLuID, Figure 7: the time of training a part against its width"
    return Result(NAME, title, "\n".join(lines), rows, charts, {}, quick, claims=judged(statements))


JUDGED = """\
The first claim is FLuID's, as the distance from its bar of 10 % of the whole model's time; the
second asks whether a straight line explains 95 % of the variance; the third, whether half the width
saves at least 40 % of the time. A verdict is Student's t-test at 5 % over the repetitions, with
Holm's correction for all claims of the page."""


def _statements(name: str, ratio: Any) -> list[Statement]:
    away = np.abs(ratio - np.array(WIDTHS)[:, None]).max(axis=0)
    fits = [_explained(column) for column in ratio.T]
    claims = {
        "times are within 10 % of the width": (NEAR - away).tolist(),
        "times fall in a straight line (share of the variance above 95 %)": [
            fit - 0.95 for fit in fits
        ],
        "half the width saves more than 40 % of the time": (0.6 - ratio[-1]).tolist(),
    }
    return [
        Statement(f"{name}: {words}", values, " %", 0.01, "repetition")
        for words, values in claims.items()
    ]


def _explained(times: Any) -> float:
    """The share of the variance that a straight line through the times explains."""
    slope, level = np.polyfit(WIDTHS, times, 1)
    rest = times - (slope * np.array(WIDTHS) + level)
    return float(1 - np.var(rest) / np.var(times)) if np.var(times) else 1.0
