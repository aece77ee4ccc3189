"""K-Vib on digits by writer: its runs in numbers, and the claims on them.

With the same seed, all samplers have the same start and the same mini-batches, so K-Vib is compared
with each rival seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rota_lab.reproduce.interval import FAILS, HOLDS, Claim, Statement
from rota_lab.reproduce.kvib_theory_view import SOURCE
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.race import crossing

CLAIMED = tuple(SOURCE)
"""The rivals that its paper compares K-Vib with."""
TARGETS = (0.90, 0.95)
LAST = 5
"""The last loss and accuracy of a run are means of this many tests: one alone is as noisy as the
sampler."""
VERSIONS = {
    1: "10 % of the clients hold 82 % of the images",
    2: "20 % hold 90 %",
    3: "50 % hold 98 %",
}
"""The words of K-Vib's paper."""
SHARES, NEAR = {1: 0.82, 2: 0.90, 3: 0.98}, 0.01
"""The shares of the images in these words, and how near ours should be."""
TITLES = {
    "uniform": "uniform",
    "kvib": "K-Vib",
    "vrb": "Vrb",
    "mabs": "Mabs",
    "avare": "Avare",
    "optimal": "optimal",
    "proportional": "proportional",
    "fedavg": "FedAvg's mean",
    "osmd": "OSMD",
    "osmd-adaptive": "adaptive OSMD",
    "osmd-independent": "independent OSMD",
    "clustered-size": "clustered by size",
    "clustered-similarity": "clustered by similarity",
    "divfl": "DivFL",
    "kvib-G": "K-Vib, G = 0.1",
    "ocs": "OCS",
    "pow-d": "pow-d",
    "rpow-d": "rpow-d",
    "cpow-d": "cpow-d",
}

Numbers = dict[str, Any]
"""One run in numbers."""
Value = Callable[[Numbers], float | None]
"""Takes one number out of a run."""


def runs_of(found: dict[str, Found], version: int, method: str) -> list[Numbers]:
    """The finished runs of a sampler, by seed, each with the rounds of its tests."""
    runs: list[Numbers] = []
    for part in found.values():
        if (part["version"], part["method"]) != (version, method):
            continue
        for run in part["runs"]:
            tests = [part["every"] * (k + 1) for k in range(len(run["loss"]))]
            runs.append({**run, "tests": tests})
    return sorted(runs, key=lambda run: int(run["seed"]))


def last(run: Numbers, name: str) -> float:
    """The mean of the last tests; a loss that is not finite is infinite."""
    return float(np.mean([math.inf if value is None else value for value in run[name][-LAST:]]))


def rounds_to(run: Numbers, target: float) -> float | None:
    """Where the best accuracy so far crosses the target, on the line between two tests."""
    before, best = 0, 0.0
    for now, accuracy in zip(run["tests"], run["accuracy"], strict=True):
        if accuracy >= target:
            return crossing((before, best), (now, accuracy), target)
        before, best = now, max(best, accuracy)
    return None


def gigabytes_to(run: Numbers, target: float) -> float | None:
    """The traffic, up and down, until the target is reached."""
    rounds = rounds_to(run, target)
    if rounds is None:
        return None
    return float(np.interp(rounds, [0, *run["tests"]], [0, *run["bytes"]])) / 1e9


def gains(found: dict[str, Found], version: int, rival: str, value: Value) -> dict[int, float]:
    """K-Vib's value minus a rival's, by seed.

    With the same seed, both have the same start and the same mini-batches.
    """
    mine = {run["seed"]: value(run) for run in runs_of(found, version, "kvib")}
    theirs = {run["seed"]: value(run) for run in runs_of(found, version, rival)}
    out = {}
    for seed in sorted(mine.keys() & theirs.keys()):
        ours, other = mine[seed], theirs[seed]
        if ours is not None and other is not None and math.isfinite(ours - other):
            out[seed] = ours - other
    return out


def against(found: dict[str, Found], version: int, rival: str, value: Value) -> list[float]:
    """K-Vib's value minus a rival's, seed by seed."""
    return list(gains(found, version, rival, value).values())


def accuracy(run: Numbers) -> float:
    return last(run, "accuracy")


def points(run: Numbers) -> float:
    """The last accuracy in per cent."""
    return 100 * accuracy(run)


def quickness(run: Numbers, target: float) -> float | None:
    """Minus the logarithm of the rounds to a target: differences are log-ratios of rounds."""
    rounds = rounds_to(run, target)
    return None if rounds is None else -math.log(rounds)


def overall(found: dict[str, Found], rival: str, value: Value) -> tuple[list[float], list[int]]:
    """K-Vib's mean gain over the versions, seed by seed, and these versions.

    They are those in which all runs have a value, and the seeds are those that all of them have.
    """
    some = {}
    for version in VERSIONS:
        gain = gains(found, version, rival, value)
        if 1 < len(gain) == len(gains(found, version, rival, points)):
            some[version] = gain
    if not some:
        return [], []
    seeds = sorted(set.intersection(*(set(gain) for gain in some.values())))
    means = [float(np.mean([gain[seed] for gain in some.values()])) for seed in seeds]
    return means, list(some)


def statements(found: dict[str, Found]) -> list[Statement]:
    """Figure 5 in words: K-Vib learns faster than its rivals and ends above them."""
    out = []
    for rival in CLAIMED:
        name = TITLES[rival]
        gain, versions = overall(found, rival, points)
        if gain:
            words = f"K-Vib's last accuracy is above that of {name} ({_mean_of(versions)})"
            out.append(Statement(words, gain, " points"))
        for target in TARGETS:
            ratios, versions = overall(found, rival, partial(quickness, target=target))
            if ratios:
                words = f"{name} takes more rounds to {target:.0%} than K-Vib"
                out.append(Statement(f"{words} ({_mean_of(versions)})", ratios, log=True))
    return out


def counted(found: dict[str, Found]) -> list[Claim]:
    """What is counted and not drawn: who holds how much, and the traffic of a drawn client."""
    out = []
    for version, theirs in SHARES.items():
        ours = [part["split"]["share"] for part in found.values() if part["version"] == version]
        if ours:
            words = f"v{version}: the few large clients hold {theirs:.0%} of the images"
            held = abs(ours[0] - theirs) <= NEAR
            out.append(Claim(f"{words}: here {ours[0]:.1%}", HOLDS if held else FAILS))
    traffic = {}
    for method in ("kvib", "uniform"):
        runs = [run for version in VERSIONS for run in runs_of(found, version, method)]
        drawn = sum(run["clients"] * run["tests"][-1] for run in runs)
        traffic[method] = sum(run["bytes"][-1] for run in runs) / drawn if drawn else 0.0
    if min(traffic.values()) > 0:
        ratio = traffic["kvib"] / traffic["uniform"]
        words = "K-Vib needs no additional communication: its bytes per drawn client are"
        held = abs(ratio - 1) <= 1e-3
        out.append(Claim(f"{words} {ratio:.4f} times uniform's", HOLDS if held else FAILS))
    return out


def _mean_of(versions: list[int]) -> str:
    names = [f"v{version}" for version in versions]
    return names[0] if len(names) == 1 else f"mean of {', '.join(names)}"
