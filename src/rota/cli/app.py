"""The commands, and what becomes of their mistakes. Results go to standard output, progress and messages to standard error.

Exit status: 0 done, 1 the run failed, 2 bad usage or input, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any

import typer

from rota.cli import loading
from rota.cli.measure import bench, reproduce
from rota.cli.options import Json, kinds, starting
from rota.cli.output import Stopped, interrupted, print_json, print_line
from rota.cli.runs import compare, report, run
from rota.errors import BadInput, did_you_mean, what_and_where

app = typer.Typer(
    help="Federated learning that decides, every round, who trains which model.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the examples keep their lines, and it reads the same in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="recipes, samplers, estimators, servers, models, data or partitions; default: all.",
            autocompletion=starting(kinds),
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
    with loading():
        from rota import recipe
        from rota.recipe import registry

    known = kinds()
    if kind is not None and kind not in known:
        raise BadInput(f"unknown kind '{kind}': {did_you_mean(kind, known)}")
    tables: dict[str, list[dict[str, Any]]] = {}
    for each in [kind] if kind else known:
        if each == "recipes":
            tables[each] = [
                {"name": name, "summary": recipe.read(name).get("summary", "")}
                for name in recipe.names()
            ]
        else:
            tables[each] = registry.table(each)
    if as_json:
        print_json(tables[kind] if kind else tables)
        return
    for each, entries in tables.items():
        print_line(each)
        width = max(len(entry["name"]) for entry in entries)
        for entry in entries:
            print_line(f"  {entry['name']:{width}}  {entry['summary']}")
            if kind and "needs" in entry:
                bias = "unbiased" if entry["unbiased"] else "biased"
                print_line(
                    f"  {'':{width}}    {bias}; needs {entry['needs']}; cost: {entry['costs']}"
                )


def doctor(as_json: Json = False) -> None:
    """Say what is installed, and which devices and data there are.

    \b
    Examples:
      rota doctor
      rota doctor --json
    """
    with loading():
        from rota.cli import doctor

    found = doctor.examine()
    if as_json:
        print_json(found)
        return
    for topic, entries in found.items():
        print_line(topic)
        width = max(len(name) for name in entries)
        for name, value in entries.items():
            print_line(f"  {name:{width}}  {value}")


app.command()(run)
app.command("list")(list_)
app.command()(compare)
app.command()(report)
app.command()(reproduce)
app.command()(bench)
app.command()(doctor)

USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises for wrong arguments: the base of the one such error that it exports."""


def status(words: list[str]) -> int:
    """Run a command line and say what went wrong, if anything: every mistake becomes one sentence and a status."""
    with loading():
        from rota.cli.progress import say

    try:
        ended = int(app(words, prog_name="rota", standalone_mode=False) or 0)
        if ended == 130:  # how typer passes a Ctrl-C on
            say("rota: interrupted")
        return ended
    except USAGE_ERROR as mistake:
        say(f"rota: {_usage(mistake, words)}")
        return 2
    except BadInput as mistake:
        say(f"rota: {mistake}")
        return 2
    except (
        KeyboardInterrupt,
        typer.Abort,
    ):  # before a command begins; and how older versions of typer do
        say("rota: interrupted")
        return 130
    except Stopped as stop:
        if os.environ.get("ROTA_DEBUG") and stop.status == 1:
            raise
        kept = (
            "; the checkpoint is written" * bool(stop.again)
            if stop.status == 130
            else "; set ROTA_DEBUG=1 for the traceback"
        )
        say(f"rota: {stop}{kept}")
        if stop.again:
            say(f"rota: to resume: {stop.again}")
        return stop.status
    except Exception as error:
        if interrupted(error):
            say("rota: interrupted")
            return 130
        if os.environ.get("ROTA_DEBUG"):
            raise
        say(f"rota: it failed: {what_and_where(error)}; set ROTA_DEBUG=1 for the traceback")
        return 1


def _usage(mistake: Any, words: list[str]) -> str:
    """Typer's complaint about the arguments as one sentence, and where to read on."""
    text = mistake.format_message().rstrip(".")
    if "option_name" in vars(mistake) and text.startswith("No such option"):
        known = [name for parameter in mistake.ctx.command.params for name in parameter.opts]
        hint = _key(mistake.option_name, words) if "--set" in known else ""
        text = f"unknown option {mistake.option_name}: {hint or did_you_mean(mistake.option_name, known)}"
    return f"{text[0].lower()}{text[1:]} (see {mistake.ctx.command_path if mistake.ctx else 'rota'} --help)"


def _key(option: str, words: list[str]) -> str:
    """What to write for an option that is a key of the recipe (--rounds 5, --lr=0.1, --sampler.budget 3); nothing for any other."""
    from rota import recipe

    key = option.removeprefix("--")
    if key.partition(".")[0] in recipe.TASK_KEYS:
        key = f"task.{key}"
    elif key.partition(".")[0] not in recipe.KEYS:
        return ""
    given, equals, value = next(
        word for word in words if word.partition("=")[0] == option
    ).partition("=")
    if not equals:
        value = next(
            (word for word in words[words.index(given) + 1 :][:1] if not word.startswith("-")),
            "VALUE",
        )
    return f"it is a key of the recipe, so use --set {shlex.quote(f'{key}={value}')}"
