"""The words and tables of the page `selective`: settings, rivals, costs, and the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from rota_lab.reproduce.chart import DASHES, Chart, Line
from rota_lab.reproduce.parts import Found

PLAIN = {"small": 0.3266, "classic": 0.8432, "wide": 0.9731}
"""The paper's FedAvg at 0 % balanced, on the global test set."""
SETTING = (
    "Nine nodes hold data in three partitions: N % random images, and for the rest labels 0-3, 4-6 "
    "or 7-9. The server keeps 10,000 training images; the partitions are equal, and as large as "
    "the smallest pool of labels permits. All nodes train in every round. The *own* tests have the "
    "mix of labels of the node's training images; the *global* test has all test images. "
    "*Centralised* is one node with all images."
)
OPEN = (
    "The paper names no optimiser, learning rate, mini-batch, local epochs, number of rounds or "
    "threshold. Here it is SGD with the settings below, and the threshold is found by itself. "
    "Before they are grouped, nodes train alone for as long as in five rounds."
)


def text(
    pieces: Sequence[Any], found: dict[str, Found], runs: Any, titles: dict[str, str], quick: bool
) -> str:
    """The page's first part."""
    lines = [SETTING, "", OPEN, ""]
    if quick:
        lines.append("The short version is on scikit-learn's 8x8 digits.")
    for model in runs.models:
        work = next(p.work for p in pieces if p.model == model and not p.rates)
        seeds = sorted({len(part["runs"]) for key, part in runs.parts.items() if key[0] == model})
        lines.append(
            f"- {titles[model]}: lr {work.lr:g}, mini-batches of {work.batch}, {work.rounds} "
            f"rounds of {work.epochs} local epoch; seeds: {' or '.join(map(str, seeds))}"
        )
    done = sum(p.name in found for p in pieces)
    lines += ["", f"{done} of {len(pieces)} runs are finished; the others are left out."]
    machines = sorted({part["machine"] for part in found.values()})
    precisions = sorted({part["precision"] for part in found.values()})
    if machines:
        lines += ["", f"They were played in {' and '.join(precisions)} on {'; '.join(machines)}."]
    return "\n".join(
        [
            *lines,
            "",
            *_plain(runs, titles),
            *_rivals(runs),
            *_costs(runs),
            *_sweep(pieces, found, titles),
        ]
    )


def _plain(runs: Any, titles: dict[str, str]) -> list[str]:
    """FedAvg at 0 % on the global test, beside what nodes reach there that share nothing."""
    lines = []
    for model, paper in PLAIN.items():
        ours, alone = (runs.values(model, 0, method, "shared") for method in ("fedavg", "local"))
        if ours and alone:
            each = (100 * float(value) for value in (paper, np.mean(ours), np.mean(alone)))
            lines.append(f"| {titles[model]} | " + " | ".join(f"{v:.2f}" for v in each) + " |")
    if not lines:
        return []
    head = (
        "FedAvg at 0 % on the global test, in %. Where the paper's number is that of nodes that "
        "share nothing, its FedAvg learned nothing from the other partitions; ours does."
    )
    names = "| model | the paper's FedAvg | FedAvg here | local training here |"
    return [head, "", names, "|---|---:|---:|---:|", *lines, ""]


def _rivals(runs: Any) -> list[str]:
    """Where each rival is better than Selective on the own tests, by the mean over seeds."""
    lines = []
    for rival in ("fedavg", "local", "ifca", "cfl", "pacfl"):
        apart = {
            (model, balance): float(np.mean(values))
            for model in runs.models
            for balance in (0, 50, 100)
            if (values := runs.apart(model, balance, rival, "selective", "mean"))
        }
        if not apart:
            continue
        better, equal = sum(v > 0 for v in apart.values()), sum(v == 0 for v in apart.values())
        words = f"better in {better}, equal in {equal}, worse in {len(apart) - better - equal}"
        lines.append(f"- {rival}: {words} of {len(apart)}")
        if better + equal == len(apart) and better:
            lines[-1] += "; **it is nowhere worse than Selective**"
    if not lines:
        return []
    head = (
        "Against Selective on the nodes' own tests, by the means over seeds, in the places that "
        "are finished (a place is a model and a balance of 0, 50 or 100 %):"
    )
    return [head, "", *lines, ""]


def _costs(runs: Any) -> list[str]:
    """Bytes and client-seconds of a whole run at 0 %, relative to FedAvg."""
    lines = []
    for method in ("selective", "local", "ifca", "cfl", "pacfl"):
        for model in runs.models:
            plain = runs.parts.get((model, 0, "fedavg"))
            mine = runs.parts.get((model, 0, method))
            if plain and mine:
                more = [mine[key] / plain[key] for key in ("bytes", "client_seconds")]
                lines.append(f"| {method} | {model} | {more[0]:.3f} | {more[1]:.3f} |")
                break
    if not lines:
        return []
    head = "What a whole run at 0 % costs, as a multiple of FedAvg's (the clock is virtual):"
    names = "| method | model | bytes | client-seconds |"
    return [head, "", names, "|---|---|---:|---:|", *lines, ""]


def _swept(pieces: Sequence[Any], found: dict[str, Found]) -> dict[str, list[Any]]:
    """The finished pieces of the sweep, by model."""
    done = [p for p in pieces if p.rates and p.name in found]
    done.sort(key=lambda p: p.model)
    return {model: list(some) for model, some in groupby(done, key=lambda p: p.model)}


def of_rate(runs: dict[str, Found], rate: float, key: str) -> list[float]:
    """A number of each seed at a learning rate."""
    return [run[key] for name, run in runs.items() if name.startswith(f"lr {rate:g} seed ")]


def _sweep(pieces: Sequence[Any], found: dict[str, Found], titles: dict[str, str]) -> list[str]:
    """How much the hyper-parameters decide, as a table."""
    out = []
    for model, some in sorted(
        _swept(pieces, found).items(), key=lambda m: list(titles).index(m[0])
    ):
        for p in some:
            runs = found[p.name]["runs"]
            key = "shared" if p.method == "fedavg" else "mean"
            what = "FedAvg, global test" if p.method == "fedavg" else "Selective, own tests"
            cells = [100 * float(np.mean(of_rate(runs, rate, key))) for rate in p.rates]
            work = f"{p.work.rounds} x {p.work.epochs} | {p.work.batch}"
            numbers = " | ".join(f"{cell:.1f}" for cell in cells)
            out.append(f"| {titles[model]} | {what} | {work} | {numbers} |")
    if not out:
        return []
    rates = next(p.rates for p in pieces if p.rates)
    head = (
        "How much the settings decide at 0 % balanced: accuracy in % (mean over three seeds) for "
        "each learning rate. Rounds times local epochs are the same in all lines of a model. "
        "With one round, nodes train once, and their models are averaged once."
    )
    names = "| model | what | rounds x epochs | mini-batch |"
    names += "".join(f" lr {rate:g} |" for rate in rates)
    return [head, "", names, "|---|---|---|---:|" + "---:|" * len(rates), *out, ""]


def swept(pieces: Sequence[Any], found: dict[str, Found], titles: dict[str, str]) -> list[Chart]:
    """FedAvg's accuracy on the global test against the learning rate, one line per setting."""
    lines, colours = [], list(titles)
    for model, some in _swept(pieces, found).items():
        for dashed, p in enumerate(each for each in some if each.method == "fedavg"):
            runs = found[p.name]["runs"]
            y = [float(np.mean(of_rate(runs, rate, "shared"))) for rate in p.rates]
            name = f"{titles[model]}, E={p.work.epochs}, B={p.work.batch}"
            x = [float(np.log10(rate)) for rate in p.rates]
            colour = colours.index(model) + len(colours) * (dashed // len(DASHES))
            lines.append(Line(name, x, y, colour, dashed % len(DASHES)))
    title = "FedAvg at 0 % on the global test: the settings decide, too"
    return [Chart("sweep", title, "log10 of the learning rate", "accuracy", lines)]
