"""rota.run: play an experiment's rounds, keep them on disk, stop in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from rota import loop, weights
from rota.engine import Devices, Engine, make
from rota.engine.local import TOO_FEW
from rota.errors import BadInput
from rota.estimate import ESTIMATORS, SERVERS, Estimator, Server
from rota.hints import called, shown
from rota.loop import Experiment, State
from rota.plan import NOT_FINITE, Task
from rota.running.check import check
from rota.running.record import ASKED, Record, at, columns, finite, reached, tested
from rota.sampling import SAMPLERS, Sampler, Uniform
from rota.sampling.metrics import SUMMED, Meter
from rota.world.availability import Availability

if TYPE_CHECKING:
    from rota.running.folder import Folder

CHECKPOINT_SECONDS = 5.0
"""A crash loses no more than this much work ..."""
CHECKPOINT_COSTS = 20.0
"""... or so many times what a checkpoint takes, where that is more."""


PATIENCE = 5
"""So many rounds in a row in which clients trained and no update could be used end a run."""


class Stuck(RuntimeError):
    """Nothing is learned any more, and going on would change nothing."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run (Ctrl-C); `folder` holds its checkpoint, where it has a folder."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(
            f"to go on with it: rota.run(..., out='{folder}', resume=True)"
            if folder
            else "it has no folder to go on from"
        )
        self.folder = folder


@dataclass(frozen=True)
class Run:
    """A finished run."""

    experiment: Experiment
    state: State
    records: list[Record]
    summary: dict[str, Any]
    folder: Path | None = None

    @property
    def rounds(self) -> dict[str, list[Any]]:
        """The rounds as a table: a dict of columns."""
        return columns(self.records)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The trained modules by name."""
        out = {}
        for name, task, model in zip(
            self.experiment.names, self.experiment.tasks, self.state.models, strict=True
        ):
            out[name] = task.build()
            weights.load(out[name], model)
        return out


def run(
    tasks: list[Task],
    sampler: Sampler | None = None,
    *,
    estimator: Estimator | None = None,
    server: Server | None = None,
    devices: Devices | None = None,
    availability: Availability | None = None,
    rounds: int = 100,
    seed: int = 0,
    evaluate: int = 1,
    target: float | None = None,
    metrics: Sequence[str] = (),
    engine: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[Record], None] | None = None,
) -> Run:
    """Train the tasks together for some rounds.

    With `out` the run is kept in that folder and can be resumed after a crash, exactly. `watch` is called with each round's record.
    `metrics` are measures of the sampler to be written with every round (rota.sampling.metrics): "regret", "variance" ...
    """
    if not isinstance(out, str | Path | None):
        raise BadInput(f"out is {shown(out)}, but it takes a folder's path or None")
    if resume and not out:
        raise BadInput(
            "resume is True, but out is not given: give the folder of the run to go on with"
        )
    given = {
        "sampler": sampler,
        "estimator": estimator,
        "server": server,
        "devices": devices,
        "availability": availability,
    }
    policies: dict[str, Any] = {"sampler": Uniform()} | {
        key: value for key, value in given.items() if value is not None
    }
    experiment = Experiment(
        tasks,
        **policies,
        rounds=rounds,
        seed=seed,
        evaluate=evaluate,
        target=target,
        metrics=metrics,
    )
    return execute(
        experiment,
        engine=engine,
        device=device,
        precision=precision,
        out=Path(out) if out else None,
        resume=resume,
        watch=watch,
    )


def execute(
    experiment: Experiment,
    *,
    engine: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    out: Path | None = None,
    resume: bool = False,
    config: dict[str, Any] | None = None,
    watch: Callable[[Record], None] | None = None,
) -> Run:
    """Run an experiment; `config` is what the folder's config.toml says (a description of the objects where it is None)."""
    check(experiment)
    machine = make(engine, experiment.tasks, experiment.devices, experiment.seed, device, precision)
    state = loop.begin(experiment, machine)
    try:
        if out is None:
            return _play(experiment, machine, state, None, watch)
        from rota.running.folder import Folder

        with (Folder.reopen if resume else Folder.create)(
            out, config or describe(experiment)
        ) as folder:
            return _play(experiment, machine, state, folder, watch)
    except KeyboardInterrupt as stop:
        raise Interrupted(out) from stop


def _play(
    experiment: Experiment,
    machine: Engine,
    state: State,
    folder: Folder | None,
    watch: Callable[[Record], None] | None,
) -> Run:
    """Play the rounds that are left to play, and write down what they came to."""
    spent, records = 0.0, list[Record]()
    if folder:
        folder.write_data(experiment)
        state, spent = folder.read_state(state)
        records = folder.records()
        refuse(experiment, records)
    meter = (
        Meter(experiment.metrics, experiment.sampler, machine, records[-1] if records else {})
        if experiment.metrics
        else None
    )
    began = saved = time.monotonic()

    def wall(now: float) -> float:
        return spent + now - began - (meter.seconds if meter else 0.0)

    pause = CHECKPOINT_SECONDS
    done = bool(records) and reached(records[-1], experiment.target)
    try:
        while state.round < experiment.rounds and not done:
            after, entry = loop.play(experiment, machine, state, meter)
            if folder:
                folder.append(entry)
            state = after  # only now: a checkpoint of a round whose line is not written could not be resumed
            records.append(entry)
            refuse(experiment, records)
            done = reached(entry, experiment.target)
            if folder and time.monotonic() - saved > pause:
                start = time.monotonic()
                folder.save(state, wall(start))
                saved = time.monotonic()
                pause = max(CHECKPOINT_SECONDS, CHECKPOINT_COSTS * (saved - start))
            if watch:
                watch(entry)
    finally:
        # whatever ended the rounds, the last whole one is kept
        if folder:
            folder.save(state, wall(time.monotonic()))
    summary = summarise(experiment, records, wall(time.monotonic()))
    if folder:
        folder.write_models(experiment, state)
        folder.write_summary(summary)
    return Run(experiment, state, records, summary, folder.path if folder else None)


def refuse(experiment: Experiment, records: list[Record]) -> None:
    """End a run in which nothing is learned any more, of whatever model. A single client, round or model that fails ends none."""
    wrong: dict[str, str] = {}
    number = 0
    for line in reversed(records):
        if any(model["trained"] for model in line["models"].values()):
            return
        failed = {
            each["model"]: each["reason"]
            for each in line["failures"]
            if each["reason"].removesuffix(ASKED) != TOO_FEW
        }
        if (
            not failed
            and line["failures"]
            and max(task.roster.sizes.max() for task in experiment.tasks) < 2
        ):
            raise BadInput(
                f"no client can train ({TOO_FEW}): give clients two examples or more, or choose a model without BatchNorm"
            )
        wrong |= failed
        number += bool(failed)
        if number == min(PATIENCE, experiment.rounds):
            break
    else:
        return
    why, whose = (
        next(iter(wrong.values())).removesuffix(ASKED),
        " and ".join(f"'{name}'" for name in wrong),
    )
    nothing = f"round {records[-1]['round']}: no client's update could be used in {number} round{'s' * (number > 1)} ({why})"
    help = (
        f"a lower lr for {whose} may help"
        if why == NOT_FINITE
        else f"mend the model, the loss or the data of {whose}"
    )
    raise Stuck(f"{nothing}: {help}")


def summarise(experiment: Experiment, records: list[Record], wall_seconds: float) -> dict[str, Any]:
    """A run in a few numbers; accuracies are the last tested ones, `rounds_to_target` counts until each model reached it."""
    tests = [line for line in records if tested(line)]
    last = tests[-1]
    models: dict[str, Any] = {}
    for name in experiment.names:
        models[name] = {key: last["models"][name][key] for key in ("loss", "accuracy")}
        known = [
            value
            for line in tests
            if (value := finite(line["models"][name]["accuracy"])) is not None
        ]
        models[name]["best_accuracy"] = max(known, default=None)
        if experiment.target is not None:
            hits = [line["round"] for line in tests if at(line["models"][name], experiment.target)]
            models[name]["rounds_to_target"] = hits[0] if hits else None
        models[name]["failures"] = sum(
            failure["model"] == name for line in records for failure in line["failures"]
        )
    measured = [f"{name}_total" for name in SUMMED if name in experiment.metrics]
    totals = {key: records[-1][key] for key in ("seconds", "bytes_up", "bytes_down", *measured)}
    return {
        "rounds": len(records),
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        **{key: last[key] for key in ("worst_accuracy", "accuracy_spread") if key in last},
        "models": models,
        **totals,
        "server_bytes": max(line["server_bytes"] for line in records),
        "client_seconds": sum(line["client_seconds"] for line in records),
        "failures": sum(len(line["failures"]) for line in records),
        "wall_seconds": round(wall_seconds, 3),
    }


def describe(experiment: Experiment) -> dict[str, Any]:
    """An experiment made in Python, in a recipe's words as far as it has them: what config.toml holds where there is no recipe."""

    def told(value: Any) -> Any:
        """A number, a text or a list of such, as TOML has them; None for anything else."""
        value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        if isinstance(value, tuple | list):
            return [each for each in map(told, value) if each is not None]
        return value if isinstance(value, str | int | float) else None

    def plain(values: dict[str, Any]) -> dict[str, Any]:
        return {key: known for key, value in values.items() if (known := told(value)) is not None}

    def words(value: Any) -> dict[str, Any]:
        return plain(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else {}

    numbers = plain({k: getattr(experiment, k) for k in ("rounds", "seed", "evaluate", "target")})
    policies = {
        k: words(getattr(experiment, k))
        for k in ("sampler", "estimator", "server", "devices", "availability")
    }
    for key, known in (("sampler", SAMPLERS), ("estimator", ESTIMATORS), ("server", SERVERS)):
        policies[key] = {"name": called(getattr(experiment, key), known), **policies[key]}
    numbers |= {"metrics": list(experiment.metrics)} if experiment.metrics else {}
    tasks = []
    for task, name in zip(experiment.tasks, experiment.names, strict=True):
        work = plain({f.name: getattr(task, f.name) for f in fields(task)})
        functions = {key: _name(getattr(task, key)) for key in ("model", "loss", "score")}
        tasks.append(
            {
                **work,
                "name": name,
                **functions,
                "data": task.roster.name,
                "clients": task.roster.clients,
            }
        )
    return {"python": True, **numbers, **policies, "task": tasks}


def _name(value: Any) -> str:
    """Of a function or a class, or of an object's class."""
    return str(getattr(value, "__qualname__", type(value).__name__))
