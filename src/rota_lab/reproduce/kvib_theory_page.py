"""K-Vib's theory as a page: tables, charts and claims, from the parts that are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rota_lab.reproduce import kvib_theory_sections as sections
from rota_lab.reproduce.chart import COLOURS, Chart, Line
from rota_lab.reproduce.interval import FAILS, HOLDS, Claim, interval, judged
from rota_lab.reproduce.kvib_parts import CURVES, SETTINGS, named
from rota_lab.reproduce.kvib_studies import LARGEST, RATES, SWEPT
from rota_lab.reproduce.kvib_theory_answer import SHORT, answer
from rota_lab.reproduce.kvib_theory_claims import ALL_BUDGETS, statements
from rota_lab.reproduce.kvib_theory_view import (
    KVIB,
    OURS,
    SETTING_TITLES,
    SOURCE,
    WHERES,
    View,
    table,
    title,
)
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds

DRAWN = (*SOURCE.values(), KVIB, "avare-independent", "proportional-independent", OURS, "optimal")
"""The lanes in the chart over the budgets."""


def report(found: dict[str, Found], everything: Sequence[str], quick: bool) -> Result:
    """Claims, tables and charts, from the parts that are finished."""
    view = View(found)
    checks = {}
    if len(found) < len(everything):
        checks[f"all parts are finished ({len(found)} of {len(everything)})"] = False
    claims = judged(statements(view))
    text = "\n".join(
        [
            sections.WARNING * quick + sections.INTRODUCTION,
            answer(view, claims),
            sections.MEASURED.format(**sections.numbers(view)),
            *(section(view) for section in sections.ALL),
            sections.not_run(found, everything),
            listed(claims),
        ]
    )
    name = "K-Vib: variance and regret on Synthetic"
    some = rows(view)
    return Result(
        "kvib-theory", name, text, some, charts(view), checks, quick, claims=claims, listed=False
    )


CLAIMS = """
## Claims
All claims are judged together with Holm's correction over the page. The interval beside a verdict
is the claim's own 95 % interval, without the correction. Variances and relative regrets are
compared as ratios: 2 times means that the other one is twice as large. Other numbers are
differences, which are above 0 where the claim holds.

"""


def listed(claims: Sequence[Claim]) -> str:
    """All claims, and how many of each group hold, fail, or cannot be told."""
    groups: dict[str, list[str]] = {}
    for claim in claims:
        group = claim.words.partition(":")[0].partition(", K = ")[0]
        groups.setdefault(group, []).append(claim.verdict)
    lines = []
    for group, verdicts in groups.items():
        counts = [verdicts.count(verdict) for verdict in (HOLDS, FAILS)]
        lines.append([group, *map(str, counts), str(len(verdicts) - sum(counts))])
    counted = table(["claims on", "hold", "fail", "cannot tell"], lines)
    each = table(["claim", "verdict"], [[claim.words, f"**{claim.verdict}**"] for claim in claims])
    return "\n".join([CLAIMS, counted, "", each, ""])


def rows(view: View) -> list[Row]:
    """The cumulative variances at K = 10."""
    out = []
    for setting, name in SETTING_TITLES.items():
        for where, words in WHERES.items():
            for lane in (*SHORT, "optimal"):
                values = list(view.numbers(setting, where, lane, "variance").values())
                if values:
                    quantity = f"{name}, {words}, {title(lane)}: cumulative variance"
                    out.append(over_seeds(quantity, None, values))
    return out


def charts(view: View) -> list[Chart]:
    """The charts that have lines."""
    some = [over_rounds(view, setting) for setting in SETTINGS]
    some += [over_budgets(view), over_time(view), over_rates(view), who_holds(view)]
    return [chart for chart in some if chart.lines]


def drawn(
    place: int, name: str, x: Sequence[float], columns: Sequence[Sequence[float]], log: bool = True
) -> Line:
    """A line of means with a band; `columns` has the values of each point."""
    points = [interval(np.log10(each).tolist() if log else list(each)) for each in columns]
    band = None
    if min(len(each) for each in columns) > 2:
        band = ([point.low for point in points], [point.high for point in points])
    mean = [point.mean for point in points]
    return Line(name, x, mean, place, place // len(COLOURS), band)


def over_rounds(view: View, setting: str) -> Chart:
    """The variance over the rounds, on own updates."""
    lines, parts = [], view.study(setting)
    for place, lane in enumerate(CURVES if parts else ()):
        curves = [part["own"].get(lane, {}).get("curve") for part in parts]
        curves = [curve for curve in curves if curve]
        if curves and min(map(min, curves)) > 0:
            columns = list(zip(*curves, strict=True))
            ends = np.linspace(0, parts[0]["rounds"], len(columns) + 1)
            x = ((ends[1:] + ends[:-1]) / 2).tolist()
            lines.append(drawn(place, title(lane), x, columns))
    words = f"Variance over the rounds, {SETTING_TITLES[setting]}, own updates, K = 10"
    return Chart(f"variance-{setting}", words, "round", "log10 variance", lines)


def over_budgets(view: View) -> Chart:
    """The cumulative variance against the budget, on shared updates."""
    lines = []
    for place, lane in enumerate(DRAWN):
        columns = []
        for budget in ALL_BUDGETS:
            values = view.numbers("logits", "shared", named(lane, budget), "variance").values()
            columns.append(list(values))
        if all(columns) and all(min(each) > 0 for each in columns):
            x = np.log10(ALL_BUDGETS).tolist()
            lines.append(drawn(place, title(lane), x, columns))
    words = "Cumulative variance against the budget, logits, shared updates"
    return Chart("budgets", words, "log10 K", "log10 variance", lines)


def over_time(view: View) -> Chart:
    """Eq. 7 over T: the static regrets and the hindsight gap."""
    parts = [part["over time"] for part in view.study("logits")]
    parts = [over for over in parts if len(over["ends"]) > 1]
    pairs: dict[str, Callable[[dict[str, Any]], list[float]]] = {
        "hindsight gap": lambda over: minus(over["fixed"], over["least"]),
        "static, K-Vib": lambda over: minus(over[KVIB], over["fixed"]),
        "static, full feedback": lambda over: minus(over["kvib-full"], over["fixed"]),
        "static, uniform": lambda over: minus(over["uniform-fixed"], over["fixed"]),
        "static, Vrb": lambda over: minus(over["vrb-multinomial"], over["fixed"]),
        "static, Avare": lambda over: minus(over["avare-multinomial"], over["fixed"]),
    }
    lines = []
    for place, (name, take) in enumerate(pairs.items()):
        columns = list(zip(*(take(over) for over in parts), strict=True))
        if columns and min(map(min, columns)) > 0:
            x = np.log10(parts[0]["ends"]).tolist()
            lines.append(drawn(place, name, x, columns))
    words = "Equation 7 over T, logits, shared updates, K = 10"
    return Chart("theorems", words, "log10 T", "log10 regret", lines)


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def over_rates(view: View) -> Chart:
    """The sweep of learning rates."""
    lines, parts = [], view.study("sweep")
    for place, lane in enumerate(SWEPT if parts else ()):
        columns = []
        for rate in RATES:
            losses = [part["own"][f"{lane}-{rate:g}"]["loss"] for part in parts]
            columns.append([loss for loss in losses if loss is not None])
        if all(columns):
            lines.append(drawn(place, title(lane), np.log10(RATES).tolist(), columns))
    words = "Test loss against the learning rate, logits, K = 5"
    return Chart("rates", words, "log10 learning rate", "log10 test loss", lines)


def who_holds(view: View) -> Chart:
    """K-Vib's Figure 6."""
    lines = []
    for part in view.study("holds"):
        for place, (name, held) in enumerate(part["of"].items()):
            y = [100 * share for share in held["shares"]]
            lines.append(Line(name, [100 * each for each in LARGEST], y, place))
    words = "Figure 6: what the clients with most data hold"
    return Chart("holds", words, "% of the clients", "% of the examples", lines)
