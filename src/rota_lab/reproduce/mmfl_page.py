"""Multi-model FL's Table I as a page.

Accuracy relative to full participation, costs, and which of the source's claims hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rota_lab.reproduce import mmfl_claims
from rota_lab.reproduce.chart import COLOURS, Chart, Line
from rota_lab.reproduce.interval import interval
from rota_lab.reproduce.mmfl_cells import (
    PAPER,
    TITLES,
    Cells,
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

MANY = 6
"""Up to this many methods with missing runs are named."""


@dataclass(frozen=True)
class About:
    """What is run, for the page to say."""

    clients: int
    budget: float
    rounds: int
    last: int
    """The number of rounds at the end over which accuracies are averaged."""
    server: float
    """The server's learning rate."""
    tasks: dict[str, list[list[str]]]
    """By setting: the rows of the table of tasks."""
    methods: dict[str, tuple[str, str]]
    """The sampler and the estimator of each method, with their options."""
    theta: dict[str, float]
    """By setting: the fraction of the budget that K-Vib spreads evenly if no client lacks data."""
    drawn: list[str]
    """Methods that draw by what they know about the clients' updates or losses."""
    single: list[str]
    """Methods that do not use the clients' processors."""
    runs: list[tuple[str, str, int]]
    """All runs, finished or not: setting, method and seed."""
    quick: bool = False


def report(found: Cells, about: About) -> Result:
    """Claims, tables and charts, from the runs that are finished.

    The short version does not show the source's numbers.
    """
    rows = []
    checks: dict[str, bool] = {}
    number = sum(len(runs) for runs in found.values())
    if number < len(about.runs):
        checks[f"all runs are finished ({number} of {len(about.runs)})"] = False
    settings = [setting for setting in PAPER if relative(found, setting, "full")]
    for setting in settings:
        for method, title in TITLES.items():
            values = relative(found, setting, method)
            if values and method != "full":
                name = f"{setting} tasks, {title}: accuracy relative to full participation"
                paper = None if about.quick else PAPER[setting].get(method)
                rows.append(over_seeds(name, paper, values))
    claims = [] if about.quick else mmfl_claims.claims(found, settings)
    title = "Several models at once: accuracy relative to full participation"
    text = _text(found, settings, about)
    charts = [_chart(found, setting, about) for setting in settings]
    return Result("mmfl-table1", title, text, rows, charts, checks, about.quick, claims=claims)


def _seeds(number: int) -> str:
    return f"{number} seed{'s' if number > 1 else ''}"


def _text(found: Cells, settings: list[str], about: About) -> str:
    lines = [_first(about), "", *_missing(found, about)]
    if not about.quick:
        lines += _headline(found, settings)
    lines += [_reading(about), ""]
    for setting in settings:
        lines += [f"## {setting} tasks", "", *grid(TASKS, about.tasks[setting], numbers=(4, 5)), ""]
        lines += [*_table(found, setting, about), "", *_failed(found, setting)]
        lines += [*_models(found, setting), ""]
        if not about.quick and len(mmfl_claims.words(found, setting)) > 1:
            lines += _costs(found, setting)
            lines += [f"All pairs of the source's methods with {setting} tasks:", ""]
            lines += [*mmfl_claims.all_pairs(found, setting), ""]
    if not about.quick:
        lines += ["## Why costs differ from the source's words", "", mmfl_claims.WHY, ""]
        lines += ["## Where the source's code differs", "", REASONS, ""]
        lines += _kvib(found, settings, about)
    lines += ["## Methods", "", *_methods(about)]
    lines += ["## Charts" if about.quick else "## Claims and charts", ""]
    return "\n".join([*lines, *made_on(found), BELOW_THE_TEXT])


def _first(about: About) -> str:
    """What is reproduced."""
    size = (
        f"{about.clients} clients, by {about.budget:g} draws per round, for {about.rounds} rounds"
    )
    if about.quick:
        return (
            "**This is the short version of MMFL's Table I. It shows that the reproduction "
            f"runs, and is not the result.** Several models are trained at once over {size}. The "
            "source's numbers are left out, since its runs are larger."
        )
    return (
        f"MMFL's Table I: several models are trained at once over {size}. Among the five tasks, "
        "MNIST by writer replaces the source's EMNIST."
    )


def _headline(found: Cells, settings: list[str]) -> list[str]:
    """How many pairs of the source's methods are in its order."""
    words = []
    for setting in settings:
        right, number, against = mmfl_claims.in_order(found, setting)
        if number:
            clear = f"{against or 'none'} clearly against it"
            words.append(f"{right} of {number} with {setting} tasks ({clear})")
    if not words:
        return []
    return [
        f"**By the means over the seeds, {' and '.join(words)} of all pairs of the source's",
        "methods are in the source's order.** \"Clearly\" goes by the pair's own 95 % interval.",
        "Each pair is also judged over the runs of all settings together, with Holm's correction;",
        "the verdicts stand below the tables.",
        "",
    ]


def _costs(found: Cells, setting: str) -> list[str]:
    """The source's Low and High beside ours, and why ours are others."""
    return [
        "The source calls costs Low or High. Here a cost is Low if it is nearer, as a factor, to",
        "that of the cheapest of the source's methods than to that of the dearest. Between these",
        f"lies a factor of {mmfl_claims.spread(found, setting)}.",
        "",
        *mmfl_claims.cost_table(found, setting),
        "",
    ]


def _missing(found: Cells, about: About) -> list[str]:
    """Which runs are not finished."""
    left: dict[str, list[str]] = {}
    for setting, method, seed in about.runs:
        if seed not in found.get(f"{setting}-{method}", {}):
            left.setdefault(f"{TITLES[method]} with {setting} tasks", []).append(str(seed))
    if not left:
        return []
    words = f"**{sum(map(len, left.values()))} of {len(about.runs)} runs are missing**"
    if len(left) > MANY:
        return [f"{words}.", ""]
    which = "; ".join(f"{cell}, seed {' and '.join(some)}" for cell, some in left.items())
    return [f"{words}: {which}. These rows have fewer seeds.", ""]


def _reading(about: About) -> str:
    """How to read the tables."""
    return f"""\
Each client lacks the data of one model with a chance of 10 %; which one is random. In each round, a
quarter of the clients can train one model, half of them can train half of their models (rounded
up), and a quarter can train all. That is their number of processors, and each processor may be
drawn.

Accuracies are means over the last {about.last} rounds. The relative accuracy is the mean over the
models, divided by that of full participation with the same seed. Brackets show 95 % intervals of
means over the seeds (Student's t); differences between two methods are taken seed by seed. A row
that does not name its seeds has all of them. The last table of the page shows the lowest and the
highest seed instead. Costs are those of a whole run: communication in both directions, the clients'
computing on equal devices, and the most that the server held between rounds."""


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
    """Methods by accuracy, with their costs per run, as means over their seeds."""
    head = [
        "method",
        "source",
        "relative accuracy",
        "communication",
        "computation",
        "server memory",
    ]
    rows = []
    most = len(seeds(found, setting))
    for method in _ranked(found, setting):
        runs, values = finished(found, setting, method), relative(found, setting, method)
        paper = PAPER[setting].get(method)
        accuracy = f"{np.mean(values):.3f}"
        if len(values) > 1 and method != "full":
            between = interval(values)
            accuracy += f" ({between.low:.3f} to {between.high:.3f})"
        if len(values) < most:
            accuracy += f", {_seeds(len(values))}"
        rows.append(
            [
                TITLES[method],
                "–" if paper is None else f"{paper:.3f}",
                accuracy,
                f"{three_digits(_mean(runs, 'bytes') / 2**30)} GiB",
                _time(_mean(runs, "client_seconds")),
                f"{three_digits(_mean(runs, 'server_bytes') / 2**20)} MiB",
            ]
        )
    if about.quick:
        for row in [head, *rows]:
            del row[1]
    return grid(tuple(head), rows)


def _failed(found: Cells, setting: str) -> list[str]:
    """The runs with updates that could not be used; early parts did not record them."""
    lines = []
    for method in _ranked(found, setting):
        for seed in seeds(found, setting, method):
            failures = found[f"{setting}-{method}"][seed].get("failures", {})
            for name, number in failures.items():
                words = f"{number} of {name}, which were not finite"
                lines.append(f"- {TITLES[method]}, seed {seed}: {words}")
    return ["Updates that could not be used:", "", *lines, ""] if lines else []


def _time(seconds: float) -> str:
    if seconds >= 360:
        return f"{three_digits(seconds / 3600)} h"
    return f"{three_digits(seconds / 60)} min"


def _models(found: Cells, setting: str) -> list[str]:
    """The accuracy of every model, by method."""
    names = list(finished(found, setting, "full")[0]["models"])
    rows = []
    for method in _ranked(found, setting):
        runs = finished(found, setting, method)
        row = [TITLES[method], f"{_mean(runs, 'accuracy'):.1%}"]
        each = [float(np.mean([run["models"][name] for run in runs])) for name in names]
        for value in each:
            row.append(f"**{value:.1%}**" if value == min(each) else f"{value:.1%}")
        rows.append(row)
    head = ("method", "mean", *names)
    return ["Accuracy of each model; the worst in bold:", "", *grid(head, rows)]


REASONS = """\
The source's published code of that time had the faults listed here. Which version of the code made
the table is not known. `rota reproduce mmfl-faults` puts the faults back, each alone and all
together, and shows what they do to the order of the methods ([results](mmfl-faults.md)).

- FedVARP and GVR\\* added the remembered updates once for every drawn client.
- Random, FedVARP and SCAFFOLD counted a client with several processors, or without some model, as a
  client with one processor and all models, which is biased. Here the weights count both.
- GVR took the clients' shares of the data from the wrong clients. LVR divided losses by the number
  of examples.
- The networks ended in ReLU and softmax, before a loss that takes a softmax again. In training, the
  logits of labels that a client does not have were set to 0. Here the networks end in logits, and
  none is changed.
- Full participation had all data of all models. Here it has the same data as the others.

Where the source says nothing, or says two things: the 12 draws per round are from the slides (the
code takes a tenth of the processors, 24). We read GVR\\* as remembered updates with beta = 1. The
source's ± is the spread of the learning curve, not of the seeds, and is left out. Nothing in its
theory puts LVR above GVR: GVR draws by the norms that make up the variance, LVR by losses that
stand for them."""


def _kvib(found: Cells, settings: list[str], about: About) -> list[str]:
    """What MMFL-KVib gains and costs.

    Its rivals here ask all clients, remember all updates, or learn nothing.
    """
    rows, words, even = [], [], []
    for setting in settings:
        sides: dict[str, list[str]] = {"above": [], "below": [], "not distinguishable from": []}
        for rival in ("lvr", "stale-vre", "random"):
            if not seeds(found, setting, "kvib", rival):
                continue
            mine = finished(found, setting, "kvib", rival)
            theirs = finished(found, setting, rival, "kvib")
            ahead = lead(found, setting, "kvib", rival)
            row = [setting, TITLES[rival], difference(ahead)]
            for name in ("bytes", "client_seconds", "server_bytes"):
                row.append(three_digits(_mean(mine, name) / _mean(theirs, name)))
            rows.append(row)
            sides[side(ahead)].append(TITLES[rival])
        order = [f"{where} {' and '.join(some)}" for where, some in sides.items() if some]
        words.append(f"{', '.join(order)} with {setting} tasks")
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
        "K-Vib over pairs of model and client is new here. It learns from the drawn clients alone:",
        "no other client does any work for it, and the server remembers no updates.",
        f"In accuracy it is {'; '.join(words)} (by the 95 % intervals).",
        "By its rule, it spreads the fraction theta of its budget evenly, as Random does: in so",
        f"few rounds that is up to {', '.join(even)}.",
        "",
        *grid(head, rows, numbers=(2, 3, 4, 5)),
        "",
    ]


def _methods(about: About) -> list[str]:
    """The policies with their options, and what all of them have in common."""
    budget = f"All methods but full participation have a budget of {about.budget:g} draws"
    words = [f"{budget}; the server's learning rate is {about.server:g}."]
    if about.single:
        names = "; ".join(TITLES[method] for method in about.single)
        words.append(
            "These methods do not use the clients' processors, and each drawn client trains one "
            f"model: {names}."
        )
    if not about.quick:
        words.append(RATES)
    rows = []
    for method, title in TITLES.items():
        if method in about.methods:
            rows.append([title, *about.methods[method]])
    return [*words, "", *grid(("method", "sampler", "estimator"), rows, numbers=()), ""]


RATES = """\
Learning rates are not tuned. They are those of the source's code (CIFAR-10's is from September
2024; it was 0.01 before; MNIST by writer has the rate of its MNIST). By their rules, `theta` is
(pairs / (rounds budget))^(1/3), and `gamma` is the sum of omega / (t budget) after t rounds.
Methods without a number of the source are not in its table; StaleVR and StaleVRE are later methods
by its authors."""
BELOW_THE_TEXT = """\
This page was written from their numbers, on the machine that the last line names. The charts show
means over the seeds, for full participation and Random (black) and for all methods that draw by
what is known about the clients' updates or losses. The other methods draw at random or in turn, and
are in the tables only."""


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([run[name] for run in runs]))


def _chart(found: Cells, setting: str, about: About) -> Chart:
    """Mean accuracy over the rounds: methods that draw by what they know, full and Random."""
    black = len(COLOURS) - 1
    looks = {"full": (black, 0), "random": (black, 1)}
    for colour, method in enumerate(about.drawn):
        looks[method] = (colour, 0)
    lines = []
    for method in _ranked(found, setting):
        if method in looks:
            runs = finished(found, setting, method)
            mean = np.mean([run["curve"]["accuracy"] for run in runs], axis=0).tolist()
            rounds = runs[0]["curve"]["rounds"]
            lines.append(Line(TITLES[method], rounds, mean, *looks[method]))
    title = f"{setting} tasks: mean accuracy of the models"
    return Chart(f"{setting}-tasks", title, "round", "accuracy", lines)
