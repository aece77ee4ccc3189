"""Charts over the rounds: accuracy, loss, the spread across clients, and whatever else a run wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.report import numbers
from rota.report.charts import Chart, Series, Trace, plain, safe
from rota.report.groups import Group
from rota.report.runs import Record

Pick = Callable[[Record], float | None]
Floats = NDArray[np.float64]
Table = dict[str, dict[str, list[float | None]]]

POINTS = 1000
"""Longer curves are thinned to this many points: more than a chart has pixels."""
FEW = 15
"""A curve of up to this many points shows where they are: a single one would not be seen as a line."""
EVERY = " all"
"""Marks the x table's entries for all rounds; the others are for those that were tested."""
SHARE = {"tickformat": "~%", "autorangeoptions": {"clipmin": -0.02, "clipmax": 1.02}}
"""An axis of shares: with few points plotly would go far beyond what a share can be."""
MEASURES = {"accuracy": "score", "loss": "loss"}
"""What is averaged, where it is no share."""
FAIRNESS = {"worst_accuracy", "accuracy_spread"}
"""The plain values that a round with several models has of them together."""
KNOWN = FAIRNESS | {
    "round",
    "accuracy",
    "loss",
    "seconds",
    "bytes_up",
    "bytes_down",
    "server_bytes",
    "client_seconds",
}
"""The plain values of a round that the page shows in their own places; others get a chart each."""


def x_table(groups: list[Group]) -> tuple[dict[str, dict[str, str]], Table]:
    """The x axes' titles and units, and the groups' x values: means over their seeds, in units that suit all of them."""
    picks: dict[str, Pick] = {
        "round": lambda line: line["round"],
        "seconds": lambda line: line["seconds"],
        "bytes": lambda line: line["bytes_up"] + line["bytes_down"],
    }
    table = {}
    for number, group in enumerate(groups):
        for along in (f"{number}", f"{number}{EVERY}"):
            table[along] = {
                name: _values(group, along, pick).mean(axis=0) for name, pick in picks.items()
            }
    most = {
        name: max(float(np.max(entry[name], initial=0.0)) for entry in table.values())
        for name in picks
    }
    second, time = numbers.scale(most["seconds"], numbers.SECONDS)
    byte, sent = numbers.scale(most["bytes"], numbers.BYTES)
    units = {"round": 1.0, "seconds": second, "bytes": byte}
    axes = {
        "round": {"title": "round", "unit": ""},
        "seconds": {"title": f"virtual time ({time})", "unit": time},
        "bytes": {"title": f"data sent, up and down ({sent})", "unit": sent},
    }
    return axes, {
        along: {name: plain(values / units[name]) for name, values in entry.items()}
        for along, entry in table.items()
    }


def score(name: str, title: str, series: list[Series]) -> Chart:
    """The test accuracy or loss; an accuracy that is no share is called a score."""
    share = name == "accuracy" and all(one.share for one in series)
    word = "accuracy" if share else MEASURES[name]
    chart = Chart(
        f"{name} {title}".strip(),
        f"{title}: test {word}" if title else f"Test {word}",
        progress=True,
    )
    chart.empty = "No round has been tested yet."
    for one in series:
        chart.traces += _curve(one, one.along, _score(name, one.model), "line", share)
    chart.layout["yaxis"] = _axis(share)
    chart.note = (
        "Share of the test examples that are classified correctly."
        if share
        else f"Mean {word} of the test examples."
    )
    targets = {run.target for one in series for run in one.group.runs}
    if name == "accuracy" and len(targets) == 1 and (target := targets.pop()) is not None:
        chart.note += f" The dotted line is the target, {numbers.score(share)(target)}."
        line = {"color": "#888888", "width": 1, "dash": "dot"}
        chart.layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": target,
                "y1": target,
                "line": line,
            }
        ]
    return chart


def _axis(share: bool) -> dict[str, Any]:
    """The y axis of accuracies, or of what is no share."""
    return SHARE if share else {"tickformat": "~g"}


def worst(chart: Chart, series: list[Series]) -> None:
    """Mark the worst model of every round on a chart of the accuracies, under their lines."""
    for one in series:
        chart.traces = [
            *_curve(one, one.along, _score("worst_accuracy", None), "under", one.share),
            *chart.traces,
        ]
        chart.note += " The broad line lies under the worst model of each round."


def across(series: list[Series]) -> list[Chart]:
    """How evenly the models are served: the worst of them for each group (where the chart of accuracies has it not), and their spread."""
    share = all(one.share for one in series)
    low = Chart(
        "worst",
        "The worst model",
        "The lowest of the models’ accuracies in each round.",
        progress=True,
    )
    for one in series if len(series) > 1 else []:
        low.traces += _curve(one, one.along, _score("worst_accuracy", None), "line", share)
    apart = Chart(
        "model spread",
        "How far the models are apart",
        "Standard deviation of the models’ accuracies.",
        progress=True,
    )
    for one in series:
        apart.traces += _curve(one, one.along, _score("accuracy_spread", None), "line", share)
    low.layout, apart.layout = (
        {"yaxis": _axis(share)},
        {"yaxis": {"tickformat": "~%" if share else "~g", "rangemode": "tozero"}},
    )
    return [chart for chart in (low, apart) if chart.traces]


def training(chart: Chart, series: Series) -> None:
    """Add the clients' own loss to a chart of the test loss: every round has one."""
    own = replace(series, label="training")
    traces = _curve(own, own.along + EVERY, _score("train_loss", own.model), "dotted", False)
    if traces:
        for trace in chart.traces:
            trace["name"] = "test"
        chart.traces += traces
        chart.title = "Loss"
        chart.note = "Mean loss of the test examples, and of the cohort’s training examples while they were trained on."
        chart.layout["showlegend"] = True


def spread(title: str, series: list[Series]) -> Chart:
    """How the accuracy differs between clients, where they were tested one by one."""
    share = all(one.share for one in series)
    word = "accuracy" if share else MEASURES["accuracy"]
    heading = f"{title}: {word} across clients" if title else f"{word.capitalize()} across clients"
    chart = Chart(f"spread {title}".strip(), heading, progress=True)
    chart.note = "The median client, and the band from the 10th to the 90th percentile; each client is tested on data like its own."
    for one in series:
        low, middle, high = (
            _values(one.group, one.along, _client(part, one.model)).mean(axis=0)
            for part in ("p10", "p50", "p90")
        )
        if np.isfinite(middle).any():
            chart.traces += [
                *_band(one, one.along, low, high),
                _line(one, one.along, middle, "line", share),
            ]
    if any(len(one.group.runs) > 1 for one in series):
        chart.note += " All three are means over seeds."
    chart.layout = {"yaxis": _axis(share)}
    return chart


def measures(groups: list[Group], series: list[Series]) -> list[Chart]:
    """The rounds' other plain values: the variance of the estimate, regret, whatever a run was asked to write."""
    lines = [line for group in groups for run in group.runs for line in run.rounds]
    keys = dict.fromkeys(
        key
        for line in lines
        for key, value in line.items()
        if key not in KNOWN and type(value) in (int, float)
    )
    charts = []
    for key in keys:
        pick: Pick = _score(key, None)
        chart = Chart(
            f"measure {key}",
            key.replace("_", " ").capitalize(),
            progress=True,
            layout={"yaxis": {"tickformat": "~g"}},
        )
        for one in series[: len(groups)]:
            chart.traces += _curve(one, one.along + EVERY, pick, "line", False)
        for trace in chart.traces:
            trace["connectgaps"] = True  # not every round need have one
        charts.append(chart)
    return charts


def _curve(series: Series, along: str, pick: Pick, role: str, share: bool) -> list[Trace]:
    """A group's mean over its seeds, and the band from the lowest to the highest seed where there are several."""
    values = _values(series.group, along, pick)
    if not np.isfinite(values).any():
        return []
    edges = (
        _band(series, along, values.min(axis=0), values.max(axis=0))
        if len(values) > 1 and role == "line"
        else []
    )
    return [*edges, _line(series, along, values.mean(axis=0), role, share)]


def _band(series: Series, along: str, low: Floats, high: Floats) -> list[Trace]:
    """The area between two curves: plotly fills from a trace to the one before it."""
    edge = {
        "type": "scatter",
        "mode": "lines" if len(low) > 1 else "markers",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    meta = {"series": series.key, "along": along}
    lower = {**edge, "y": plain(low), "meta": {**meta, "role": "edge"}}
    return [lower, {**edge, "y": plain(high), "fill": "tonexty", "meta": {**meta, "role": "band"}}]


def _line(series: Series, along: str, y: Floats, role: str, share: bool) -> Trace:
    meta = {
        "series": series.key,
        "along": along,
        "role": role,
        "value": "%{y:.1%}" if share else "%{y:.4~g}",
    }
    mode = "lines+markers" if len(y) <= FEW else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": safe(series.label),
        "y": plain(y),
        "meta": meta,
    }


def _score(name: str, model: str | None) -> Pick:
    if model is None:
        return lambda line: line.get(name)
    return lambda line: line["models"].get(model, {}).get(name)


def _client(part: str, model: str | None) -> Pick:
    return lambda line: line["models"].get(model, {}).get("client_accuracy", {}).get(part)


def _values(group: Group, along: str, pick: Pick) -> Floats:
    """A row for each run of the group, a column for each round that all of them have (so that a mean is always over the same
    seeds); runs that have none are left out. Where there are too many rounds, an even selection with both ends."""
    lines = [run.rounds if along.endswith(EVERY) else run.tested for run in group.runs]
    runs = [{line["round"]: line for line in some} for some in lines if some]
    if not runs:
        return np.zeros((1, 0))
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    if len(rounds) > POINTS:
        rounds = [
            rounds[place] for place in np.linspace(0, len(rounds) - 1, POINTS).round().astype(int)
        ]
    picked: list[list[Any]] = [[pick(run[now]) for now in rounds] for run in runs]
    return np.array(picked, dtype=np.float64)  # None becomes nan
