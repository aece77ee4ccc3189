"""K-Vib on digits by writer as a page.

Rounds to a target, last losses and accuracies, K-Vib against each rival, the verdicts on K-Vib's
claims, and what so many seeds can tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from rota_lab.reproduce.chart import COLOURS, Chart, Line
from rota_lab.reproduce.interval import (
    CANNOT_TELL,
    FAILS,
    HOLDS,
    LEVEL,
    Claim,
    Interval,
    detectable,
    interval,
    judged,
)
from rota_lab.reproduce.kvib_femnist_claims import (
    CLAIMED,
    LAST,
    TARGETS,
    TITLES,
    VERSIONS,
    Numbers,
    accuracy,
    against,
    counted,
    gigabytes_to,
    last,
    overall,
    points,
    rounds_to,
    runs_of,
    statements,
)
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds

WORST, LEAST = 3.0, 0.9
"""Charts cut losses and accuracies off here: late differences would be too small to see."""


def report(found: dict[str, Found], everything: list[str], quick: bool) -> Result:
    """Claims, tables and charts, from the parts that are finished."""
    rows, checks, charts = [], {}, []
    if len(found) < len(everything):
        checks[f"all parts are finished ({len(found)} of {len(everything)})"] = False
    for version in VERSIONS:
        for method, title in TITLES.items():
            runs = runs_of(found, version, method)
            if runs:
                accuracies = [accuracy(run) for run in runs]
                rows.append(over_seeds(f"v{version}, {title}: accuracy", None, accuracies))
                rows += _reached(f"v{version}, {title}", runs)
        charts += _charts(found, version)
    claims = [*judged(statements(found)), *counted(found)]
    title = "K-Vib: digits by writer, in three degrees of imbalance"
    text = _text(found, everything, quick, claims)
    return Result("kvib-femnist", title, text, rows, charts, checks, quick, claims=claims)


def _reached(title: str, runs: list[Numbers]) -> list[Row]:
    """A row with the rounds to each target that all runs reach."""
    out = []
    for target in TARGETS:
        rounds = [rounds_to(run, target) for run in runs]
        some = [each for each in rounds if each is not None]
        if len(some) == len(rounds):
            out.append(over_seeds(f"{title}: rounds to {target:.0%}", None, some))
    return out


def _charts(found: dict[str, Found], version: int) -> list[Chart]:
    """Accuracy and loss: first K-Vib's samplers and the optimum, then the others."""
    main = ["kvib", *CLAIMED, "optimal"]
    others = ["kvib", "optimal", *(method for method in TITLES if method not in main)]
    charts = []
    for file, name, methods in (
        ("accuracy", "accuracy", main),
        ("loss", "loss", main),
        ("others", "accuracy", others),
        ("others-loss", "loss", others),
    ):
        title = f"v{version}: test {name}" + ", other samplers" * (methods is others)
        label = {"accuracy": "accuracy, %", "loss": "log10 loss"}[name]
        lines = _lines(found, version, methods, name)
        charts.append(Chart(f"v{version}-{file}", title, "round", label, lines))
    return [chart for chart in charts if len(chart.lines) > 1]


def _lines(found: dict[str, Found], version: int, methods: Sequence[str], name: str) -> list[Line]:
    """The mean curve of each sampler, with a band from three seeds on."""
    lines = []
    for place, method in enumerate(methods):
        runs = runs_of(found, version, method)
        if runs:
            curves = np.array([_drawn(name, run[name]) for run in runs])
            points = [interval(values) for values in curves.T.tolist()]
            band = ([p.low for p in points], [p.high for p in points]) if len(runs) > 2 else None
            mean = [point.mean for point in points]
            dashed = place // len(COLOURS)
            lines.append(Line(TITLES[method], runs[0]["tests"], mean, place, dashed, band))
    return lines


def _drawn(name: str, values: Sequence[float | None]) -> list[float]:
    """A curve as it is drawn: accuracies in per cent, losses as logarithms, both cut off."""
    if name == "accuracy":
        return [100 * max(LEAST, value or 0.0) for value in values]
    losses = [WORST if value is None else max(value, 1e-9) for value in values]
    return [math.log10(min(WORST, loss)) for loss in losses]


WARNING = """\
**This is a quick version, with few rounds, seeds and samplers. It shows that the reproduction runs,
and is not the result.**

"""


def _text(
    found: dict[str, Found], everything: list[str], quick: bool, claims: Sequence[Claim]
) -> str:
    parts = list(found.values())
    budget, rounds, every = 27, 500, 10
    if parts:
        budget, rounds, every = parts[0]["budget"], parts[0]["rounds"], parts[0]["every"]
    machines = dict.fromkeys(f"{each['machine']}, {each['precision']}" for each in parts)
    left = [f"`{name}`" for name in everything if name not in found]
    sections = [
        f"""\
K-Vib's "federated optimization evaluation" (section 4, Figure 5): digits by many writers, a few of
whom hold most of the images. {budget} clients (5 %) train per round, in mini-batches of 20, for
three local epochs; there are {rounds} rounds, and the server step is 1. The paper shows curves and
gives no values. It claims that K-Vib has "the best performance in classic FL tasks comparing
baselines". These baselines are uniform sampling, Vrb, Mabs and Avare; the other samplers are our
addition.

{DIFFERENCES}

A model is tested every {every} rounds. The last accuracy and the last loss are means of the last
{LAST} tests. The rounds to a target are those until the best accuracy so far crosses the target, on
the line between two tests. Gigabytes count the traffic up and down until then, including what
clients are asked for before the draw; they are the mean of the seeds that were trained together.
Intervals are 95 % confidence intervals of the mean over seeds (Student's t). K-Vib's gain over a
rival is taken seed by seed, since all samplers have the same start and the same mini-batches with
the same seed; where the gain is positive, K-Vib is better. In the charts, losses above {WORST:g}
and accuracies below {LEAST:.0%} are drawn as these values.
""",
        *(_version(found, version) for version in VERSIONS),
        _verdicts(found),
        _power(found, claims[: len(statements(found))]),
    ]
    if left:
        sections.append(f"## Not run\n{', '.join(left)}\n")
    sections.append("\n".join(f"- {words}" for words in machines))
    return WARNING * quick + "\n".join(section for section in sections if section) + "\n"


DIFFERENCES = """\
## What differs from the source
- **Data.** K-Vib's FEMNIST is the digits of Federated EMNIST (3,383 writers; the text names
  LEAF's), cut by Chen et al. in a way that is not published. Here it is MNIST by its 539 writers
  (`mnist-writers`, about 111 images each), cut by the partition `unbalanced`: a tenth, a fifth or a
  half of the writers, chosen at random, keep all their images, and each of the others keeps 2 or 3
  at random. These numbers lead to K-Vib's shares where writers have about 101 images. No writer is
  removed. All 10,000 test images are by other writers. All seeds have the same split. Ink is 1 and
  paper is 0; in Federated EMNIST it is the other way round.
- **Numbers that the text has lost.** The local learning rate is 0.01 here. For G, the bound in the
  regularisers of K-Vib and Vrb, we use the default, which needs no bound: gamma is sum of
  omega / (t K) after t rounds. "K-Vib, G = 0.1" has the value that its paper most likely had. theta
  is (N / (T K))^(1/3) for K-Vib and 0.3 for Vrb, since N > T; Mabs, Avare and OSMD have their
  defaults.
- **Network.** It is the network of K-Vib's code, which has no activations behind its convolutions
  (`kvib_cnn`, 582,026 parameters). The text calls it McMahan's CNN, which it is not.
- **Uniform sampling.** "uniform" is unbiased, as in K-Vib's Algorithm 1: an update counts
  share * N / K. K-Vib's code takes FedAvg's weighted mean, with the weights of the wrong clients.
  "FedAvg's mean" is that mean with the right weights.
- **Loss.** K-Vib's code records the loss on the training images; here it is the loss on the test
  images.

The Power-of-Choice family asks two candidates for each place. OCS lets 32 clients train for 3 that
upload, as in Chen et al. AOCS is not run, since its probabilities are OCS's. DivFL and clustered
sampling by similarity keep every client's last update on the server (1.25 GB here)."""


def _verdicts(found: dict[str, Found]) -> str:
    """Which rivals K-Vib is above and below, and why some cannot be told apart from it."""
    lines = [line for version in VERSIONS if (line := _verdict(found, version))]
    if not lines:
        return ""
    return "\n".join(["## What follows", *lines, "", WHY, ""])


WHY = """\
`optimal` knows the norms of all clients' updates, and has the least variance that independent draws
of this budget can have (K-Vib, Lemma 3). Where K-Vib cannot be told apart from it, no better
unbiased sampler of this kind would show in the accuracy. In later rounds, K-Vib's variance is below
those of Vrb and Avare ([kvib-theory](kvib-theory.md)), but this does not show in the accuracy
either. The Power-of-Choice samplers and DivFL are biased, the former towards clients with high
losses."""


def _power(found: dict[str, Found], claims: Sequence[Claim]) -> str:
    """How many claims can be told, and how large a gain would have been seen."""
    rows = []
    for rival in (*CLAIMED, "optimal"):
        mean, versions = overall(found, rival, points)
        each = {f"v{version}": against(found, version, rival, points) for version in versions}
        for name, gain in {**each, "mean": mean}.items():
            if len(gain) > 1:
                least = f"{detectable(gain, LEVEL / max(len(claims), 1)):.2f}"
                cells = [TITLES[rival], name, _spread(gain, "+.2f"), least, str(len(gain))]
                rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return ""
    counts = [sum(each.verdict == one for each in claims) for one in (HOLDS, FAILS, CANNOT_TELL)]
    heads = ("K-Vib against", "on", "gain, points", "least gain that would show", "seeds")
    return f"""\
## What so many seeds can tell
K-Vib's claim is about the tasks as a whole, so it is judged by the mean over the versions, with the
same seeds. Of {len(claims)} claims {counts[0]} hold, {counts[1]} fail, and {counts[2]} cannot be
told (Student's t, with Holm's correction over these claims; the brackets are each claim's own 95 %
interval). The tables above have each version by itself, without a correction. The mean over the
versions was chosen after a look at both: judged by version, no claim can be told.

The table says how large a gain in the last accuracy must be to show with a chance of 80 %, at the
strictest level of Holm's correction ({LEVEL:g} / {len(claims)}) and with the spread that was
measured. `optimal` is the bound: no sampler with independent coins has less variance. Where its
distance from K-Vib is below what would show, accuracies cannot tell K-Vib from the best sampler of
its kind.

| {" | ".join(heads)} |
|---|---|---:|---:|---:|
{chr(10).join(rows)}
"""


def _verdict(found: dict[str, Found], version: int) -> str:
    above, below, alike = list[str](), list[str](), list[str]()
    for rival, title in TITLES.items():
        gain = against(found, version, rival, accuracy)
        if rival != "kvib" and len(gain) > 1:
            between = interval(gain)
            (above if between.low > 0 else below if between.high < 0 else alike).append(title)
    if not above + below + alike:
        return ""
    first, second, third = (" / ".join(each) or "none" for each in (above, below, alike))
    order = f"clearly above {first}; clearly below {second}; not distinguishable from {third}"
    return f"- v{version}, last accuracy, by single 95 % intervals: K-Vib is {order}."


def _version(found: dict[str, Found], version: int) -> str:
    split = next((part["split"] for part in found.values() if part["version"] == version), None)
    if split is None:
        return f"## v{version}: {VERSIONS[version]}\nNot run.\n"
    who = f"{split['large']} of {split['clients']} clients"
    words = f"{who} hold {split['share']:.1%} of {split['images']:,} images here"
    targets = [f"{target:.0%}" for target in TARGETS]
    heads = [
        "sampler",
        *(f"rounds to {target}" for target in targets),
        *(f"GB to {target}" for target in targets),
        "last accuracy, %",
        "last loss",
        "clients per round",
        "seeds",
    ]
    lines = [
        f"## v{version}: {VERSIONS[version]} ({words})",
        f"| {' | '.join(heads)} |",
        "|---|" + "---:|" * (len(heads) - 1),
    ]
    for method, title in TITLES.items():
        runs = runs_of(found, version, method)
        if runs:
            cells = [title]
            cells += [_until([rounds_to(run, target) for run in runs]) for target in TARGETS]
            cells += [_until([gigabytes_to(run, target) for run in runs]) for target in TARGETS]
            cells.append(_spread([100 * accuracy(run) for run in runs], ".2f"))
            cells.append(_spread([last(run, "loss") for run in runs], ".3g"))
            cells.append(f"{np.mean([run['clients'] for run in runs]):.1f}")
            cells.append(str(len(runs)))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_rivals(found, version)])


def _rivals(found: dict[str, Found], version: int) -> list[str]:
    """K-Vib against each rival, seed by seed."""
    heads = ["K-Vib against", "K-Vib's gain in accuracy, points"]
    heads += [f"in rounds to {target:.0%}" for target in TARGETS]
    heads.append("seeds")
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for rival, title in TITLES.items():
        gain = against(found, version, rival, accuracy)
        if rival == "kvib" or not gain:
            continue
        cells = [title, _spread([100 * each for each in gain], "+.2f")]
        for target in TARGETS:
            sooner = against(found, version, rival, partial(rounds_to, target=target))
            all_reach = len(sooner) == len(gain)
            cells.append(_spread([-each for each in sooner], "+.0f") if all_reach else "–")
        cells.append(str(len(gain)))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 2 else []


def _until(values: list[float | None]) -> str:
    """A mean with its interval if all runs reached the target, else how many did."""
    some = [value for value in values if value is not None]
    if len(some) == len(values):
        return _spread(some, ".3g")
    return f"{len(some)} of {len(values)} runs" if some else "not reached"


def _spread(values: list[float], form: str) -> str:
    """A mean, with its interval from two seeds on."""
    diverged = [value for value in values if not math.isfinite(value)]
    if diverged:
        return f"diverged in {len(diverged)} of {len(values)}"
    between: Interval = interval(values)
    if len(values) == 1:
        return f"{between.mean:{form}}"
    return f"{between.mean:{form}} ({between.low:{form}} to {between.high:{form}})"
