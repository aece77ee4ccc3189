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
import traceback
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rota.errors import BadInput, did_you_mean

app = typer.Typer(
    help="Federated learning that decides, every round, who trains, which model, how much of it and with whom it is shared.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the examples keep their lines, and it reads the same in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)


class EngineName(StrEnum):
    auto = "auto"
    sequential = "sequential"
    batched = "batched"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class PrecisionName(StrEnum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


def _one_of(choices: type[StrEnum]) -> dict[str, Any]:
    """An option that takes one of a few words, with a "did you mean" for any other."""

    def parse(word: str) -> StrEnum:
        if word not in list(choices):
            near = did_you_mean(word, choices)
            hint = f"; {near}" if near.startswith("did") else ""
            raise typer.BadParameter(f"'{word}' is not one of {', '.join(choices)}{hint}")
        return choices(word)

    return {"parser": parse, "metavar": "|".join(choices), "autocompletion": _starting(lambda: list(choices))}


def _starting(words: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Shell completion from a list that is made when it is needed."""
    return lambda incomplete: [word for word in words() if word.startswith(incomplete)]


def _recipes() -> list[str]:
    from rota import recipe

    return recipe.names()


def _kinds() -> list[str]:
    from rota import registry

    return ["recipes", *registry.KINDS]


def _reproductions() -> list[str]:
    from rota import reproduce

    return list(reproduce.REPRODUCTIONS)


def _works() -> list[str]:
    from rota import bench

    return list(bench.names())


Recipe = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A ready recipe (see `rota list recipes`) or a .toml file.", autocompletion=_starting(_recipes)),
]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe (KEY= unsets it); may be given many times.")
]
Engine = Annotated[EngineName, typer.Option(help="What trains the clients.", **_one_of(EngineName))]
Device = Annotated[DeviceName, typer.Option(help="Where.", **_one_of(DeviceName))]
Precision = Annotated[PrecisionName, typer.Option(help="Of products; tf32 and bf16 are for a GPU.", **_one_of(PrecisionName))]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def _print(text: str) -> None:
    """A line of results. A reader that has seen enough (`rota list | head -1`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(value: Any) -> None:
    from rota.record import finite

    _print(json.dumps(finite(value), allow_nan=False))


@app.command()
def run(
    recipe: Recipe,
    set_: Set = [],  # noqa: B006
    engine: Engine = EngineName.auto,
    device: Device = DeviceName.auto,
    precision: Precision = PrecisionName.fp32,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; default: runs/RECIPE-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, exactly where its last checkpoint is.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe.

    \b
    Examples:
      rota run fedavg-digits
      rota run fedavg-mnist --set task.lr=0.05 --set rounds=50 --out runs/try
      rota run runs/try/config.toml --out runs/try --resume
    """
    from rota import recipe as recipes

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
    chosen = "".join(f" --{key} {value}" for key, value in how.items() if value not in ("auto", "fp32"))
    again = f"rota run {shlex.quote(str(out / 'config.toml'))} --out {folder}{chosen} --resume"
    summary = _run_one(config, title, out, how, resume, again)
    report = _report([out], out / "report.html")
    if as_json:
        _print_json({**summary, "folder": str(out), "report": str(report)})
        return
    models = "" if len(summary["models"]) == 1 else f" on average over {len(summary['models'])} models"
    _print(f"accuracy {summary['accuracy']:.2%}, loss {_loss(summary)}{models} after {_rounds(summary)}")
    _print(f"report: {report}")


def _loss(summary: dict[str, Any]) -> str:
    from rota.progress import loss

    return loss(summary["loss"])


def _rounds(summary: dict[str, Any]) -> str:
    return f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}"


class Stopped(Exception):
    """A run ended before its last round: the exit status, what happened, and the command that goes on with it, if it had begun."""

    def __init__(self, status: int, what: str, again: str | None) -> None:
        super().__init__(what)
        self.status = status
        self.again = again


def _run_one(config: dict[str, Any], title: str, out: Path, how: dict[str, Any], resume: bool, again: str) -> dict[str, Any]:
    """Resolve, build and run one config in its folder, with progress; `how` goes to `execute`, `again` is the command that resumes it."""
    from rota import progress
    from rota import recipe as recipes
    from rota.experiment import Interrupted, execute

    config = recipes.resolve(config)
    _check_folder(config, out, resume)  # before the data are loaded
    with progress.waiting("loading the data", still=True):
        experiment = recipes.build(config)
    try:
        with progress.rounds(title, experiment.rounds) as watch:
            return execute(experiment, **how, out=out, resume=resume, config=config, watch=watch).summary
    except BadInput:
        raise
    except (Interrupted, KeyboardInterrupt) as stop:
        raise Stopped(130, "interrupted", again if (out / "config.toml").exists() else None) from stop
    except Exception as error:
        raise Stopped(1, f"the run failed: {_what_and_where(error)}", again if (out / "config.toml").exists() else None) from error


def _check_folder(config: dict[str, Any], out: Path, resume: bool) -> None:
    """A new run needs a fresh folder, a resumed one the folder of a run with the same configuration."""
    from rota.store import Folder, refuse_used

    try:
        if resume:
            with Folder.reopen(out, config):
                return
        refuse_used(out)
    except OSError as error:
        raise BadInput(f"cannot use the output folder {out} ({error.strerror}): choose another --out") from error


def _what_and_where(error: BaseException) -> str:
    """An unforeseen error in one line, with the place in the code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' * bool(words)}{words} ({Path(place.filename).name}, line {place.lineno})"


def _report(folders: list[Path], target: Path) -> Path:
    from rota import progress
    from rota.report import write

    with progress.waiting("writing the report"):
        return write(folders, target)


@app.command("list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="recipes, samplers, estimators, servers, models, data or partitions; default: all.",
            autocompletion=_starting(_kinds),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List what can be named in a recipe.

    \b
    Examples:
      rota list
      rota list samplers
      rota list models --json
    """
    from rota import recipe, registry

    known = _kinds()
    if kind is not None and kind not in known:
        raise BadInput(f"unknown kind '{kind}': {did_you_mean(kind, known)}")
    tables: dict[str, list[dict[str, Any]]] = {}
    for each in [kind] if kind else known:
        if each == "recipes":
            tables[each] = [{"name": name, "summary": recipe.read(name).get("summary", "")} for name in recipe.names()]
        else:
            members = registry.KINDS[each].items()
            tables[each] = [{"name": n, "summary": registry.summary(m), "options": list(registry.options(each, m))} for n, m in members]
    if as_json:
        _print_json(tables[kind] if kind else tables)
        return
    for each, entries in tables.items():
        _print(each)
        width = max(len(entry["name"]) for entry in entries)
        for entry in entries:
            _print(f"  {entry['name']:{width}}  {entry['summary']}")


@app.command()
def compare(
    recipe: Recipe,
    vary: Annotated[list[str], typer.Option(metavar="KEY=A,B,...", help="What to vary; several make all combinations.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The comparison's folder: a run folder inside for each value and seed.")],
    seeds: Annotated[int, typer.Option(metavar="N", help="How many seeds for each value.")] = 1,
    set_: Set = [],  # noqa: B006
    engine: Engine = EngineName.auto,
    device: Device = DeviceName.auto,
    precision: Precision = PrecisionName.fp32,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --out: finished runs are kept.")] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe for every value and seed, and compare.

    \b
    Examples:
      rota compare fedavg-digits --vary estimator=fedavg,unbiased --out runs/a
      rota compare fedavg-mnist --vary task.lr=0.05,0.1 --seeds 5 --out runs/b
    """
    from rota import compare as comparisons
    from rota import recipe as recipes

    config = recipes.read(recipe)
    for setting in set_:
        config = recipes.override(config, setting)
    runs = comparisons.variants(config, vary, seeds)
    started = {name: resume and (out / name / "config.toml").exists() for name in runs}
    for name, variant in runs.items():  # a mistake in the last one should not show after hours
        _check_folder(recipes.resolve(variant), out / name, started[name])
    if resume and not any(started.values()):
        raise BadInput(f"there is no comparison to resume in {out}: leave --resume out to start one there")
    if not resume:
        _check_folder({}, out, resume)
    given = [word for word in sys.argv[1:] if word != "--resume"]
    how = {"engine": engine, "device": device, "precision": precision}
    results = []
    for number, (name, variant) in enumerate(runs.items(), start=1):
        title = f"{name} ({number}/{len(runs)})"
        summary = _run_one(variant, title, out / name, how, started[name], f"rota {shlex.join(given)} --resume")
        results.append({"run": name, **summary})
    report = _report([out / name for name in runs], out / "report.html")
    if as_json:
        _print_json(results)
        return
    width = max(len(name) for name in runs)
    for result in results:
        _print(f"{result['run']:{width}}  accuracy {result['accuracy']:.2%}  loss {_loss(result)}  {_rounds(result)}")
    _print(f"report: {report}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders of run folders.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page to write; default: report.html in the first folder.")] = None,
) -> None:
    """Write one self-contained HTML page about some runs.

    \b
    Examples:
      rota report runs/try
      rota report runs/a runs/b --out both.html
    """
    _print(str(_report(folders, out or folders[0] / "report.html")))


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A table or figure of the sources; leave out to list them.", autocompletion=_starting(_reproductions)
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller version, to see that it works.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the results page.")] = Path("runs/reproduce"),
    as_json: Json = False,
) -> None:
    """Measure a table or figure of the sources again.

    \b
    Examples:
      rota reproduce
      rota reproduce gd-bound
      rota reproduce gd-bound --quick --json
    """
    from rota import progress, registry, reproduce

    known = {each: registry.summary(function) for each, function in reproduce.REPRODUCTIONS.items()}
    if name is None:
        if as_json:
            _print_json([{"name": each, "summary": summary} for each, summary in known.items()])
            return
        for each, summary in known.items():
            _print(f"{each:{max(map(len, known))}}  {summary}")
        return
    if name not in known:
        raise BadInput(f"unknown reproduction '{name}': {did_you_mean(name, known)}")
    try:
        out.mkdir(parents=True, exist_ok=True)  # not after hours
    except OSError as error:
        raise BadInput(f"cannot write to the output folder {out} ({error.strerror}): choose another --out") from error
    with progress.waiting(f"reproducing {name}"):
        result = reproduce.run(name, quick=quick)
        page = reproduce.write_page(result, out)
    if as_json:
        _print_json(result.rows)
        return
    columns = ("paper", "measured", "low", "high", "seeds")
    _print("".join(f"{column:>10}" for column in columns) + "  quantity")
    for row in result.rows:
        values = dict(row)
        numbers = ("-" if values[column] is None else f"{values[column]:.4g}" for column in columns)
        _print("".join(f"{number:>10}" for number in numbers) + f"  {row['quantity']}")
    for claim, held in result.checks.items():
        _print(f"{'yes' if held else 'NO'}: {claim}")
    _print(f"page: {page}")


@app.command()
def bench(
    work: Annotated[
        str | None,
        typer.Argument(metavar="[WORK]", help="What to train; leave out to list the works.", autocompletion=_starting(_works)),
    ] = None,
    device: Device = DeviceName.auto,
    peers: Annotated[str, typer.Option(metavar="A,B|all|none", help="The systems to compare with.")] = "all",
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Measured rounds of each of the two passes.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the results, with the machine and versions, as JSON.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure rota's speed against peers on the same work.

    \b
    Examples:
      rota bench
      rota bench 2nn
      rota bench cnn --peers pfl,flower --rounds 5 --out cnn.json
    """
    from rota import bench as benches
    from rota import progress

    if work is None:
        known = benches.names()
        if as_json:
            _print_json([{"name": each, "summary": summary} for each, summary in known.items()])
            return
        for each, summary in known.items():
            _print(f"{each:{max(map(len, known))}}  {summary}")
        return
    chosen = benches.chosen(peers)
    if out is not None and not out.absolute().parent.is_dir():  # not after hours
        raise BadInput(f"there is no folder {out.absolute().parent} for --out: make it, or choose another file")
    result = benches.bench(work, device=device, peers=chosen, rounds=rounds, say=progress.say)
    if out is not None:
        benches.write(result, out)
    if as_json:
        _print_json(result.rows)
        return
    for line in benches.table(result):
        _print(line)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, and which devices and data there are.

    \b
    Examples:
      rota doctor
      rota doctor --json
    """
    from rota import doctor

    found = doctor.examine()
    if as_json:
        _print_json(found)
        return
    for topic, entries in found.items():
        _print(topic)
        width = max(len(name) for name in entries)
        for name, value in entries.items():
            _print(f"  {name:{width}}  {value}")


USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises for wrong arguments: the base of the one such error that it exports."""


def main() -> None:
    """The entry point: every mistake becomes one sentence and a status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's stop is a Ctrl-C: checkpoint, then go
    sys.exit(_status(sys.argv[1:] or ["--help"]))


def _status(words: list[str]) -> int:
    """Run a command line and say what went wrong, if anything."""
    from rota.progress import say

    try:
        status = int(app(words, prog_name="rota", standalone_mode=False) or 0)
        if status == 130:  # how typer passes a Ctrl-C on
            say("rota: interrupted")
        return status
    except USAGE_ERROR as mistake:
        say(f"rota: {_usage(mistake)}")
        return 2
    except BadInput as mistake:
        say(f"rota: {mistake}")
        return 2
    except typer.Abort:  # how older versions of typer do
        say("rota: interrupted")
        return 130
    except Stopped as stop:
        if os.environ.get("ROTA_DEBUG") and stop.status == 1:
            raise
        kept = "; the checkpoint is written" * bool(stop.again) if stop.status == 130 else "; set ROTA_DEBUG=1 for the traceback"
        say(f"rota: {stop}{kept}")
        if stop.again:
            say(f"rota: to resume: {stop.again}")
        return stop.status
    except Exception as error:
        if os.environ.get("ROTA_DEBUG"):
            raise
        say(f"rota: it failed: {_what_and_where(error)}; set ROTA_DEBUG=1 for the traceback")
        return 1


def _usage(mistake: Any) -> str:
    """Typer's complaint about the arguments as one sentence, and where to read on."""
    text = mistake.format_message().rstrip(".")
    if "option_name" in vars(mistake) and text.startswith("No such option"):
        known = [name for parameter in mistake.ctx.command.params for name in parameter.opts]
        text = f"unknown option {mistake.option_name}: {did_you_mean(mistake.option_name, known)}"
    return f"{text[0].lower()}{text[1:]} (see {mistake.ctx.command_path if mistake.ctx else 'rota'} --help)"


if __name__ == "__main__":
    main()
