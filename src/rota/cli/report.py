"""rota report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rota.cli.output import print_line


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
    """Write a self-contained HTML page about one or more runs.

    \b
    Examples:
      rota report runs/try
      rota report runs/a runs/b --out both.html
    """
    print_line(str(write_page(folders, out or folders[0] / "report.html")))


def write_page(folders: list[Path], target: Path) -> Path:
    """Write the report of these folders to `target`, and return its path."""
    from rota.cli import progress
    from rota.report import write

    with progress.waiting("writing the report"):
        return write(folders, target)
