"""rota serve: the server of a fleet of real clients."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rota.cli import loading
from rota.cli.options import Allow, Json, Recipe, Set
from rota.cli.output import print_json, print_line
from rota.cli.report import write_page
from rota.cli.run import train
from rota.errors import BadInput

Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients find the server.")]


def serve(
    recipe: Recipe,
    set_: Set = [],  # noqa: B006
    allow: Allow = [],  # noqa: B006
    listen: Listen = "127.0.0.1:9092",
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of `rota keys`: TLS, and only known clients."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text, also for other machines.")
    ] = False,
    clients: Annotated[int, typer.Option(metavar="N", help="Begin when N clients are there.")] = 1,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for them.")
    ] = 600.0,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="A round's longest time; default: from measured times."
        ),
    ] = None,
    quantile: Annotated[
        float, typer.Option(help="Derive it from this quantile of the drawn clients' times.")
    ] = 1.0,
    enough: Annotated[
        float, typer.Option(help="End a round when this share of its rows is there.")
    ] = 1.0,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Add updates in a fixed order, to repeat bit for bit.")
    ] = False,
    database: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the SuperLink keeps its state; default: memory."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run; default: runs/RECIPE-TIME."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out from its last checkpoint.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a recipe on real devices, whose owners start `rota client`.

    \b
    Examples:
      rota serve recipe.toml --clients 5
      rota serve recipe.toml --listen 0.0.0.0:9092 --keys keys --clients 5
    """
    with loading():
        from rota import recipe as recipes
        from rota.cli.summary import sentences
        from rota.flower.fleet import Rules
        from rota.flower.serve import Meeting, fleet_at

    if resume and out is None:
        raise BadInput("--resume needs --out: give the folder of the run to resume")
    rules = Rules(deadline=deadline, quantile=quantile, enough=enough, ordered=ordered)
    rules.check()
    config = recipes.read(recipe, allow)
    for setting in set_:
        config = recipes.override(config, setting)
    title = Path(recipe).absolute().stem
    out = out or Path("runs") / f"{title}-{time.strftime('%Y%m%d-%H%M%S')}"
    given = {
        "set": set_,
        "allow": allow,
        "listen": listen,
        "keys": keys,
        "insecure": insecure,
        "deadline": deadline,
        "quantile": quantile,
        "enough": enough,
        "ordered": ordered,
        "database": database,
    }
    with fleet_at(listen, keys, insecure, rules, database) as fleet:
        meeting = Meeting(fleet)
        file = out.with_name(f"{out.name}.clients.json")

        def build(config: dict[str, Any]) -> Any:
            if not resume:
                file.unlink(missing_ok=True)
            return meeting.build(config, clients, wait, file)

        how = {"engine": meeting, "device": "cpu"}
        again = shlex.join(["rota", "serve", recipe, *_words(given), "--out", str(out), "--resume"])
        summary = train(config, title, out, how, resume, again, build)
        counts = dict(fleet.counts)
    report = write_page([out], out / "report.html")
    if as_json:
        print_json({**summary, "folder": str(out), "report": str(report), **counts})
        return
    for line in [*sentences(summary), f"report: {report}"]:
        print_line(line)
    if counts.get("late"):
        print_line(f"{counts['late']} replies came too late")


def _words(given: dict[str, Any]) -> list[str]:
    """Options as the words of a command."""
    words: list[str] = []
    for key, value in given.items():
        if isinstance(value, bool):
            words += [f"--{key}"] * value
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            words += [word for each in values for word in (f"--{key}", str(each))]
    return words
