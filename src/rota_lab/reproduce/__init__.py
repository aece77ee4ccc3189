"""Tables and figures of the sources, measured again: one file a reproduction, and one line in REPRODUCTIONS."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rota.errors import BadInput, did_you_mean
from rota_lab.reproduce import fedavg_cells
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.fedavg_table1 import fedavg_table1
from rota_lab.reproduce.gd_bound import gd_bound
from rota_lab.reproduce.kvib_femnist import estimate as femnist_estimate
from rota_lab.reproduce.kvib_femnist import kvib_femnist
from rota_lab.reproduce.kvib_theory import estimate as kvib_estimate
from rota_lab.reproduce.kvib_theory import kvib_theory
from rota_lab.reproduce.mmfl_faults import estimate as faults_estimate
from rota_lab.reproduce.mmfl_faults import mmfl_faults
from rota_lab.reproduce.mmfl_table1 import estimate as mmfl_estimate
from rota_lab.reproduce.mmfl_table1 import mmfl_table1
from rota_lab.reproduce.result import Result, Row, over_seeds, table, write_page

__all__ = [
    "REPRODUCTIONS",
    "Chart",
    "Line",
    "Result",
    "Row",
    "check",
    "estimate",
    "is_short",
    "names",
    "over_seeds",
    "run",
    "table",
    "write_page",
]

REPRODUCTIONS: dict[str, Callable[..., Result]] = {
    "gd-bound": gd_bound,
    "fedavg-table1": fedavg_table1,
    "kvib-theory": kvib_theory,
    "kvib-femnist": kvib_femnist,
    "mmfl-table1": mmfl_table1,
    "mmfl-faults": mmfl_faults,
}
"""Name -> function of `quick` (a short version that shows the way, not the paper's scale). Its docstring's first line is the summary.

A function may take, by name, `out` (the folder of its results, where it can keep finished parts), `say` (for lines of progress), and any of
the options `only`, `minutes`, `device` and `precision`.
"""
ESTIMATES: dict[str, Callable[..., list[str]]] = {
    "fedavg-table1": fedavg_cells.estimate,
    "kvib-theory": kvib_estimate,
    "kvib-femnist": femnist_estimate,
    "mmfl-table1": mmfl_estimate,
    "mmfl-faults": faults_estimate,
}
"""Name -> function of `only` that says in lines how much work it is. It may take `out`, and leave away what is finished there."""


def names() -> dict[str, str]:
    """The reproductions, and a sentence on each."""
    return {
        name: (inspect.getdoc(function) or "").partition("\n")[0]
        for name, function in REPRODUCTIONS.items()
    }


def check(name: str, options: dict[str, Any], quick: bool = False) -> None:
    """Refuse an unknown reproduction, options that it does not take (None: not given), and what makes no sense."""
    if name not in REPRODUCTIONS:
        raise BadInput(f"unknown reproduction '{name}': {did_you_mean(name, REPRODUCTIONS)}")
    for option, value in options.items():
        if value is not None and not _takes(name, option):
            raise BadInput(f"--{option} is not for {name}: leave it out")
    if quick and options.get("only") is not None:
        raise BadInput(
            "--only is not for --quick, which has parts of its own: leave out one of the two"
        )
    minutes = options.get("minutes")
    if minutes is not None and not minutes >= 0:
        raise BadInput(f"--minutes is {minutes:g}: give 0, which runs nothing, or more")


def estimate(
    name: str, only: str | None = None, out: Path | None = None, quick: bool = False
) -> list[str]:
    """How much work a reproduction is, as lines; where it can tell, without what `out` has already."""
    check(name, {})
    if name not in ESTIMATES:
        raise BadInput(f"--estimate is not for {name}, which is short: leave it out")
    if quick:
        raise BadInput("--estimate is not for --quick, which is short: leave out one of the two")
    function = ESTIMATES[name]
    return (
        function(only, out) if "out" in inspect.signature(function).parameters else function(only)
    )


def run(
    name: str,
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Result:
    """Run one reproduction by name; `options` are those that it takes (None: not given)."""
    check(name, options, quick)
    given = {"out": out, "say": say, **options}
    return REPRODUCTIONS[name](
        quick,
        **{key: value for key, value in given.items() if value is not None and _takes(name, key)},
    )


def is_short(name: str) -> bool:
    """Whether it says nothing while it runs."""
    return not _takes(name, "say")


def _takes(name: str, option: str) -> bool:
    return option in inspect.signature(REPRODUCTIONS[name]).parameters
