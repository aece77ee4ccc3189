"""The command line: puts the commands together and reports their errors.

Results go to standard output, progress and messages to standard error.
Exit status: 0 done, 1 the run failed, 2 bad usage or input, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any

import typer

import rota
from rota.cli import loading
from rota.cli.bench import bench
from rota.cli.client import client
from rota.cli.compare import compare
from rota.cli.complete import in_bash
from rota.cli.demo import demo
from rota.cli.doctor import doctor
from rota.cli.keys import keys
from rota.cli.list import list_
from rota.cli.output import Stopped, interrupted, print_line
from rota.cli.report import report
from rota.cli.reproduce import reproduce
from rota.cli.run import run
from rota.cli.serve import serve
from rota.cli.ui import ui
from rota.errors import BadInput, did_you_mean, what_and_where

app = typer.Typer(
    help="Federated learning that decides, every round, who trains which model.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # without markup the examples keep their lines, in a pipe too
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print_line(f"rota {rota.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(run)
app.command("list")(list_)
app.command()(compare)
app.command()(report)
app.command()(ui)
app.command()(reproduce)
app.command()(bench)
app.command()(doctor)
app.command()(demo)
app.command()(serve)
app.command()(client)
app.command()(keys)

USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises for wrong arguments. It exports only one subclass of it."""


def status(words: list[str]) -> int:
    """Run a command line and return its exit status. Report each error in one sentence."""
    with loading():
        from rota.cli.progress import messages, say

    try:
        with messages(), in_bash():
            ended = int(app(words, prog_name="rota", standalone_mode=False) or 0)
        if ended == 130:  # typer's way to pass on a Ctrl-C
            say("rota: interrupted")
        return ended
    except USAGE_ERROR as mistake:
        say(f"rota: {_usage(mistake, words)}")
        return 2
    except BadInput as mistake:
        say(f"rota: {mistake}")
        return 2
    except (KeyboardInterrupt, typer.Abort):  # before a command begins; older versions of typer
        say("rota: interrupted")
        return 130
    except Stopped as stop:
        if os.environ.get("ROTA_DEBUG") and stop.status == 1:
            raise
        if stop.status != 130:
            say(f"rota: {stop}; set ROTA_DEBUG=1 for the traceback")
        elif stop.again:
            say(f"rota: {stop}; the checkpoint is written")
        else:
            say(f"rota: {stop}")
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
    """Typer's complaint about the arguments as one sentence, with where to read more."""
    text = mistake.format_message().rstrip(".")
    if "option_name" in vars(mistake) and text.startswith("No such option"):
        option = mistake.option_name
        known = [name for parameter in mistake.ctx.command.params for name in parameter.opts]
        hint = _setting(option, words) if "--set" in known else ""
        text = f"unknown option {option}: {hint or did_you_mean(option, known)}"
    command = mistake.ctx.command_path if mistake.ctx else "rota"
    return f"{text[0].lower()}{text[1:]} (see {command} --help)"


def _setting(option: str, words: list[str]) -> str:
    """What to write instead of an option that is a recipe's key; empty for any other option.

    Such options are --rounds 5, --lr=0.1 or --sampler.budget 3.
    """
    from rota import recipe

    key = option.removeprefix("--")
    first = key.partition(".")[0]
    if first in recipe.TASK_KEYS:
        key = f"task.{key}"
    elif first not in recipe.top_keys():
        return ""
    place = next(n for n, word in enumerate(words) if word.partition("=")[0] == option)
    _, equals, value = words[place].partition("=")
    if not equals:
        after = words[place + 1 : place + 2]
        value = after[0] if after and not after[0].startswith("-") else "VALUE"
    return f"it is a key of the recipe, so use --set {shlex.quote(f'{key}={value}')}"
