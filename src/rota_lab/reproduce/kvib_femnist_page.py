"""K-Vib on digits by writer as a page: rounds to a target, last losses and accuracies, K-Vib against each rival, and what holds of S1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rota_lab.reproduce.chart import COLOURS, Chart, Line
from rota_lab.reproduce.interval import Interval, interval
from rota_lab.reproduce.kvib_theory_page import CLAIMED
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.race import crossing
from rota_lab.reproduce.result import Result, over_seeds

TARGETS = (0.90, 0.95)
LAST = 5
"""The tests at the end whose mean is a run's last loss and accuracy: one alone is as noisy as the sampler."""
WORST, LEAST = 3.0, 0.9
"""Losses above and accuracies below these are drawn as these: what differs late would be too small to see."""
VERSIONS = {
    1: "10 % of the clients hold 82 % of the images",
    2: "20 % hold 90 %",
    3: "50 % hold 98 %",
}
"""S1's words."""
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


def runs_of(found: dict[str, Found], version: int, method: str) -> list[Numbers]:
    """The finished runs of a sampler, by seed, each with the rounds of its tests."""
    some = [
        part for part in found.values() if (part["version"], part["method"]) == (version, method)
    ]
    runs = [
        {**run, "tests": [part["every"] * (k + 1) for k in range(len(run["loss"]))]}
        for part in some
        for run in part["runs"]
    ]
    return sorted(runs, key=lambda run: int(run["seed"]))


def last(run: Numbers, name: str) -> float:
    """The mean of the last tests; a loss that is not finite is infinite."""
    return float(np.mean([math.inf if value is None else value for value in run[name][-LAST:]]))


def rounds_to(run: Numbers, target: float) -> float | None:
    """Where the curve, made monotonic (the best accuracy so far), crosses the target on the line between two tests."""
    before, best = 0, 0.0
    for now, accuracy in zip(run["tests"], run["accuracy"], strict=True):
        if accuracy >= target:
            return crossing((before, best), (now, accuracy), target)
        before, best = now, max(best, accuracy)
    return None


def gigabytes_to(run: Numbers, target: float) -> float | None:
    """What had gone up and down until then."""
    rounds = rounds_to(run, target)
    return (
        None
        if rounds is None
        else float(np.interp(rounds, [0, *run["tests"]], [0, *run["bytes"]])) / 1e9
    )


def report(found: dict[str, Found], everything: list[str], quick: bool) -> Result:
    """Claims, tables and charts, from the parts that are finished."""
    rows, checks, charts = [], {}, []
    if len(found) < len(everything):
        checks[f"all parts are finished ({len(found)} of {len(everything)})"] = False
    for version in VERSIONS:
        for method, title in TITLES.items():
            runs = runs_of(found, version, method)
            if runs:
                rows.append(
                    over_seeds(
                        f"v{version}, {title}: accuracy",
                        None,
                        [last(run, "accuracy") for run in runs],
                    )
                )
                rows += _reached(f"v{version}, {title}", runs)
        checks |= _claims(found, version)
        charts += _charts(found, version)
    title = "K-Vib: digits by writer, in three degrees of unbalance"
    return Result(
        "kvib-femnist", title, _text(found, everything, quick), rows, charts, checks, quick
    )


def _reached(title: str, runs: list[Numbers]) -> list[Any]:
    """Rows of the rounds to each target that all runs reach."""
    out = []
    for target in TARGETS:
        rounds = [rounds_to(run, target) for run in runs]
        some = [each for each in rounds if each is not None]
        if len(some) == len(rounds):
            out.append(over_seeds(f"{title}: rounds to {target:.0%}", None, some))
    return out


def against(
    found: dict[str, Found], version: int, rival: str, value: Callable[[Numbers], float | None]
) -> list[float]:
    """K-Vib's value less a rival's, seed by seed: a seed is the same start and the same mini-batches for both."""
    mine, theirs = (
        {run["seed"]: value(run) for run in runs_of(found, version, method)}
        for method in ("kvib", rival)
    )
    pairs = [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]
    return [
        ours - other
        for ours, other in pairs
        if ours is not None and other is not None and math.isfinite(ours - other)
    ]


def accuracy(run: Numbers) -> float:
    return last(run, "accuracy")


def _claims(found: dict[str, Found], version: int) -> dict[str, bool]:
    """S1's Figure 5 in words: K-Vib learns faster than its rivals and ends above them."""
    out = {}
    for rival in CLAIMED:
        gain = against(found, version, rival, accuracy)
        if len(gain) > 1:
            points = interval([100 * each for each in gain])
            out[
                f"v{version}: K-Vib's last accuracy is above that of {TITLES[rival]} (gain {points} points)"
            ] = points.low > 0
        for target in TARGETS:
            sooner = against(found, version, rival, partial(rounds_to, target=target))
            if len(sooner) == len(gain) > 1:
                rounds = interval([-each for each in sooner])
                out[
                    f"v{version}: K-Vib reaches {target:.0%} before {TITLES[rival]} (gain {rounds} rounds)"
                ] = rounds.low > 0
    return out


def _charts(found: dict[str, Found], version: int) -> list[Chart]:
    """Accuracy and loss of what S1 compares and of the optimum, then of K-Vib, the optimum and all others."""
    main = ["kvib", *CLAIMED, "optimal"]
    others = ["kvib", "optimal", *(method for method in TITLES if method not in main)]

    def draw_loss(values: Sequence[float | None]) -> list[float]:
        return [
            math.log10(min(WORST, WORST if value is None else max(value, 1e-9))) for value in values
        ]

    def draw_accuracy(values: Sequence[float | None]) -> list[float]:
        return [100 * max(LEAST, value or 0.0) for value in values]

    charts = [
        _chart(
            found,
            version,
            "accuracy",
            f"v{version}: test accuracy",
            "accuracy, %",
            main,
            "accuracy",
            draw_accuracy,
        ),
        _chart(
            found, version, "loss", f"v{version}: test loss", "log10 loss", main, "loss", draw_loss
        ),
        _chart(
            found,
            version,
            "others",
            f"v{version}: test accuracy, other samplers",
            "accuracy, %",
            others,
            "accuracy",
            draw_accuracy,
        ),
        _chart(
            found,
            version,
            "others-loss",
            f"v{version}: test loss, other samplers",
            "log10 loss",
            others,
            "loss",
            draw_loss,
        ),
    ]
    return [chart for chart in charts if len(chart.lines) > 1]


def _chart(
    found: dict[str, Found],
    version: int,
    file: str,
    title: str,
    label: str,
    methods: Sequence[str],
    name: str,
    drawn: Callable[[Sequence[float | None]], list[float]],
) -> Chart:
    lines = []
    for place, method in enumerate(methods):
        runs = runs_of(found, version, method)
        if runs:
            points = [
                interval(values)
                for values in np.array([drawn(run[name]) for run in runs]).T.tolist()
            ]
            band = ([p.low for p in points], [p.high for p in points]) if len(runs) > 2 else None
            y = [point.mean for point in points]
            lines.append(
                Line(TITLES[method], runs[0]["tests"], y, place, place // len(COLOURS), band)
            )
    return Chart(f"v{version}-{file}", title, "round", label, lines)


def _text(found: dict[str, Found], everything: list[str], quick: bool) -> str:
    warning = (
        "**A quick version: few rounds, seeds and samplers. It shows the way, not the result.**\n\n"
        * quick
    )
    machines = "\n".join(
        f"- {words}"
        for words in dict.fromkeys(
            f"{each['machine']}, {each['precision']}" for each in found.values()
        )
    )
    versions = "\n".join(_version(found, version) for version in VERSIONS)
    budget, rounds, every = next(
        ((part["budget"], part["rounds"], part["every"]) for part in found.values()), (27, 500, 10)
    )
    left = [name for name in everything if name not in found]
    missing = f"\n## Not run\n{', '.join(f'`{name}`' for name in left)}\n" if left else ""
    return f"""{warning}S1's "federated optimization evaluation" (section 4, Figure 5): digits of many writers, of whom a few hold most of
the images, {budget} clients a round (5 %), mini-batches of 20, three local epochs, {rounds} rounds, server step 1. S1 shows curves and
gives no values. Its claim: K-Vib has "the best performance in classic FL tasks comparing baselines", which are uniform sampling, Vrb, Mabs
and Avare. The other samplers are our addition.

## What differs from the source
- **Data.** S1's FEMNIST is the digits of Federated EMNIST (3,383 writers; the text names LEAF's), cut by Chen et al. in a way that is not
  published. Here it is MNIST by its 539 writers (`mnist-writers`, about 111 images each), cut by the partition `unbalanced`: a tenth, a
  fifth or a half of the writers, at random, keep all their images, each of the others keeps 2 or 3 at random, as many as lead to S1's
  shares where writers have about 101 images. Nobody is removed. The test images, all 10,000, are by other writers. All seeds have
  the same split. Ink is 1 and paper 0; in Federated EMNIST it is the other way round.
- **Numbers that the text has lost.** The local learning rate is 0.01 here. For G, the bound in the regularisers of K-Vib and Vrb, the
  default is taken, which needs none: gamma is sum of omega / (t K) after t rounds. "K-Vib, G = 0.1" has what S1 most likely had.
  theta is (N / (T K))^(1/3) for K-Vib and 0.3 for Vrb, since N > T; Mabs, Avare and OSMD have their defaults.
- **Network.** That of S1's code, without activations behind its convolutions (`kvib_cnn`, 582,026 parameters). The text calls it
  McMahan's CNN, which it is not.
- **Uniform sampling.** "uniform" is unbiased, as in S1's Algorithm 1: an update counts share * N / K. S1's code takes FedAvg's weighted
  mean (with the weights of the wrong clients): "FedAvg's mean" is that, with the right ones.
- **Loss.** S1's code records it on the training images; here it is that on the test images.

The Power-of-Choice family asks two candidates for each place, and OCS lets 32 clients train for 3 that upload, as in Chen et al. AOCS is
not run, since its probabilities are OCS's. DivFL and clustered sampling by similarity keep every client's last update on the server
(1.25 GB here).

A model is tested every {every} rounds. Last accuracy and loss are means of the last {LAST} tests. Rounds to a target are those until the
best accuracy so far crosses it, on the line between two tests. Gigabytes are what went up and down until then, the means of seeds that
were trained together, what was asked of clients before the draw included. Intervals are 95 % confidence intervals of the mean over seeds
(Student's t). K-Vib's gain over a rival is taken seed by seed, since a seed has the same start and the same mini-batches for all
samplers; where it is positive, K-Vib is the better. In the charts, losses above {WORST:g} and accuracies below {LEAST:.0%} are drawn as
these.

{versions}{_verdicts(found)}{missing}
{machines}
"""


def _verdicts(found: dict[str, Found]) -> str:
    """Which rivals K-Vib is above and below, and which it cannot be told from, with the reason."""
    lines = [line for version in VERSIONS if (line := _verdict(found, version))]
    if not lines:
        return ""
    return "\n".join(
        [
            "## What follows",
            *lines,
            "",
            "`optimal` knows the norms of all clients' updates and has the least variance that independent draws of this budget can have",
            "(S1, Lemma 3). Where K-Vib cannot be told from it, no better unbiased sampler of this kind would show in the accuracy; that",
            "in later rounds K-Vib's variance is below those of Vrb and Avare ([kvib-theory](kvib-theory.md)) does not show either. The",
            "Power-of-Choice samplers and DivFL are biased, the former towards clients with high losses.",
            "",
        ]
    )


def _verdict(found: dict[str, Found], version: int) -> str:
    above, below, alike = list[str](), list[str](), list[str]()
    for rival, title in TITLES.items():
        gain = against(found, version, rival, accuracy)
        if rival != "kvib" and len(gain) > 1:
            between = interval(gain)
            (above if between.low > 0 else below if between.high < 0 else alike).append(title)
    if not above + below + alike:
        return ""
    words = [" / ".join(each) or "none" for each in (above, below, alike)]
    return f"- v{version}, last accuracy: K-Vib is clearly above {words[0]}; clearly below {words[1]}; not to be told from {words[2]}."


def _version(found: dict[str, Found], version: int) -> str:
    split = next((part["split"] for part in found.values() if part["version"] == version), None)
    if split is None:
        return f"## v{version}: {VERSIONS[version]}\nNot run.\n"
    words = f"{split['large']} of {split['clients']} clients hold {split['share']:.1%} of {split['images']:,} images here"
    heads = [f"rounds to {target:.0%}" for target in TARGETS] + [
        f"GB to {target:.0%}" for target in TARGETS
    ]
    lines = [
        f"## v{version}: {VERSIONS[version]} ({words})",
        f"| sampler | {' | '.join(heads)} | last accuracy, % | last loss | clients a round | seeds |",
        "|---|" + "---:|" * (len(heads) + 4),
    ]
    for method, title in TITLES.items():
        runs = runs_of(found, version, method)
        if runs:
            cells = [_until([rounds_to(run, target) for run in runs]) for target in TARGETS]
            cells += [_until([gigabytes_to(run, target) for run in runs]) for target in TARGETS]
            cells += [
                _spread([100 * accuracy(run) for run in runs], ".2f"),
                _spread([last(run, "loss") for run in runs], ".3g"),
            ]
            cells += [f"{np.mean([run['clients'] for run in runs]):.1f}", str(len(runs))]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_rivals(found, version)])


def _rivals(found: dict[str, Found], version: int) -> list[str]:
    """K-Vib against each rival, seed by seed."""
    heads = [
        "K-Vib's gain in accuracy, points",
        *(f"in rounds to {target:.0%}" for target in TARGETS),
    ]
    lines = [
        f"| K-Vib against | {' | '.join(heads)} | seeds |",
        "|---|" + "---:|" * (len(heads) + 1),
    ]
    for rival, title in TITLES.items():
        gain = against(found, version, rival, accuracy)
        if rival == "kvib" or not gain:
            continue
        cells = [_spread([100 * each for each in gain], "+.2f")]
        for target in TARGETS:
            sooner = against(found, version, rival, partial(rounds_to, target=target))
            cells.append(
                _spread([-each for each in sooner], "+.0f") if len(sooner) == len(gain) else "–"
            )
        lines.append(f"| {title} | {' | '.join(cells)} | {len(gain)} |")
    return [*lines, ""] if len(lines) > 2 else []


def _until(values: list[float | None]) -> str:
    """A mean with its interval where all runs got there, else how many did."""
    some = [value for value in values if value is not None]
    if len(some) == len(values):
        return _spread(some, ".3g")
    return f"{len(some)} of {len(values)} runs" if some else "not reached"


def _spread(values: list[float], form: str) -> str:
    """A mean with its interval, from two seeds on."""
    if not all(map(math.isfinite, values)):
        return f"diverged in {sum(not math.isfinite(value) for value in values)} of {len(values)}"
    between: Interval = interval(values)
    return f"{between.mean:{form}}" + (
        f" ({between.low:{form}} to {between.high:{form}})" if len(values) > 1 else ""
    )
