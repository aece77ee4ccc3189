"""Runs and federations as small tables of HTML, and the report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rota.errors import BadInput


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table."""
    top = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    body = ""
    for row in rows:
        body += f"<tr>{''.join(f'<td>{escape(_word(cell))}</td>' for cell in row)}</tr>"
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _word(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def run(finished: Any) -> str:
    """A run: its models' scores, its costs, and what went wrong."""
    from rota.cli.summary import sentences
    from rota.scores import title

    summary = finished.summary
    rows = []
    for name, model in summary["models"].items():
        found = title(model["score"]), model["accuracy"], model["best_accuracy"], model["loss"]
        rows.append([name, *found])
    words = "".join(f"<p>{escape(each)}</p>" for each in sentences(summary))
    return words + table(["model", "score", "last", "best", "loss"], rows)


def federation(data: Any) -> str:
    """A federation: its clients, and how unequal they are."""
    sizes = data.train.sizes
    low, middle, high = (int(each) for each in np.quantile(sizes, [0, 0.5, 1], method="lower"))
    rows = [
        ["clients", f"{data.clients:,}"],
        ["training examples", f"{len(data.train.y):,}"],
        ["of a client", f"{low:,} to {high:,}, median {middle:,}"],
        ["test examples", f"{len(data.test.y):,}, {'shared' if data.shared_test else 'by client'}"],
        ["shape of an example", " × ".join(map(str, data.shape)) or "one number"],
        ["classes", f"{data.classes}" if data.classes else "none: real targets"],
    ]
    return table([data.name, ""], rows)


def report(finished: Any, target: str | Path | None = None) -> Path:
    """Write the report of a run, by default as report.html in its folder."""
    from rota.report import write

    if finished.folder is None:
        raise BadInput("this run has no folder to report on: give rota.run an `out`")
    return write([finished.folder], Path(target or finished.folder / "report.html"))
