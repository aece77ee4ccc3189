"""What each client gets, and who was grouped with whom."""

from __future__ import annotations

from typing import Any

from rota.report import curves, numbers, tables
from rota.report.charts import Chart, Series, Trace, axis, rounded, safe
from rota.report.groups import Group
from rota.report.history import History, measured, shares

SETTINGS = 4
"""Groups are drawn for at most this many settings."""
BARS = 150
"""The most clients with a bar each."""
LISTED = 20
"""The most groups whose sizes are named."""
COLUMNS = {
    "own_mean": "Mean client",
    "own_worst": "Worst client",
    "own_p10": "10th percentile",
    "own_spread": "Spread of clients",
    "shared_mean": "Mean on the whole test set",
}


def table(groups: list[Group]) -> str:
    """One row per setting; empty if no client has a test set or a group of its own."""
    runs = [run for group in groups for run in group.runs]
    known = [key for key in COLUMNS if any(run.last(key) is not None for run in runs)]
    if not known:
        return ""
    rows, form = [], numbers.score(shares(runs))
    for group in groups:
        cells = [[run.last(key) for run in group.runs] for key in known]
        means = [
            numbers.mean([value for value in cell if value is not None], form)
            if any(value is not None for value in cell)
            else numbers.NONE
            for cell in cells
        ]
        rows.append([group.label, *means])
    return tables.table(["Run", *(COLUMNS[key] for key in known)], rows)


def charts(groups: list[Group], series: list[Series]) -> list[Chart]:
    """Clients' accuracies by round, and for single settings each client's, and the groups."""
    out, share = [], all(one.share for one in series)
    word = curves.named(series)
    for key, words in (("own_mean", "mean client"), ("own_p10", "10th percentile of clients")):
        chart = Chart(key, f"{word} of the {words}", progress=True)
        chart.note = "The model that each client uses, on the client’s own test set."
        chart.layout = {"yaxis": curves.score_axis(share)}
        for one in series:
            chart.traces += curves.over_rounds(one, key, share)
        out.append(chart)
    for number, group in enumerate(groups[:SETTINGS]):
        of = f"{group.label}: " if len(groups) > 1 else ""
        out += [_each(number, of, group), *_alike(number, of, group)]
    return [chart for chart in out if chart.traces]


def _each(number: int, of: str, group: Group) -> Chart:
    """Each client's accuracy in the last test, one colour per group."""
    words = f"ach client’s {measured(group.runs)[0]}"
    chart = Chart(f"gets {number}", f"{of}e{words}" if of else f"E{words}")
    chart.note = "On the client’s own test set, in the last test."
    share = shares(group.runs)
    value = "%{y:.1%}" if share else "%{y:.4~g}"
    entry = group.runs[0].tested[-1].get("groups_of_clients", {}) if group.runs[0].tested else {}
    if sum(len(each.get("own", {})) for each in entry.values()) > BARS:
        return chart
    chart.title += ", by group" * (len(entry) > 1)
    names: list[str] = []
    for index, (model, each) in enumerate(entry.items()):
        own = each.get("own", {})
        if not own:
            continue
        chart.traces.append(
            {
                "type": "bar",
                "name": safe(model),
                "x": [f"{client}" for client in own],
                "y": rounded([float("nan") if v is None else v for v in own.values()]),
                "hovertemplate": f"client %{{x}} in {safe(model)}: {value}<extra></extra>",
                "meta": {"role": "class", "index": index},
            }
        )
        names += own
    first = group.runs[0].tested[0].get("groups_of_clients", {}) if names else {}
    told = [pair for each in first.values() for pair in each.get("own", {}).items()]
    before = {client: value for client, value in told if value is not None}
    if len(group.runs[0].tested) > 1 and before:
        chart.note += " A diamond is the first test."
        chart.traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "first test",
                "x": names,
                "y": rounded([before.get(client, float("nan")) for client in names]),
                "hovertemplate": f"client %{{x}} in the first test: {value}<extra></extra>",
                "meta": {"role": "before"},
            }
        )
    chart.layout = {
        "xaxis": axis("clients", type="category"),
        "yaxis": curves.score_axis(share),
        "bargap": 0.1,
        "showlegend": len(entry) > 1,
    }
    return chart


def _alike(number: int, of: str, group: Group) -> list[Chart]:
    """How alike clients were when the last groups were formed, ordered by group."""
    run = group.runs[0]
    found = [line["groups"] for line in run.rounds if "groups" in line]
    if not found:
        return []
    asked = sum(line.get("asked_for_groups", 0) for line in run.rounds)
    out = []
    for task, entry in found[-1].items():
        which = of + (f"{task}: " if len(found[-1]) > 1 else "")
        words = "ho was grouped with whom"
        chart = Chart(f"alike {number} {task}", f"{which}w{words}" if which else f"W{words}")
        members = entry["members"]
        sizes = ", ".join(f"{len(each):,}" for each in members[:LISTED])
        chart.note = f"{len(members)} groups, of {sizes} clients."
        if len(members) == 1:
            chart.note = f"One group, of {sizes} clients."
        elif len(members) > LISTED:
            chart.note = f"{len(members):,} groups, the first of {sizes} clients."
        chart.traces = [_heat(entry, members)]
        if "similarity" in entry:
            chart.note += " The darker, the more alike two clients are; groups follow each other."
        chart.layout = {
            "xaxis": axis("clients", type="category", showticklabels=False, ticks=""),
            "yaxis": axis("clients", type="category", autorange="reversed"),
        }
        if asked and len(found[-1]) == 1:
            chart.note += f" The run's groups took {asked:,} trainings or tests of clients."
        chart.note += _seed(group, run)
        out.append(chart)
    return out


def _heat(entry: dict[str, Any], members: list[list[int]]) -> Trace:
    """The similarity of clients, or whether they are in one group."""
    of = {client: g for g, clients in enumerate(members) for client in clients}
    some = entry.get("clients") or [client for clients in members for client in clients][:60]
    z = entry.get("similarity") or [[float(of[a] == of[b]) for b in some] for a in some]
    names = [f"{client} (group {of[client]})" for client in some]
    return {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": z,
        "zmin": 0,
        "hovertemplate": "clients %{x} and %{y}: %{z:.3f}<extra></extra>",
        "meta": {"role": "heat"},
    }


def _seed(group: Group, run: History) -> str:
    """Which seed a chart of a single run shows."""
    return f" Seed {run.config.get('seed')}." if len(group.runs) > 1 else ""
