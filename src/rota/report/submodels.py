"""Charts about sub-models: what rounds took, who held a part, and which units parts left out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.report import curves, numbers
from rota.report.charts import Chart, Series, Trace, axis, rounded, safe
from rota.report.groups import Group
from rota.report.history import History

CLIENTS = 40
"""The rows of the chart of clients: those that held parts most often."""
COLUMNS = 200
"""The columns of the chart of clients: neighbouring rounds share one if there are more."""
PLACES = 64
"""The columns of the chart of units."""
SETTINGS = 4
"""Charts of single runs are drawn for at most this many settings."""


def submodels(groups: list[Group], series: list[Series]) -> list[Chart]:
    """All of the section's charts; none if no client could hold a part of a model."""
    parted = [group for group in groups if any(run.widths for run in group.runs)]
    if not parted:
        return []
    several = len(groups) > 1
    charts = [_times(groups, series[: len(groups)])]
    if several:
        charts.append(_against_time(groups, series[: len(groups)]))
    for number, group in enumerate(parted[:SETTINGS]):
        of = f"{group.label}: " if several else ""
        charts += [_holders(number, of, group), *_units(number, of, group)]
    if len(parted) > SETTINGS and len(charts) > 2:
        rest = f"Charts of clients and units are left out for {len(parted) - SETTINGS} settings."
        charts[2].note += f" {rest}"
    return [chart for chart in charts if chart.traces]


def _times(groups: list[Group], series: list[Series]) -> Chart:
    """The time of each round, and for a single run the client that the round waited for."""
    chart = Chart("round time", "Time of each round", progress=True)
    lines = [line for group in groups for run in group.runs for line in run.rounds]
    step, unit = numbers.scale(
        max((line["round_seconds"] for line in lines), default=0.0), numbers.SECONDS
    )
    chart.layout = {"yaxis": axis(f"virtual time ({unit})", rangemode="tozero")}
    chart.note = "A round lasts as long as its slowest client."
    for one in series:
        traces = curves.times(one, step)
        if traces and len(one.group.runs) == 1 and one.group.runs[0].widths:
            traces = _waited_for(traces, one, step, unit)
        chart.traces += traces
    if len(groups) == 1:
        if any(trace["mode"] == "markers" and any(trace["y"]) for trace in chart.traces[1:]):
            chart.note += " Dots: the slowest client held a part."
        chart.note += _before_and_after(groups[0].runs[0])
    return chart


def _waited_for(traces: list[Trace], series: Series, step: float, unit: str) -> list[Trace]:
    """The line with each round's slowest client in its labels, and dots where it held a part."""
    *_, line = traces
    run = series.group.runs[0]
    of = {entry["round"]: entry.get("slowest") for entry in run.rounds}
    text: list[str] = []
    dots: list[float | None] = []
    for now, y in zip(curves.rounds_of(series.group), line["y"], strict=True):
        slowest = of[now]
        if slowest is None:
            text.append("")
            dots.append(None)
            continue
        part = slowest["width"] < 1
        text.append(f"client {slowest['client']}, width {slowest['width']:.3g}")
        dots.append(y if part else None)
    meta = {**line["meta"], "value": f"%{{y:.3~g}} {unit}, %{{text}}"}
    line |= {"mode": "lines" if len(text) > 1 else "markers", "text": text, "meta": meta}
    quiet = {key: value for key, value in line["meta"].items() if key != "value"}
    marks = {**line, "mode": "markers", "y": dots, "hoverinfo": "skip", "meta": quiet}
    return [*traces, marks]


def _before_and_after(run: History) -> str:
    """How long the slowest client took before it held parts, and with parts, in words."""
    with_part: dict[int, list[float]] = {}
    for line in run.rounds:
        for part in line.get("held", {}).values():
            for client, seconds in zip(part["client"], part["seconds"], strict=True):
                if seconds is not None:
                    with_part.setdefault(client, []).append(seconds)
    whole: dict[int, list[float]] = {}
    for line in run.rounds:
        slowest = line.get("slowest")
        if slowest and slowest["width"] == 1 and slowest["client"] in with_part:
            whole.setdefault(slowest["client"], []).append(slowest["seconds"])
    if not whole:
        return ""
    client = max(whole, key=lambda each: np.mean(whole[each]))
    before, after = float(np.mean(whole[client])), float(np.mean(with_part[client]))
    took = f"{numbers.duration(before)} with the whole model"
    then = f"{numbers.duration(after)} with parts"
    return f" Client {client} took {took} where the round waited for it, and {then}."


def _against_time(groups: list[Group], series: list[Series]) -> Chart:
    """Accuracy against virtual time, whatever axis the reader has chosen for the other charts."""
    share = all(one.share for one in series)
    word = curves.measured(series)[0]
    chart = Chart("accuracy against time", f"Test {word} against virtual time")
    curve = [curves.against_time(one) for one in series]
    most = max((float(np.max(x, initial=0.0)) for x, _ in curve), default=0.0)
    step, unit = numbers.scale(most, numbers.SECONDS)
    value = "%{y:.1%}" if share else "%{y:.4~g}"
    for one, (x, y) in zip(series, curve, strict=True):
        if np.isfinite(y).any():
            trace = {
                "type": "scatter",
                "mode": "lines+markers" if len(y) <= curves.FEW else "lines",
                "name": safe(one.label),
                "x": rounded(x / step),
                "y": rounded(y),
                "hovertemplate": f"{value} after %{{x:.3~g}} {unit}",
                "meta": {"series": one.key, "role": "line"},
            }
            chart.traces.append(trace)
    seeds = any(len(group.runs) > 1 for group in groups)
    chart.note = "The clock runs as long as each round’s slowest client."
    chart.note += " Means over seeds." if seeds else ""
    chart.layout = {"xaxis": axis(f"virtual time ({unit})", rangemode="tozero")}
    chart.layout["yaxis"] = curves.score_axis(share)
    return chart


def _holders(number: int, of: str, group: Group) -> Chart:
    """Who held a part, and when; a whole model is 0 % left out."""
    run = next(run for run in group.runs if run.widths)
    title = f"{of}who trained how much" if of else "Who trained how much"
    chart = Chart(f"holders {number}", title)
    times: dict[int, int] = {}
    for held in run.widths.values():
        for client, width in held.items():
            if width < 1:
                times[client] = times.get(client, 0) + 1
    if not times:
        chart.note = "Nobody has held a part yet."
        return chart
    shown = sorted(sorted(times, key=lambda client: (-times[client], client))[:CLIENTS])
    rounds = sorted(run.widths)
    bins = np.array_split(np.array(rounds), min(COLUMNS, len(rounds)))
    z, text = [], []
    for client in shown:
        row, words = [], []
        for some in bins:
            widths = [w for now in some.tolist() if (w := run.widths[now].get(client)) is not None]
            row.append(1 - float(np.mean(widths)) if widths else np.nan)
            words.append(_when(some) + (f"width {np.mean(widths):.3g}" if widths else "not drawn"))
        z.append(rounded(row))
        text.append(words)
    heat = {
        "type": "heatmap",
        "x": rounded([some.mean() for some in bins]),
        "y": [f"{client}" for client in shown],
        "z": z,
        "zmin": 0,
        "zmax": 1 - min(min(held.values(), default=1.0) for held in run.widths.values()),
        "text": text,
        "hovertemplate": "client %{y}, %{text}<extra></extra>",
        "hoverongaps": False,
        "meta": {"role": "heat"},
    }
    chart.traces = [heat]
    chart.layout = {
        "xaxis": axis("round"),
        "yaxis": axis("client", type="category", autorange="reversed"),
    }
    chart.note = "Colour: the share of each layer’s units that a client left out; 0 % is the whole."
    chart.note += " Blank: not drawn."
    if len(times) > len(shown):
        chart.note += f" The {len(shown)} of {len(times):,} clients that held parts most often."
    chart.note += _seed(group, run)
    return chart


def _when(some: NDArray[np.int64]) -> str:
    return f"round {some[0]}: " if len(some) == 1 else f"rounds {some[0]} to {some[-1]}: "


def _units(number: int, of: str, group: Group) -> list[Chart]:
    """How often parts left out each unit, by layer; layers are stretched to one length."""
    run = next(run for run in group.runs if run.widths)
    charts = []
    for model, layers in run.dropped.items():
        parts = sum(len(line["held"][model]["client"]) for line in run.rounds if "held" in line)
        if not parts:
            continue
        which = of + (f"{model}: " if len(run.dropped) > 1 else "")
        words = "ow often each unit was left out"
        chart = Chart(f"units {number} {model}", f"{which}h{words}" if which else f"H{words}")
        z, text = [], []
        for counts in layers.values():
            at = np.arange(PLACES) * len(counts) // PLACES
            share = counts[at] / parts
            z.append(rounded(share))
            text.append([f"{place + 1} of {len(counts)}" for place in at.tolist()])
        heat: dict[str, Any] = {
            "type": "heatmap",
            "x": list(range(1, PLACES + 1)),
            "y": [safe(layer) for layer in layers],
            "z": z,
            "zmin": 0,
            "zmax": max(float(counts.max()) / parts for counts in layers.values()),
            "text": text,
            "hovertemplate": "%{y}, %{text}: left out by %{z:.0%} of parts<extra></extra>",
            "meta": {"role": "heat"},
        }
        chart.traces = [heat]
        chart.layout = {
            "xaxis": axis("units of a layer, first to last", showticklabels=False, ticks=""),
            "yaxis": axis("", type="category", autorange="reversed"),
        }
        chart.note = f"Share of the {parts:,} parts that left a unit out, by layer."
        chart.note += " Layers of many units are shown in groups of neighbours."
        chart.note += _seed(group, run)
        charts.append(chart)
    return charts


def _seed(group: Group, run: History) -> str:
    """Which seed a chart of a single run shows."""
    return f" Seed {run.config.get('seed')}." if len(group.runs) > 1 else ""
