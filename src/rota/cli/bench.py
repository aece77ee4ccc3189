"""rota bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rota.cli import loading
from rota.cli.complete import known, starting
from rota.cli.options import Device, Json
from rota.cli.output import print_json, print_line, print_names
from rota.errors import BadInput


def bench(
    work: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORK]",
            help="What to train; without it, list the works.",
            autocompletion=starting(lambda: known()["works"]),
        ),
    ] = None,
    device: Device = "auto",
    peers: Annotated[
        str, typer.Option(metavar="A,B|all|none", help="The systems to compare with.")
    ] = "all",
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of measured rounds in each of the two passes."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One pass, without rota's reference engine.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the results as JSON, with the machine and versions, after every run.",
        ),
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
    with loading():
        from rota.cli import progress
        from rota_lab import bench as benches

    if work is None:
        print_names(benches.names(), as_json)
        return
    chosen = benches.chosen(peers)
    if out is not None and not out.absolute().parent.is_dir():  # show it now, not after hours
        raise BadInput(
            f"there is no folder {out.absolute().parent} for --out: make it, or choose another file"
        )
    result = benches.bench(
        work, device=device, peers=chosen, rounds=rounds, quick=quick, out=out, say=progress.say
    )
    if as_json:
        print_json(result.rows)
        return
    for line in benches.table(result):
        print_line(line)
