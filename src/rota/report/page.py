"""The page: the places for charts and tables, the words around them, and everything it needs inside."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from rota.report import clients, curves, tables
from rota.report.charts import Chart, Series, models_of, series_of, worst_of
from rota.report.groups import METHODS, Group
from rota.report.runs import averaged
from rota.running.folder import flat

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""The browser holds the page to it: nothing is fetched, whatever is in it."""
COLOURS = 6
DASHES = ("solid", "dash", "dot", "dashdot")
CROWD = 5
"""So many bands, or filled histograms, can lie over each other and still be read; of more, only the one under the pointer is drawn."""
AXES = {"round": "Rounds", "seconds": "Virtual time", "bytes": "Data sent"}


def render(groups: list[Group]) -> str:
    """The whole page."""
    name, series, models = title(groups), series_of(groups), models_of(groups)
    axes, x = curves.x_table(groups)
    sections = _charts(groups, series, models)
    series = [*series, *worst_of(groups)]
    colours = [one.key for one in series if one.key not in ("mean", "worst")]
    shown = {chart.key: chart for charts in sections.values() for chart in charts if chart.traces}
    payload = {
        "series": {
            one.key: _style(colours.index(one.key) if one.key in colours else None)
            for one in series
        },
        "crowd": CROWD,
        "axes": axes,
        "x": x,
        "charts": {
            key: {"traces": chart.traces, "layout": chart.layout, "progress": chart.progress}
            for key, chart in shown.items()
        },
    }
    crowded = f"Bands are left out while more than {CROWD} lines are shown: point at a name above to see its band."
    notes = {"Across clients": crowded if len(series) > CROWD else ""}
    notes["Progress" if sections["Progress"] else "Each model"] = _seeds_in_words(
        groups, notes["Across clients"]
    )
    parts = [
        _headline(name, groups, models),
        _controls(series),
        *(
            _section(heading, notes.get(heading, ""), "".join(map(_figure, charts)), "charts")
            for heading, charts in sections.items()
        ),
        _models(groups, models),
        _runs(groups),
        _section(
            "Failures",
            "Clients whose work could not be used, by reason, over all seeds.",
            tables.failures(groups),
        ),
        _configuration(groups),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(name)} – rota</title>
<style>{_file("page.css")}</style>
</head>
<body>
{"".join(parts)}
<script>{plotly()}</script>
<script type="application/json" id="page">{_json(payload)}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


def plotly() -> str:
    """plotly.js, less the hosts it names: they belong to its maps and its logo, which this page has none of."""
    from plotly.offline import get_plotlyjs

    return re.sub(r"https?://(?!www\.w3\.org/)", "", get_plotlyjs())


def title(groups: list[Group]) -> str:
    """The folder's name, or that of the folder that holds them all."""
    runs = [run for group in groups for run in group.runs]
    places = {run.folder.parent.name for run in runs} if len(runs) > 1 else {runs[0].folder.name}
    return places.pop() if len(places) == 1 and places != {""} else "Comparison"


def _charts(groups: list[Group], series: list[Series], models: list[str]) -> dict[str, list[Chart]]:
    """The charts by section. Models of one run stand in one chart, unless their scores are of different kinds."""
    together = averaged([run for group in groups for run in group.runs])
    each = [("", [one for one in series if one.model])]
    if len(groups) > 1 and len(models) > 1:
        each = [(model, [replace(one, model=model) for one in series]) for model in models]
    scored = each if together or len(groups) > 1 else [(f"{one.model}", [one]) for one in series]
    return {
        "Progress": _progress(groups, series) if together else [],
        "Across models": curves.across(series[: len(groups)]),
        "Each model": [
            curves.score(name, model, some)
            for model, some in scored
            for name in ("accuracy", "loss")
            if model
        ],
        "Across clients": [
            chart for model, some in scored if (chart := curves.spread(model, some)).traces
        ],
        "Other measures": curves.measures(groups, series),
        "Who was sampled": [
            chart for model, some in each for chart in clients.sampling(model, some)
        ],
        "Who holds what": clients.holdings(groups),
    }


def _progress(groups: list[Group], series: list[Series]) -> list[Chart]:
    """The accuracies and the losses; of one run with one model, the training loss too; of one with several, the worst of them."""
    accuracy, loss = curves.score("accuracy", "", series), curves.score("loss", "", series)
    if len(series) == 1 and series[0].model:
        curves.training(loss, series[0])
    curves.worst(accuracy, worst_of(groups))
    return [accuracy, loss]


def _headline(name: str, groups: list[Group], models: list[str]) -> str:
    runs = [run for group in groups for run in group.runs]
    facts = [
        _span({len(models)}, "model") + (f" ({', '.join(models)})" if models else ""),
        _span({run.clients for run in runs}, "client"),
        _span({len(run.rounds) for run in runs}, "round"),
    ]
    if len(groups) > 1:
        facts.append(_span({len(groups)}, "setting"))
    if len(runs) > 1:
        facts.append(_span({len(runs)}, "run"))
    facts += _methods(groups)
    summaries = {str(run.config.get("summary", "")) for run in runs}
    summary = (
        f"<p>{escape(summaries.pop())}</p>" if len(summaries) == 1 and summaries != {""} else ""
    )
    late = [
        f"{run.folder.name} at round {len(run.rounds)} of {run.config.get('rounds', '?')}"
        for run in runs
        if not run.finished
    ]
    warning = f'<p class="warning">Not finished: {escape(", ".join(late))}.</p>' if late else ""
    cards = ""
    for label, value, remark in tables.tiles(groups):
        small = f"<small>{escape(remark)}</small>" if remark else ""
        long = ' class="long"' if len(value) > 13 else ""
        cards += f"<div><dt>{escape(label)}</dt><dd{long}>{escape(value)}{small}</dd></div>"
    return f'<header><h1>{escape(name)}</h1>{summary}<p>{escape(" · ".join(facts))}</p>{warning}<dl class="tiles">{cards}</dl></header>'


def _methods(groups: list[Group]) -> list[str]:
    """The sampler, estimator and server, where all runs have the same; the others are in the settings' names."""
    found = {key: {flat(group.runs[0].config).get(key) for group in groups} for key in METHODS}
    return [
        f"{key.removesuffix('.name')} {name}"
        for key, names in found.items()
        if len(names) == 1 and (name := names.pop())
    ]


def _controls(series: list[Series]) -> str:
    """The x axis' choice, and a button for each series."""
    axes, chips = "", ""
    for key, word in AXES.items():
        checked = " checked" if key == "round" else ""
        axes += f'<label><input type="radio" name="axis" value="{key}"{checked}><span>{word}</span></label>'
    for one in series:
        mark = f"<i></i><span>{escape(one.label)}</span>"
        chips += f'<button type="button" class="chip" aria-pressed="true" data-series="{escape(one.key)}">{mark}</button>'
    every = '<button type="button" id="all" hidden>show all</button>'
    legend = (
        f'<div class="chips" role="group" aria-label="Show or hide">{chips}{every}</div>'
        if len(series) > 1
        else ""
    )
    return f"""<nav class="bar" aria-label="Charts">
<fieldset class="switch"><legend>Against</legend>{axes}</fieldset>
<label class="check"><input type="checkbox" id="log"><span>log loss</span></label>
{legend}</nav>
<noscript><p class="warning">The charts need JavaScript; the tables do not.</p></noscript>"""


def _section(heading: str, note: str, body: str, kind: str = "plain") -> str:
    words = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<section><h2>{escape(heading)}</h2>{words}<div class="{kind}">{body}</div></section>'
        if body
        else ""
    )


def _figure(chart: Chart) -> str:
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    body = (
        f'<div class="plot" data-chart="{escape(chart.key)}"></div>'
        if chart.traces
        else f'<p class="empty">{escape(chart.empty)}</p>'
    )
    return f"<figure><figcaption><h3>{escape(chart.title)}</h3>{note}</figcaption>{body}</figure>"


def _models(groups: list[Group], models: list[str]) -> str:
    """Where there are several: the table of models, that of the rounds that each took to the target, and that of what all of it cost."""
    if not tables.several(groups):
        return ""
    note = "Each model’s final score; they are of different kinds."
    if averaged([run for group in groups for run in group.runs]):
        note = "Final accuracies. The worst model is each run’s own; the spread is the models’ standard deviation."
    aims = tables.to_target(groups, models)
    note += " All at once is the first round in which all models are at the target." if aims else ""
    section = _section("Models", note, tables.models(groups, models) + aims)
    if not _costs(groups):
        return section
    note = "Communication, the clients’ computing and the server’s memory until the runs’ ends; in brackets, multiples of the least."
    return section + _section("Costs", note, tables.costs(groups))


def _costs(groups: list[Group]) -> bool:
    """Whether there is a table of costs: settings, each of several models, to be compared."""
    return len(groups) > 1 and tables.several(groups)


def _runs(groups: list[Group]) -> str:
    """The table of groups; folded under it, that of single runs."""
    each = [
        Group(f"{group.label}, seed {run.config.get('seed')}", [run])
        for group in groups
        for run in group.runs
    ]
    if len(each) == 1:
        return ""
    body = tables.runs(groups, paid=not _costs(groups))
    if len(each) == len(groups):
        return _section("Runs", "", body)
    every = f"<details><summary>Every run ({len(each)})</summary>{tables.runs(each)}</details>"
    return _section(
        "Runs", "± is half of the 95 % interval of the mean over seeds (Student’s t).", body + every
    )


def _configuration(groups: list[Group]) -> str:
    body = differences = tables.differences(groups)
    for group in groups:
        of = f"config.toml of {group.label}" if len(groups) > 1 else "config.toml"
        first, *others = [f"{run.config.get('seed')}" for run in group.runs]
        seeds = f" (seed {first}; the same with {', '.join(others)})" if others else ""
        body += f"<details><summary>{escape(of + seeds)}</summary><pre>{escape(group.runs[0].text)}</pre></details>"
    return _section(
        "Configuration",
        "What differs between the settings, and each setting’s file." if differences else "",
        body,
    )


def _seeds_in_words(groups: list[Group], crowded: str) -> str:
    several = [group for group in groups if len(group.runs) > 1]
    uneven = any(len({len(run.rounds) for run in group.runs}) > 1 for group in several)
    words = (
        f"Lines are means over seeds, bands go from the lowest to the highest seed. {crowded}".strip()
        if several
        else ""
    )
    return words + (
        " Where seeds stopped at different rounds, a line ends with the first of them."
        if uneven
        else ""
    )


def _style(number: int | None) -> dict[str, Any]:
    """A place in the palette, which colour-blind people can tell apart; from the seventh on, dashed. None is ink, for means and worst."""
    if number is None:
        return {"colour": -1, "dash": "solid"}
    return {"colour": number % COLOURS, "dash": DASHES[number // COLOURS % len(DASHES)]}


def _span(values: set[int], noun: str) -> str:
    """3 clients; 10 to 20 clients."""
    least, most = min(values), max(values)
    return f"{least:,}{f' to {most:,}' if most > least else ''} {noun}{'' if most == 1 else 's'}"


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("rota.report").joinpath(name).read_text(encoding="utf-8")
