"""rota reproduce."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from rota.cli import loading
from rota.cli.complete import known, starting
from rota.cli.options import Json, one_of
from rota.cli.output import print_json, print_line, print_names
from rota.errors import BadInput
from rota.running.choices import DEVICES, PRECISIONS


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A table or figure of the sources; without it, list them.",
            autocompletion=starting(lambda: known()["reproductions"]),
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller version, to see that it works.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Only some parts, such as 2nn-iid,cnn-B10-C0.1."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Stop after this time; 0 only writes the page from the finished parts.",
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Show how much work it is, and do none.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Device to train on.", **one_of(DEVICES, "auto", like=r"cuda:\d+")),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Precision of products.", **one_of(PRECISIONS)),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the results page and finished parts.")
    ] = Path("runs/reproduce"),
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the sources.

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
        print_names(reproduce.names(), as_json)
        return
    options = {"only": only, "minutes": minutes, "device": device, "precision": precision}
    reproduce.check(name, options, quick)
    if estimate:
        for line in reproduce.estimate(name, only, out, quick):
            print_line(line)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)  # an error here should not come after hours
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
