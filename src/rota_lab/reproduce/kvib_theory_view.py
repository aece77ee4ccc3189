"""The finished parts of kvib-theory as paired numbers, and how its page writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rota_lab.reproduce.interval import geometric, interval
from rota_lab.reproduce.kvib_parts import BUDGET, LEARNERS, Piece, named
from rota_lab.reproduce.parts import Found

LEARNER_TITLES = {
    "uniform": "uniform",
    "vrb": "Vrb",
    "mabs": "Mabs",
    "avare": "Avare",
    "osmd": "OSMD",
    "osmd-adaptive": "adaptive OSMD",
    "kvib": "K-Vib",
    "proportional": "proportional",
    "succession": "succession",
}
PROCEDURE_TITLES = {
    "fixed": "fixed size",
    "multinomial": "with replacement",
    "sequential": "without replacement",
    "independent": "coins",
    "systematic": "systematic",
}
ALONE = {
    "full": "full participation",
    "clustered-size": "clustered by size",
    "kvib-full": "K-Vib, full feedback",
    "optimal": "optimal",
}
WHERES = {"own": "own updates", "shared": "shared updates"}
SETTING_TITLES = {"logits": "logits", "twice": "softmax twice"}
MEASURES = {
    "variance": "cumulative variance",
    "late": "late variance",
    "relative": "relative regret",
    "regret": "regret (eq. 6)",
}
SOURCE = {
    "uniform": "uniform-fixed",
    "vrb": "vrb-multinomial",
    "mabs": "mabs-multinomial",
    "avare": "avare-multinomial",
}
"""The rivals that K-Vib's paper compares it with, by the procedures of their sources."""
KVIB, OURS, OURS_COINS = "kvib-independent", "succession-systematic", "succession-independent"
MORE_KNOWN = ("full", "kvib-full", "optimal")
"""The lanes that know the norms of all clients."""


def title(lane: str) -> str:
    """A lane in words."""
    if lane in ALONE:
        return ALONE[lane]
    learner, _, procedure = lane.rpartition("-")
    return f"{LEARNER_TITLES[learner]}, {PROCEDURE_TITLES[procedure]}"


@dataclass(frozen=True)
class View:
    """The finished parts, by study."""

    found: dict[str, Found]

    def study(self, name: str) -> list[Found]:
        """The finished parts of a study."""
        return [part for part in self.found.values() if part["study"] == name]

    def numbers(self, setting: str, where: str, lane: str, key: str) -> dict[str, float]:
        """One of a lane's numbers by seed, from all parts of the setting that have it."""
        out = {}
        for part in [*self.study(setting), *self.more(setting)]:
            value = part.get(where, {}).get(lane, {}).get(key)
            if value is not None:
                out[part["which"].rpartition("-")[2]] = float(value)
        return out

    def more(self, setting: str) -> list[Found]:
        """The parts of a setting with other budgets on own updates, and with systematic draws."""
        parts = [*self.study("budgets"), *self.study("systematic")]
        return [part for part in parts if Piece(part["study"], part["which"]).setting == setting]

    def paired(
        self, setting: str, where: str, one: str, other: str, key: str
    ) -> list[tuple[float, float]]:
        """The numbers of two lanes with the same seeds."""
        first, second = (self.numbers(setting, where, lane, key) for lane in (one, other))
        return [(first[seed], second[seed]) for seed in first if seed in second]

    def ratios(self, setting: str, where: str, larger: str, smaller: str, key: str) -> list[float]:
        """log(larger / smaller) by seed."""
        pairs = self.paired(setting, where, larger, smaller, key)
        return [math.log(one / other) for one, other in pairs]

    def against_all(
        self, setting: str, where: str, lanes: Sequence[str], mine: str, key: str
    ) -> list[float]:
        """log(the least of the rivals' numbers / mine), for the seeds that have all of them."""
        ours = self.numbers(setting, where, mine, key)
        theirs = [self.numbers(setting, where, lane, key) for lane in lanes]
        out = []
        for seed, value in ours.items():
            if theirs and all(seed in each for each in theirs):
                out.append(math.log(min(each[seed] for each in theirs) / value))
        return out

    def rivals(self, setting: str, where: str, budget: int = BUDGET) -> list[str]:
        """The lanes at a budget that know no more than rota's sampler."""
        lanes = list[str]()
        for learner in ("uniform", *LEARNERS):
            if learner != "succession":
                lanes += [f"{learner}-{procedure}" for procedure in PROCEDURE_TITLES]
        lanes = [named(lane, budget) for lane in (*lanes, "clustered-size")]
        return [lane for lane in lanes if self.numbers(setting, where, lane, "variance")]

    def seeds(self, setting: str) -> int:
        """How many seeds of a setting are finished."""
        return len(self.study(setting))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, or a sentence if it has no rows."""
    if not rows:
        return "Not run."
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def positive(values: Sequence[float]) -> str:
    """A geometric mean with its interval; a plain mean where a value is not positive."""
    if not values:
        return "–"
    if min(values) <= 0:
        return str(interval(values)) if len(values) > 1 else f"{values[0]:.3g}"
    return str(geometric(values)) if len(values) > 1 else f"{values[0]:.3g}"


def plain(values: Sequence[float]) -> str:
    """A mean with its interval."""
    if not values:
        return "–"
    return str(interval(values)) if len(values) > 1 else f"{values[0]:.3g}"


def times(logs: Sequence[float]) -> str:
    """The geometric mean of ratios, from their logarithms, with its interval."""
    return positive([math.exp(each) for each in logs])


def middle(values: Sequence[float]) -> float:
    """The geometric mean of positive values."""
    return float(np.exp(np.mean(np.log(values))))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of a power law through points, by least squares of logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
