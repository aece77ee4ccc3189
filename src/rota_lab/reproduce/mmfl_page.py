"""Multi-model FL's Table I as a page: accuracy relative to full participation, costs, and which of the source's claims hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from rota_lab.reproduce.chart import COLOURS, Chart, Line
from rota_lab.reproduce.interval import interval
from rota_lab.reproduce.mmfl_cells import (
    PAPER,
    TITLES,
    Cells,
    chance,
    difference,
    finished,
    grid,
    lead,
    made_on,
    relative,
    seeds,
    side,
    three_digits,
)
from rota_lab.reproduce.result import Result, over_seeds

BELOW = ("gvr-star", "stale-vr")
"""Methods that S0 has below full participation, which is 1 by definition."""
ORDER = (
    ("gvr-star", "gvr", "at least"),
    ("gvr-star", "lvr", "at least"),
    ("stale-vr", "gvr", "at least"),
    ("stale-vr", "lvr", "at least"),
    ("gvr", "random", "above"),
    ("lvr", "random", "above"),
)
"""What S0's table says of its own methods, pair by pair."""


@dataclass(frozen=True)
class About:
    """What is run, as the page says it."""

    clients: int
    budget: float
    rounds: int
    last: int
    """The rounds at the end over which accuracies are averaged."""
    server: float
    """The server's learning rate."""
    tasks: dict[str, list[list[str]]]
    """By setting: a row of the table of tasks each."""
    methods: dict[str, tuple[str, str]]
    """The sampler and the estimator of each method, with their options."""
    theta: dict[str, float]
    """By setting: the part of its budget that K-Vib spreads evenly, if no client lacks a model."""
    drawn: list[str]
    """Methods that draw by what they know of the clients' updates or losses."""
    single: list[str]
    """Methods that know no processors."""
    runs: list[tuple[str, str, int]]
    """All runs, finished or not: setting, method and seed."""
    quick: bool = False


def report(found: Cells, about: About) -> Result:
    """Claims, tables and charts, from the runs that are finished. The short version has nothing of the source beside its numbers."""
    rows = []
    checks: dict[str, bool] = {}
    claims: dict[str, bool] = {}
    number = sum(len(runs) for runs in found.values())
    if number < len(about.runs):
        checks[f"all runs are finished ({number} of {len(about.runs)})"] = False
    settings = [setting for setting in PAPER if relative(found, setting, "full")]
    for setting in settings:
        for method, title in TITLES.items():
            values = relative(found, setting, method)
            if values and method != "full":
                name = f"{setting} tasks, {title}: accuracy relative to full participation"
                rows.append(
                    over_seeds(name, None if about.quick else PAPER[setting].get(method), values)
                )
        claims |= {} if about.quick else _order(found, setting)
    title = "Several models at once: accuracy relative to full participation"
    charts = [_chart(found, setting, about) for setting in settings]
    return Result(
        "mmfl-table1",
        title,
        _text(found, settings, about, claims),
        rows,
        charts,
        checks | claims,
        about.quick,
    )


def _order(found: Cells, setting: str) -> dict[str, bool]:
    """S0's order, claim by claim, by the means over the seeds of both."""
    out = {}
    for method in BELOW:
        if values := relative(found, setting, method):
            mean = float(np.mean(values))
            out[
                f"{setting} tasks: {TITLES[method]}, {mean:.3f}, stays below 1, which is full participation"
            ] = mean < 1
    for better, worse, how in ORDER:
        mine, theirs = (
            relative(found, setting, better, worse),
            relative(found, setting, worse, better),
        )
        if mine:
            first, second = float(np.mean(mine)), float(np.mean(theirs))
            note = _both(found, setting, better, worse)
            between = chance(lead(found, setting, better, worse)) if first > second else ""
            claim = f"{setting} tasks: {TITLES[better]}, {first:.3f}, is {how} {TITLES[worse]}, {second:.3f}{note}{between}"
            out[claim] = first > second if how == "above" else first >= second
    return out


def _both(found: Cells, setting: str, *methods: str) -> str:
    """A word on the seeds of a comparison, where one of the methods has more in the table."""
    common = seeds(found, setting, *methods)
    alike = all(seeds(found, setting, method) == common for method in methods)
    return "" if alike else f" (over the {_seeds(len(common)).removeprefix('1 ')} that both have)"


def _seeds(number: int) -> str:
    return f"{number} seed{'s' if number > 1 else ''}"


def _text(found: Cells, settings: list[str], about: About, claims: dict[str, bool]) -> str:
    held = f"Of {len(claims)} claims on the order of the source's methods {sum(claims.values())} hold; they are listed below the tables, and"
    more = "StaleVR, which its table does not have, is taken as GVR\\*."
    lines = [
        _first(about),
        "",
        *_missing(found, about),
        *([held, more, ""] if claims else []),
        _reading(about),
        "",
    ]
    for setting in settings:
        lines += [f"## {setting} tasks", "", *grid(TASKS, about.tasks[setting], numbers=(4, 5)), ""]
        lines += [
            *_table(found, setting, about),
            "",
            *_failed(found, setting),
            *_models(found, setting),
            "",
        ]
        lines += [] if about.quick else _turned(found, setting)
    if not about.quick:
        lines += [
            "## Where the source's code differs",
            "",
            REASONS,
            "",
            *_kvib(found, settings, about),
        ]
    lines += [
        "## Methods",
        "",
        *_methods(about),
        "## Claims and charts" if claims else "## Charts",
        "",
    ]
    return "\n".join([*lines, *made_on(found), BELOW_THE_TEXT])


def _first(about: About) -> str:
    """What it is."""
    size = f"{about.clients} clients, by {about.budget:g} draws a round, for {about.rounds} rounds"
    if about.quick:
        return (
            "**This is the short version of S0's Table I, which shows the way and nothing else.** Several models are trained at once\n"
            f"over {size}; the source's numbers, which are of more, are left out."
        )
    return (
        f"S0's Table I: several models are trained at once over {size}.\n"
        "In the place of the source's EMNIST, among the five tasks, stands MNIST by writer."
    )


def _missing(found: Cells, about: About) -> list[str]:
    """Which runs are not finished."""
    left: dict[str, list[str]] = {}
    for setting, method, seed in about.runs:
        if seed not in found.get(f"{setting}-{method}", {}):
            left.setdefault(f"{TITLES[method]} with {setting} tasks", []).append(str(seed))
    if not left:
        return []
    number = sum(map(len, left.values()))
    which = "; ".join(f"{cell}, seed {' and '.join(some)}" for cell, some in left.items())
    words = f": {which}. These rows have fewer seeds." if len(left) <= MANY else "."
    return [f"**{number} of {len(about.runs)} runs are missing**{words}", ""]


MANY = 6
"""Up to so many methods with missing runs are named."""


def _reading(about: About) -> str:
    """How to read the tables."""
    return f"""A client lacks the data of one model, at random, with a chance of 10 %. In a round a quarter of the clients can train one
model, half of them half of their models (rounded up), a quarter all: so many processors they have, and each may be drawn.

Accuracies are means over the last {about.last} rounds. The relative accuracy is the mean over the models, divided by that of full
participation with the same seed. In brackets are 95 % intervals of means over the seeds (Student's t; of the difference of two methods,
seed by seed); a row that does not name its seeds has all of them. The last table of the page has the lowest and the highest seed instead.
Costs are those of a whole run: communication both ways, the clients' computing on equal devices, and the most that the server held
between rounds."""


TASKS = (
    "task",
    "data",
    "split",
    "network",
    "parameters",
    "learning rate",
    "local work",
    "tested on",
)


def _ranked(found: Cells, setting: str) -> list[str]:
    """The methods that have runs, the most accurate first."""
    some = [method for method in TITLES if relative(found, setting, method)]
    return sorted(some, key=lambda each: -float(np.mean(relative(found, setting, each))))


def _table(found: Cells, setting: str, about: About) -> list[str]:
    """Methods by accuracy, with what they cost a run: the means over their seeds."""
    rows = []
    most = len(seeds(found, setting))
    for method in _ranked(found, setting):
        runs, values, paper = (
            finished(found, setting, method),
            relative(found, setting, method),
            PAPER[setting].get(method),
        )
        between = interval(values) if len(values) > 1 and method != "full" else None
        spread = f" ({between.low:.3f} to {between.high:.3f})" if between else ""
        fewer = f", {_seeds(len(values))}" if len(values) < most else ""
        rows.append(
            [
                TITLES[method],
                *([] if about.quick else ["–" if paper is None else f"{paper:.3f}"]),
                f"{np.mean(values):.3f}{spread}{fewer}",
                f"{three_digits(_mean(runs, 'bytes') / 2**30)} GiB",
                _time(_mean(runs, "client_seconds")),
                f"{three_digits(_mean(runs, 'server_bytes') / 2**20)} MiB",
            ]
        )
    source = () if about.quick else ("source",)
    return grid(
        ("method", *source, "relative accuracy", "communication", "computation", "server memory"),
        rows,
    )


def _failed(found: Cells, setting: str) -> list[str]:
    """The runs in which clients' updates could not be used. (Parts that were made before this was written down say nothing.)"""
    lines = []
    for method in _ranked(found, setting):
        for seed in seeds(found, setting, method):
            some = found[f"{setting}-{method}"][seed].get("failures", {})
            lines += [
                f"- {TITLES[method]}, seed {seed}: {number} of {name}, which were not finite"
                for name, number in some.items()
            ]
    return ["Updates that could not be used:", "", *lines, ""] if lines else []


def _time(seconds: float) -> str:
    return (
        f"{three_digits(seconds / 3600)} h"
        if seconds >= 360
        else f"{three_digits(seconds / 60)} min"
    )


def _models(found: Cells, setting: str) -> list[str]:
    """The accuracy of every model by method; the worst stands out."""
    names = list(finished(found, setting, "full")[0]["models"])
    rows = []
    for method in _ranked(found, setting):
        runs = finished(found, setting, method)
        each = [float(np.mean([run["models"][name] for run in runs])) for name in names]
        shown = [f"**{value:.1%}**" if value == min(each) else f"{value:.1%}" for value in each]
        rows.append([TITLES[method], f"{_mean(runs, 'accuracy'):.1%}", *shown])
    return [
        "Accuracy of each model; the worst in bold:",
        "",
        *grid(("method", "mean", *names), rows),
    ]


def _turned(found: Cells, setting: str) -> list[str]:
    """Pairs of methods whose order is not the source's, with the difference in relative accuracy seed by seed."""
    lines = []
    known = [method for method in PAPER[setting] if relative(found, setting, method)]
    for better, worse in permutations(known, 2):
        ahead = lead(found, setting, worse, better)
        if PAPER[setting][better] > PAPER[setting][worse] and len(ahead) > 1 and np.mean(ahead) > 0:
            theirs = PAPER[setting][better] - PAPER[setting][worse]
            lines.append(
                f"- {TITLES[better]} is above {TITLES[worse]} by {theirs:.3f} in the source, here below it by "
                f"{difference(ahead)}{_both(found, setting, better, worse)}{chance(ahead)}"
            )
    if not lines:
        return []
    return [
        "Pairs in another order than the source's, by the difference of their relative accuracies:",
        "",
        *lines,
        "",
    ]


REASONS = """These faults were in the source's published code of that time, though which version of it made the table is not known.
`rota reproduce mmfl-faults` puts them back, each alone and all together, and says what they do to the order of the methods
([results](mmfl-faults.md)).

- FedVARP and GVR\\* added the remembered updates once for every drawn client.
- Random, FedVARP and SCAFFOLD counted a client with several processors, or without some model, as one with one processor and all
  models, which is biased. Here the weights count both.
- GVR took the clients' shares of the data from the wrong clients. LVR divided losses by the number of examples.
- The networks ended in ReLU and softmax, before a loss that takes a softmax again, and logits of labels that a client does not have were
  set to 0 in training. Here they end in logits, and none is changed.
- Full participation had all data of all models; here it has the same as the others.

Where the source is silent or says two things: 12 draws a round are the slides' (the code takes a tenth of the processors, 24). GVR\\*
is read as remembered updates with beta = 1. The source's ± is the spread of the learning curve, not of the seeds, and is left out. Nothing
in its theory puts LVR above GVR: GVR draws by the norms that the variance is made of, LVR by losses that stand for them."""


def _kvib(found: Cells, settings: list[str], about: About) -> list[str]:
    """What MMFL-KVib gives and costs, against those that ask all clients, remember all updates, or learn nothing."""
    rows, words, even = [], [], []
    for setting in settings:
        rivals = [
            rival
            for rival in ("lvr", "stale-vre", "random")
            if seeds(found, setting, "kvib", rival)
        ]
        for rival in rivals:
            mine, theirs = (
                finished(found, setting, "kvib", rival),
                finished(found, setting, rival, "kvib"),
            )
            ratios = (
                _mean(mine, name) / _mean(theirs, name)
                for name in ("bytes", "client_seconds", "server_bytes")
            )
            rows.append(
                [
                    setting,
                    TITLES[rival],
                    difference(lead(found, setting, "kvib", rival)),
                    *map(three_digits, ratios),
                ]
            )
        sides: dict[str, list[str]] = {"above": [], "below": [], "not told apart from": []}
        for rival in rivals:
            sides[side(lead(found, setting, "kvib", rival))].append(TITLES[rival])
        words.append(
            ", ".join(f"{side} {' and '.join(some)}" for side, some in sides.items() if some)
            + f" with {setting} tasks"
        )
        even.append(f"{about.theta[setting]:.2f} with {setting} tasks")
    if not rows:
        return []
    head = (
        "tasks",
        "MMFL-KVib against",
        "relative accuracy, difference",
        "communication, ratio",
        "computation, ratio",
        "server memory, ratio",
    )
    return [
        "## MMFL-KVib",
        "",
        "K-Vib over pairs of model and client is new here. It learns from the drawn clients alone: no other works for it, and the server",
        f"remembers no updates. In accuracy it is {'; '.join(words)} (by the 95 % intervals).",
        f"By its rule it spreads the part theta of its budget evenly, as Random does: in so few rounds that is up to {', '.join(even)}.",
        "",
        *grid(head, rows, numbers=(2, 3, 4, 5)),
        "",
    ]


def _methods(about: About) -> list[str]:
    """The policies with their options, and what all have in common."""
    rows = [
        [TITLES[method], *about.methods[method]] for method in TITLES if method in about.methods
    ]
    single = [TITLES[method] for method in about.single]
    words = [
        f"All but full participation have a budget of {about.budget:g} draws; the server's learning rate is {about.server:g}."
    ]
    if single:
        words.append(
            f"{'; '.join(single)}: these know no processors, and each drawn client trains one model."
        )
    if not about.quick:
        words.append(RATES)
    return [*words, "", *grid(("method", "sampler", "estimator"), rows, numbers=()), ""]


RATES = """Learning rates are not tuned, but those of the source's code (CIFAR-10's since September 2024, 0.01 before; MNIST by writer has
that of its MNIST). By their rule, `theta` is (pairs / (rounds budget))^(1/3), and `gamma` the sum of omega / (t budget) after t rounds.
What has no number of the source is not in its table; StaleVR and StaleVRE are its authors' later methods."""
BELOW_THE_TEXT = """This page was written from their numbers, on the machine that the last line names. The charts show means over the seeds,
of full participation and Random (black) and of all methods that draw by what is known of the clients' updates or losses. The others,
which draw at random or in turn, are in the tables alone."""


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([run[name] for run in runs]))


def _chart(found: Cells, setting: str, about: About) -> Chart:
    """Mean accuracy over the rounds, of the methods that draw by what they know, between full participation and Random."""
    looks = {"full": (len(COLOURS) - 1, 0), "random": (len(COLOURS) - 1, 1)} | {
        method: (k, 0) for k, method in enumerate(about.drawn)
    }
    lines = []
    for method in _ranked(found, setting):
        if method in looks:
            runs = finished(found, setting, method)
            mean = np.mean([run["curve"]["accuracy"] for run in runs], axis=0)
            lines.append(
                Line(TITLES[method], runs[0]["curve"]["rounds"], mean.tolist(), *looks[method])
            )
    return Chart(
        f"{setting}-tasks",
        f"{setting} tasks: mean accuracy of the models",
        "round",
        "accuracy",
        lines,
    )
