"""rota run, and how one recipe is trained in its folder."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rota.cli import loading
from rota.cli.options import (
    Allow,
    Device,
    Engine,
    Json,
    Precision,
    Recipe,
    Set,
    Track,
)
from rota.cli.output import Stopped, interrupted, print_json, print_line
from rota.cli.report import write_page
from rota.errors import BadInput, what_and_where

if TYPE_CHECKING:
    from rota.experiment import Experiment  # which loads torch
    from rota.running.record import Record
    from rota.running.watch import Watch

Rounds: TypeAlias = "Callable[[str, int, str], AbstractContextManager[Callable[[Record], None]]]"


def run(
    recipe: Recipe,
    set_: Set = [],  # noqa: B006
    allow: Allow = [],  # noqa: B006
    engine: Engine = "auto",
    device: Device = "auto",
    precision: Precision = "fp32",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run; default: runs/RECIPE-TIME."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the run in --out from its last checkpoint."),
    ] = False,
    track: Track = [],  # noqa: B006
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Train in N processes of this machine; the models are the same."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a recipe.

    \b
    Examples:
      rota run fedavg-digits
      rota run fedavg-mnist --set task.lr=0.05 --set rounds=50 --out runs/try
      rota run runs/try/config.toml --out runs/try --resume
      rota run fedavg-digits --track tensorboard
      rota run fedavg-digits --processes 2
    """
    with loading():
        from rota import recipe as recipes
        from rota.cli.summary import sentences
        from rota.recipe import trust
        from rota.spread import start

    if resume and out is None:
        raise BadInput("--resume needs --out: give the folder of the run to resume")
    config = recipes.read(recipe, allow)
    for setting in set_:
        config = recipes.override(config, setting)
    if start.launched() and start.rank() > 0:
        start.serve(config, engine, device, precision)
        return
    path = Path(recipe).absolute()
    title = path.parent.name if path.name == "config.toml" else path.stem
    out = out or Path("runs") / f"{title}-{time.strftime('%Y%m%d-%H%M%S')}"
    if start.restarted() and (out / "config.toml").exists():
        resume = True
    how: dict[str, Any] = {"engine": engine, "device": device, "precision": precision}
    what = [str(out / "config.toml")]
    if any(trust.own(config)):  # config.toml does not lie beside these modules
        what = [recipe, *(word for setting in set_ for word in ("--set", setting))]
        what += [word for module in allow for word in ("--allow", module)]
    again = _resuming(what, out, {**how, "processes": processes}, track)
    how["engine"] = start.over(engine, processes)
    summary = train(config, title, out, how, resume, again, track=track)
    report = write_page([out], out / "report.html")
    if as_json:
        print_json({**summary, "folder": str(out), "report": str(report)})
        return
    for line in [*sentences(summary), f"report: {report}"]:
        print_line(line)


def _resuming(what: list[str], out: Path, how: dict[str, Any], track: list[str]) -> str:
    """The command that resumes the run in a folder."""
    words = ["rota", "run", *what, "--out", str(out)]
    for key, value in how.items():
        if value not in ("auto", "fp32", None):
            words += [f"--{key}", str(value)]
    words += [word for name in track for word in ("--track", name)]
    return shlex.join([*words, "--resume"])


def train(
    config: dict[str, Any],
    title: str,
    out: Path,
    how: dict[str, Any],
    resume: bool,
    again: str,
    build: Callable[[dict[str, Any]], Experiment] | None = None,
    track: Sequence[str] = (),
    rounds: Rounds | None = None,
) -> dict[str, Any]:
    """Train one config in its folder, show the progress, and return the summary.

    `how` is passed to `execute`; `again` is the command that resumes this run. `build` makes the
    experiment, if its data are elsewhere. `track` names trackers. `rounds` shows the rounds, by
    default on standard error.
    """
    with loading():
        from rota import recipe as recipes
        from rota.cli import progress
        from rota.running.folder import Gone
        from rota.running.run import execute
        from rota.running.summary import Stuck
        from rota.scores import SCORES, name, of_all
        from rota.spread import Lost
        from rota.track import tracker

        tracking = [tracker(name, out) for name in dict.fromkeys(track)]

    config = recipes.resolve(config)
    check_folder(config, out, resume)  # before the data are loaded
    with progress.waiting("loading the data", still=True):
        experiment = (build or recipes.build)(config)
    try:
        word = of_all(name(task.score, SCORES) for task in experiment.tasks)
        with (rounds or progress.rounds)(title, experiment.rounds, word) as show:
            watch: Watch = [show, *tracking]
            done = execute(experiment, **how, out=out, resume=resume, config=config, watch=watch)
    except BadInput:
        raise
    except (Stuck, Gone) as end:
        raise Stopped(1, f"the run failed: {end}", None) from end
    except Lost as lost:
        raise Stopped(1, f"the run failed: {lost}", again) from lost
    except (Exception, KeyboardInterrupt) as error:
        begun = again if (out / "config.toml").exists() else None
        if interrupted(error):
            raise Stopped(130, "interrupted", begun) from error
        raise Stopped(1, f"the run failed: {what_and_where(error)}", begun) from error
    return done.summary


def check_folder(config: dict[str, Any], out: Path, resume: bool) -> None:
    """A new run needs an unused folder, a resumed run the folder of a run with the same config."""
    from rota.running.folder import Folder, refuse_used

    try:
        if resume:
            with Folder.reopen(out, config):
                return
        refuse_used(out)
    except OSError as error:
        raise BadInput(
            f"cannot use the output folder {out} ({error.strerror}): choose another --out"
        ) from error
