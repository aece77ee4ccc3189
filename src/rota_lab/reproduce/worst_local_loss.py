"""A node whose loss converges to C times its optimum while the global loss converges.

Node k has the loss F_k(w) = 1/2 |w - c_k|^2 + m_k, which is smooth and strongly convex with L = mu
= 1. Nodes 1 to N-1 have their minimum at 0, and node N, with the share p of the data, has it at a
distance of delta. The global minimum is then at w* = p c_N, so

    F_N(w*) - F_N* = 1/2 (1 - p)^2 delta^2
    Gamma = F* - sum p_k F_k* = 1/2 p (1 - p) delta^2

For a loss of C F_N* it takes 1/2 (1 - p)^2 delta^2 = (C - 1) F_N*. The paper's proof takes
Gamma / p = (C - 1) F_N* instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rota.arrays import Array
from rota.data.federation import Federation, Part
from rota.engine import make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.loop import begin, play
from rota.plan import Task
from rota.sampling import Full
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.result import Result, Row, over_seeds

FACTORS = (1.5, 2.0, 5.0, 10.0)
"""C: how far above its optimum node N's loss shall be."""
WIDE, NODES, MINE, LEAST = 10, 10, 4, 0.5
"""Numbers of w, nodes, node N's examples (the others have four too), and F_N*."""
TOLERANCE = 1e-9


class Point(nn.Module):
    """A model that is a point: its output for an example x = 1 is w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[None]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """1/2 |w - c|^2 + m; an example's target is c and m."""
    return 0.5 * (outputs - targets[:, :WIDE]).square().sum(dim=1) + targets[:, WIDE]


def less(outputs: Tensor, targets: Tensor) -> Tensor:
    """A score that is higher where the loss is lower."""
    return -loss(outputs, targets)


class Path(NamedTuple):
    """By round: node N's loss in units of its optimum, and the global loss above its optimum."""

    ratio: list[float]
    gap: list[float]


def federation(delta: float) -> Federation:
    """Nodes 1 to N-1 around 0, and node N at a distance of delta."""
    centres = np.zeros((NODES, WIDE))
    centres[-1] = delta / math.sqrt(WIDE)
    target = np.repeat(np.column_stack([centres, np.zeros(NODES)]), MINE, axis=0)
    target[-MINE:, WIDE] = LEAST
    x, y = torch.ones(len(target), 1, dtype=torch.float64), torch.from_numpy(target)
    train = Part(x, y, np.arange(NODES + 1) * MINE)
    return Federation("points", train, Part(x, y, np.array([0, len(y)])), classes=0)


def played(delta: float, rounds: int) -> Path:
    """FedAvg with five whole-data steps per node and round, and full participation."""
    data = federation(delta)
    task = Task(Point, data, lr=0.1, batch=None, steps=5, loss=loss, score=less, name="point")
    experiment = Experiment([task], Full(), FedAvg(), rounds=rounds, evaluate=rounds)
    engine = make("sequential", experiment, "cpu")
    state, ratio, gap = begin(experiment, engine), list[float](), list[float]()
    best = _losses(data, _best(delta)).mean()
    for _ in range(rounds):
        state, _ = play(experiment, engine, state)
        losses = _losses(data, state.models[0].params)
        ratio.append(float(losses[-1]) / LEAST)
        gap.append(float(losses.mean() - best))
    return Path(ratio, gap)


def _best(delta: float) -> Tensor:
    """The global minimum: the mean of the nodes' minima."""
    return torch.full((WIDE,), delta / math.sqrt(WIDE) / NODES, dtype=torch.float64)


def _losses(data: Federation, w: Tensor) -> Array:
    """F_k(w) for every node; they have equally many examples."""
    each = loss(w.expand(len(data.train.y), -1), data.train.y).numpy()
    return np.asarray(each.reshape(NODES, MINE).mean(axis=1))


def corrected(factor: float) -> float:
    """delta with F_N(w*) = C F_N*."""
    return math.sqrt(2 * (factor - 1) * LEAST) / (1 - 1 / NODES)


def printed(factor: float) -> float:
    """delta with Gamma / p = (C - 1) F_N*, as the paper's proof chooses it."""
    return math.sqrt(2 * (factor - 1) * LEAST / (1 - 1 / NODES))


def worst_local_loss(quick: bool = False) -> Result:
    """Selective FedAvg's theorem: one node's loss ends at C times its optimum."""
    rounds = 60 if quick else 100
    rows: list[Row] = []
    right, wrong, checks = [], [], dict[str, bool]()
    for colour, factor in enumerate(FACTORS):
        good, bad = played(corrected(factor), rounds), played(printed(factor), rounds)
        words = f"C = {factor:g}: node N's loss / its optimum"
        rows.append(over_seeds(f"{words}, with our delta", factor, [good.ratio[-1]]))
        rows.append(over_seeds(f"{words}, with the paper's Gamma", factor, [bad.ratio[-1]]))
        right.append(Line(f"C = {factor:g}", range(1, rounds + 1), good.ratio, colour))
        right.append(Line("", [1, rounds], [factor, factor], colour, dashed=2))
        right.append(Line("", range(1, rounds + 1), bad.ratio, colour, dashed=1))
        gaps = [math.log10(max(gap, 1e-16)) for gap in good.gap]
        wrong.append(Line(f"C = {factor:g}", range(1, rounds + 1), gaps, colour))
        checks |= _checks(factor, good, bad)
    return Result(
        name="worst-local-loss",
        title="The worst local loss of a model that converges",
        text=TEXT,
        rows=rows,
        charts=[
            Chart("ratio", "Node N's loss over its optimum", "round", "F_N / F_N*", right),
            Chart("gap", "The global loss above its minimum", "round", "log10", wrong),
        ],
        checks=checks,
        quick=quick,
    )


def _checks(factor: float, good: Path, bad: Path) -> dict[str, bool]:
    short = 1 + (1 - 1 / NODES) * (factor - 1)
    least, near = f"1 + (1 - p)(C - 1) = {short:.4g}", TOLERANCE * factor
    return {
        f"C = {factor:g}: the global loss converges to its minimum": abs(good.gap[-1]) < TOLERANCE,
        f"C = {factor:g}: node N's loss converges to C times its optimum": (
            abs(good.ratio[-1] - factor) < near
        ),
        f"C = {factor:g}: with the paper's choice of Gamma it converges to {least} times it": (
            abs(bad.ratio[-1] - short) < near
        ),
    }


TEXT = """
The paper on Selective FedAvg claims that for every C there are data for which FedAvg's global loss
converges to its minimum while one node's loss converges to C times its own minimum. The claim is
true. This page builds such data and measures it on rota's own rounds. The proof that it prints does
not show it.

What is assumed here: every node's loss is a quadratic with L = mu = 1, so its assumptions 1 and 2
hold. Nodes take whole-data steps and all take part, so there is no noise (assumption 3 with sigma =
0). Gradients are bounded along the path (assumption 4). Node N's minimum is above 0, because C
times 0 would be no loss at all. There are ten nodes with equal data, p = 0.1.

Where the printed proof fails:

- It assumes that nodes 1 to N-1 are at their own minima in the limit, F_k(w_T) -> F_k*. With
  strongly convex losses (its assumption 2) this and the convergence of F to its minimum exclude
  each other for C above 1. If all other nodes were at their minima at w*, their gradients there
  would be 0. The sum of all gradients is 0 at w*, so node N's would be 0 too, and node N would be
  at its own minimum.
- It therefore takes Gamma / p = (C - 1) F_N*. But Gamma also has what the other nodes lose. Here
  node N's loss is F_N* + (1 - p) Gamma / p, which is less than C F_N*: the dashed lines.
- It calls Gamma a choice. Gamma follows from the data; the distance delta of node N's minimum is
  what can be chosen.
- It bounds node N's loss from above only, so it does not show that the loss is as large as C F_N*.
  In the bound, epsilon / 2 is not divided by p, and the last lines write C F* for C F_N*.

The solid lines have the delta that follows from F_N(w*) = C F_N*; the dotted ones are C.
"""
