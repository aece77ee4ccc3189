"""K-Vib's theory as a page: intervals, charts, and which of the source's claims hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from rota.sampling import SAMPLERS
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.interval import Interval, interval
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, over_seeds

BUDGET = 10
CLAIMED = ("uniform", "vrb", "mabs", "avare")
"""The rivals that S1 compares with."""
TITLES = {
    "kvib": "K-Vib",
    "kvib-full": "K-Vib, full feedback",
    "optimal": "optimal",
    "uniform": "uniform",
    "vrb": "Vrb",
    "mabs": "Mabs",
    "avare": "Avare",
    "osmd": "OSMD",
    "osmd-adaptive": "adaptive OSMD",
    "osmd-independent": "independent OSMD",
}


def of(found: Found, name: str) -> Interval:
    """One of a part's numbers over its seeds."""
    return interval([run[name] for run in found["runs"]])


def unscaled(found: Found) -> list[float]:
    """The regret with q = p / K in the place of p, against the same optimum."""
    return [found["budget"] * run["cost"] - (run["cost"] - run["regret"]) for run in found["runs"]]


def ratio(found: Found) -> list[float]:
    """sum l(p) / sum min l."""
    return [run["cost"] / (run["cost"] - run["regret"]) for run in found["runs"]]


def values(name: str) -> Callable[[Found], list[float]]:
    """One of a part's numbers, a value a seed."""
    return lambda found: [run[name] for run in found["runs"]]


def report(found: dict[str, Found], all_parts: int, quick: bool) -> Result:
    """Claims, tables and charts, from the parts that are finished."""
    rows = [
        over_seeds(f"{_title(each)}: cumulative {name}", None, [run[name] for run in each["runs"]])
        for each in found.values()
        for name in ("regret", "variance")
    ]
    checks = {}
    if len(found) < all_parts:
        checks[f"all parts are finished ({len(found)} of {all_parts})"] = False
    checks |= _order(found) | _rivals(found) | _budgets(found) | _gamma(found)
    return Result(
        "kvib-theory",
        "K-Vib: variance and regret on Synthetic",
        _text(found, quick),
        rows,
        _charts(found),
        checks,
        quick,
    )


def _title(each: Found) -> str:
    return f"{TITLES[each['sampler']]}, K = {each['budget']}" + (
        f", G = {each['bound']:g}" if each["bound"] else ""
    )


def _order(found: dict[str, Found]) -> dict[str, bool]:
    names = [f"{sampler}-K{BUDGET}" for sampler in ("optimal", "kvib-full", "kvib")]
    if not all(name in found for name in names):
        return {}
    best, full, partial = (of(found[name], "variance").mean for name in names)
    words = f"optimal {best:.3g}, full feedback {full:.3g}, partial feedback {partial:.3g}"
    claim = f"cumulative variance at K = {BUDGET}: optimal <= K-Vib with full feedback <= with partial feedback ({words})"
    return {claim: best <= full <= partial}


def _rivals(found: dict[str, Found]) -> dict[str, bool]:
    """Is K-Vib's interval below a rival's?"""
    out = {}
    mine = found.get(f"kvib-K{BUDGET}")
    for rival in CLAIMED:
        theirs = found.get(f"{rival}-K{BUDGET}")
        if mine and theirs:
            ours, other = of(mine, "regret"), of(theirs, "regret")
            claim = f"at K = {BUDGET} the cumulative regret of K-Vib, {ours}, is below that of {TITLES[rival]}, {other}"
            out[f"{claim}, with 95 % intervals apart"] = ours.high < other.low
    return out


def _sweep(found: dict[str, Found], sampler: str) -> list[Found]:
    """A sampler's parts by budget."""
    some = [each for each in found.values() if each["sampler"] == sampler and each["bound"] is None]
    return sorted(some, key=lambda each: int(each["budget"]))


def _budgets(found: dict[str, Found]) -> dict[str, bool]:
    out = {}
    mine = _sweep(found, "kvib")
    if len(mine) > 1:
        means = [of(each, "regret").mean for each in mine]
        budgets = ", ".join(str(each["budget"]) for each in mine)
        words = ", ".join(f"{mean:.3g}" for mean in means)
        falls = all(after < before for before, after in pairwise(means))
        out[f"K-Vib's cumulative regret falls with K ({words} at K = {budgets})"] = falls
    return (
        out
        | _ends(found, "", values("regret"))
        | _ends(found, " if q = p / K stands for p in l(p)", unscaled)
    )


def _ends(
    found: dict[str, Found], how: str, pick: Callable[[Found], list[float]]
) -> dict[str, bool]:
    """Does a rival's regret fall from the smallest to the largest budget?"""
    sweeps = {TITLES[rival]: parts for rival in CLAIMED if len(parts := _sweep(found, rival)) > 1}
    if not sweeps:
        return {}
    means = {
        title: (float(np.mean(pick(parts[0]))), float(np.mean(pick(parts[-1]))))
        for title, parts in sweeps.items()
    }
    words = ", ".join(
        f"{title} {first:.3g} to {last:.3g}" for title, (first, last) in means.items()
    )
    ends = next(iter(sweeps.values()))
    claim = f"that of its rivals does not fall from K = {ends[0]['budget']} to {ends[-1]['budget']}{how} ({words})"
    return {claim: all(last >= first for first, last in means.values())}


def _gamma(found: dict[str, Found]) -> dict[str, bool]:
    mine = found.get(f"kvib-K{BUDGET}")
    hand = [each for each in found.values() if each["bound"]]
    if not mine or not hand:
        return {}
    means = {each["bound"]: of(each, "regret").mean for each in hand}
    best = min(means, key=means.__getitem__)
    seeds = min(len(each["runs"]) for each in hand)
    own = float(np.mean([run["regret"] for run in mine["runs"][:seeds]]))
    spread = [of(each, "variance").mean for each in hand]
    numbers = f"{own:.3g} against {means[best]:.3g} with G = {best:g}, on the same {seeds} seeds"
    claim = f"K-Vib without a G has at most 10 % more cumulative regret than with the best G of {len(means)} ({numbers})"
    ratio = max(spread) / min(spread)
    words = f"K-Vib is not sensitive to gamma: over the G tried, its cumulative variance is within a factor of 2 (it is {ratio:.3f})"
    return {claim: own <= 1.1 * means[best], words: ratio <= 2}


def _charts(found: dict[str, Found]) -> list[Chart]:
    charts = []
    main = [found[name] for name in (f"{sampler}-K{BUDGET}" for sampler in TITLES) if name in found]
    some = [each for each in main if each["sampler"] in ("optimal", "kvib-full", "kvib", "uniform")]
    charts.append(
        _curves(
            "feedback",
            f"Variance at K = {BUDGET}: K-Vib between the optimum and uniform",
            "variance",
            some,
        )
    )
    rivals = [each for each in main if each["sampler"] not in ("optimal", "kvib-full")]
    charts.append(
        _curves(
            "regret",
            f"Cumulative regret at K = {BUDGET} (dashed: with replacement)",
            "regret",
            rivals,
        )
    )
    charts.append(
        _curves(
            "variance", f"Variance at K = {BUDGET} (dashed: with replacement)", "variance", rivals
        )
    )
    charts.append(
        _curves("loss", f"Test loss at K = {BUDGET} (dashed: with replacement)", "loss", rivals)
    )
    for name, what, pick in (
        ("cost", "l(p) / least l", ratio),
        ("variance", "cumulative variance", values("variance")),
    ):
        lines = [
            line for sampler in TITLES if (line := _against_budget(_sweep(found, sampler), pick))
        ]
        charts.append(
            Chart(
                f"budget-{name}",
                f"{what} against the budget (dashed: with replacement)",
                "K",
                f"log10 {what}",
                lines,
            )
        )
    hand = sorted(
        (each for each in found.values() if each["bound"]), key=lambda each: float(each["bound"])
    )
    if len(hand) > 1 and (own := found.get(f"kvib-K{BUDGET}")):
        x = [math.log10(each["bound"]) for each in hand]
        given, free = [of(each, "regret") for each in hand], of(own, "regret")
        lines = [Line("G by hand", x, [each.mean for each in given], 0, band=_band(given))]
        lines.append(Line("no G", [x[0], x[-1]], [free.mean] * 2, 1, band=_band([free] * 2)))
        charts.append(
            Chart(
                "gamma",
                f"K-Vib at K = {BUDGET}: gamma = G^2 N / (theta K)",
                "log10 G",
                "cumulative regret",
                lines,
            )
        )
    return [chart for chart in charts if chart.lines]


def _band(intervals: Sequence[Interval]) -> tuple[list[float], list[float]] | None:
    return (
        ([each.low for each in intervals], [each.high for each in intervals])
        if math.isfinite(intervals[0].low)
        else None
    )


def _dashed(sampler: str) -> bool:
    return getattr(SAMPLERS[sampler], "procedure", "") == "multinomial"


def _curves(file: str, title: str, name: str, some: list[Found]) -> Chart:
    """One of the kept curves of several parts, with bands over seeds; regret and variance as logarithms."""
    lines = []
    for each in some:
        runs = np.array([run["curves"][name] for run in each["runs"]])
        if name != "loss" and runs.min() <= 0:
            continue  # it has no logarithm
        points = [
            interval(values) for values in (runs if name == "loss" else np.log10(runs)).T.tolist()
        ]
        x = [10 * (place + 1) for place in range(len(points))]
        colour, dashed = list(TITLES).index(each["sampler"]), _dashed(each["sampler"])
        lines.append(
            Line(
                TITLES[each["sampler"]],
                x,
                [point.mean for point in points],
                colour,
                dashed,
                _band(points),
            )
        )
    what = {"regret": "log10 cumulative regret", "variance": "log10 variance", "loss": "test loss"}[
        name
    ]
    return Chart(file, title, "round", what, lines)


def _against_budget(some: list[Found], pick: Callable[[Found], list[float]]) -> Line | None:
    if len(some) < 2:
        return None
    sampler = some[0]["sampler"]
    points = [interval(np.log10(pick(each)).tolist()) for each in some]
    y, x = [point.mean for point in points], [each["budget"] for each in some]
    return Line(TITLES[sampler], x, y, list(TITLES).index(sampler), _dashed(sampler), _band(points))


def _text(found: dict[str, Found], quick: bool) -> str:
    warning = (
        "**A quick version: few rounds, seeds and budgets. It shows the way, not the result.**\n\n"
        * quick
    )
    any_part = next(iter(found.values()), None)
    rounds = any_part["rounds"] if any_part else 0
    machines = "\n".join(
        f"- {words}" for words in dict.fromkeys(each["machine"] for each in found.values())
    )
    return f"""{warning}S1's theory evaluation: K-Vib and its unbiased rivals on S1's Synthetic data (`synthetic-kvib`: 100 clients,
a tenth of which hold 63 %), logistic regression, lr 0.02, mini-batches of 64, one epoch, server step 1, {rounds} rounds: the recipe
`kvib-synthetic`. S1 shows figures and gives no values. In each round all clients are trained beside the run
([metrics](../runs.md#metrics)), so that what is measured is exact for the probabilities applied, and not an estimate from one draw:

- **variance** (eq. 2): E|estimate - D|^2, by the formula of the sampler's own procedure;
- **regret** (eq. 6): l(p) - min l, with l(p) = sum pi_i^2 / p_i, pi_i = d_i |g_i|, and the minimum over 0 < p <= 1, sum p = K (Lemma 3).

Intervals are 95 % confidence intervals of the mean over seeds (Student's t). Every run trains its own model, so a sampler is measured on
the updates that its own noise leads to: a noisy one makes larger updates, and is charged for that too. `cost / least`,
sum l(p) / sum min l, divides that out.

## What l(p) means for draws with replacement
Vrb, Mabs, Avare and OSMD draw K times with replacement by q. As in S1 their p is K q. Two things follow that S1 does not say:

- l(K q) = l(q) / K, so their regret falls with K as 1 / K by itself, as K-Vib's does. It can only rise if q itself stands for p, as S1's
  words on its Figure 7 suggest ("the optimal sampling value is decreasing. As a result, the regret of baselines increases").
  Both are below.
- K q may exceed 1, where the optimum of eq. 6 may not: their regret can be negative. Nor is it a variance up to a constant: with
  independent coins the variance is l(p) - sum pi_i^2, with replacement l(K q) - |D|^2 / K. The variances compare the samplers; the
  regrets compare each with an oracle of K-Vib's kind.

## All samplers at K = {BUDGET}
{_table(found)}

`late` is the variance of the second half of the rounds: what is left when the first rounds, in which little is known, are over.
`improvement` (Definition 12) is the optimum's variance / that of uniform coins, `quality` the excess over the optimum / that of uniform
coins (0 is optimal); means over the rounds.

## Against the budget
{_budget_table(found)}

## Against gamma
{_gamma_table(found)}

{_why(found)}

{machines}
"""


def _table(found: dict[str, Found]) -> str:
    lines = [
        "| sampler | cumulative regret | cumulative variance | late | cost / least | improvement | quality | loss | accuracy | seeds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for sampler, title in TITLES.items():
        each = found.get(f"{sampler}-K{BUDGET}")
        if each:
            numbers = [str(of(each, name)) for name in ("regret", "variance", "late")] + [
                str(interval(ratio(each)))
            ]
            numbers += [f"{of(each, name).mean:.3g}" for name in ("improvement", "quality", "loss")]
            lines.append(
                f"| {title} | {' | '.join(numbers)} | {of(each, 'accuracy').mean:.2%} | {len(each['runs'])} |"
            )
    return "\n".join(lines)


def _budget_table(found: dict[str, Found]) -> str:
    budgets = sorted({each["budget"] for each in found.values()})
    lines = []
    picks: tuple[tuple[str, Callable[[Found], list[float]]], ...] = (
        ("cumulative regret", values("regret")),
        ("cumulative regret, q in the place of p", unscaled),
        ("cumulative variance", values("variance")),
        ("cost / least", ratio),
    )
    for title, pick in picks:
        lines += [
            "",
            f"| {title} | {' | '.join(f'K = {budget}' for budget in budgets)} |",
            "|---|" + "---:|" * len(budgets),
        ]
        for sampler, name in TITLES.items():
            if pick is unscaled and not _dashed(sampler) and sampler != "uniform":
                continue
            parts = {each["budget"]: each for each in _sweep(found, sampler)}
            if len(parts) > 1:
                lines.append(
                    f"| {name} | {' | '.join(str(interval(pick(parts[b]))) if b in parts else '–' for b in budgets)} |"
                )
    seeds = ", ".join(
        f"{len(each['runs'])} at K = {each['budget']}" for each in _sweep(found, "kvib")
    )
    return "\n".join([*lines[1:], "", f"Seeds: {seeds}."])


def _gamma_table(found: dict[str, Found]) -> str:
    lines = [
        "| K-Vib | cumulative regret | cumulative variance | loss | seeds |",
        "|---|---:|---:|---:|---:|",
    ]
    hand = sorted(
        (each for each in found.values() if each["bound"]), key=lambda each: float(each["bound"])
    )
    own = found.get(f"kvib-K{BUDGET}")
    for each in ([own] if own else []) + hand:
        title = f"G = {each['bound']:g}" if each["bound"] else "no G: the default"
        lines.append(
            f"| {title} | {of(each, 'regret')} | {of(each, 'variance')} | {of(each, 'loss').mean:.3g} | {len(each['runs'])} |"
        )
    return "\n".join(lines)


def _why(found: dict[str, Found]) -> str:
    """What explains the numbers, where they are there."""
    needed = [f"{sampler}-K{BUDGET}" for sampler in ("kvib", "avare", "vrb", "uniform", "optimal")]
    if not all(name in found for name in needed):
        return ""
    late = ", ".join(
        f"{TITLES[found[name]['sampler']]} {of(found[name], 'late').mean:.3g}" for name in needed
    )
    return f"""## Why
**The first rounds decide the sums.** A few clients hold most of the data, so most of l(p) is theirs, and with {BUDGET} of 100 clients a
round it takes some ten rounds until one of them has been drawn. Until then K-Vib and Vrb take it for a client with an update of 0: its
probability falls below the uniform one, towards theta K / N, while those that were seen rise. Avare takes it for one as large as the
largest seen. All updates are also at their largest in these rounds, and an unlikely draw of a large client, which counts 1 / p, throws
the model back and makes them larger still. Once the large clients are known, the order is another: the variance of the second half of the
rounds is {late}.

**gamma** is what keeps unseen clients in the draw. Where no G is given it is sum of omega / (t K), Theorem 8's gamma with the mean square
of the scores so far for G^2, and without theta. That form was chosen on seeds 0 to 4, where the mean square of the first cohort's
scores had done badly (too small whenever none of the large clients is in it, as is likely); the runs here have other seeds. A G near the
largest score (0.12 in the first round) keeps K-Vib near uniform sampling.

**The budget.** With small budgets uniform sampling, Mabs and OSMD do not converge at lr 0.02: the weights 1 / p of their rare large
clients are steps that are too long. Their regret at the smallest K is that of a model that does not learn, and it falls with K in either
reading: that q in the place of p makes a rival's regret rise is true of the same updates at every K, and here the updates shrink with the
noise. With large budgets independent coins are the better procedure: as K grows to N their variance goes to 0, with replacement it does
not, though their cost l(K q) is then below the least that coins can have.
"""
