"""K-Vib's theory on its Synthetic task (section 4 and App. F), and rota's own sampler there.

The main parts are one seed of one setting each: samplers train on their own updates, and then all
of them draw on the updates that full participation recorded. Further parts are other budgets on own
updates, systematic draws, and the studies of kvib_studies.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota.data.federation import Federation
from rota.sampling import (
    Avare,
    ClusteredSize,
    Full,
    KVib,
    KVibFull,
    Mabs,
    Optimal,
    Osmd,
    OsmdAdaptive,
    Proportional,
    Sampler,
    Succession,
    Uniform,
    Vrb,
)
from rota_lab.reproduce.kvib_stack import (
    Lane,
    Meter,
    Row,
    Stack,
    least_cost,
    own_updates,
    shared_updates,
)
from rota_lab.reproduce.parts import Found, in_time

ROUNDS, BUDGET, BUDGETS = 500, 10, (5, 20)
SETTINGS = {"logits": (0.005, False), "twice": (0.02, True)}
"""The learning rate, and whether softmax is applied twice as in K-Vib's published code."""
SEEDS = range(5, 25)
"""rota's sampler was chosen on seed 100, and the form of K-Vib's gamma on seeds 0 to 4."""
WIDE = SEEDS[:10]
"""The seeds with all budgets, procedures, starts and bounds on shared updates; the others have the
lanes of `OWN`."""
LEARNERS: dict[str, Callable[..., Sampler]] = {
    "vrb": Vrb,
    "mabs": Mabs,
    "avare": Avare,
    "osmd": Osmd,
    "osmd-adaptive": OsmdAdaptive,
    "kvib": KVib,
    "proportional": Proportional,
    "succession": Succession,
}
PROCEDURES = {"multinomial": "with replacement", "sequential": "without", "independent": "coins"}
OWN = (
    "uniform-fixed",
    "uniform-independent",
    "uniform-multinomial",
    "proportional-independent",
    "osmd-adaptive-multinomial",
    "vrb-multinomial",
    "vrb-independent",
    "mabs-multinomial",
    "avare-multinomial",
    "avare-independent",
    "osmd-multinomial",
    "kvib-multinomial",
    "kvib-independent",
    "kvib-full",
    "optimal",
)
"""The lanes that train on their own updates at K = 10. With full participation these are 16, and
torch's softmax is several times faster over multiples of 16."""
SHARED = (*(name for name in OWN if name != "kvib-full"), "clustered-size")
"""The lanes that draw on recorded updates at all budgets."""
OWN_BUDGETS = (
    "uniform-fixed",
    "uniform-independent",
    "proportional-independent",
    "vrb-multinomial",
    "mabs-multinomial",
    "avare-multinomial",
    "avare-independent",
    "kvib-independent",
)
"""The lanes that do so at other budgets: 16 at both of them."""
SYSTEMATIC = (
    "proportional-systematic",
    "avare-systematic",
    "kvib-systematic",
    "succession-systematic",
    "succession-independent",
)
"""rota's sampler, and rivals that draw as it does: with full participation 16 at all budgets."""
CURVES = (
    "uniform-fixed",
    "vrb-multinomial",
    "mabs-multinomial",
    "avare-multinomial",
    "avare-independent",
    "kvib-independent",
    "kvib-full",
    "succession-systematic",
    "optimal",
)
"""The lanes that the charts over the rounds show."""
POINTS = 20
"""The points of a curve over the rounds."""
ENDS = (31, 62, 125, 250, 500)
"""The rounds after which the regret is looked at."""
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1)
"""The G of the sensitivity study, with theta = 0.3."""
LARGEST = (1.0, 0.1, 0.01)
"""The G of K-Vib and Vrb by one rule, in units of the largest score of the run."""
TERMS = ("uniform-fixed", "kvib-independent", "optimal")
EVERY = 25
"""The rounds between two looks at the gradients."""


@dataclass(frozen=True)
class Piece:
    """What a part measures: a seed, or one of the other studies."""

    study: str
    which: str
    rounds: int = ROUNDS
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.study}-{self.which}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call the part."""
        return {self.name, self.study}

    @property
    def seed(self) -> int:
        """The seed of a part that has one."""
        return int(self.which.rpartition("seed")[2])

    @property
    def setting(self) -> str:
        """The setting of a part that may be of either: it is named unless it is logits."""
        return self.which.partition("-")[0] if "-" in self.which else "logits"


def of(name: str, budget: int = BUDGET) -> Sampler:
    """The sampler of a lane: LEARNER-PROCEDURE, or the name of a sampler without a choice."""
    others: dict[str, Callable[..., Sampler]] = {
        "clustered-size": ClusteredSize,
        "kvib-full": KVibFull,
        "optimal": Optimal,
    }
    if name in others:
        return others[name](budget=budget)
    learner, _, procedure = name.rpartition("-")
    make: Callable[..., Sampler] = Uniform if learner == "uniform" else LEARNERS[learner]
    return make(budget=budget, procedure=procedure)


def everything() -> list[str]:
    """All samplers by all of their procedures, without those of SYSTEMATIC."""
    learners = [learner for learner in LEARNERS if learner != "succession"]
    names = [f"uniform-{procedure}" for procedure in ("fixed", *PROCEDURES)]
    names += [f"{learner}-{procedure}" for learner in learners for procedure in PROCEDURES]
    names.remove("uniform-sequential")  # the same as fixed
    return [*names, "clustered-size", "kvib-full", "optimal"]


def own_lanes(names: tuple[str, ...], budgets: tuple[int, ...], rate: float) -> list[Lane]:
    """What trains on its own updates."""
    return [
        Lane(named(name, budget), of(name, budget), rate) for budget in budgets for name in names
    ]


def named(name: str, budget: int) -> str:
    """The name of a lane, with its budget unless that is 10."""
    return name if budget == BUDGET else f"{name}-K{budget}"


def shared_lanes(recorded: list[Row], setting: str, wide: bool) -> list[Lane]:
    """What draws on recorded updates; all procedures, starts and bounds are tried on logits."""
    if not wide:
        return [Lane(name, of(name)) for name in OWN]
    names = everything() if setting == "logits" else [*SHARED, "kvib-full"]
    lanes = [Lane(name, of(name)) for name in names]
    for budget in BUDGETS:
        lanes += [Lane(named(name, budget), of(name, budget)) for name in SHARED]
    return lanes + more_lanes(recorded) if setting == "logits" else lanes


def more_lanes(recorded: list[Row]) -> list[Lane]:
    """Avare's starts, and G by one rule for K-Vib and Vrb."""
    largest = max(float(row.scores.max()) for row in recorded)
    lanes = []
    for procedure in ("multinomial", "independent"):
        avare = of(f"avare-{procedure}")
        lanes.append(Lane(f"avare-zero-{procedure}", avare, start=np.zeros_like))
        lanes.append(Lane(f"avare-pass-{procedure}", avare, start=np.copy))
    for part in LARGEST:
        bound = largest * part
        lanes.append(Lane(f"kvib-largest-{part:g}", KVib(BUDGET, bound=bound)))
        lanes.append(Lane(f"vrb-largest-{part:g}", Vrb(BUDGET, bound=bound)))
    for bound in BOUNDS:
        lanes.append(Lane(f"kvib-G{bound:g}", KVib(BUDGET, theta=0.3, bound=bound)))
    return [*lanes, Lane("kvib-theta", KVib(BUDGET, theta=0.3))]


# --- the parts that are one seed


def main(part: Piece, federation: Federation, deadline: float) -> Found:
    """One seed of a setting: own updates at K = 10, then the recorded ones."""
    rate, twice = SETTINGS[part.study]
    lanes = [Lane("full", Full(), rate), *own_lanes(OWN, (BUDGET,), rate)]
    stack = Stack(federation, lanes, part.seed, twice)
    terms = Terms(stack)
    meters, weights, rows = own_updates(
        stack, part.rounds, deadline, (lambda *_: None) if twice else terms.look
    )
    shared = list[Meter]()
    for lane in shared_lanes(rows, part.study, part.seed in WIDE):
        in_time(deadline)
        shared.append(shared_updates(lane, stack.shares, rows, part.seed))
    out = {
        "own": tested(stack, meters, weights),
        "shared": {meter.lane.name: totals(meter) for meter in shared},
        "over time": over_time(shared, rows),
        "lemma 2": lemma_2(rows),
    }
    return out if twice else out | {"terms": terms.means(meters)}


def budgets(part: Piece, federation: Federation, deadline: float) -> Found:
    """One seed of a setting at the other budgets, on own updates."""
    rate, twice = SETTINGS[part.setting]
    stack = Stack(federation, own_lanes(OWN_BUDGETS, BUDGETS, rate), part.seed, twice)
    meters, weights, _ = own_updates(stack, part.rounds, deadline)
    return {"own": tested(stack, meters, weights)}


def systematic(part: Piece, federation: Federation, deadline: float) -> Found:
    """One seed of a setting: rota's sampler and systematic draws at all budgets."""
    rate, twice = SETTINGS[part.setting]
    lanes = own_lanes(SYSTEMATIC, (BUDGET, *BUDGETS), rate)
    stack = Stack(federation, [Lane("full", Full(), rate), *lanes], part.seed, twice)
    meters, weights, rows = own_updates(stack, part.rounds, deadline)
    shared = dict[str, Any]()
    for lane in lanes:
        in_time(deadline)
        shared[lane.name] = totals(shared_updates(lane, stack.shares, rows, part.seed))
    return {"own": tested(stack, meters, weights), "shared": shared}


def tested(stack: Stack, meters: list[Meter], weights: Tensor) -> dict[str, dict[str, Any]]:
    """What the lanes measured on their own updates, with the last models' tests."""
    out = dict[str, dict[str, Any]]()
    for meter, scores in zip(meters, stack.tested(weights), strict=True):
        mine: dict[str, Any] = totals(meter)
        mine |= {key: finite(value) for key, value in scores.items()}
        if meter.lane.name in CURVES:
            mine["curve"] = meter.curve(POINTS)
        out[meter.lane.name] = mine
    return out


def totals(meter: Meter) -> dict[str, float | None]:
    """Sums over the rounds as JSON has them."""
    return {key: finite(value) for key, value in meter.totals().items()}


def finite(value: float) -> float | None:
    """A number as JSON has it, with six digits; None if a run has diverged."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def over_time(meters: list[Meter], rows: list[Row]) -> dict[str, Any]:
    """Eq. 7 after some rounds: sum l(p), the best fixed p's sum, and the sum of the least l."""
    squares = np.cumsum(np.array([row.scores for row in rows]) ** 2, axis=0)
    ends = [end for end in ENDS if end <= len(rows)] or [len(rows)]
    fixed = [least_cost(np.sqrt(squares[end - 1]), BUDGET) for end in ends]
    least = [sum(row.least(BUDGET) for row in rows[:end]) for end in ends]
    out: dict[str, Any] = {"ends": ends, "fixed": fixed, "least": least}
    for meter in meters:
        if meter.lane.name in CURVES:
            out[meter.lane.name] = [finite(sum(meter.cost[:end])) for end in ends]
    return out


def lemma_2(rows: list[Row]) -> dict[str, float | None]:
    """Eq. 3's bound and the exact variances of the two procedures, for uniform p."""
    scores, total = (
        np.array([row.scores for row in rows]),
        np.array([row.total for row in rows]),
    )
    clients, squares = scores.shape[1], (scores**2).sum(axis=1)
    coins = (clients / BUDGET - 1) * squares
    factor = (clients - BUDGET) / (BUDGET * (clients - 1))
    bound, fixed = factor * clients * squares, factor * (clients * squares - total**2)
    late = len(rows) // 2
    out = {
        "bound": bound.sum(),
        "fixed": fixed.sum(),
        "coins": coins.sum(),
        "fixed is below coins": (fixed < coins).mean(),
        "late bound": bound[late:].sum(),
        "late fixed": fixed[late:].sum(),
        "late coins": coins[late:].sum(),
    }
    return {key: finite(float(value)) for key, value in out.items()}


class Terms:
    """Theorem 13's terms along some runs: what one step gains and loses by the descent lemma.

    E f(x - d) <= f(x) - <grad f, D> + L / 2 (|D|^2 + variance), where D is the full update and only
    the variance depends on the sampler. The runs are those on logits, whose L is known.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.lanes = [place for place, lane in enumerate(stack.lanes) if lane.name in TERMS]
        self.rows: dict[int, list[dict[str, float]]] = {lane: [] for lane in self.lanes}
        d = stack.shares[0]
        moment = sum(w * (x.T @ x / len(x)).double() for w, x in zip(d, stack.x, strict=True))
        # softmax's Hessian is at most 1/2
        self.smooth = float(torch.linalg.eigvalsh(moment)[-1]) / 2

    def look(self, now: int, weights: Tensor, whole: Tensor) -> None:
        """Take the terms of a round, from the models before it and the full updates."""
        if (now - 1) % EVERY:
            return
        d = self.stack.shares[0]
        for lane in self.lanes:
            losses, slopes = self.stack.gradients(weights[:, :, lane])
            slope = np.tensordot(d, slopes, axes=1)
            full = whole[:, :, lane].double().numpy()
            apart = ((slopes - slope) ** 2).sum(axis=(1, 2))
            self.rows[lane].append(
                {
                    "round": now,
                    "loss": float(d @ losses),
                    "gradient": float((slope**2).sum()),
                    "between clients": float(d @ apart),
                    "progress": float((slope * full).sum()),
                    "step": float((full**2).sum()) * self.smooth / 2,
                }
            )

    def means(self, meters: list[Meter]) -> dict[str, dict[str, float | None]]:
        """The means over the rounds that were looked at."""
        out = {}
        for lane, rows in self.rows.items():
            meter = meters[lane]
            mine = {
                key: float(np.mean([row[key] for row in rows]))
                for key in ("gradient", "between clients", "progress", "step")
            }
            looked = [int(row["round"]) - 1 for row in rows]
            mine["variance"] = float(np.mean(np.array(meter.variance)[looked])) * self.smooth / 2
            mine["fall"] = (rows[0]["loss"] - rows[-1]["loss"]) / max(looked[-1], 1)
            mine["smooth"] = self.smooth
            out[meter.lane.name] = {key: finite(value) for key, value in mine.items()}
        return out
