"""Tables and figures of the sources, measured again: one file a reproduction, and one line in REPRODUCTIONS."""

from __future__ import annotations

from collections.abc import Callable

from rota.errors import BadInput, did_you_mean
from rota.reproduce.chart import Chart, Line
from rota.reproduce.gd_bound import gd_bound
from rota.reproduce.result import Result, Row, over_seeds, write_page

__all__ = ["REPRODUCTIONS", "Chart", "Line", "Result", "Row", "over_seeds", "run", "write_page"]

REPRODUCTIONS: dict[str, Callable[[bool], Result]] = {"gd-bound": gd_bound}
"""Name -> function of `quick` (a short version that shows the way, not the paper's scale). Its docstring's first line is the summary."""


def run(name: str, quick: bool = False) -> Result:
    """Run one reproduction by name."""
    if name not in REPRODUCTIONS:
        raise BadInput(f"unknown reproduction '{name}': {did_you_mean(name, REPRODUCTIONS)}")
    return REPRODUCTIONS[name](quick)
