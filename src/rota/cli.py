"""The command line. Results go to standard output, progress and messages to standard error.

Exit status: 0 done, 1 the run failed, 2 bad usage or input, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rota.errors import BadInput, did_you_mean

app = typer.Typer(
    help="Federated learning that decides, every round, who trains, which model, how much of it and with whom it is shared.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class EngineName(StrEnum):
    auto = "auto"
    sequential = "sequential"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _complete_recipe(incomplete: str) -> list[str]:
    from rota import recipe

    return [name for name in recipe.names() if name.startswith(incomplete)]


Recipe = Annotated[str, typer.Argument(help="A ready recipe (see `rota list recipes`) or a .toml file.", autocompletion=_complete_recipe)]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be given many times.")]
Engine = Annotated[EngineName, typer.Option(help="What trains the clients.")]
Device = Annotated[DeviceName, typer.Option(help="Where.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@app.command()
def run(
    recipe: Recipe,
    set_: Set = [],  # noqa: B006
    engine: Engine = EngineName.auto,
    device: Device = DeviceName.auto,
    out: Annotated[Path | None, typer.Option(help="The run's folder; default: runs/RECIPE-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, exactly where its last checkpoint is.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe.

    Examples: `rota run fedavg-digits` · `rota run fedavg-mnist --set task.lr=0.05 --set rounds=50 --out runs/try` ·
    `rota run runs/try/config.toml --out runs/try --resume`
    """
    from rota import recipe as recipes

    if resume and out is None:
        raise BadInput("--resume needs --out: the folder of the run to go on with")
    config = recipes.read(recipe)
    for setting in set_:
        config = recipes.override(config, setting)
    out = out or Path("runs") / f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    summary = _run_one(config, Path(recipe).stem, out, engine, device, resume)
    report = _report([out], out / "report.html")
    if as_json:
        print(json.dumps({**summary, "folder": str(out), "report": str(report)}))
        return
    models = "" if len(summary["models"]) == 1 else f" on average over {len(summary['models'])} models"
    print(f"accuracy {summary['accuracy']:.2%}, loss {summary['loss']:.4f}{models} after {summary['rounds']} rounds")
    print(f"report: {report}")


def _run_one(config: dict[str, Any], title: str, out: Path, engine: str, device: str, resume: bool) -> dict[str, Any]:
    """Resolve, build and run one config in its folder, with progress."""
    from rota import progress
    from rota import recipe as recipes
    from rota.experiment import Interrupted, execute
    from rota.store import refuse_used

    config = recipes.resolve(config)
    if not resume:
        refuse_used(out)  # before the data are loaded
    with progress.waiting("loading the data"):
        experiment = recipes.build(config)
    with progress.rounds(title, experiment.rounds) as watch:
        try:
            return execute(experiment, engine=engine, device=device, out=out, resume=resume, config=config, watch=watch).summary
        except (BadInput, Interrupted):
            raise
        except Exception as error:
            raise RunFailed(f"the run failed: {type(error).__name__}: {error}", _resume_line(out)) from error


class RunFailed(Exception):
    """A run ended with an error: what and where, and how to go on."""


def _resume_line(out: Path) -> str:
    folder = shlex.quote(str(out))
    return f"to resume: rota run {folder}/config.toml --out {folder} --resume"


def _report(folders: list[Path], target: Path) -> Path:
    from rota.report import write

    return write(folders, target)


@app.command("list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="recipes, samplers, estimators, servers, models, data or partitions; default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List what can be named in a recipe, each with a line on what it is.

    Examples: `rota list` · `rota list samplers` · `rota list models --json`
    """
    from rota import recipe, registry

    known = ["recipes", *registry.KINDS]
    if kind is not None and kind not in known:
        raise BadInput(f"unknown kind '{kind}': {did_you_mean(kind, known)}")
    tables: dict[str, list[dict[str, Any]]] = {}
    for each in [kind] if kind else known:
        if each == "recipes":
            tables[each] = [{"name": name, "summary": recipe.read(name).get("summary", "")} for name in recipe.names()]
        else:
            members = registry.KINDS[each]
            tables[each] = [{"name": n, "summary": registry.summary(m), "options": list(registry.options(m))} for n, m in members.items()]
    if as_json:
        print(json.dumps(tables[kind] if kind else tables))
        return
    for each, entries in tables.items():
        print(each)
        width = max(len(entry["name"]) for entry in entries)
        for entry in entries:
            print(f"  {entry['name']:{width}}  {entry['summary']}")


@app.command()
def compare(
    recipe: Recipe,
    vary: Annotated[list[str], typer.Option(metavar="KEY=A,B,...", help="What to vary; several make all combinations.")],
    out: Annotated[Path, typer.Option(help="The comparison's folder: one run folder inside for each value and seed.")],
    seeds: Annotated[int, typer.Option(help="How many seeds for each value.")] = 1,
    set_: Set = [],  # noqa: B006
    engine: Engine = EngineName.auto,
    device: Device = DeviceName.auto,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --out: finished runs are kept.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe once for every value and seed, and compare.

    Examples: `rota compare fedavg-digits --vary estimator=fedavg,unbiased --seeds 3 --out runs/estimators` ·
    `rota compare fedavg-mnist --vary task.lr=0.05,0.1,0.2 --out runs/lr`
    """
    from rota import compare as comparisons
    from rota import recipe as recipes
    from rota.store import refuse_used

    config = recipes.read(recipe)
    for setting in set_:
        config = recipes.override(config, setting)
    runs = comparisons.variants(config, vary, seeds)
    for variant in runs.values():
        recipes.resolve(variant)  # a mistake in the last one should not show after hours
    if not resume:
        refuse_used(out)
    results = []
    for number, (name, variant) in enumerate(runs.items(), start=1):
        started = (out / name / "config.toml").exists()
        summary = _run_one(variant, f"{name} ({number}/{len(runs)})", out / name, engine, device, resume and started)
        results.append({"run": name, **summary})
    report = _report(comparisons.run_folders([out]), out / "report.html")
    if as_json:
        print(json.dumps(results))
        return
    width = max(len(name) for name in runs)
    for result in results:
        print(f"{result['run']:{width}}  accuracy {result['accuracy']:.2%}  loss {result['loss']:.4f}  {result['rounds']} rounds")
    print(f"report: {report}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; default: report.html in the first folder.")] = None,
) -> None:
    """Write one self-contained HTML page about some runs.

    Examples: `rota report runs/try` · `rota report runs/a runs/b --out both.html`
    """
    from rota.compare import run_folders

    print(_report(run_folders(folders), out or folders[0] / "report.html"))


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table or figure of the sources; leave out to list them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller version, to see that it works.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write the results page; default: runs/reproduce.")] = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the sources: paper against measured.

    Examples: `rota reproduce` · `rota reproduce gd-bound` · `rota reproduce gd-bound --quick --json`
    """
    from rota import progress, registry, reproduce

    if name is None:
        for each, function in reproduce.REPRODUCTIONS.items():
            print(f"{each}  {registry.summary(function)}")
        return
    if name not in reproduce.REPRODUCTIONS:
        raise BadInput(f"unknown reproduction '{name}': {did_you_mean(name, reproduce.REPRODUCTIONS)}")
    with progress.waiting(f"reproducing {name}"):
        result = reproduce.run(name, quick=quick)
        page = reproduce.write_page(result, out or Path("runs") / "reproduce")
    if as_json:
        print(json.dumps(result.json()))
        return
    print(result.text())
    print(f"page: {page}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which devices there are, and which data are at hand.

    Example: `rota doctor`
    """
    from rota import doctor

    found = doctor.examine()
    if as_json:
        print(json.dumps(found))
        return
    for topic, entries in found.items():
        print(topic)
        width = max(len(name) for name in entries)
        for name, value in entries.items():
            print(f"  {name:{width}}  {value}")


def main() -> None:
    """The entry point: every mistake becomes one sentence and a status."""
    from rota.experiment import Interrupted

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's stop is a Ctrl-C: checkpoint, then go
    try:
        app()
    except BadInput as mistake:
        _say(f"rota: {mistake}")
        sys.exit(2)
    except Interrupted as stop:
        _say("rota: interrupted" + (f"; the checkpoint is written; {_resume_line(stop.folder)}" if stop.folder else ""))
        sys.exit(130)
    except RunFailed as failure:
        if os.environ.get("ROTA_DEBUG"):
            raise
        _say(f"rota: {failure.args[0]}")
        _say(f"rota: {failure.args[1]}; set ROTA_DEBUG=1 for the traceback")
        sys.exit(1)


if __name__ == "__main__":
    main()
