"""rota compare."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rota.cli import loading
from rota.cli.complete import varying
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
from rota.cli.output import Stopped, print_json, print_line
from rota.cli.report import write_page
from rota.cli.run import check_folder, train
from rota.errors import BadInput

if TYPE_CHECKING:
    from rota.cli.jobs import Launcher
    from rota.recipe.compare import Variant  # which loads torch


def compare(
    recipe: Recipe,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B,...",
            autocompletion=varying,
            help="What to vary. Several of these make all combinations;"
            " K+L=A+B,C+D varies two keys together.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder of the comparison, with a run folder for each value and seed.",
        ),
    ],
    seeds: Annotated[int, typer.Option(metavar="N", help="Number of seeds for each value.")] = 1,
    set_: Set = [],  # noqa: B006
    allow: Allow = [],  # noqa: B006
    engine: Engine = "auto",
    device: Device = "auto",
    precision: Precision = "fp32",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume the comparison in --out. Finished runs are not run again."
        ),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of runs at once. Each has its share of the cores, and of the GPUs.",
        ),
    ] = 1,
    launcher: Annotated[
        Literal["here", "ray"],
        typer.Option(
            help="Where the runs of --jobs go on: on this machine, or on a Ray cluster.",
        ),
    ] = "here",
    track: Track = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Run a recipe for each value and seed, and compare the runs.

    \b
    Examples:
      rota compare fedavg-digits --vary estimator=fedavg,unbiased --out runs/a
      rota compare fedavg-mnist --vary task.lr=0.05,0.1 --seeds 5 --out runs/b
      rota compare fedavg-digits --vary sampler=kvib,full --jobs 2 --out runs/c
      rota compare fedavg-mnist --vary seed=0,1 --jobs 8 --launcher ray --out d
    """
    with loading():
        from rota import recipe as recipes
        from rota.cli import progress
        from rota.cli.summary import table
        from rota.recipe import compare as comparisons
        from rota.track import tracker

    config = recipes.read(recipe, allow)
    for setting in set_:
        config = recipes.override(config, setting)
    runs = comparisons.variants(config, vary, seeds)
    started = {name for name in runs if resume and (out / name / "config.toml").exists()}
    for name, variant in runs.items():
        check_folder(recipes.resolve(variant.config), out / name, name in started)
    # a comparison that was killed early may have nothing but an empty folder of its first run
    if resume and not any((out / name).is_dir() for name in runs):
        raise BadInput(
            f"there is no comparison to resume in {out}: leave --resume out to start one there"
        )
    if not resume:
        check_folder({}, out, resume)
    for name in track:  # whether it is installed
        tracker(name, out)
    # a mistake in the last run should show now, not after hours
    with progress.waiting("checking the settings", still=True):
        comparisons.check_all(runs)
    if biased := comparisons.made_biased(runs):
        logging.getLogger("rota").warning(biased)
    how = {"engine": engine, "device": device, "precision": precision}
    if jobs > 1 or launcher == "ray":
        where = _launcher(launcher)
        results, stuck, again = _train_at_once(
            jobs, where, runs, out, how, started, track, recipe, allow
        )
    else:
        results, stuck = _train_all(runs, out, how, started, track)
        again = None
    if not results:
        last = list(stuck.values())[-1]
        raise Stopped(1, f"all runs failed; the last one: {last}", again)
    report = write_page([out / result["run"] for result in results], out / "report.html")
    if as_json:
        told = comparisons.told(runs, results)
        print_json([{**run, "folder": str(out / run["run"])} for run in told])
    else:
        for line in [*table(results), f"report: {report}"]:
            print_line(line)
    if stuck:
        which = f"{len(stuck)} of {len(runs)} runs failed and are left out"
        raise Stopped(1, f"{which}: {', '.join(stuck)}", again)


def _train_all(
    runs: dict[str, Variant],
    out: Path,
    how: dict[str, Any],
    started: set[str],
    track: list[str],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The summaries of the runs, and why the runs that got stuck failed."""
    from rota.cli import progress
    from rota.recipe.compare import play
    from rota.running.summary import Stuck

    again = _again()
    names, failed = list(runs), dict[str, str]()

    def one(name: str) -> dict[str, Any]:
        title = f"{name} ({names.index(name) + 1}/{len(names)})"
        try:
            resume = name in started
            return train(runs[name].config, title, out / name, how, resume, again, track=track)
        except Stopped as end:
            if isinstance(end.__cause__, Stuck):
                raise end.__cause__ from None
            raise

    def stuck(name: str, end: Stuck) -> None:
        failed[name] = f"the run failed: {end}"
        progress.say(f"rota: {name}: {failed[name]}")

    return play(names, one, stuck), failed


def _again() -> str:
    """The command that resumes this comparison."""
    given = [word for word in sys.argv[1:] if word != "--resume"]
    return f"rota {shlex.join(given)} --resume"


def _launcher(name: str) -> Launcher:
    """What starts the processes that train several runs at once."""
    from rota.cli import cluster, jobs

    return cluster.launcher() if name == "ray" else jobs.start


def _train_at_once(
    number: int,
    launch: Launcher,
    runs: dict[str, Variant],
    out: Path,
    how: dict[str, Any],
    started: set[str],
    track: list[str],
    recipe: str,
    allow: list[str],
) -> tuple[list[dict[str, Any]], dict[str, str], str | None]:
    """The same in several processes, and the command that resumes what can be resumed."""
    from rota.cli import jobs, progress

    again, failed, resumable = _again(), dict[str, str](), False
    common = {"recipe": recipe, "allow": allow, "how": how, "track": track, "again": again}
    todo = [
        {
            **common,
            "name": name,
            "config": variant.config,
            "out": str((out / name).absolute()),
            "resume": name in started,
        }
        for name, variant in runs.items()
    ]

    def fail(name: str, why: str, can_go_on: bool) -> None:
        nonlocal resumable
        failed[name], resumable = why, resumable or can_go_on
        progress.say(f"rota: {name}: {why}")

    def say(name: str, line: str) -> None:
        progress.say(f"{name}: {line}" if name else line)

    try:
        with progress.together(len(todo)) as show:
            found = jobs.play(todo, number, launch, show, fail, say)
    except KeyboardInterrupt as stop:
        raise Stopped(130, "interrupted", again) from stop
    results = [{"run": name, **summary} for name, summary in found.items()]
    return results, failed, again if resumable else None
