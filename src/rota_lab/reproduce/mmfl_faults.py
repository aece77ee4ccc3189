"""What the faults of S0's published code do to its Table I: each put back alone, and all of them with the code's own network.

`FAULTS` are policies that are wrong on purpose, and nothing but this uses them. Runs without a fault that mmfl-table1 has finished are taken
from there.
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
from rota.estimate.stale import Round
from rota.plan import Plan, State
from rota.sampling import Gvr, Lvr, Random
from rota.weights import Weights
from rota_lab.reproduce.mmfl_cells import PAPER
from rota_lab.reproduce.mmfl_faults_page import report
from rota_lab.reproduce.mmfl_table1 import (
    BUDGET,
    METHODS,
    SEEDS,
    SETTINGS,
    Method,
    Part,
    Settings,
    lines,
    played,
)
from rota_lab.reproduce.mmfl_table1 import NAME as TABLE1
from rota_lab.reproduce.parts import chosen, left, results, start
from rota_lab.reproduce.result import Result

NAME = "mmfl-faults"


@dataclass(frozen=True)
class Repeated(FedVarp):
    """FedVARP whose sum of remembered updates is added once for every drawn client."""

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> Round:
        sums = super().begin(state, models, plan)
        for each, drawn in zip(
            sums.sums, np.bincount(plan.model, minlength=len(models)).tolist(), strict=True
        ):
            each.update *= drawn
        return sums


@dataclass(frozen=True)
class Uncounted(Random):
    """Random whose weights take every client for one with one processor and all models: share / (C / S), C = budget / processors."""

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        factor = state["processors"] * len(shares) / np.maximum((shares > 0).sum(axis=0), 1)
        return replace(plan, weight=plan.weight * factor[plan.client])


@dataclass(frozen=True)
class Misplaced(Gvr):
    """MMFL-GVR whose weights have the shares of other clients: a model's k-th drawn client has the k-th's of those drawn for any model."""

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        place = np.arange(len(plan)) - np.searchsorted(
            plan.model, plan.model
        )  # rows are sorted by model, then client
        other = np.sort(plan.client)[place]
        return replace(
            plan, weight=plan.weight * shares[plan.model, other] / shares[plan.model, plan.client]
        )


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
"""By fault: the methods of S0's table that its code has it in, with it alone."""
TABLE = {method: METHODS[method] for method in PAPER["3"]}
"""The methods of S0's table without a fault."""
TOGETHER: dict[str, Method] = {
    **TABLE,
    **{method: policies for some in FAULTS.values() for method, policies in some.items()},
    "fedvarp": lambda b: (Uncounted(BUDGET, b), Repeated()),  # which has two
}
"""With all faults that its code has in them."""
RUNS: dict[str, dict[str, Method]] = {
    "3": {
        **TABLE,
        **{
            f"{method}-{fault}": policies
            for fault, some in FAULTS.items()
            for method, policies in some.items()
        },
    },
    "published": TOGETHER,
}
"""By setting: without a fault, with one each; with all faults and the network of the code."""
QUICK = ("full", "fedvarp", "fedvarp-repeated")


def published_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """The network of S0's code: mmfl_cnn, whose logits go through ReLU and softmax before a loss that takes a softmax again."""
    return nn.Sequential(models.mmfl_cnn(shape, classes), nn.ReLU(), nn.Softmax(dim=-1))


TASKS: Settings = {
    "3": SETTINGS["3"],
    "published": {name: replace(kind, model=published_cnn) for name, kind in SETTINGS["3"].items()},
}


def parts(quick: bool = False) -> list[Part]:
    """All parts, in the order they are run in."""
    if quick:
        return [Part("3", method, 0) for method in QUICK]
    return [
        Part(setting, method, seed)
        for setting, methods in RUNS.items()
        for seed in range(SEEDS)
        for method in methods
    ]


def method_of(part: Part) -> Method:
    """A part's sampler and estimator."""
    return RUNS[part.setting][part.method]


def estimate(only: str | None = None, out: Path | None = None) -> list[str]:
    """How much work the parts are that `out` does not have yet, as lines: one for a setting and method."""
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
    """What the faults of S0's published code do to its Table I: each of them put back alone, and all together.

    Takes what mmfl-table1 takes, and does not run its finished parts again.
    """
    everything = parts(quick)
    files = [] if quick else results(out, NAME, TABLE1)
    runner = start(files, [part.name for part in everything], minutes, device, precision, say)
    return report(
        played(runner, everything, only, TASKS, method_of, quick),
        {fault: list(some) for fault, some in FAULTS.items()},
        len(everything),
        quick,
    )
