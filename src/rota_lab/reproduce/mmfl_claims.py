"""The claims of multi-model FL's Table I: the order of its methods, and their costs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from rota_lab.reproduce.interval import FAILS, HOLDS, Claim, Statement, interval, judged
from rota_lab.reproduce.mmfl_cells import (
    PAPER,
    TITLES,
    Cells,
    difference,
    finished,
    grid,
    lead,
    three_digits,
)

COSTS = {"communication": "bytes", "computation": "client_seconds", "memory": "server_bytes"}
"""The source's cost columns, and what is measured."""
LOW, HIGH = "Low", "High"
MEASURED = {
    "fedvarp": (LOW, LOW, HIGH),
    "mifa": (LOW, LOW, HIGH),
    "scaffold": (LOW, LOW, LOW),
    "random": (LOW, LOW, LOW),
    "full": (HIGH, HIGH, LOW),
    "gvr": (LOW, HIGH, LOW),
    "lvr": (LOW, LOW, LOW),
    "gvr-star": (LOW, HIGH, HIGH),
}
"""The source's words on each method's communication, computation and memory."""

WHY = """\
Two of the source's words on costs cannot be had together with what its methods do:

- **Communication of GVR, LVR and GVR\\*.** Before each draw, every client needs the current models
  to compute the norms of its updates (GVR) or its losses (LVR). Here these downloads count. The
  source's Low is right for uploads, since only drawn clients send updates.
- **Memory of SCAFFOLD.** Somebody has to keep a control variate per client and model. Here that is
  the server, which sends it with the model, so clients need not remember anything. SCAFFOLD's own
  paper leaves it with the clients; then the server's memory is Low, and the clients' is not."""


def pairs(setting: str) -> list[tuple[str, str]]:
    """All pairs of the source's methods, the better one first."""
    paper = PAPER[setting]
    ranked = sorted(paper, key=lambda method: -paper[method])
    return list(combinations(ranked, 2))


def leads(found: Cells, setting: str) -> dict[tuple[str, str], list[float]]:
    """By pair: the better method's lead, seed by seed, if both methods have runs."""
    out = {}
    for better, worse in pairs(setting):
        ahead = lead(found, setting, better, worse)
        if ahead:
            out[better, worse] = ahead
    return out


def claims(found: Cells, settings: Iterable[str]) -> list[Claim]:
    """The order, judged over the seeds, and the costs, which are counted."""
    settings = list(settings)
    return judged(_order(found, settings)) + _costs(found, settings)


def _order(found: Cells, settings: list[str]) -> list[Statement]:
    """First all pairs together, then pair by pair over all runs of all settings."""
    out, every = [], dict[frozenset[str], list[float]]()
    words: dict[frozenset[str], list[str]] = {}
    for setting in settings:
        ahead = leads(found, setting)
        common = min((len(each) for each in ahead.values()), default=0)
        if common > 1:
            right = np.array([each[:common] for each in ahead.values()]) > 0
            each = (right.sum(axis=0) - len(ahead) / 2).tolist()
            start = f"{setting} tasks: more than half of the {len(ahead)} pairs of methods"
            out.append(Statement(f"{start} are in the source's order", each, " pairs"))
        for (better, worse), values in ahead.items():
            pair = frozenset((better, worse))
            every.setdefault(pair, []).extend(values)
            words.setdefault(pair, []).append(f"{TITLES[better]} is above {TITLES[worse]}")
    for pair, values in every.items():
        if len(values) > 1:
            same = list(dict.fromkeys(words[pair]))
            text = same[0] + f" (with {settings[-1]} tasks: below it)" * bool(same[1:])
            out.append(Statement(text, values, " points", scale=0.01, each="run"))
    return out


def in_order(found: Cells, setting: str) -> tuple[int, int, int]:
    """How many pairs are in the source's order by the means, of how many; and clearly against."""
    ahead = leads(found, setting).values()
    right = sum(np.mean(values) > 0 for values in ahead)
    against = sum(len(values) > 1 and interval(values).high < 0 for values in ahead)
    return int(right), len(ahead), against


def all_pairs(found: Cells, setting: str) -> list[str]:
    """A table of all pairs: the source's difference, and ours."""
    rows = []
    for (better, worse), values in leads(found, setting).items():
        theirs = PAPER[setting][better] - PAPER[setting][worse]
        order = "yes" if np.mean(values) > 0 else "**no**"
        names = [TITLES[better], TITLES[worse]]
        rows.append([*names, f"{theirs:.3f}", difference(values), order, str(len(values))])
    head = ("method", "is above", "source", "measured", "the source's order", "seeds")
    return grid(head, rows, numbers=(2, 3, 5))


def word(value: float, least: float, most: float) -> str:
    """Low or High: which of the extremes is nearer, as a factor."""
    return LOW if value * value < least * most else HIGH


def costs(found: Cells, setting: str, name: str) -> dict[str, float]:
    """A cost of each of the source's methods that has runs: the mean over its seeds."""
    out = {}
    for method in PAPER[setting]:
        runs = finished(found, setting, method)
        if runs:
            out[method] = float(np.mean([run[name] for run in runs]))
    return out


def words(found: Cells, setting: str) -> dict[str, list[str]]:
    """Our Low and High of each of the source's methods, in the order of COSTS."""
    out: dict[str, list[str]] = {}
    for name in COSTS.values():
        known = costs(found, setting, name)
        for method, value in known.items():
            mine = word(value, min(known.values()), max(known.values()))
            out.setdefault(method, []).append(mine)
    return out


def _costs(found: Cells, settings: list[str]) -> list[Claim]:
    """Cost by cost, whether every method's word is the source's; costs are counted, not drawn."""
    out = []
    for setting in settings:
        ours = words(found, setting)
        if len(ours) < len(PAPER[setting]):
            continue
        for place, cost in enumerate(COSTS):
            other = [TITLES[each] for each in ours if ours[each][place] != MEASURED[each][place]]
            text = f"{setting} tasks: {cost} is Low and High for the methods that the source names"
            same = f"{len(ours) - len(other)} of {len(ours)}"
            but = f", but not for {', '.join(other)}" if other else ""
            out.append(Claim(f"{text}: {same}{but}", FAILS if other else HOLDS))
    return out


def cost_table(found: Cells, setting: str) -> list[str]:
    """The source's words beside ours; where they differ, ours are in bold."""
    rows = []
    for method, ours in words(found, setting).items():
        row = [TITLES[method]]
        for theirs, mine in zip(MEASURED[method], ours, strict=True):
            row.append(f"{theirs} / {mine}" if theirs == mine else f"{theirs} / **{mine}**")
        rows.append(row)
    head = ("method", *(f"{cost}, source / here" for cost in COSTS))
    return grid(head, rows, numbers=())


def spread(found: Cells, setting: str) -> str:
    """The factor between the dearest and the cheapest method, by cost."""
    out = []
    for cost, name in COSTS.items():
        values = costs(found, setting, name).values()
        factor = max(values) / min(values)
        out.append(f"{three_digits(factor)} in {cost}")
    return ", ".join(out)
