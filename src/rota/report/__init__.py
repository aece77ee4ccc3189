"""The report: one HTML file of a run or of several to compare, which opens anywhere and asks no network for anything.

runs.py      what is read of a run folder
groups.py    which runs are one setting with several seeds, and what a setting is called
numbers.py   numbers for people
charts.py    what a chart is: plain plotly values, finished in page.js
curves.py    the charts over rounds
clients.py   the charts over clients
tables.py    the tables
page.py      the page around them (page.css, page.js)
"""

from __future__ import annotations

from pathlib import Path

from rota import files
from rota.errors import BadInput
from rota.report.groups import group
from rota.report.page import render
from rota.report.runs import find, read

__all__ = ["write"]


def write(folders: list[Path], target: Path) -> Path:
    """Write the page of these run folders (or folders of run folders, as `rota compare` makes) to `target`."""
    found = [
        read(path) for path in dict.fromkeys(path for folder in folders for path in find(folder))
    ]
    if not found:
        raise BadInput("there is nothing to report on: name at least one run folder")
    html = render(group(found))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write(target, html)
    except OSError as error:
        raise BadInput(
            f"cannot write the report to {target} ({error.strerror}): choose another place"
        ) from error
    return target
