"""The report: one self-contained HTML file about one or more runs. It needs no network.

history.py   what is read from a run folder
groups.py    which runs are one setting with several seeds, and the settings' names
numbers.py   numbers as people write them
charts.py    what a chart is: plain plotly values, finished in page.js
curves.py    the charts over rounds
clients.py   the charts over clients
submodels.py the charts about sub-models
tables.py    the tables
page.py      the page around them (page.css, page.js)
"""

from __future__ import annotations

import os
from pathlib import Path

from rota import files
from rota.errors import BadInput
from rota.report.groups import group
from rota.report.history import History, find, not_a_run, read
from rota.report.page import render

__all__ = ["write"]


def _page(runs: list[History]) -> str:
    """The page. If a run's files are not what a run writes, the sentence names the run."""
    try:
        return render(group(runs))
    except Exception as error:
        if isinstance(error, BadInput) or os.environ.get("ROTA_DEBUG"):
            raise
        for run in runs if len(runs) > 1 else []:
            _page([run])
        raise not_a_run(runs[0].folder, error) from error


def write(folders: list[Path], target: Path) -> Path:
    """Write the page about some run folders, or folders of run folders, to `target`."""
    found = dict.fromkeys(path for folder in folders for path in find(folder))
    if not found:
        raise BadInput("there is nothing to report on: name at least one run folder")
    html = _page([read(path) for path in found])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write(target, html)
    except OSError as error:
        raise BadInput(
            f"cannot write the report to {target} ({error.strerror}): choose another place"
        ) from error
    return target
