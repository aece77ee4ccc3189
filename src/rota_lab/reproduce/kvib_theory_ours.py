"""The section on rota's own sampler: on Synthetic, elsewhere, and where it fails."""

from __future__ import annotations

import math

from rota_lab.reproduce.interval import interval
from rota_lab.reproduce.kvib_parts import named
from rota_lab.reproduce.kvib_theory_claims import ALL_BUDGETS, against, ours_of
from rota_lab.reproduce.kvib_theory_text import OURS_TEXT
from rota_lab.reproduce.kvib_theory_view import (
    KVIB,
    OURS,
    SETTING_TITLES,
    WHERES,
    View,
    middle,
    table,
    times,
    title,
)


def ours(view: View) -> str:
    """rota's own sampler: against all on Synthetic, elsewhere, and where it fails."""
    rows = []
    for setting, name in SETTING_TITLES.items():
        for where, words in WHERES.items():
            for budget in ALL_BUDGETS:
                mine = named(OURS, budget)
                by_lane = {
                    lane: view.ratios(setting, where, lane, mine, "variance")
                    for lane in view.rivals(setting, where, budget)
                }
                by_lane = {lane: logs for lane, logs in by_lane.items() if logs}
                if not by_lane:
                    continue
                best = min(by_lane, key=lambda lane: sum(by_lane[lane]) / len(by_lane[lane]))
                optimal = view.ratios(setting, where, mine, named("optimal", budget), "variance")
                cells = [f"{name}, {words}, K = {budget}", str(len(by_lane))]
                cells += [title(best.partition("-K")[0]), times(by_lane[best])]
                kvib = by_lane.get(named(KVIB, budget), [])
                rows.append([*cells, times(kvib), times(optimal)])
    heads = ["Synthetic", "rivals", "best rival", "best rival / ours", "K-Vib / ours"]
    first = table([*heads, "ours / optimal"], rows)
    second, third = _elsewhere(view, "other"), _elsewhere(view, "made")
    return "\n".join(
        [f"## rota's own sampler\n{OURS_TEXT}", first, "", second, "", third, "", _fails(view), ""]
    )


def _elsewhere(view: View, study: str) -> str:
    """Every sampler's variance divided by that of rota's, on other updates."""
    parts, rows = view.study(study), []
    lanes = list(
        dict.fromkeys(lane for part in parts for by in part["budgets"].values() for lane in by)
    )
    mine = ours_of(lanes)
    lanes = [lane for lane in lanes if lane != mine]
    for part in parts:
        for budget, by in part["budgets"].items():
            cells = [f"{part['which']}, K = {budget}"]
            rows.append([*cells, *(times(against(by[lane], by[mine])) for lane in lanes)])
    heads = {"other": "other federations: variance / ours", "made": "made-up updates: / ours"}
    return table([heads[study], *(title(lane) for lane in lanes)], rows)


def _fails(view: View) -> str:
    """Where a rival that knows no more has less variance than rota's sampler."""
    out = []
    for part in [*view.study("other"), *view.study("made")]:
        for budget, by in part["budgets"].items():
            better, mine = [], ours_of(by)
            for lane, values in by.items():
                logs = against(values, by[mine])
                known = lane.startswith("succession") or lane == "optimal"
                if not known and len(logs) > 1 and interval(logs).high < 0:
                    ratio = middle([math.exp(each) for each in logs])
                    better.append(f"{title(lane)} ({ratio:.3g} times)")
            if better:
                out.append(f"- {part['which']}, K = {budget}: {'; '.join(better)}.")
    if not out:
        return "No rival has clearly less variance than rota's sampler on these updates."
    head = "**Its failures.** These rivals have clearly less variance than rota's sampler:"
    return "\n".join([head, "", *out])
