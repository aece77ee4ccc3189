"""The commands that measure: reproduce and bench."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from rota.cli import loading
from rota.cli.options import (
    Device,
    DeviceName,
    Json,
    PrecisionName,
    one_of,
    reproductions,
    starting,
    works,
)
from rota.cli.output import print_json, print_line
from rota.errors import BadInput


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A table or figure of the sources; leave out to list them.",
            autocompletion=starting(reproductions),
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller version, to see that it works.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Some of its parts, such as 2nn-iid,cnn-B10-C0.1."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Stop after so long; 0 writes the page of what is finished."
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say how much work it is, and do none.")
    ] = False,
    device: Annotated[DeviceName | None, typer.Option(help="Where.", **one_of(DeviceName))] = None,
    precision: Annotated[
        PrecisionName | None, typer.Option(help="Of products.", **one_of(PrecisionName))
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the results page and finished parts go.")
    ] = Path("runs/reproduce"),
    as_json: Json = False,
) -> None:
    """Measure a table or figure of the sources again.

    \b
    Examples:
      rota reproduce
      rota reproduce gd-bound
      rota reproduce gd-bound --quick --json
      rota reproduce fedavg-table1 --only 2nn-iid-B10 --minutes 30
    """
    with loading():
        from rota.cli import progress
        from rota_lab import reproduce

    if name is None:
        _list(reproduce.names(), as_json)
        return
    options = {"only": only, "minutes": minutes, "device": device, "precision": precision}
    reproduce.check(name, options, quick)
    if estimate:
        for line in reproduce.estimate(name, only, out, quick):
            print_line(line)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)  # not after hours
    except OSError as error:
        raise BadInput(
            f"cannot write to the output folder {out} ({error.strerror}): choose another --out"
        ) from error
    with progress.waiting(f"reproducing {name}") if reproduce.is_short(name) else nullcontext():
        result = reproduce.run(name, quick, out, progress.say, **options)
        page = reproduce.write_page(result, out)
    if as_json:
        print_json(result.rows)
        return
    for line in [*reproduce.table(result), f"page: {page}"]:
        print_line(line)


def bench(
    work: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORK]",
            help="What to train; leave out to list the works.",
            autocompletion=starting(works),
        ),
    ] = None,
    device: Device = DeviceName.auto,
    peers: Annotated[
        str, typer.Option(metavar="A,B|all|none", help="The systems to compare with.")
    ] = "all",
    rounds: Annotated[
        int | None, typer.Option(metavar="N", help="Measured rounds of each of the two passes.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One pass, and without rota's reference engine.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the results, with the machine and versions, as JSON; after every run.",
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
        _list(benches.names(), as_json)
        return
    chosen = benches.chosen(peers)
    if out is not None and not out.absolute().parent.is_dir():  # not after hours
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


def _list(known: dict[str, str], as_json: bool) -> None:
    """What a command can be asked for, when it is asked for nothing."""
    if as_json:
        print_json([{"name": each, "summary": summary} for each, summary in known.items()])
        return
    for each, summary in known.items():
        print_line(f"{each:{max(map(len, known))}}  {summary}")
