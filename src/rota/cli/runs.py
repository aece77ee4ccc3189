"""The commands that train and report: run, compare, report."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rota.cli import loading
from rota.cli.options import (
    Device,
    DeviceName,
    Engine,
    EngineName,
    Json,
    Precision,
    PrecisionName,
    Recipe,
    Set,
)
from rota.cli.output import Stopped, interrupted, print_json, print_line
from rota.errors import BadInput, at, what_and_where


def run(
    recipe: Recipe,
    set_: Set = [],  # noqa: B006
    engine: Engine = EngineName.auto,
    device: Device = DeviceName.auto,
    precision: Precision = PrecisionName.fp32,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's folder; default: runs/RECIPE-TIME."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in --out, exactly where its last checkpoint is."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe.

    \b
    Examples:
      rota run fedavg-digits
      rota run fedavg-mnist --set task.lr=0.05 --set rounds=50 --out runs/try
      rota run runs/try/config.toml --out runs/try --resume
    """
    with loading():
        from rota import recipe as recipes
        from rota.cli.progress import loss
        from rota.recipe.compare import diverged, failed, reached, rounds

    if resume and out is None:
        raise BadInput("--resume needs --out: the folder of the run to go on with")
    config = recipes.read(recipe)
    for setting in set_:
        config = recipes.override(config, setting)
    path = Path(recipe).absolute()
    title = path.parent.name if path.name == "config.toml" else path.stem
    out = out or Path("runs") / f"{title}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = shlex.quote(str(out))
    how = {"engine": engine, "device": device, "precision": precision}
    chosen = "".join(
        f" --{key} {value}" for key, value in how.items() if value not in ("auto", "fp32")
    )
    again = f"rota run {shlex.quote(str(out / 'config.toml'))} --out {folder}{chosen} --resume"
    summary = _run_one(config, title, out, how, resume, again)
    report = _report([out], out / "report.html")
    if as_json:
        print_json({**summary, "folder": str(out), "report": str(report)})
        return
    models = (
        "" if len(summary["models"]) == 1 else f" on average over {len(summary['models'])} models"
    )
    print_line(
        f"accuracy {summary['accuracy']:.2%}, loss {loss(summary['loss'])}{models} after {rounds(summary)}"
    )
    if models:
        each = ", ".join(
            f"{name} {model['accuracy']:.2%}" for name, model in summary["models"].items()
        )
        print_line(
            f"{each}; worst {summary['worst_accuracy']:.2%}, spread {summary['accuracy_spread']:.2%}"
        )
    for line in (reached(summary), diverged(summary), failed(summary)):
        if line:
            print_line(line)
    print_line(f"report: {report}")


def compare(
    recipe: Recipe,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B,...",
            help="What to vary; several make all combinations; K+L=A+B,C+D go in pairs.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="The comparison's folder: a run folder inside for each value and seed.",
        ),
    ],
    seeds: Annotated[int, typer.Option(metavar="N", help="How many seeds for each value.")] = 1,
    set_: Set = [],  # noqa: B006
    engine: Engine = EngineName.auto,
    device: Device = DeviceName.auto,
    precision: Precision = PrecisionName.fp32,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the comparison in --out: finished runs are kept."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe for every value and seed, and compare.

    \b
    Examples:
      rota compare fedavg-digits --vary estimator=fedavg,unbiased --out runs/a
      rota compare fedavg-mnist --vary task.lr=0.05,0.1 --seeds 5 --out runs/b
    """
    with loading():
        from rota import recipe as recipes
        from rota.cli import progress
        from rota.recipe import compare as comparisons
        from rota.running.experiment import Stuck

    config = recipes.read(recipe)
    for setting in set_:
        config = recipes.override(config, setting)
    runs = comparisons.variants(config, vary, seeds)
    started = {name: resume and (out / name / "config.toml").exists() for name in runs}
    for name, variant in runs.items():
        _check_folder(recipes.resolve(variant), out / name, started[name])
    if resume and not any(started.values()):
        raise BadInput(
            f"there is no comparison to resume in {out}: leave --resume out to start one there"
        )
    if not resume:
        _check_folder({}, out, resume)
    with progress.waiting(
        "checking the settings", still=True
    ):  # a mistake in the last one should not show after hours
        comparisons.check_all(runs)
    given = [word for word in sys.argv[1:] if word != "--resume"]
    how = {"engine": engine, "device": device, "precision": precision}
    results, stuck = [], {}
    for number, (name, variant) in enumerate(runs.items(), start=1):
        title = f"{name} ({number}/{len(runs)})"
        try:
            with at(
                f"the run '{name}'"
            ):  # what was checked are the data of each setting's first seed
                summary = _run_one(
                    variant,
                    title,
                    out / name,
                    how,
                    started[name],
                    f"rota {shlex.join(given)} --resume",
                )
        except Stopped as end:
            if not isinstance(end.__cause__, Stuck):
                raise
            stuck[name] = str(end)  # the others can go on
            progress.say(f"rota: {name}: {end}")
            continue
        results.append({"run": name, **summary})
    if not results:
        raise Stopped(1, f"all runs failed, the last so: {stuck.popitem()[1]}", None)
    report = _report([out / result["run"] for result in results], out / "report.html")
    if as_json:
        print_json(results)
    else:
        for line in [*comparisons.table(results), f"report: {report}"]:
            print_line(line)
    if stuck:
        raise Stopped(
            1,
            f"{len(stuck)} of {len(runs)} runs failed, and are left out: {', '.join(stuck)}",
            None,
        )


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders of run folders.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page to write; default: report.html in the first folder."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about some runs.

    \b
    Examples:
      rota report runs/try
      rota report runs/a runs/b --out both.html
    """
    print_line(str(_report(folders, out or folders[0] / "report.html")))


def _run_one(
    config: dict[str, Any], title: str, out: Path, how: dict[str, Any], resume: bool, again: str
) -> dict[str, Any]:
    """Resolve, build and run one config in its folder, with progress; `how` goes to `execute`, `again` is the command that resumes it."""
    with loading():
        from rota import recipe as recipes
        from rota.cli import progress
        from rota.running.experiment import Stuck, execute

    config = recipes.resolve(config)
    _check_folder(config, out, resume)  # before the data are loaded
    with progress.waiting("loading the data", still=True):
        experiment = recipes.build(config)
    try:
        with progress.rounds(title, experiment.rounds) as watch:
            return execute(
                experiment, **how, out=out, resume=resume, config=config, watch=watch
            ).summary
    except BadInput:
        raise
    except Stuck as end:
        raise Stopped(1, f"the run failed: {end}", None) from end
    except (Exception, KeyboardInterrupt) as error:
        begun = again if (out / "config.toml").exists() else None
        if interrupted(error):
            raise Stopped(130, "interrupted", begun) from error
        raise Stopped(1, f"the run failed: {what_and_where(error)}", begun) from error


def _check_folder(config: dict[str, Any], out: Path, resume: bool) -> None:
    """A new run needs a fresh folder, a resumed one the folder of a run with the same configuration."""
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


def _report(folders: list[Path], target: Path) -> Path:
    from rota.cli import progress
    from rota.report import write

    with progress.waiting("writing the report"):
        return write(folders, target)
