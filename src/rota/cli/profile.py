"""rota doctor --profile: how fast this machine trains the models of a recipe."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rota.cli import loading
from rota.cli.output import print_json, print_line
from rota.errors import BadInput, first_line

WIDTHS = (1.0, 0.75, 0.5, 0.25)
"""The widths of models that are measured."""
CLIENTS = 8
"""How many clients train in each measurement."""
SECONDS = 1.0
"""How long each measurement lasts, at least."""


def profile(
    recipe: str,
    settings: Sequence[str],
    allow: Sequence[str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Print a row for each engine and width, and add a line to a file of devices."""
    with loading():
        from rota import recipe as recipes
        from rota.cli import progress
        from rota.running.check import check
        from rota.running.choices import ENGINES

    config = recipes.read(recipe, allow)
    for setting in settings:
        config = recipes.override(config, setting)
    config = recipes.resolve(config)
    with progress.waiting("loading the data", still=True):
        experiment = recipes.build(config)
    check(experiment)
    rows = []
    for engine in [name for name in ENGINES if name != "flower"]:  # that one trains elsewhere
        for width in WIDTHS:
            found = measure(experiment, engine, width)
            rows.append({"engine": engine, "width": width, **found})
    name = f"{platform.node()}, {recipe}"
    line = {"name": name, "gflops": float(f"{rows[0]['gflops']:.4g}")}
    if out:
        _append(out, json.dumps(line))
    if as_json:
        print_json({"rows": rows, "device": line})
        return
    for text in table(rows):
        print_line(text)
    print_line(f"a line of devices{f', added to {out}' if out else ''}: {json.dumps(line)}")


def measure(experiment: Any, engine: str, width: float) -> dict[str, float]:
    """GFLOP/s of clients that hold parts of this width, and seconds per client and model.

    The FLOPs are what the virtual clock counts. The first pass is not timed, because an engine
    compiles and caches in it.
    """
    import numpy as np

    from rota import engine as engines
    from rota import loop
    from rota.estimate import FedAvg
    from rota.plan import Plan
    from rota.probe import Setting
    from rota.submodel import Fixed, Ordered, Whole, hold
    from rota.world.devices import Devices

    trial = experiment.using(
        estimator=FedAvg(),
        devices=Devices(gflops=1.0),
        capacity=Fixed(sizes=(width,)) if width < 1 else Whole(),
        submodel=Ordered(),
    )
    machine = engines.make(engine, trial, "cpu")
    state = loop.begin(trial, machine)
    model, client = np.nonzero(state.shares[:, :CLIENTS])
    shares = state.shares[model, client]
    plan = Plan(client, model, np.ones(len(client)), shares)
    held = hold(
        trial.policies, trial.units, state.models, state.shares, state.policies, trial.seed, 1
    )
    pace = np.ones(len(state.models))
    job = Setting(machine, trial.estimator, state.models, 1, trial.seed, pace, held).job(
        plan, {}, None
    )
    work = 0.0
    for chunk in machine.train(job):
        for reason in filter(None, chunk.reason):
            raise BadInput(f"a client cannot train: {reason}")
        work += float(chunk.costs.computing.sum())
    passes, began, spent = 0, time.perf_counter(), 0.0
    while spent < SECONDS or not passes:
        for _ in machine.train(job):
            pass
        passes, spent = passes + 1, time.perf_counter() - began
    return {"gflops": work * passes / spent, "seconds": spent / passes / len(plan)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The measurements as lines, each engine's times relative to its time for the whole model."""
    whole = {row["engine"]: row["seconds"] for row in rows if row["width"] == 1}
    lines = ["engine       width   GFLOP/s   seconds per client   of the whole model's time"]
    for row in rows:
        share = row["seconds"] / whole[row["engine"]]
        lines.append(
            f"{row['engine']:<10} {row['width']:>7.2f} {row['gflops']:>9.3g} "
            f"{row['seconds']:>20.3g} {share:>26.0%}"
        )
    return lines


def _append(out: Path, line: str) -> None:
    """Add a line to a file of devices, which may be new."""
    try:
        before = out.read_text(encoding="utf-8") if out.exists() else ""
        between = "" if before.endswith("\n") or not before else "\n"
        out.write_text(f"{before}{between}{line}\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise BadInput(f"cannot write to {out} ({why}): choose another --out") from error
