"""Charts over the rounds: accuracy, loss, the spread across clients, and what else a run wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.report import numbers
from rota.report.charts import Chart, Series, Trace, rounded, safe
from rota.report.groups import Group
from rota.report.history import History
from rota.running.record import Record

Pick = Callable[[Record], float | None]
Floats = NDArray[np.float64]
Table = dict[str, dict[str, list[float | None]]]

POINTS = 1000
"""Longer curves are thinned to this many points, more than a chart has pixels."""
FEW = 15
"""A curve of up to this many points also has markers: a single point is not seen as a line."""
EVERY = " all"
"""Marks the x table's entries for all rounds; the other entries are for the tested rounds."""
SHARE = {"tickformat": "~%", "autorangeoptions": {"clipmin": -0.02, "clipmax": 1.02}}
"""An axis of shares: with few points plotly would extend it far beyond 0 and 1."""
KNOWN = {
    "round",
    "accuracy",
    "loss",
    "worst_accuracy",
    "accuracy_spread",
    "seconds",
    "round_seconds",
    "bytes_up",
    "bytes_down",
    "server_bytes",
    "client_seconds",
    "parts",
    "narrowest",
    "own_mean",
    "own_worst",
    "own_p10",
    "own_spread",
    "shared_mean",
    "asked_for_groups",
}
"""The plain values of a round that the page shows elsewhere. Each other value gets a chart."""


def x_table(groups: list[Group]) -> tuple[dict[str, dict[str, str]], Table]:
    """The titles and units of the x axes, and the groups' x values as means over their seeds."""
    picks: dict[str, Pick] = {
        "round": lambda line: line["round"],
        "seconds": lambda line: line["seconds"],
        "bytes": lambda line: line["bytes_up"] + line["bytes_down"],
    }
    table: dict[str, dict[str, Floats]] = {}
    most = dict.fromkeys(picks, 0.0)
    for number, group in enumerate(groups):
        for along in (f"{number}", f"{number}{EVERY}"):
            entry = table.setdefault(along, {})
            for name, pick in picks.items():
                entry[name] = _values(group, along, pick).mean(axis=0)
                most[name] = max(most[name], float(np.max(entry[name], initial=0.0)))
    second, time = numbers.scale(most["seconds"], numbers.SECONDS)
    byte, sent = numbers.scale(most["bytes"], numbers.BYTES)
    units = {"round": 1.0, "seconds": second, "bytes": byte}
    axes = {
        "round": {"title": "round", "unit": ""},
        "seconds": {"title": f"virtual time ({time})", "unit": time},
        "bytes": {"title": f"data sent, up and down ({sent})", "unit": sent},
    }
    scaled: Table = {}
    for along, entry in table.items():
        scaled[along] = {name: rounded(values / units[name]) for name, values in entry.items()}
    return axes, scaled


def _personal(run: History) -> bool:
    """Whether the clients of a run use models of their own."""
    return bool(run.config.get("personal", {}).get("name", "none") != "none")


def score(name: str, title: str, series: list[Series]) -> Chart:
    """The test score or loss."""
    share = name == "accuracy" and all(one.share for one in series)
    word, better = measured(series) if name == "accuracy" else ("loss", "lower")
    heading = f"{title}: test {word}" if title else f"Test {word}"
    chart = Chart(f"{name} {title}".strip(), heading, progress=True)
    chart.empty = "No round has been tested yet."
    for one in series:
        chart.traces += _curve(one, one.along, _score(name, one.model), "line", share)
    chart.layout["yaxis"] = score_axis(share)
    chart.note = "Mean loss on the test examples."
    if name == "accuracy" and not share:
        chart.note = f"{named(series)} on the test examples. {better.capitalize()} is better."
    if share:
        chart.note = "Share of the test examples that are classified correctly."
    if any(_personal(run) for one in series for run in one.group.runs):
        chart.note += " With personal models, it is the mean over those of the clients."
    targets = {run.target for one in series for run in one.group.runs}
    if name == "accuracy" and len(targets) == 1 and (target := targets.pop()) is not None:
        chart.note += f" The dotted line is the target, {numbers.score(share)(target)}."
        chart.layout["shapes"] = [_level(target)]
    return chart


def measured(series: list[Series]) -> tuple[str, str]:
    """What the score of these is called, and whether "higher" or "lower" is better."""
    found = {one.measured for one in series}
    return found.pop() if len(found) == 1 else ("score", "higher")


def named(series: list[Series]) -> str:
    """The same at the beginning of a sentence."""
    word = measured(series)[0]
    return word[0].upper() + word[1:]


def _level(y: float) -> dict[str, Any]:
    """A dotted line across the chart."""
    line = {"color": "#888888", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def score_axis(share: bool) -> dict[str, Any]:
    """The y axis of accuracies, or of scores that are not shares."""
    return SHARE if share else {"tickformat": "~g"}


def worst(chart: Chart, series: list[Series]) -> None:
    """Mark the worst model of each round on a chart of the accuracies, under their lines."""
    for one in series:
        pick = _score("worst_accuracy", None)
        chart.traces = [*_curve(one, one.along, pick, "under", one.share), *chart.traces]
        chart.note += " The broad line marks the worst model of each round."


def across(series: list[Series]) -> list[Chart]:
    """How evenly the models are served: their spread, and for several groups the worst of them."""
    share = all(one.share for one in series)
    low = Chart("worst", "The worst model", progress=True, layout={"yaxis": score_axis(share)})
    low.note = f"The worst {measured(series)[0]} of the models in each round."
    for one in series if len(series) > 1 else []:
        low.traces += _curve(one, one.along, _score("worst_accuracy", None), "line", share)
    apart = Chart("model spread", "Spread of the models", progress=True)
    apart.note = f"Standard deviation of the models’ {measured(series)[0]}."
    apart.layout = {"yaxis": {"tickformat": "~%" if share else "~g", "rangemode": "tozero"}}
    for one in series:
        apart.traces += _curve(one, one.along, _score("accuracy_spread", None), "line", share)
    return [chart for chart in (low, apart) if chart.traces]


def over_rounds(series: Series, name: str, share: bool) -> list[Trace]:
    """A value of each tested round."""
    return _curve(series, series.along, _score(name, None), "line", share)


def training(chart: Chart, series: Series) -> None:
    """Add the clients' training loss, which every round has, to a chart of the test loss."""
    own = replace(series, label="training")
    traces = _curve(own, own.along + EVERY, _score("train_loss", own.model), "dotted", False)
    if traces:
        for trace in chart.traces:
            trace["name"] = "test"
        chart.traces += traces
        chart.title = "Loss"
        chart.note = (
            "Mean loss on the test examples, and on the cohort’s training examples during training."
        )
        chart.layout["showlegend"] = True


def spread(title: str, series: list[Series]) -> Chart:
    """How the accuracy differs between clients, where each was tested on its own data."""
    share = all(one.share for one in series)
    word = measured(series)[0]
    heading = f"{title}: {word} across clients" if title else f"{named(series)} across clients"
    chart = Chart(f"spread {title}".strip(), heading, progress=True)
    chart.note = (
        "The median client, and the band from the 10th to the 90th percentile."
        " Each client is tested on data like its own."
    )
    for one in series:
        low, middle, high = (
            _values(one.group, one.along, _client(part, one.model)).mean(axis=0)
            for part in ("p10", "p50", "p90")
        )
        if np.isfinite(middle).any():
            chart.traces += _band(one, one.along, low, high)
            chart.traces.append(_line(one, one.along, middle, "line", share))
    if any(len(one.group.runs) > 1 for one in series):
        chart.note += " All three are means over seeds."
    chart.layout = {"yaxis": score_axis(share)}
    return chart


def measures(groups: list[Group], series: list[Series]) -> list[Chart]:
    """The rounds' other plain values, such as metrics that the run was asked to write."""
    keys: dict[str, None] = {}
    for group in groups:
        for run in group.runs:
            for line in run.rounds:
                keys |= {k: None for k, v in line.items() if type(v) in (int, float)}
    charts = []
    for key in keys:
        if key in KNOWN:
            continue
        chart = Chart(f"measure {key}", key.replace("_", " ").capitalize(), progress=True)
        chart.layout = {"yaxis": {"tickformat": "~g"}}
        for one in series[: len(groups)]:
            chart.traces += _curve(one, one.along + EVERY, _score(key, None), "line", False)
        for trace in chart.traces:
            trace["connectgaps"] = True  # not every round must have a value
        charts.append(chart)
    return charts


def times(series: Series, step: float) -> list[Trace]:
    """The time of each round, in steps of so many seconds."""

    def pick(line: Record) -> float:
        return float(line["round_seconds"]) / step

    return _curve(series, series.along + EVERY, pick, "line", False)


def against_time(series: Series) -> tuple[Floats, Floats]:
    """The virtual clock at each test, and the score; means over the seeds."""
    seconds = _values(series.group, series.along, lambda line: line["seconds"])
    scores = _values(series.group, series.along, _score("accuracy", series.model))
    return seconds.mean(axis=0), scores.mean(axis=0)


def _curve(series: Series, along: str, pick: Pick, role: str, share: bool) -> list[Trace]:
    """A group's mean over its seeds, and the band from the lowest to the highest seed."""
    values = _values(series.group, along, pick)
    if not np.isfinite(values).any():
        return []
    edges: list[Trace] = []
    if len(values) > 1 and role == "line":
        edges = _band(series, along, values.min(axis=0), values.max(axis=0))
    return [*edges, _line(series, along, values.mean(axis=0), role, share)]


def _band(series: Series, along: str, low: Floats, high: Floats) -> list[Trace]:
    """The area between two curves. Plotly fills from a trace to the one before it."""
    edge = {
        "type": "scatter",
        "mode": "lines" if len(low) > 1 else "markers",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    meta = {"series": series.key, "along": along}
    lower = {**edge, "y": rounded(low), "meta": {**meta, "role": "edge"}}
    upper = {**edge, "y": rounded(high), "fill": "tonexty", "meta": {**meta, "role": "band"}}
    return [lower, upper]


def _line(series: Series, along: str, y: Floats, role: str, share: bool) -> Trace:
    value = "%{y:.1%}" if share else "%{y:.4~g}"
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(y) <= FEW else "lines",
        "name": safe(series.label),
        "y": rounded(y),
        "meta": {"series": series.key, "along": along, "role": role, "value": value},
    }


def _score(name: str, model: str | None) -> Pick:
    """A value of the round, or of one of its models."""
    if model is None:
        return lambda line: line.get(name)
    return lambda line: line["models"].get(model, {}).get(name)


def _client(part: str, model: str | None) -> Pick:
    return lambda line: line["models"].get(model, {}).get("client_accuracy", {}).get(part)


def _values(group: Group, along: str, pick: Pick) -> Floats:
    """A row for each run of the group, a column for each round that all of them have.

    So a mean is always over the same seeds. Runs without any round are left out. Of very many
    rounds it is an even selection with both ends.
    """
    runs, rounds = _rounds(group, along)
    picked: list[list[Any]] = [[pick(run[now]) for now in rounds] for run in runs]
    return np.array(picked, dtype=np.float64).reshape(len(runs), len(rounds))  # None becomes nan


def rounds_of(group: Group) -> list[int]:
    """The rounds that a curve over all rounds shows."""
    return _rounds(group, EVERY)[1]


def _rounds(group: Group, along: str) -> tuple[list[dict[int, Record]], list[int]]:
    """Each run's lines by round, and the rounds that a curve shows."""
    runs = []
    for run in group.runs:
        lines = run.rounds if along.endswith(EVERY) else run.tested
        if lines:
            runs.append({line["round"]: line for line in lines})
    if not runs:
        return [{}], []
    rounds = sorted(set.intersection(*map(set, runs)))
    if len(rounds) > POINTS:
        places = np.linspace(0, len(rounds) - 1, POINTS).round().astype(int)
        rounds = [rounds[place] for place in places]
    return runs, rounds
