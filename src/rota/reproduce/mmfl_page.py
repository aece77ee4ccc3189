"""Multi-model FL's Table I as a page: accuracy relative to full participation, costs, and which of the source's claims hold."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

from rota.reproduce.chart import Chart, Line
from rota.reproduce.interval import interval
from rota.reproduce.parts import Found
from rota.reproduce.result import Result, over_seeds

TITLES = {
    "full": "Full participation",
    "random": "Random",
    "gvr": "MMFL-GVR",
    "lvr": "MMFL-LVR",
    "gvr-star": "MMFL-GVR*",
    "stale-vr": "StaleVR",
    "stale-vre": "StaleVRE",
    "kvib": "MMFL-KVib",
    "fedvarp": "FedVARP",
    "mifa": "MIFA",
    "scaffold": "SCAFFOLD",
    "fedstale": "FedStale",
    "round-robin": "Round robin, clients'",
    "round-robin-server": "Round robin, server's",
    "fedfair": "FedFairMMFL",
}
PAPER = {
    "3": {"fedvarp": 0.712, "mifa": 0.868, "scaffold": 0.794, "random": 0.778, "full": 1.0, "gvr": 0.893, "lvr": 0.912, "gvr-star": 0.960},
    "5": {"fedvarp": 0.690, "mifa": 0.835, "scaffold": 0.650, "random": 0.749, "full": 1.0, "gvr": 0.842, "lvr": 0.849, "gvr-star": 0.869},
}
ORDER = (
    ("full", "gvr-star", "above"),
    ("full", "stale-vr", "above"),
    ("gvr-star", "gvr", "at least"),
    ("gvr-star", "lvr", "at least"),
    ("stale-vr", "gvr", "at least"),
    ("stale-vr", "lvr", "at least"),
    ("gvr", "random", "above"),
    ("lvr", "random", "above"),
)
"""What S0's table says of its own methods, pair by pair."""


TEXT = """Several models are trained at once over 120 clients, of whom 12 draws a round may train (S0, Table I). One client in ten
holds half of the data; every client has three labels of ten, others for each model; one in ten lacks a model's data; a quarter can train
one model in a round, half of them half of the models (rounded up), a quarter all. Five local steps on all of a client's examples, 150
rounds. The accuracy is the mean over the models and the last 21 rounds, on the last 70 % of the test images, relative to that of full
participation with the same seed; in brackets are 95 % intervals over the seeds (Student's t). The costs are those of a whole run:
communication both ways, the clients' computing on equal devices, and the most that the server held between rounds.

Where the source is silent, wrong or ambiguous: the budget is the slides' 12 draws (the code takes a tenth of the processors, 24);
full participation has the same data as the others (the code gives it every model); the networks end in logits (the code's in
ReLU and softmax, before a loss that takes a softmax again), and no logit is set to 0 in training. Random, FedVARP and SCAFFOLD weigh
by the client's processors and models, which the code leaves out, and is biased by; the code of the table's time also took GVR's
shares from the wrong clients, added the remembered updates once for every drawn client (FedVARP, GVR*), and divided LVR's losses by
the number of examples. So the order of these methods may differ from the source's; where it does, it is listed below the table. The
source's ± is the spread of the learning curve, not of the seeds, and is left out. GVR* is read as: remembered updates with beta = 1.
Methods without a number in the source's table are StaleVR and StaleVRE (its authors' later ones), MMFL-KVib (K-Vib over pairs,
new here), FedStale, the two round robins and FedFairMMFL.
"""


Cells = dict[str, dict[int, Found]]
"""The finished runs by setting and method, and by seed."""


def seeds(found: Cells, setting: str, *methods: str) -> list[int]:
    """Those of which all these methods' runs are finished, and full participation's."""
    return sorted(set.intersection(*(set(found.get(f"{setting}-{method}", {})) for method in ("full", *methods))))


def finished(found: Cells, setting: str, method: str, *beside: str) -> list[Found]:
    """A method's runs with the seeds that full participation has too, and those beside it."""
    return [found[f"{setting}-{method}"][seed] for seed in seeds(found, setting, method, *beside)]


def relative(found: Cells, setting: str, method: str, *beside: str) -> list[float]:
    """Accuracy over that of full participation with the same seed, seed by seed."""
    both = (finished(found, setting, *order, *beside) for order in ((method, "full"), ("full", method)))
    return [mine["accuracy"] / full["accuracy"] for mine, full in zip(*both, strict=True)]


def report(found: Cells, everything: int, quick: bool) -> Result:
    """Claims, tables and charts, from the runs that are finished."""
    rows, checks = [], {}
    number = sum(len(runs) for runs in found.values())
    if number < everything:
        checks[f"all runs are finished ({number} of {everything})"] = False
    settings = [setting for setting in PAPER if relative(found, setting, "full")]
    for setting in settings:
        for method, title in TITLES.items():
            values = relative(found, setting, method)
            if values and method != "full":
                name = f"{setting} tasks, {title}: accuracy relative to full participation"
                rows.append(over_seeds(name, PAPER[setting].get(method), values))
        checks |= _order(found, setting)
    title = "Several models at once: accuracy relative to full participation"
    charts = [_chart(found, setting) for setting in settings]
    return Result("mmfl-table1", title, _text(found, settings, quick), rows, charts, checks, quick)


def _order(found: Cells, setting: str) -> dict[str, bool]:
    """S0's order, claim by claim, by the means over the seeds of both."""
    out = {}
    for better, worse, how in ORDER:
        mine, theirs = relative(found, setting, better, worse), relative(found, setting, worse, better)
        if mine:
            first, second = float(np.mean(mine)), float(np.mean(theirs))
            claim = f"{setting} tasks: {TITLES[better]}, {first:.3f}, is {how} {TITLES[worse]}, {second:.3f}"
            out[claim] = first > second if how == "above" else first >= second
    return out


def _text(found: Cells, settings: list[str], quick: bool) -> str:
    lines = [TEXT]
    if quick:
        lines += ["**This is the short version, which shows the way and nothing else.**", ""]
    for setting in settings:
        lines += [f"## {setting} tasks", "", *_table(found, setting), "", *_turned(found, setting)]
    runs = [run for runs in found.values() for run in runs.values()]
    machines = sorted({f"{run['machine']}, {run['precision']}" for run in runs})
    return "\n".join([*lines, *(f"Runs on {words}." for words in machines)])


def _table(found: Cells, setting: str) -> list[str]:
    """Methods by accuracy, with what they cost a run: the means over their seeds."""
    lines = [
        "| method | source | relative accuracy | mean | worst model | communication | computation | server memory | seeds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    some = [method for method in TITLES if relative(found, setting, method)]
    for method in sorted(some, key=lambda each: -float(np.mean(relative(found, setting, each)))):
        runs = finished(found, setting, method)
        values, paper = relative(found, setting, method), PAPER[setting].get(method)
        between = interval(values)
        spread = f" ({between.low:.3f} to {between.high:.3f})" if len(values) > 1 and method != "full" else ""
        worst = float(np.mean([min(run["models"].values()) for run in runs]))
        cells = [
            TITLES[method],
            "–" if paper is None else f"{paper:.3f}",
            f"{between.mean:.3f}{spread}",
            f"{_mean(runs, 'accuracy'):.1%}",
            f"{worst:.1%}",
            f"{_mean(runs, 'bytes') / 2**30:.3g} GiB",
            f"{_mean(runs, 'client_seconds') / 3600:.3g} h",
            f"{_mean(runs, 'server_bytes') / 2**20:.4g} MiB",
            str(len(values)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _turned(found: Cells, setting: str) -> list[str]:
    """Pairs of methods whose order is not the source's, with the difference seed by seed."""
    lines = []
    known = [method for method in PAPER[setting] if relative(found, setting, method)]
    for better, worse in permutations(known, 2):
        mine, theirs = found[f"{setting}-{better}"], found[f"{setting}-{worse}"]
        lead = [theirs[seed]["accuracy"] - mine[seed]["accuracy"] for seed in sorted(mine.keys() & theirs.keys())]
        if PAPER[setting][better] > PAPER[setting][worse] and len(lead) > 1 and np.mean(lead) > 0:
            points = interval([100 * each for each in lead])
            sure = "" if points.low > 0 else ", which may be chance"
            numbers = f"{PAPER[setting][better]:.3f} against {PAPER[setting][worse]:.3f}"
            lines.append(f"- source: {TITLES[better]} above {TITLES[worse]}, {numbers}; here below it by {points} points{sure}")
    if not lines:
        return []
    return ["Pairs in another order than the source's:", "", *lines, "", REASONS]


REASONS = """The source's FedVARP added the remembered updates once for every drawn client, and its FedVARP, SCAFFOLD and Random counted a
client with several processors or models as one with one: all three were biased, and here are not. GVR draws by the very norms that the
estimator's variance is made of, LVR by losses that stand for them: nothing in the source's theory makes LVR the better of the two.
"""


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([run[name] for run in runs]))


def _chart(found: Cells, setting: str) -> Chart:
    """Mean accuracy over the rounds, of the methods that S0 proposes or compares with, and of K-Vib's."""
    shown = [m for m in ("full", "gvr-star", "stale-vr", "gvr", "lvr", "kvib", "random") if relative(found, setting, m)]
    lines = []
    for colour, method in enumerate(shown):
        runs = finished(found, setting, method)
        mean = np.mean([run["curve"]["accuracy"] for run in runs], axis=0)
        lines.append(Line(TITLES[method], runs[0]["curve"]["rounds"], mean.tolist(), colour))
    return Chart(f"{setting}-tasks", f"{setting} tasks: mean accuracy of the models", "round", "accuracy", lines)
