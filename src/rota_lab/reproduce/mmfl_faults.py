"""What the faults of MMFL's published code do to its Table I.

Each fault is put back alone, and all of them are put back together with the code's own network. The
policies in FAULTS are wrong on purpose, and only this reproduction uses them. Runs without a fault
that mmfl-table1 has finished are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from rota import models
from rota.arrays import Array
from rota.estimate import FedVarp, Scaffold, Unbiased
from rota.estimate.memory import Tensors
from rota.estimate.stale import StaleSums
from rota.plan import Plan, State
from rota.sampling import Gvr, Lvr, Random
from rota.weights import Weights
from rota_lab.reproduce.mmfl_cells import PAPER
from rota_lab.reproduce.mmfl_faults_page import report
from rota_lab.reproduce.mmfl_table1 import (
    BUDGET,
    METHODS,
    SETTINGS,
    Method,
    Piece,
    Settings,
    in_order,
    lines,
    played,
)
from rota_lab.reproduce.mmfl_table1 import NAME as TABLE1
from rota_lab.reproduce.parts import chosen, left, results, start
from rota_lab.reproduce.result import Result

NAME = "mmfl-faults"


@dataclass(frozen=True)
class Repeated(FedVarp):
    """FedVARP that adds the sum of remembered updates once for every drawn client."""

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> StaleSums:
        sums = super().begin(state, models, plan)
        drawn = np.bincount(plan.model, minlength=len(models)).tolist()
        for each, clients in zip(sums.sums, drawn, strict=True):
            each.update *= clients
        return sums


@dataclass(frozen=True)
class Uncounted(Random):
    """Random whose weights treat every client as one with one processor and all models.

    The weights are share / (C / S), with C = budget / processors.
    """

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        factor = state["processors"] * len(shares) / np.maximum((shares > 0).sum(axis=0), 1)
        return replace(plan, weight=plan.weight * factor[plan.client])


@dataclass(frozen=True)
class Misplaced(Gvr):
    """MMFL-GVR whose weights have the shares of other clients.

    A model's k-th drawn client has the share of the k-th client that was drawn for any model.
    """

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        # rows are sorted by model, then by client
        place = np.arange(len(plan)) - np.searchsorted(plan.model, plan.model)
        other = np.sort(plan.client)[place]
        right, wrong = shares[plan.model, plan.client], shares[plan.model, other]
        return replace(plan, weight=plan.weight * wrong / right)


FAULTS: dict[str, dict[str, Method]] = {
    "repeated": {
        "fedvarp": lambda b: (Random(BUDGET, b), Repeated()),
        "gvr-star": lambda b: (Gvr(BUDGET, b), Repeated()),
    },
    "uncounted": {
        "random": lambda b: (Uncounted(BUDGET, b), Unbiased()),
        "fedvarp": lambda b: (Uncounted(BUDGET, b), FedVarp()),
        "scaffold": lambda b: (Uncounted(BUDGET, b), Scaffold()),
    },
    "misplaced": {"gvr": lambda b: (Misplaced(BUDGET, b), Unbiased())},
    "unshared": {"lvr": lambda b: (Lvr(BUDGET, b, by_share=False), Unbiased())},
}
"""By fault: the methods of MMFL's table whose code has the fault, each with this fault alone."""
TABLE = {method: METHODS[method] for method in PAPER["3"]}
"""The methods of MMFL's table without a fault."""
TOGETHER: dict[str, Method] = {
    **TABLE,
    **FAULTS["repeated"],
    **FAULTS["uncounted"],
    **FAULTS["misplaced"],
    **FAULTS["unshared"],
    "fedvarp": lambda b: (Uncounted(BUDGET, b), Repeated()),  # it has two faults
}
"""The methods of MMFL's table with all the faults of their code."""


def _alone() -> dict[str, Method]:
    """The methods without a fault, and with one fault each."""
    out = dict(TABLE)
    for fault, methods in FAULTS.items():
        for name, method in methods.items():
            out[f"{name}-{fault}"] = method
    return out


RUNS: dict[str, dict[str, Method]] = {"3": _alone(), "published": TOGETHER}
"""The methods by setting; "published" has all faults and the network of the code."""
QUICK = ("full", "fedvarp", "fedvarp-repeated")


def published_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """The network of MMFL's code: mmfl_cnn, ReLU and softmax; its loss takes a softmax again."""
    return nn.Sequential(models.mmfl_cnn(shape, classes), nn.ReLU(), nn.Softmax(dim=-1))


PUBLISHED = {name: replace(spec, model=published_cnn) for name, spec in SETTINGS["3"].items()}
TASKS: Settings = {"3": SETTINGS["3"], "published": PUBLISHED}


def parts(quick: bool = False) -> list[Piece]:
    """All parts, in the order in which they run."""
    if quick:
        return [Piece("3", method, 0) for method in QUICK]
    return in_order(RUNS)


def method_of(part: Piece) -> Method:
    """How a part's sampler and estimator are made."""
    return RUNS[part.setting][part.method]


def estimate(only: str | None = None, out: Path | None = None) -> list[str]:
    """How much work the unfinished parts are, as lines."""
    return lines(left(results(out, NAME, TABLE1), chosen(only, parts())), method_of)


def mmfl_faults(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """What the faults of MMFL's published code do to its Table I: each alone, and all together.

    It takes the same options as mmfl-table1, and does not run its finished parts again.
    """
    everything = parts(quick)
    files = [] if quick else results(out, NAME, TABLE1)
    runner = start(files, [part.name for part in everything], minutes, device, precision, say)
    cells = played(runner, everything, only, TASKS, method_of, quick)
    faults = {fault: list(methods) for fault, methods in FAULTS.items()}
    return report(cells, faults, len(everything), quick)
