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
"""The rivals that its paper compares K-Vib with."""
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
}

Pick = Callable[[Found], list[float]]
"""Takes one number per seed out of a part."""


def of(found: Found, name: str) -> Interval:
    """The interval of one of a part's numbers over its seeds."""
    return interval([run[name] for run in found["runs"]])


def unscaled(found: Found) -> list[float]:
    """The regret with q = p / K in place of p, against the same optimum."""
    return [found["budget"] * run["cost"] - (run["cost"] - run["regret"]) for run in found["runs"]]


def ratio(found: Found) -> list[float]:
    """sum l(p) / sum min l."""
    return [run["cost"] / (run["cost"] - run["regret"]) for run in found["runs"]]


def values(name: str) -> Pick:
    """One of a part's numbers."""
    return lambda found: [run[name] for run in found["runs"]]


def report(found: dict[str, Found], all_parts: int, quick: bool) -> Result:
    """Claims, tables and charts, from the parts that are finished."""
    rows = []
    for each in found.values():
        for name in ("regret", "variance"):
            rows.append(over_seeds(f"{_title(each)}: cumulative {name}", None, values(name)(each)))
    checks = {}
    if len(found) < all_parts:
        checks[f"all parts are finished ({len(found)} of {all_parts})"] = False
    checks |= _order(found) | _rivals(found) | _budgets(found) | _gamma(found)
    title = "K-Vib: variance and regret on Synthetic"
    text = _text(found, quick)
    return Result("kvib-theory", title, text, rows, _charts(found), checks, quick)


def _title(each: Found) -> str:
    bound = f", G = {each['bound']:g}" if each["bound"] else ""
    return f"{TITLES[each['sampler']]}, K = {each['budget']}{bound}"


def _order(found: dict[str, Found]) -> dict[str, bool]:
    """Is the variance of the optimum below that of K-Vib, and full feedback below partial?"""
    names = [f"{sampler}-K{BUDGET}" for sampler in ("optimal", "kvib-full", "kvib")]
    if not all(name in found for name in names):
        return {}
    best, full, partial = (of(found[name], "variance").mean for name in names)
    order = "optimal <= K-Vib with full feedback <= with partial feedback"
    words = f"optimal {best:.3g}, full feedback {full:.3g}, partial feedback {partial:.3g}"
    claim = f"cumulative variance at K = {BUDGET}: {order} ({words})"
    return {claim: best <= full <= partial}


def _rivals(found: dict[str, Found]) -> dict[str, bool]:
    """Is the interval of K-Vib's regret below a rival's?"""
    out = {}
    mine = found.get(f"kvib-K{BUDGET}")
    for rival in CLAIMED:
        theirs = found.get(f"{rival}-K{BUDGET}")
        if mine and theirs:
            ours, other = of(mine, "regret"), of(theirs, "regret")
            regret = f"at K = {BUDGET} the cumulative regret of K-Vib, {ours},"
            claim = f"{regret} is below that of {TITLES[rival]}, {other}"
            out[f"{claim}, with 95 % intervals apart"] = ours.high < other.low
    return out


def _sweep(found: dict[str, Found], sampler: str) -> list[Found]:
    """A sampler's parts, by budget."""
    some = [each for each in found.values() if each["sampler"] == sampler and each["bound"] is None]
    return sorted(some, key=lambda each: int(each["budget"]))


def _by_hand(found: dict[str, Found]) -> list[Found]:
    """The parts with a G that is given by hand, by that G."""
    some = [each for each in found.values() if each["bound"]]
    return sorted(some, key=lambda each: float(each["bound"]))


def _budgets(found: dict[str, Found]) -> dict[str, bool]:
    """Does K-Vib's regret fall with the budget, and that of its rivals not?"""
    out = {}
    mine = _sweep(found, "kvib")
    if len(mine) > 1:
        means = [of(each, "regret").mean for each in mine]
        budgets = ", ".join(str(each["budget"]) for each in mine)
        words = ", ".join(f"{mean:.3g}" for mean in means)
        falls = all(after < before for before, after in pairwise(means))
        out[f"K-Vib's cumulative regret falls with K ({words} at K = {budgets})"] = falls
    out |= _ends(found, "", values("regret"))
    return out | _ends(found, " if q = p / K stands for p in l(p)", unscaled)


def _ends(found: dict[str, Found], how: str, pick: Pick) -> dict[str, bool]:
    """Does a rival's regret fall from the smallest to the largest budget?"""
    words, budgets, rises = [], (0, 0), True
    for rival in CLAIMED:
        parts = _sweep(found, rival)
        if len(parts) > 1:
            first, last = (float(np.mean(pick(each))) for each in (parts[0], parts[-1]))
            words.append(f"{TITLES[rival]} {first:.3g} to {last:.3g}")
            rises &= last >= first
            budgets = budgets if budgets[0] else (parts[0]["budget"], parts[-1]["budget"])
    if not words:
        return {}
    ends = f"from K = {budgets[0]} to {budgets[1]}{how}"
    return {f"that of its rivals does not fall {ends} ({', '.join(words)})": rises}


def _gamma(found: dict[str, Found]) -> dict[str, bool]:
    """Is K-Vib without a G as good as with one, and does G matter little?"""
    mine, hand = found.get(f"kvib-K{BUDGET}"), [each for each in found.values() if each["bound"]]
    if not mine or not hand:
        return {}
    means = {each["bound"]: of(each, "regret").mean for each in hand}
    best = min(means, key=means.__getitem__)
    seeds = min(len(each["runs"]) for each in hand)
    own = float(np.mean([run["regret"] for run in mine["runs"][:seeds]]))
    numbers = f"{own:.3g} against {means[best]:.3g} with G = {best:g}, on the same {seeds} seeds"
    regret = "K-Vib without a G has at most 10 % more cumulative regret than with the best G"
    spread = [of(each, "variance").mean for each in hand]
    largest = max(spread) / min(spread)
    variance = "over the G tried, its cumulative variance is within a factor of 2"
    return {
        f"{regret} of {len(means)} ({numbers})": own <= 1.1 * means[best],
        f"K-Vib is not sensitive to gamma: {variance} (it is {largest:.3f})": largest <= 2,
    }


def _charts(found: dict[str, Found]) -> list[Chart]:
    """The charts that have lines."""
    main = [found[name] for name in (f"{sampler}-K{BUDGET}" for sampler in TITLES) if name in found]
    feedback = ("optimal", "kvib-full", "kvib", "uniform")
    some = [each for each in main if each["sampler"] in feedback]
    rivals = [each for each in main if each["sampler"] not in ("optimal", "kvib-full")]
    at, dashes = f"at K = {BUDGET}", "(dashed: with replacement)"
    between = f"Variance {at}: K-Vib between the optimum and uniform"
    charts = [
        _curves("feedback", between, "variance", some),
        _curves("regret", f"Cumulative regret {at} {dashes}", "regret", rivals),
        _curves("variance", f"Variance {at} {dashes}", "variance", rivals),
        _curves("loss", f"Test loss {at} {dashes}", "loss", rivals),
    ]
    picks: dict[str, tuple[str, Pick]] = {
        "cost": ("l(p) / least l", ratio),
        "variance": ("cumulative variance", values("variance")),
    }
    for name, (what, pick) in picks.items():
        sweeps = [_against_budget(_sweep(found, sampler), pick) for sampler in TITLES]
        lines = [line for line in sweeps if line]
        title = f"{what} against the budget {dashes}"
        charts.append(Chart(f"budget-{name}", title, "K", f"log10 {what}", lines))
    hand, own = _by_hand(found), found.get(f"kvib-K{BUDGET}")
    if len(hand) > 1 and own:
        x = [math.log10(each["bound"]) for each in hand]
        given, free = [of(each, "regret") for each in hand], of(own, "regret")
        lines = [
            Line("G by hand", x, [each.mean for each in given], 0, band=_band(given)),
            Line("no G", [x[0], x[-1]], [free.mean] * 2, 1, band=_band([free] * 2)),
        ]
        title = f"K-Vib {at}: gamma = G^2 N / (theta K)"
        charts.append(Chart("gamma", title, "log10 G", "cumulative regret", lines))
    return [chart for chart in charts if chart.lines]


def _band(intervals: Sequence[Interval]) -> tuple[list[float], list[float]] | None:
    """The intervals' ends, unless there is one seed only."""
    if not math.isfinite(intervals[0].low):
        return None
    return [each.low for each in intervals], [each.high for each in intervals]


def _dashed(sampler: str) -> bool:
    return getattr(SAMPLERS[sampler], "procedure", "") == "multinomial"


def _curves(file: str, title: str, name: str, some: list[Found]) -> Chart:
    """A curve per part, with bands over seeds; regret and variance are drawn as logarithms."""
    labels = {"regret": "log10 cumulative regret", "variance": "log10 variance"}
    lines = []
    for each in some:
        runs = np.array([run["curves"][name] for run in each["runs"]])
        if name != "loss":
            if runs.min() <= 0:
                continue  # it has no logarithm
            runs = np.log10(runs)
        points = [interval(column) for column in runs.T.tolist()]
        x = [10 * (place + 1) for place in range(len(points))]
        y = [point.mean for point in points]
        sampler = each["sampler"]
        colour = list(TITLES).index(sampler)
        lines.append(Line(TITLES[sampler], x, y, colour, _dashed(sampler), _band(points)))
    return Chart(file, title, "round", labels.get(name, "test loss"), lines)


def _against_budget(some: list[Found], pick: Pick) -> Line | None:
    """A sampler's numbers against the budget, as logarithms; None for a single budget."""
    if len(some) < 2:
        return None
    sampler = some[0]["sampler"]
    points = [interval(np.log10(pick(each)).tolist()) for each in some]
    x, y = [each["budget"] for each in some], [point.mean for point in points]
    colour = list(TITLES).index(sampler)
    return Line(TITLES[sampler], x, y, colour, _dashed(sampler), _band(points))


WARNING = """\
**This is a quick version, with few rounds, seeds and budgets. It shows that the reproduction runs,
and is not the result.**

"""


def _text(found: dict[str, Found], quick: bool) -> str:
    parts = list(found.values())
    rounds = parts[0]["rounds"] if parts else 0
    machines = dict.fromkeys(f"- {each['machine']}" for each in parts)
    places = "\n".join(machines)
    return (
        WARNING * quick
        + f"""\
K-Vib's theory evaluation: K-Vib and its unbiased rivals on its Synthetic data (`synthetic-kvib`:
100 clients, a tenth of which hold 63 %), logistic regression, lr 0.02, mini-batches of 64, one
epoch, server step 1, {rounds} rounds: the recipe `kvib-synthetic`. The paper shows figures and
gives no values. To measure, all clients are trained in each round, apart from the run
([metrics](../runs.md#metrics)). So the measured values are exact for the probabilities that were
applied, and not estimated from one draw:

- **variance** (eq. 2): E|estimate - D|^2, by the formula of the sampler's own procedure;
- **regret** (eq. 6): l(p) - min l, with l(p) = sum pi_i^2 / p_i, pi_i = d_i |g_i|, and the minimum
  over 0 < p <= 1, sum p = K (Lemma 3).

Intervals are 95 % confidence intervals of the mean over seeds (Student's t). Every run trains its
own model, so a sampler is measured on the updates that its own noise leads to: a noisy sampler
causes larger updates, and pays for them too. `cost / least`, sum l(p) / sum min l, divides this
effect out.

## What l(p) means for draws with replacement
Vrb, Mabs, Avare and OSMD draw K times with replacement, by q. As in K-Vib's paper, their p is K q.
Two things follow that the paper does not say:

- l(K q) = l(q) / K, so their regret falls with K as 1 / K by itself, as K-Vib's does. It can only
  rise if q itself stands for p, as the paper's words on Figure 7 suggest ("the optimal sampling
  value is decreasing. As a result, the regret of baselines increases"). Both readings are below.
- K q may exceed 1, where the optimum of eq. 6 may not, so their regret can be negative. Nor is the
  regret a variance up to a constant: with independent coins the variance is l(p) - sum pi_i^2, with
  replacement it is l(K q) - |D|^2 / K. The variances compare the samplers; the regrets compare each
  of them with an oracle of K-Vib's kind.

## All samplers at K = {BUDGET}
{_table(found)}

`late` is the variance of the second half of the rounds: what remains after the first rounds, in
which little is known. `improvement` (Definition 12) is the optimum's variance / that of uniform
coins. `quality` is the excess over the optimum / the variance of uniform coins (0 is optimal). Both
are means over the rounds.

## Against the budget
{_budget_table(found)}

## Against gamma
{_gamma_table(found)}

{_why(found)}

{places}
"""
    )


def _table(found: dict[str, Found]) -> str:
    heads = ["sampler", "cumulative regret", "cumulative variance", "late", "cost / least"]
    heads += ["improvement", "quality", "loss", "accuracy", "seeds"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for sampler, title in TITLES.items():
        each = found.get(f"{sampler}-K{BUDGET}")
        if each:
            cells = [title]
            cells += [str(of(each, name)) for name in ("regret", "variance", "late")]
            cells.append(str(interval(ratio(each))))
            cells += [f"{of(each, name).mean:.3g}" for name in ("improvement", "quality", "loss")]
            cells += [f"{of(each, 'accuracy').mean:.2%}", str(len(each["runs"]))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _budget_table(found: dict[str, Found]) -> str:
    budgets = sorted({each["budget"] for each in found.values()})
    picks: dict[str, Pick] = {
        "cumulative regret": values("regret"),
        "cumulative regret, q in place of p": unscaled,
        "cumulative variance": values("variance"),
        "cost / least": ratio,
    }
    tables = []
    for title, pick in picks.items():
        heads = [title, *(f"K = {budget}" for budget in budgets)]
        lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * len(budgets)]
        for sampler, name in TITLES.items():
            parts = {each["budget"]: each for each in _sweep(found, sampler)}
            meant = pick is not unscaled or _dashed(sampler) or sampler == "uniform"
            if len(parts) > 1 and meant:
                cells = [name]
                for budget in budgets:
                    known = budget in parts
                    cells.append(str(interval(pick(parts[budget]))) if known else "–")
                lines.append(f"| {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    seeds = [f"{len(each['runs'])} at K = {each['budget']}" for each in _sweep(found, "kvib")]
    return "\n\n".join([*tables, f"Seeds: {', '.join(seeds)}."])


def _gamma_table(found: dict[str, Found]) -> str:
    lines = [
        "| K-Vib | cumulative regret | cumulative variance | loss | seeds |",
        "|---|---:|---:|---:|---:|",
    ]
    own = found.get(f"kvib-K{BUDGET}")
    for each in [*([own] if own else []), *_by_hand(found)]:
        title = f"G = {each['bound']:g}" if each["bound"] else "no G: the default"
        cells = [title, str(of(each, "regret")), str(of(each, "variance"))]
        cells += [f"{of(each, 'loss').mean:.3g}", str(len(each["runs"]))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _why(found: dict[str, Found]) -> str:
    """What explains the numbers, where all of them are there."""
    needed = [f"{sampler}-K{BUDGET}" for sampler in ("kvib", "avare", "vrb", "uniform", "optimal")]
    if not all(name in found for name in needed):
        return ""
    late = []
    for name in needed:
        late.append(f"{TITLES[found[name]['sampler']]} {of(found[name], 'late').mean:.3g}")
    return f"""## Why
**The first rounds decide the sums.** A few clients hold most of the data, so most of l(p) comes
from them. With {BUDGET} of 100 clients per round, it takes some ten rounds until such a client is
drawn for the first time. Until then, K-Vib and Vrb treat it as a client with an update of 0: its
probability falls below the uniform one, towards theta K / N, while the probabilities of clients
that were seen rise. Avare treats it as a client with the largest update seen so far. All updates
are also at their largest in these rounds, and an unlikely draw of a large client, which counts
1 / p, throws the model back and makes them larger still. Once the large clients are known, the
order changes: the variance of the second half of the rounds is {", ".join(late)}.

**gamma** keeps unseen clients in the draw. Where no G is given, gamma is sum of omega / (t K): that
is Theorem 8's gamma without theta, and with the mean square of the scores so far for G^2. This form
was chosen on seeds 0 to 4, where the mean square of the first cohort's scores had done badly (it is
too small whenever the cohort has none of the large clients, which is likely); the runs here have
other seeds. A G near the largest score (0.12 in the first round) keeps K-Vib near uniform sampling.

**The budget.** With small budgets, uniform sampling, Mabs and OSMD do not converge at lr 0.02: the
weights 1 / p of their rare large clients make steps that are too long. Their regret at the smallest
K is that of a model that does not learn, and it falls with K in either reading. That q in place
of p makes a rival's regret rise would be true if the updates were the same at every K, but here
they shrink with the noise. With large budgets, independent coins are the better procedure: as K
grows to N, their variance goes to 0. With replacement it does not, although the cost l(K q) is then
below the least that coins can have.
"""
