"""The page of the reproduction `personal`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.interval import Statement, judged
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds

PFLLIB = {
    "pathological": {"fedavg": 0.8041, "ditto": 0.9944, "fedper": 0.9947, "fedrep": 0.9956},
    "dirichlet": {"fedavg": 0.8585, "ditto": 0.9747, "fedper": 0.9744, "fedrep": 0.9756},
}
"""The accuracies on PFLlib's board, after 2,000 rounds."""
BAR = 0.01
POINTS = " points"
SPLITS = {"pathological": "two labels each", "dirichlet": "Dirichlet 0.1"}
TITLES = {
    "small": "Small",
    "early": "PFLlib's, first rounds",
    "whole": "PFLlib's",
    "tiny": "Short version",
}
TEXT = """
PFLlib's board has two settings on Fashion-MNIST: 20 clients, all of which train in every round for
one epoch in mini-batches of 10, and test sets that are a quarter of each client's images. In the
*pathological* one every client has two labels (four clients share each pair of labels); in the
other one labels are dealt by Dirichlet's distribution with 0.1. PFLlib's accuracy is that of all
test images, each tried with the model of the client that holds it. The other rows count clients.

PFLlib's code has lr 0.005 as its default, and the board names no other one. It does not name the
strength of Ditto's proximal term either (the code's default is 0, which is local training); here it
is 0.1. PFLlib's code reports the best round of a run; here it is the last one. Every setting leaves
out a seventieth of the images, the validation set of `selective`.

The small setting was first played with three other seeds, which could tell nothing. They said how
many seeds would tell, and are not among those below.
"""


def report(
    pieces: Sequence[Any],
    settings: Mapping[str, Any],
    found: dict[str, Found],
    quick: bool,
    device: str,
) -> Result:
    """The page about all finished runs."""
    done = [piece for piece in pieces if piece.name in found]
    places = list(dict.fromkeys((piece.setting, piece.split) for piece in done))
    rows: list[Row] = []
    checks: dict[str, bool] = {}
    statements: list[Statement] = []
    for setting, split in places:
        mine = {p.method: found[p.name] for p in done if (p.setting, p.split) == (setting, split)}
        where = f"{TITLES[setting]}, {SPLITS[split]}"
        rows += _rows(where, mine, {} if setting in ("small", "tiny") else PFLLIB[split])
        if setting == "whole":
            checks |= _near(where, mine, PFLLIB[split])
        statements += _claims(where, mine)
    return Result(
        name="personal",
        title="Personal models on Fashion-MNIST: PFLlib's settings",
        text=_text(pieces, settings, found, quick),
        rows=rows,
        charts=[chart for place in places if (chart := _chart(*place, done, found)).lines],
        checks=checks,
        quick=quick,
        device=device,
        claims=judged(statements),
    )


def values(part: Found, key: str) -> list[float]:
    """A number of each seed."""
    return [run[key] for run in part["runs"].values()]


def _text(
    pieces: Sequence[Any], settings: Mapping[str, Any], found: dict[str, Found], quick: bool
) -> str:
    lines = [TEXT.strip(), ""]
    for name, setting in settings.items():
        if any(piece.setting == name for piece in pieces):
            lines.append(
                f"- {TITLES[name]}: {setting.network}, {setting.images:,} images, "
                f"lr {setting.lr:g}, {setting.rounds:,} rounds, seeds: {setting.seeds}"
            )
    done = [piece for piece in pieces if piece.name in found]
    lines += ["", f"{len(done)} of {len(pieces)} runs are finished; the others are left out."]
    if quick:
        lines[-1] += " This is the short version, which only shows that everything runs."
    machines = sorted({found[piece.name]["machine"] for piece in done})
    precisions = sorted({found[piece.name]["precision"] for piece in done})
    if machines:
        lines += ["", f"They were played in {' and '.join(precisions)} on {'; '.join(machines)}."]
    return "\n".join([*lines, "", *_costs(done, found)])


def _costs(done: Sequence[Any], found: dict[str, Found]) -> list[str]:
    """What each method costs, relative to FedAvg."""
    lines = []
    for method in dict.fromkeys(piece.method for piece in done):
        for piece in done:
            plain = found.get(f"{piece.place}-fedavg")
            if piece.method == method != "fedavg" and plain:
                more = [found[piece.name][key] / plain[key] for key in ("bytes", "client_seconds")]
                lines.append(f"| {method} | {more[0]:.3f} | {more[1]:.3f} |")
                break
    if not lines:
        return []
    head = "What a whole run costs, as a multiple of FedAvg's (the clock is virtual):"
    return [head, "", "| method | bytes | client-seconds |", "|---|---:|---:|", *lines, ""]


def _rows(where: str, mine: dict[str, Found], board: dict[str, float]) -> list[Row]:
    out = []
    for method, part in mine.items():
        words = f"{where}, {method}"
        paper = board.get(method)
        out.append(over_seeds(f"{words}: test images", paper, values(part, "accuracy")))
        for key, what in (("worst", "worst client"), ("p10", "10th percentile of clients")):
            out.append(over_seeds(f"{words}: {what}", None, values(part, key)))
    return out


def _near(where: str, mine: dict[str, Found], board: dict[str, float]) -> dict[str, bool]:
    checks = {}
    for method, theirs in board.items():
        if method in mine:
            mean = float(np.mean(values(mine[method], "accuracy")))
            words = f"{where}, {method}: within a point of PFLlib's"
            checks[f"{words} ({100 * mean:.2f} against {100 * theirs:.2f} %)"] = (
                abs(mean - theirs) <= BAR
            )
    return checks


def _claims(where: str, mine: dict[str, Found]) -> list[Statement]:
    """Every method against FedAvg, and against local training."""
    out = []
    for rival in ("fedavg", "local"):
        for method, part in mine.items():
            if rival in mine and method not in ("fedavg", "local"):
                a, b = (values(each, "accuracy") for each in (part, mine[rival]))
                words = f"{where}: {method} beats {rival}"
                apart = [x - y for x, y in zip(a, b, strict=True)]
                out.append(Statement(words, apart, POINTS, 0.01))
    return out


def _chart(setting: str, split: str, done: Sequence[Any], found: dict[str, Found]) -> Chart:
    lines = []
    for colour, piece in enumerate(p for p in done if (p.setting, p.split) == (setting, split)):
        part = found[piece.name]
        curves = [[test["accuracy"] for test in curve] for curve in part["curves"].values()]
        x = [float(each) for each in part["rounds"]]
        lines.append(
            Line(piece.method, x, np.mean(curves, axis=0).tolist(), colour % 6, colour // 6)
        )
    title = f"{TITLES[setting]}, {SPLITS[split]}"
    return Chart(f"{setting}-{split}", title, "round", "accuracy of all test images", lines)
