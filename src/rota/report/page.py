"""The page: the places for charts and tables, the words around them, and all that it needs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from rota.policies import KINDS
from rota.recipe.differences import flat
from rota.report import clients, curves, gets, tables
from rota.report.charts import Chart, Series, models_of, series_of, worst_of
from rota.report.groups import Group, methods
from rota.report.history import History, averaged
from rota.report.submodels import submodels

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""The browser enforces it: the page fetches nothing, whatever is in it."""
COLOURS = 6
DASHES = ("solid", "dash", "dot", "dashdot")
CROWD = 5
"""This many bands, or filled histograms, can overlap and still be read. If there are more, only the
one under the pointer is drawn."""
CLIENTS = "Scores of the clients’ own models on their own test sets, in the last test."
AXES = {"round": "Rounds", "seconds": "Virtual time", "bytes": "Data sent"}


def render(groups: list[Group]) -> str:
    """The whole page."""
    name, series, models = title(groups), series_of(groups), models_of(groups)
    sections = _charts(groups, series, models)
    series = [*series, *worst_of(groups)]
    crowded = ""
    if len(series) > CROWD:
        hint = "point at a name above to see its band"
        crowded = f"Bands are left out while more than {CROWD} lines are shown: {hint}."
    notes = {"Across clients": crowded}
    notes["Progress" if sections["Progress"] else "Each model"] = _about_seeds(groups, crowded)
    parts = [_headline(name, groups, models), _controls(series)]
    for heading, charts in sections.items():
        body = "".join(map(_figure, charts))
        parts.append(_section(heading, notes.get(heading, ""), body, "charts"))
    failures = "Clients whose update could not be used, by reason, over all seeds."
    parts += [
        _models(groups, models),
        _section("Clients", CLIENTS, gets.table(groups)),
        _runs(groups),
        _section("Failures", failures, tables.failures(groups)),
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
<script type="application/json" id="page">{_json(_payload(groups, series, sections))}</script>
<script>{_file("page.js")}</script>
</body>
</html>
"""


def _payload(
    groups: list[Group], series: list[Series], sections: dict[str, list[Chart]]
) -> dict[str, Any]:
    """What page.js draws from."""
    axes, x = curves.x_table(groups)
    coloured = [one.key for one in series if one.key not in ("mean", "worst")]
    styles, drawn = {}, {}
    for one in series:
        styles[one.key] = _style(coloured.index(one.key) if one.key in coloured else None)
    for chart in (chart for charts in sections.values() for chart in charts):
        if chart.traces:
            drawn[chart.key] = {
                "traces": chart.traces,
                "layout": chart.layout,
                "progress": chart.progress,
            }
    return {"series": styles, "crowd": CROWD, "axes": axes, "x": x, "charts": drawn}


def plotly() -> str:
    """plotly.js without the hosts it names: they are for its maps and logo, which are not used."""
    from plotly.offline import get_plotlyjs

    return re.sub(r"https?://(?!www\.w3\.org/)", "", get_plotlyjs())


def title(groups: list[Group]) -> str:
    """The folder's name, or the name of the folder that holds all runs."""
    runs = _all(groups)
    places = {run.folder.parent.name for run in runs} if len(runs) > 1 else {runs[0].folder.name}
    return places.pop() if len(places) == 1 and places != {""} else "Comparison"


def _all(groups: list[Group]) -> list[History]:
    return [run for group in groups for run in group.runs]


def _charts(groups: list[Group], series: list[Series], models: list[str]) -> dict[str, list[Chart]]:
    """The charts by section.

    The models of one run share a chart, unless their scores are of different kinds.
    """
    together = averaged(_all(groups))
    each = [("", [one for one in series if one.model])]
    if len(groups) > 1 and len(models) > 1:
        each = [(model, [replace(one, model=model) for one in series]) for model in models]
    scored = each
    if len(groups) == 1 and not together:
        scored = [(f"{one.model}", [one]) for one in series]
    by_model, across, sampled = [], [], []
    for model, some in scored:
        if model:
            by_model += [curves.score(name, model, some) for name in ("accuracy", "loss")]
        across.append(curves.spread(model, some))
    for model, some in each:
        sampled += clients.sampling(model, some)
    return {
        "Progress": _progress(groups, series) if together else [],
        "Across models": curves.across(series[: len(groups)]),
        "Each model": by_model,
        "Across clients": [chart for chart in across if chart.traces],
        "What each client gets": gets.charts(groups, series[: len(groups)]),
        "Sub-models": submodels(groups, series),
        "Other measures": curves.measures(groups, series),
        "Who was sampled": sampled,
        "Who holds which data": clients.holdings(groups),
    }


def _progress(groups: list[Group], series: list[Series]) -> list[Chart]:
    """The accuracies and the losses.

    One run with one model also has the training loss, one with several the worst of its models.
    """
    accuracy, loss = curves.score("accuracy", "", series), curves.score("loss", "", series)
    if len(series) == 1 and series[0].model:
        curves.training(loss, series[0])
    curves.worst(accuracy, worst_of(groups))
    return [accuracy, loss]


def _headline(name: str, groups: list[Group], models: list[str]) -> str:
    runs = _all(groups)
    facts = [
        _span({len(models)}, "model") + (f" ({', '.join(models)})" if models else ""),
        _span({run.clients for run in runs}, "client"),
        _span({len(run.rounds) for run in runs}, "round"),
    ]
    if len(groups) > 1:
        facts.append(_span({len(groups)}, "setting"))
    if len(runs) > 1:
        facts.append(_span({len(runs)}, "run"))
    words = " · ".join([*facts, *_methods(groups)])
    summaries = {str(run.config.get("summary", "")) for run in runs}
    summary = ""
    if len(summaries) == 1 and summaries != {""}:
        summary = f"<p>{escape(summaries.pop())}</p>"
    late = []
    for run in runs:
        if not run.finished:
            total = run.config.get("rounds", "?")
            late.append(f"{run.folder.name} at round {len(run.rounds)} of {total}")
    warning = f'<p class="warning">Not finished: {escape(", ".join(late))}.</p>' if late else ""
    cards = ""
    for label, value, remark in tables.tiles(groups):
        small = f"<small>{escape(remark)}</small>" if remark else ""
        long = ' class="long"' if len(value) > 13 else ""
        cards += f"<div><dt>{escape(label)}</dt><dd{long}>{escape(value)}{small}</dd></div>"
    heading = f"<h1>{escape(name)}</h1>{summary}<p>{escape(words)}</p>"
    return f'<header>{heading}{warning}<dl class="tiles">{cards}</dl></header>'


def _methods(groups: list[Group]) -> list[str]:
    """The methods that all runs have in common; the settings' names have the others."""
    found = []
    for key in methods():
        names = {flat(group.runs[0].config).get(key) for group in groups}
        kind, name = key.removesuffix(".name"), names.pop()
        if not names and name and name != KINDS[kind].usual:
            found.append(f"{kind} {name}")
    return found


def _controls(series: list[Series]) -> str:
    """The choice of the x axis, and a button for each series."""
    axes, chips = "", ""
    for key, word in AXES.items():
        checked = " checked" if key == "round" else ""
        radio = f'<input type="radio" name="axis" value="{key}"{checked}>'
        axes += f"<label>{radio}<span>{word}</span></label>"
    for one in series:
        mark = f"<i></i><span>{escape(one.label)}</span>"
        which = f'aria-pressed="true" data-series="{escape(one.key)}"'
        chips += f'<button type="button" class="chip" {which}>{mark}</button>'
    legend = ""
    if len(series) > 1:
        every = '<button type="button" id="all" hidden>show all</button>'
        group = 'class="chips" role="group" aria-label="Show or hide"'
        legend = f"<div {group}>{chips}{every}</div>"
    return f"""<nav class="bar" aria-label="Charts">
<fieldset class="switch"><legend>Against</legend>{axes}</fieldset>
<label class="check"><input type="checkbox" id="log"><span>log loss</span></label>
{legend}</nav>
<noscript><p class="warning">The charts need JavaScript; the tables do not.</p></noscript>"""


def _section(heading: str, note: str, body: str, kind: str = "tables") -> str:
    """A section; nothing without a body."""
    if not body:
        return ""
    words = f"<p>{escape(note)}</p>" if note else ""
    return f'<section><h2>{escape(heading)}</h2>{words}<div class="{kind}">{body}</div></section>'


def _figure(chart: Chart) -> str:
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    if chart.traces:
        body = f'<div class="plot" data-chart="{escape(chart.key)}"></div>'
    else:
        body = f'<p class="empty">{escape(chart.empty)}</p>'
    return f"<figure><figcaption><h3>{escape(chart.title)}</h3>{note}</figcaption>{body}</figure>"


def _models(groups: list[Group], models: list[str]) -> str:
    """For several models: their final scores, their rounds to the target, and the costs."""
    if not tables.several(groups):
        return ""
    note = "Each model’s final score; the scores are of different kinds."
    if averaged(_all(groups)):
        note = (
            "Final scores. The worst model is each run’s own;"
            " the spread is the standard deviation between the models."
        )
    aims = tables.to_target(groups, models)
    if aims:
        note += " All at once is the first round in which all models are at the target."
    section = _section("Models", note, tables.models(groups, models) + aims)
    if not _costs(groups):
        return section
    note = "Communication, client computing and server memory over the whole run"
    return section + _section(
        "Costs", f"{note}, with multiples of the least.", tables.costs(groups)
    )


def _costs(groups: list[Group]) -> bool:
    """Whether there is a table of costs: for several settings with several models each."""
    return len(groups) > 1 and tables.several(groups)


def _runs(groups: list[Group]) -> str:
    """The table of groups and, folded under it, the table of single runs."""
    each = []
    for group in groups:
        for run in group.runs:
            each.append(Group(f"{group.label}, seed {run.config.get('seed')}", [run]))
    if len(each) == 1:
        return ""
    body = tables.runs(groups, paid=not _costs(groups))
    if len(each) == len(groups):
        return _section("Runs", "", body)
    every = f"<details><summary>Every run ({len(each)})</summary>{tables.runs(each)}</details>"
    note = "± is half the 95 % interval of the mean over seeds (Student’s t)."
    return _section("Runs", note, body + every) + _paired(groups)


def _paired(groups: list[Group]) -> str:
    """The settings' differences from the first one, where they have seeds in common."""
    note = (
        f"Final scores minus those of {groups[0].label}, seed by seed. With three seeds or more: "
        "the mean and its 95 % interval."
    )
    return _section("Differences", note, tables.paired(groups))


def _configuration(groups: list[Group]) -> str:
    body = differences = tables.differences(groups)
    for group in groups:
        words = f"config.toml of {group.label}" if len(groups) > 1 else "config.toml"
        first, *others = [f"{run.config.get('seed')}" for run in group.runs]
        if others:
            words += f" (seed {first}; the same with {', '.join(others)})"
        text = f"<pre>{escape(group.runs[0].text)}</pre>"
        body += f"<details><summary>{escape(words)}</summary>{text}</details>"
    note = "What differs between the settings, and each setting’s file." if differences else ""
    return _section("Configuration", note, body)


def _about_seeds(groups: list[Group], crowded: str) -> str:
    """How the curves show several seeds; empty if no setting has several."""
    several = [group for group in groups if len(group.runs) > 1]
    if not several:
        return ""
    words = "Lines are means over seeds; bands extend from the lowest to the highest seed."
    if crowded:
        words += f" {crowded}"
    if any(len({len(run.rounds) for run in group.runs}) > 1 for group in several):
        words += " Where seeds stopped at different rounds, the line ends with the first of them."
    return words


def _style(number: int | None) -> dict[str, Any]:
    """A place in the palette, which colour-blind people can tell apart; dashed from the seventh on.

    None is for means and the worst model, which are drawn in ink.
    """
    if number is None:
        return {"colour": -1, "dash": "solid"}
    return {"colour": number % COLOURS, "dash": DASHES[number // COLOURS % len(DASHES)]}


def _span(values: set[int], noun: str) -> str:
    """3 clients; 10 to 20 clients."""
    least, most = min(values), max(values)
    many = f"{least:,} to {most:,}" if most > least else f"{least:,}"
    return f"{many} {noun}{'s' * (most != 1)}"


def _json(value: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("rota.report").joinpath(name).read_text(encoding="utf-8")
