"""rota compare."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from rota.cli.output import Stopped, print_json, print_line
from rota.cli.report import write_page
from rota.cli.run import check_folder, train
from rota.errors import BadInput

if TYPE_CHECKING:
    from rota.recipe.compare import Variant  # which loads torch


def compare(
    recipe: Recipe,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B,...",
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
    track: Track = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Run a recipe for each value and seed, and compare the runs.

    \b
    Examples:
      rota compare fedavg-digits --vary estimator=fedavg,unbiased --out runs/a
      rota compare fedavg-mnist --vary task.lr=0.05,0.1 --seeds 5 --out runs/b
    """
    with loading():
        from rota import recipe as recipes
        from rota.cli import progress
        from rota.cli.summary import table
        from rota.recipe import compare as comparisons

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
    # a mistake in the last run should show now, not after hours
    with progress.waiting("checking the settings", still=True):
        comparisons.check_all(runs)
    if biased := comparisons.made_biased(runs):
        logging.getLogger("rota").warning(biased)
    how = {"engine": engine, "device": device, "precision": precision}
    results, stuck = _train_all(runs, out, how, started, track)
    if not results:
        last = list(stuck.values())[-1]
        raise Stopped(1, f"all runs failed; the last one: {last}", None)
    report = write_page([out / result["run"] for result in results], out / "report.html")
    if as_json:
        print_json(results)
    else:
        for line in [*table(results), f"report: {report}"]:
            print_line(line)
    if stuck:
        which = f"{len(stuck)} of {len(runs)} runs failed and are left out"
        raise Stopped(1, f"{which}: {', '.join(stuck)}", None)


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

    given = [word for word in sys.argv[1:] if word != "--resume"]
    again = f"rota {shlex.join(given)} --resume"
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
