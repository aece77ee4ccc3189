"""rota.run: play an experiment's rounds, keep them on disk, and stop in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rota import loop, weights
from rota.engine import Engine, Maker, make
from rota.errors import BadInput
from rota.experiment import Experiment, State
from rota.hints import shown
from rota.metrics import Meter
from rota.metrics.own import Measure
from rota.notebook import show
from rota.plan import Task
from rota.recipe.describe import describe
from rota.running.check import check, warn
from rota.running.record import Record, columns, reached
from rota.running.summary import diverged, failed, refuse_fewer, refuse_stuck, summarise
from rota.running.watch import Watch, Watcher, tell, watchers
from rota.sampling import Sampler

if TYPE_CHECKING:
    from rota.running.folder import Folder

CHECKPOINT_SECONDS = 5.0
"""A crash loses at most this much work ..."""
CHECKPOINT_COSTS = 20.0
"""... or this many times the duration of a checkpoint, if that is more."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run (Ctrl-C); `folder` holds its checkpoint, if it has a folder."""

    def __init__(self, folder: Path | None) -> None:
        resume = f"to resume it: rota.run(..., out='{folder}', resume=True)"
        super().__init__(resume if folder else "it has no folder, so it cannot be resumed")
        self.folder = folder


@dataclass(frozen=True)
class Run:
    """A finished run."""

    experiment: Experiment
    state: State
    records: list[Record]
    summary: dict[str, Any]
    folder: Path | None = None
    report, _repr_html_ = show.report, show.run

    @property
    def rounds(self) -> dict[str, list[Any]]:
        """The rounds as a table: a dict of columns."""
        return columns(self.records)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The trained modules by name."""
        names, out = self.experiment.models(self.state.models), dict[str, nn.Module]()
        for name, model in zip(names, self.state.models, strict=True):
            out[name] = self.experiment.tasks[model.task].build()
            weights.load(out[name], model.weights)
        return out


def run(
    tasks: list[Task],
    sampler: Sampler | str | dict[str, Any] | None = None,
    *,
    rounds: int = 100,
    seed: int = 0,
    evaluate: int = 1,
    target: float | None = None,
    metrics: Sequence[str | Measure] = (),
    engine: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    out: str | Path | None = None,
    resume: bool = False,
    watch: Watch = None,
    **policies: Any,
) -> Run:
    """Train the tasks together for some rounds.

    Further policies are given by their kinds: `estimator`, `server`, `devices`, `availability`,
    `admission`. With `out` the run is kept in that folder, and can be resumed exactly after a
    crash. `watch` is a function of each round's record, a watcher such as `rota.Progress()`, or a
    list. `metrics` are written with the rounds: measures of the sampler by name, such as
    "variance", and functions of the round, the models and the data that return a dict of numbers
    (rota.metrics). Policies may be given by their names, as in a recipe: `sampler="kvib"`, or
    `{"name": "kvib", "budget": 5}` with options. Without a budget 10 clients are drawn, or all if
    there are fewer.
    """
    if not isinstance(out, str | Path | None):
        raise BadInput(f"out is {shown(out)}, but it takes a folder's path or None")
    if resume and not out:
        raise BadInput("resume is True, but out is not given: give the folder of the run to resume")
    experiment = Experiment(
        tasks,
        "uniform" if sampler is None else sampler,
        rounds=rounds,
        seed=seed,
        evaluate=evaluate,
        target=target,
        metrics=metrics,
        **policies,
    )
    finished = execute(
        experiment,
        engine=engine,
        device=device,
        precision=precision,
        out=Path(out) if out else None,
        resume=resume,
        watch=watch,
    )
    told = "'failures' in the run's records says why"
    for wrong in (diverged(finished.summary), failed(finished.summary, told=told)):
        if wrong:
            logging.getLogger("rota").warning(wrong)
    return finished


def execute(
    experiment: Experiment,
    *,
    engine: str | Maker = "auto",
    device: str = "auto",
    precision: str = "fp32",
    out: Path | None = None,
    resume: bool = False,
    config: dict[str, Any] | None = None,
    watch: Watch = None,
) -> Run:
    """Run an experiment; `config` is what config.toml will say, by default a description of it."""
    told = watchers(watch)
    check(experiment)
    warn(experiment)
    machine = make(engine, experiment, device, precision)
    config = config or describe(experiment)
    try:
        state = loop.begin(experiment, machine)
        if out is None:
            return _watched(experiment, machine, state, None, config, told)
        from rota.running.folder import Folder

        with (Folder.reopen if resume else Folder.create)(out, config) as folder:
            return _watched(experiment, machine, state, folder, config, told)
    except KeyboardInterrupt as stop:
        raise Interrupted(out) from stop
    finally:
        if hasattr(machine, "close"):  # an engine with processes of its own
            machine.close()


def _watched(
    experiment: Experiment,
    machine: Engine,
    state: State,
    folder: Folder | None,
    config: dict[str, Any],
    told: list[Watcher],
) -> Run:
    """Play the rounds, and tell the watchers how it begins and ends."""
    begun: list[Watcher] = []
    try:
        for each in told:
            each.begin(config)
            begun.append(each)
        finished = _play(experiment, machine, state, folder, told)
    except BaseException as error:
        tell([each.end for each in begun], error)
        raise
    tell([each.end for each in begun], finished.summary)
    return finished


def _play(
    experiment: Experiment,
    machine: Engine,
    state: State,
    folder: Folder | None,
    told: list[Watcher],
) -> Run:
    """Play the rounds that are left, and write down the results."""
    spent, records, meter = 0.0, list[Record](), None
    better = experiment.tasks[0].better  # a target needs one score for all tasks
    if folder:
        folder.write_data(experiment)
        state, spent = folder.read_state(state)
        records = folder.records()
        refuse_stuck(experiment, records)
        refuse_fewer(experiment, records)
    if names := [each for each in experiment.metrics if isinstance(each, str)]:
        before = records[-1] if records else {}
        meter = Meter(names, experiment.sampler, machine, before)
    began = saved = time.monotonic()

    def wall(now: float) -> float:
        return spent + now - began - (meter.seconds if meter else 0.0)

    pause = CHECKPOINT_SECONDS
    done = bool(records) and reached(records[-1], experiment.target, better)
    if folder:
        folder.begin(ended=done or state.round == experiment.rounds)
    try:
        while state.round < experiment.rounds and not done:
            after, entry = loop.play(experiment, machine, state, meter)
            if folder:
                folder.append(entry)
            state = after  # only now: a checkpoint must not be ahead of the lines
            records.append(entry)
            tell([each.round for each in told], entry)
            refuse_stuck(experiment, records)
            done = reached(entry, experiment.target, better)
            if folder and time.monotonic() - saved > pause:
                start = time.monotonic()
                folder.save(state, wall(start))
                saved = time.monotonic()
                pause = max(CHECKPOINT_SECONDS, CHECKPOINT_COSTS * (saved - start))
    finally:
        if folder:  # whatever ended the rounds, the last whole one is kept
            folder.save(state, wall(time.monotonic()))
    summary = summarise(experiment, records, wall(time.monotonic()))
    if folder:
        folder.write_models(experiment, state)
        folder.write_summary(summary)
    return Run(experiment, state, records, summary, folder.path if folder else None)
