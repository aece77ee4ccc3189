"""Tables and figures of the sources, measured again.

A reproduction is one file, and one line in REPRODUCTIONS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rota.errors import BadInput, did_you_mean
from rota_lab.reproduce import fedavg_cells, fluid_studies
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.complexity import complexity
from rota_lab.reproduce.complexity import estimate as complexity_estimate
from rota_lab.reproduce.exact import exact
from rota_lab.reproduce.fedavg_table1 import fedavg_table1
from rota_lab.reproduce.fluid_linear import estimate as linear_estimate
from rota_lab.reproduce.fluid_linear import fluid_linear
from rota_lab.reproduce.fluid_time import estimate as time_estimate
from rota_lab.reproduce.fluid_time import fluid_time
from rota_lab.reproduce.gd_bound import gd_bound
from rota_lab.reproduce.kvib_femnist import estimate as femnist_estimate
from rota_lab.reproduce.kvib_femnist import kvib_femnist
from rota_lab.reproduce.kvib_theory import estimate as kvib_estimate
from rota_lab.reproduce.kvib_theory import kvib_theory
from rota_lab.reproduce.mmfl_faults import estimate as faults_estimate
from rota_lab.reproduce.mmfl_faults import mmfl_faults
from rota_lab.reproduce.mmfl_table1 import estimate as mmfl_estimate
from rota_lab.reproduce.mmfl_table1 import mmfl_table1
from rota_lab.reproduce.personal import estimate as personal_estimate
from rota_lab.reproduce.personal import personal
from rota_lab.reproduce.result import Result, Row, over_seeds, table, write_page
from rota_lab.reproduce.selective import estimate as selective_estimate
from rota_lab.reproduce.selective import selective
from rota_lab.reproduce.worst_local_loss import worst_local_loss

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
    "exact": exact,
    "fedavg-table1": fedavg_table1,
    "kvib-theory": kvib_theory,
    "kvib-femnist": kvib_femnist,
    "mmfl-table1": mmfl_table1,
    "mmfl-faults": mmfl_faults,
    **fluid_studies.reproductions(),
    "fluid-linear": fluid_linear,
    "fluid-time": fluid_time,
    "selective": selective,
    "worst-local-loss": worst_local_loss,
    "complexity": complexity,
    "personal": personal,
}
"""Name -> function of `quick`, which asks for a short version that is not at the paper's scale.

The first line of a function's docstring is its summary. A function may also take, by name, `out`
(the folder of its results, where it can keep finished parts), `say` (which prints a line of
progress), and any of the options `only`, `minutes`, `device` and `precision`.
"""
ESTIMATES: dict[str, Callable[..., list[str]]] = {
    "fedavg-table1": fedavg_cells.estimate,
    "kvib-theory": kvib_estimate,
    "kvib-femnist": femnist_estimate,
    "mmfl-table1": mmfl_estimate,
    "mmfl-faults": faults_estimate,
    **fluid_studies.estimates(),
    "fluid-linear": linear_estimate,
    "fluid-time": time_estimate,
    "selective": selective_estimate,
    "complexity": complexity_estimate,
    "personal": personal_estimate,
}
"""Name -> function of `only` that returns lines on how much work a reproduction is.

It may also take `out`, and leave out the parts that are finished there.
"""


def names() -> dict[str, str]:
    """The reproductions, with a sentence on each."""
    out = {}
    for name, function in REPRODUCTIONS.items():
        out[name] = (inspect.getdoc(function) or "").partition("\n")[0]
    return out


def check(name: str, options: dict[str, Any], quick: bool = False) -> None:
    """Reject unknown names, options that a reproduction does not take, and senseless values.

    An option whose value is None was not given.
    """
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
    """How much work a reproduction is, as lines; most leave out what is finished in `out`."""
    check(name, {})
    if name not in ESTIMATES:
        raise BadInput(f"--estimate is not for {name}, which is short: leave it out")
    if quick:
        raise BadInput("--estimate is not for --quick, which is short: leave out one of the two")
    function = ESTIMATES[name]
    takes_out = "out" in inspect.signature(function).parameters
    return function(only, out) if takes_out else function(only)


def run(
    name: str,
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Result:
    """Run one reproduction. An option whose value is None was not given."""
    check(name, options, quick)
    given = {}
    for option, value in {"out": out, "say": say, **options}.items():
        if value is not None and _takes(name, option):
            given[option] = value
    return REPRODUCTIONS[name](quick, **given)


def is_short(name: str) -> bool:
    """Whether a reproduction runs without lines of progress."""
    return not _takes(name, "say")


def _takes(name: str, option: str) -> bool:
    return option in inspect.signature(REPRODUCTIONS[name]).parameters
