"""Charts over the clients: how often each was sampled, and which data it holds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.report.charts import Chart, Series, Trace, axis, rounded, safe
from rota.report.groups import Group
from rota.report.history import History

Ints = NDArray[np.int64]

BARS = 150
"""A chart of up to this many bars shows every client; otherwise clients are binned."""
BINS = 40
"""The bins of a histogram."""
PARTS = 10
"""The number of equal groups of clients in the chart of counts against sizes."""
COLUMNS = 200
"""The columns of a heat map."""
CLASSES = 10
"""Up to this many classes have a colour each."""
ROWS = 100
"""The rows of a heat map: rarer classes share one more."""


def sampling(title: str, series: list[Series]) -> list[Chart]:
    """How often clients were sampled.

    Few clients have a bar each. Many are in a histogram, and in a chart of counts against sizes.
    """
    series = [one for one in series if _runs(one)]
    clients = [len(_counts(run, one)) for one in series for run in _runs(one)]
    if not clients:
        return []
    of = f"{title}: how" if title else "How"
    seeds = "Mean over seeds." if any(len(_runs(one)) > 1 for one in series) else ""
    if max(clients) * len(series) <= BARS:
        chart = Chart(f"sampled {title}".strip(), f"{of} often each client was sampled", seeds)
        chart.traces = [_bars(one, series) for one in series]
        chart.layout = {
            "xaxis": axis("clients, largest first"),
            "yaxis": axis("times sampled", rangemode="tozero"),
            "bargap": 0.15,
        }
        return [chart]
    counts = Chart(f"sampled {title}".strip(), f"{of} often clients were sampled")
    counts.note = f"{max(clients):,} clients by how many times they were drawn."
    counts.traces, ends = _histograms(series)
    counts.layout = {
        "xaxis": axis("times sampled", range=ends),
        "yaxis": axis("share of clients", tickformat="~%", rangemode="tozero"),
    }
    sizes = Chart(f"sampled by size {title}".strip(), f"{of} often clients were sampled, by size")
    order = f"Clients in order of size, in {PARTS} equal groups"
    sizes.note = f"{order}: the mean size and mean count of each group. {seeds}".strip()
    sizes.traces = [trace for one in series for trace in _by_size(one)]
    sizes.layout = {
        "xaxis": axis("client’s examples"),
        "yaxis": axis("times sampled", rangemode="tozero"),
    }
    return [counts, sizes] if sizes.traces else [counts]


def _bars(series: Series, beside: list[Series]) -> Trace:
    """Every client's count, largest client first; the models of one run have the same order.

    Over several seeds a bar is the mean over the clients at its place in that order.
    """
    rows, orders = [], set()
    same = [other for other in beside if _runs(other) == _runs(series)]
    for run in _runs(series):
        held, clients = _holdings(run, series)
        totals = np.sum([_holdings(run, other)[0] for other in same], axis=0)
        order = np.argsort(-totals, kind="stable")
        rows.append(_counts(run, series)[clients[order]])
        names = []
        for client, size in zip(clients[order], held[order], strict=True):
            names.append(f"client {client} ({size:,} examples)")
        orders.add(tuple(names))
    count = np.mean([row[: min(map(len, rows))] for row in rows], axis=0)
    places = list(range(1, len(count) + 1))
    # where data are dealt anew for each seed, a place in the order is not one client
    text = [f"number {place} by size" for place in places]
    return {
        "type": "bar",
        "name": safe(series.label),
        "x": places,
        "y": rounded(count),
        "text": list(orders.pop()) if len(orders) == 1 else text,
        "textposition": "none",
        "hovertemplate": "%{text}: sampled %{y:.4~g} times<extra>%{fullData.name}</extra>",
        "meta": {"series": series.key, "role": "bar"},
    }


def _histograms(series: list[Series]) -> tuple[list[Trace], list[float]]:
    """The share of clients with each count, with the seeds pooled, and the x axis' ends.

    Counts are whole numbers, and so are the bins. An empty bin on either side brings the outline
    down to the axis.
    """
    counts = [np.concatenate([_counts(run, one) for run in _runs(one)]) for one in series]
    least, most = min(int(row.min()) for row in counts), max(int(row.max()) for row in counts)
    step = -(-(most - least + 1) // BINS)
    bins = -(-(most - least + 1) // step)
    lows = least + step * np.arange(-1, bins + 2)
    names = [f"{low}" if step == 1 else f"{low} to {low + step - 1}" for low in lows[:-1].tolist()]
    traces = []
    for one, row in zip(series, counts, strict=True):
        trace = {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hvh"},
            "fill": "tozeroy",
            "name": safe(one.label),
            "x": rounded(lows[:-1] + (step - 1) / 2),
            "y": rounded(np.histogram(row, lows)[0] / len(row)),
            "text": names,
            "hovertemplate": "%{y:.1%} of clients %{text} times<extra>%{fullData.name}</extra>",
            "meta": {"series": one.key, "role": "area"},
        }
        traces.append(trace)
    return traces, [float(lows[1]) - 0.5, float(lows[-2]) - 0.5]


def _by_size(series: Series) -> list[Trace]:
    """Mean count against mean size, with the seeds pooled; nothing if all sizes are the same."""
    runs = [run for run in _runs(series) if series.model in run.data]
    if not runs:
        return []
    held = np.concatenate([_holdings(run, series)[0] for run in runs])
    count = np.concatenate([_counts(run, series)[_holdings(run, series)[1]] for run in runs])
    held, count = held[held > 0], count[held > 0]  # clients without data could not be drawn
    if not len(held) or held.min() == held.max():
        return []
    parts = np.array_split(np.argsort(held, kind="stable"), PARTS)
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": safe(series.label),
        "x": rounded([held[part].mean() for part in parts]),
        "y": rounded([count[part].mean() for part in parts]),
        "hovertemplate": (
            "%{x:,.0f} examples: sampled %{y:.3~g} times<extra>%{fullData.name}</extra>"
        ),
        "meta": {"series": series.key, "role": "line"},
    }
    return [trace]


def holdings(groups: list[Group]) -> list[Chart]:
    """Which client holds which data: a chart for each federation, by the groups' first seeds."""
    found: dict[str, tuple[str, dict[str, Any], list[Group]]] = {}
    for group in groups:
        for task, entry in _by_task(group.runs[0]).items():
            found.setdefault(json.dumps([task, entry]), (task, entry, []))[2].append(group)
    several = len({task for task, _, _ in found.values()}) > 1
    charts = []
    for number, (task, entry, whose) in enumerate(found.values()):
        title = f"{task}: data on each client" if several else "Data on each client"
        if len(whose) < len(groups):
            title += f" ({'; '.join(group.label for group in whose)})"
        chart = Chart(f"data {number}", title, _in_words(entry))
        if any(_by_task(run).get(task) != entry for group in whose for run in group.runs):
            chart.note += " The data are dealt anew for each seed; these are the first seed’s."
        labels = np.array(entry["labels"]) if "labels" in entry else None
        if labels is not None and len(labels) <= BARS and labels.shape[1] <= CLASSES:
            _stack(chart, entry, labels)
        else:
            _heat(chart, entry, labels)
        charts.append(chart)
    return charts


def _by_task(run: History) -> dict[str, Any]:
    """A run's data, which the groups of a task share."""
    return {task: run.data[model] for model, task in run.tasks.items()}


def _in_words(entry: dict[str, Any]) -> str:
    sizes = np.array(entry["sizes"])
    each = f"{sizes.min():,} each"
    if np.ptp(sizes):
        each = f"{sizes.min():,} to {sizes.max():,} each, median {np.median(sizes):,.0f}"
    training = f"{entry['examples']:,} training examples on {entry['clients']:,} clients"
    words = f"{entry['data']}: {training}, {each}."
    if "test_examples" in entry:  # the examples of a roster's clients are not at hand
        words += f" {entry['test_examples']:,} test examples."
    if len(sizes) < entry["clients"]:
        words += f" The chart shows {len(sizes):,} clients, evenly spread by size."
    return words


def _stack(chart: Chart, entry: dict[str, Any], labels: Ints) -> None:
    """Label counts on top of each other: one bar per client, largest first."""
    order = np.argsort(-np.array(entry["sizes"]), kind="stable")
    names = [f"client {client}" for client in np.array(entry["shown"])[order].tolist()]
    for label, column in enumerate(labels[order].T.tolist()):
        trace = {
            "type": "bar",
            "name": f"class {label}",
            "x": list(range(1, len(names) + 1)),
            "y": column,
            "text": names,
            "textposition": "none",
            "hovertemplate": f"%{{text}}: %{{y:,}} of class {label}<extra></extra>",
            "meta": {"role": "class", "index": label},
        }
        chart.traces.append(trace)
    chart.layout = {
        "xaxis": axis("clients, largest first"),
        "yaxis": axis("examples"),
        "barmode": "stack",
        "bargap": 0.1,
        "showlegend": True,
    }


def _heat(chart: Chart, entry: dict[str, Any], labels: Ints | None) -> None:
    """The sizes, largest first, and under them each class's share of a client's examples.

    If there are many clients, neighbours share a column.
    """
    sizes = np.array(entry["sizes"])
    order = np.argsort(-sizes, kind="stable")
    parts = np.array_split(order, min(COLUMNS, len(sizes)))
    places = np.array_split(np.arange(1, len(sizes) + 1), len(parts))
    x = rounded([part.mean() for part in places])
    bars = {
        "type": "bar",
        "x": x,
        "y": rounded([sizes[part].mean() for part in parts]),
        "hovertemplate": "number %{x:,.0f} by size: %{y:,.4~g} examples<extra></extra>",
        "meta": {"role": "sizes"},
    }
    chart.traces = [bars]
    chart.layout = {"xaxis": axis("clients, largest first"), "yaxis": axis("examples"), "bargap": 0}
    if labels is None:
        return
    names = [f"{label}" for label in range(labels.shape[1])]
    if len(names) > ROWS:
        kept = np.sort(np.argsort(-labels.sum(axis=0), kind="stable")[:ROWS])
        labels = np.column_stack([labels[:, kept], np.delete(labels, kept, axis=1).sum(axis=1)])
        names = [*(f"{label}" for label in kept.tolist()), "others"]
    share = labels / np.maximum(labels.sum(axis=1, keepdims=True), 1)
    heat = {
        "type": "heatmap",
        "x": x,
        "y": names,
        "z": [rounded(row) for row in np.transpose([share[part].mean(axis=0) for part in parts])],
        "yaxis": "y2",
        "zmin": 0,
        "hovertemplate": "number %{x:,.0f} by size: %{z:.1%} of class %{y}<extra></extra>",
        "meta": {"role": "heat"},
    }
    chart.traces.append(heat)
    chart.note += " Below the sizes: each class’s share of a client’s examples."
    chart.layout["yaxis"]["domain"] = [0.76, 1]
    chart.layout["yaxis2"] = axis("class", domain=[0, 0.7], type="category", autorange="reversed")
    chart.layout["xaxis"]["anchor"] = "y2"


def _runs(series: Series) -> list[History]:
    """The series' runs that have drawn clients for its model."""
    return [run for run in series.group.runs if series.model in run.sampled]


def _counts(run: History, series: Series) -> Ints:
    return run.sampled[str(series.model)]


def _holdings(run: History, series: Series) -> tuple[Ints, Ints]:
    """The sizes of the listed clients, and their numbers."""
    entry = run.data[str(series.model)]
    return np.array(entry["sizes"], np.int64), np.array(entry["shown"], np.int64)
