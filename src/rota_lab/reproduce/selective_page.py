"""The page of the reproduction `selective`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.interval import Statement, judged
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds
from rota_lab.reproduce.selective_text import PLAIN, swept, text

CENTRAL_ACCURACY = {"small": 0.9640, "classic": 0.9912, "wide": 0.9954}
BAR = 0.005
TITLES = {"small": "Model 1", "classic": "Model 2", "wide": "Model 3", "digits": "Model 1 (digits)"}
METHODS = ("fedavg", "selective", "local", "ifca", "cfl", "pacfl")
SHOWN = (0, 50, 100)
"""The balances in the table; all are in the charts."""
POINTS = " points"


class Table:
    """The finished runs, without those of the sweep: numbers by seed."""

    def __init__(self, pieces: Sequence[Any], found: dict[str, Found]) -> None:
        self.parts: dict[tuple[str, int, str], Found] = {}
        for p in pieces:
            if p.name in found and not p.rates:
                key, part = (p.model, p.balance, p.method), found[p.name]
                runs = {**self.parts.get(key, {}).get("runs", {}), **part["runs"]}
                self.parts[key] = {**part, "runs": runs}
        self.models = [m for m in TITLES if any(key[0] == m for key in self.parts)]

    def by_seed(self, model: str, balance: int, method: str, key: str) -> dict[str, float]:
        """A number of each seed; none if the run is not finished."""
        runs = self.parts.get((model, balance, method), {}).get("runs", {})
        return {seed: run[key] for seed, run in runs.items() if key in run}

    def values(self, model: str, balance: int, method: str, key: str) -> list[float]:
        """The same, without the seeds' names."""
        return list(self.by_seed(model, balance, method, key).values())

    def apart(self, model: str, balance: int, one: str, two: str, key: str) -> list[float]:
        """The difference of two methods, seed by seed."""
        a, b = (self.by_seed(model, balance, name, key) for name in (one, two))
        return paired(a, b)


def paired(one: dict[str, float], two: dict[str, float]) -> list[float]:
    """The differences for the seeds that both have."""
    return [one[seed] - two[seed] for seed in one if seed in two]


def report(pieces: Sequence[Any], found: dict[str, Found], quick: bool, device: str) -> Result:
    """The page about all finished runs."""
    runs = Table(pieces, found)
    rows, charts, statements = [], [], []
    for model in runs.models:
        rows += _rows(runs, model)
        charts += [_chart(runs, model, key) for key in ("shared", "mean")]
        statements += _claims(runs, model)
    statements += _complexity(runs)
    charts += [_groups_chart(runs), *swept(pieces, found, TITLES)]
    return Result(
        name="selective",
        title="Selective FedAvg: nine nodes in three partitions",
        text=text(pieces, found, runs, TITLES, quick),
        rows=rows,
        charts=[chart for chart in charts if chart.lines],
        checks={**_central(runs), **_groups(runs)},
        quick=quick,
        device=device,
        claims=judged([each for each in statements if each.values]),
    )


def _rows(runs: Table, model: str) -> list[Row]:
    rows = []
    for balance in SHOWN:
        for method in (*METHODS, "centralised"):
            for key, words in (
                ("mean", "own test sets, mean node"),
                ("worst", "own test sets, worst node"),
                ("p10", "own test sets, 10th percentile"),
                ("shared", "global test set"),
            ):
                values = runs.values(model, balance, method, key)
                if not values or (method == "centralised" and key != "shared"):
                    continue
                paper = None
                if key == "shared" and method == "centralised":
                    paper = CENTRAL_ACCURACY.get(model)
                if key == "shared" and (method, balance) == ("fedavg", 0):
                    paper = PLAIN.get(model)
                where = "" if method == "centralised" else f" at {balance} %"
                rows.append(over_seeds(f"{TITLES[model]}, {method}{where}: {words}", paper, values))
    return rows


def line(name: str, points: Iterable[tuple[float, list[float]]], colour: int, dashed: int) -> Line:
    """Means over seeds, with their extremes as a shade; places without numbers are left out."""
    known = [(x, values) for x, values in points if values]
    means = [float(np.mean(values)) for _, values in known]
    low, high = [min(values) for _, values in known], [max(values) for _, values in known]
    return Line(name, [x for x, _ in known], means, colour, dashed, band=(low, high))


def _chart(runs: Table, model: str, key: str) -> Chart:
    where = "own test sets (mean node)" if key == "mean" else "the global test set"
    lines = []
    for colour, method in enumerate(METHODS):
        points = [(float(b), runs.values(model, b, method, key)) for b in range(0, 101, 10)]
        lines.append(line(method, points, colour, dashed=int(colour > 2)))
    title = f"{TITLES[model]}: accuracy on {where}"
    some = [each for each in lines if len(each.x) > 1]
    return Chart(f"{model}-{key}", title, "balanced data in %", "accuracy", some)


def _groups_chart(runs: Table) -> Chart:
    lines = []
    for colour, model in enumerate(runs.models):
        points = [
            (float(b), runs.values(model, b, "selective", "groups")) for b in range(0, 101, 10)
        ]
        lines.append(line(TITLES[model], points, colour, 0))
    title = "How many groups Selective FedAvg forms (mean, and extremes)"
    some = [each for each in lines if len(each.x) > 1]
    return Chart("groups", title, "balanced data in %", "groups", some)


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
    return out


def _complexity(runs: Table) -> list[Statement]:
    """FedAvg at 0 % on the global test rises with the model's complexity."""
    out = []
    for one, two in (("small", "classic"), ("classic", "wide")):
        a, b = (runs.by_seed(model, 0, "fedavg", "shared") for model in (one, two))
        values = paired(b, a)
        words = f"FedAvg at 0 % on the global test: {TITLES[two]} beats {TITLES[one]}"
        out.append(Statement(words, values, POINTS, 0.01))
    return out


def _central(runs: Table) -> dict[str, bool]:
    """Whether the centralised accuracies are near the paper's."""
    checks = {}
    for model, paper in CENTRAL_ACCURACY.items():
        values = runs.values(model, 100, "centralised", "shared")
        if values:
            mean = float(np.mean(values))
            words = f"{TITLES[model]}: the centralised accuracy is within 0.5 points of the paper's"
            checks[f"{words} ({100 * mean:.2f} against {100 * paper:.2f} %)"] = (
                abs(mean - paper) <= BAR
            )
    return checks


def _groups(runs: Table) -> dict[str, bool]:
    """Whether the groups are the true ones where there are some, and one where there are none."""
    checks = {}
    for model in runs.models:
        apart = runs.values(model, 0, "selective", "recovered")
        one = runs.values(model, 100, "selective", "groups")
        if apart:
            words = f"{TITLES[model]}: at 0 % Selective finds the three partitions"
            checks[f"{words} ({sum(map(bool, apart))} of {len(apart)} seeds)"] = all(apart)
        if one:
            good = sum(value == 1 for value in one)
            words = f"{TITLES[model]}: at 100 % Selective makes one group"
            checks[f"{words} ({good} of {len(one)} seeds)"] = good == len(one)
    return checks
