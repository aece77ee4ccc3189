"""The page of the reproduction `selective`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.interval import Statement, judged
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds

CENTRAL_ACCURACY = {"small": 0.9640, "classic": 0.9912, "wide": 0.9954}
PLAIN = {"small": 0.3266, "classic": 0.8432, "wide": 0.9731}
"""The paper's FedAvg at 0 % balanced, on the global test set."""
BAR = 0.005
TITLES = {"small": "Model 1", "classic": "Model 2", "wide": "Model 3", "digits": "Model 1 (digits)"}
POINTS = " points"


class Table:
    """The finished runs."""

    def __init__(self, pieces: Sequence[Any], found: dict[str, Found]) -> None:
        self.runs = {
            (p.model, p.balance, p.method, p.seed): found[p.name] for p in pieces if p.name in found
        }
        self.models = list(dict.fromkeys(key[0] for key in self.runs))

    def values(self, model: str, balance: int, method: str, key: str) -> dict[int, float]:
        """A number of each seed that is finished."""
        return {
            seed: run[key]
            for (m, b, name, seed), run in self.runs.items()
            if (m, b, name) == (model, balance, method) and key in run
        }

    def apart(self, model: str, balance: int, one: str, two: str, key: str) -> list[float]:
        """The difference of two methods on the seeds that both have finished."""
        a, b = (self.values(model, balance, name, key) for name in (one, two))
        return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def report(
    pieces: Sequence[Any],
    found: dict[str, Found],
    quick: bool,
    device: str,
    settings: dict[str, Any],
) -> Result:
    """The page about all finished runs."""
    runs = Table(pieces, found)
    rows, charts, statements = [], [], []
    for model in runs.models:
        rows += _rows(runs, model)
        charts += [chart for key in ("mean", "shared") if (chart := _chart(runs, model, key)).lines]
        statements += _claims(runs, model)
    statements += _complexity(runs)
    return Result(
        name="selective",
        title="Selective FedAvg: nine nodes in three partitions",
        text=_text(runs, len(pieces), settings, quick),
        rows=rows,
        charts=charts,
        checks=_groups(runs),
        quick=quick,
        device=device,
        claims=judged([each for each in statements if each.values]),
    )


def _rows(runs: Table, model: str) -> list[Row]:
    rows = []
    for balance, method in dict.fromkeys((b, m) for s, b, m, _ in runs.runs if s == model):
        for key, words in (
            ("mean", "own test sets, mean node"),
            ("worst", "own test sets, worst node"),
            ("shared", "global test set"),
        ):
            values = runs.values(model, balance, method, key)
            if not values:
                continue
            paper = None
            if key == "shared" and method == "centralised":
                paper = CENTRAL_ACCURACY.get(model)
            if key == "shared" and (method, balance) == ("fedavg", 0):
                paper = PLAIN.get(model)
            where = "" if method == "centralised" else f" at {balance} %"
            quantity = f"{TITLES[model]}, {method}{where}: {words}"
            rows.append(over_seeds(quantity, paper, list(values.values())))
    return rows


def _chart(runs: Table, model: str, key: str) -> Chart:
    where = "own test sets" if key == "mean" else "the global test set"
    lines = []
    for colour, method in enumerate(("fedavg", "selective", "local", "ifca", "cfl", "pacfl")):
        x, y, low, high = [], [], [], []
        for balance in range(0, 101, 10):
            values = list(runs.values(model, balance, method, key).values())
            if values:
                x.append(float(balance))
                y.append(sum(values) / len(values))
                low.append(min(values))
                high.append(max(values))
        if len(x) > 1:
            lines.append(Line(method, x, y, colour, dashed=int(colour > 2), band=(low, high)))
    title = f"{TITLES[model]}: accuracy on {where}"
    return Chart(f"{model}-{key}", title, "balanced data in %", "accuracy", lines)


def _claims(runs: Table, model: str) -> list[Statement]:
    def versus(balance: int, one: str, two: str, key: str, words: str) -> Statement:
        values = runs.apart(model, balance, one, two, key)
        return Statement(f"{TITLES[model]}, {balance} % balanced: {words}", values, POINTS, 0.01)

    out = [
        versus(0, "selective", "fedavg", "mean", "Selective beats FedAvg on the nodes' own tests"),
        versus(0, "fedavg", "selective", "shared", "FedAvg beats Selective on the global test"),
        versus(0, "selective", "local", "mean", "Selective beats local training on the own tests"),
        versus(100, "selective", "local", "mean", "Selective beats local training on own tests"),
    ]
    for rival in ("ifca", "cfl", "pacfl"):
        for balance in (0, 50):
            words = f"Selective beats {rival} on the nodes' own tests"
            out.append(versus(balance, "selective", rival, "mean", words))
    central = runs.values(model, 100, "centralised", "shared")
    if model in CENTRAL_ACCURACY:
        near = [BAR - abs(value - CENTRAL_ACCURACY[model]) for value in central.values()]
        words = f"{TITLES[model]}: the centralised accuracy is within 0.5 points of the paper's"
        out.append(Statement(words, near, POINTS, 0.01))
    return out


def _complexity(runs: Table) -> list[Statement]:
    """FedAvg at 0 % on the global test rises with the model's complexity."""
    out = []
    for one, two in (("small", "classic"), ("classic", "wide")):
        a, b = (runs.values(model, 0, "fedavg", "shared") for model in (one, two))
        values = [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]
        words = f"FedAvg at 0 % on the global test: {TITLES[two]} beats {TITLES[one]}"
        out.append(Statement(words, values, POINTS, 0.01))
    return out


def _groups(runs: Table) -> dict[str, bool]:
    checks = {}
    for model in runs.models:
        apart = runs.values(model, 0, "selective", "recovered")
        one = runs.values(model, 100, "selective", "groups")
        if apart:
            words = f"{TITLES[model]}: at 0 % Selective finds the three partitions"
            checks[f"{words} ({sum(map(bool, apart.values()))} of {len(apart)} seeds)"] = all(
                apart.values()
            )
        if one:
            good = sum(value == 1 for value in one.values())
            words = f"{TITLES[model]}: at 100 % Selective makes one group"
            checks[f"{words} ({good} of {len(one)} seeds)"] = good == len(one)
    return checks


def _text(runs: Table, number: int, settings: dict[str, Any], quick: bool) -> str:
    lines = [
        "Nine nodes hold data in three partitions: N % random images, and for the rest labels 0-3, "
        "4-6 or 7-9. All nodes train in every round. The *own* tests have the mix of labels of the "
        "node's training images; the *global* test has all test images.",
        "",
        "The paper names no optimiser, learning rate, mini-batch, local epochs, number of rounds "
        "or threshold. Here it is SGD with one local epoch in each round; the threshold is found "
        "by itself. Nodes train alone for as long as in five rounds before they are grouped.",
        "",
    ]
    if quick:
        lines.append("The short version is on scikit-learn's 8x8 digits.")
    for model in runs.models:
        if model in settings:
            s = settings[model]
            images = f"{s.images:,} of the" if s.images else "all"
            lines.append(
                f"- {TITLES[model]}: lr {s.lr:g}, mini-batches of {s.batch}, {s.rounds} rounds, "
                f"{images} training images beyond the server's {s.validation:,}"
            )
    lines += ["", f"{len(runs.runs)} of {number} runs are finished; the others are left out."]
    return "\n".join(lines)
