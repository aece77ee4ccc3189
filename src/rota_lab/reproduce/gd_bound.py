"""Gradient descent's convergence bound (S0's first theorem), checked on rota's own round.

    F c-strongly convex and L-smooth, lr <= 1/L:   F(x_t) - F* <= (1 - lr c)^t (F(x_0) - F*)

Gradient descent is FedAvg with one client that takes one full-batch step a round; m workers that take one such step each are
synchronous distributed SGD, whose average step is the same. Both problems are linear models with float64 weights, so that L, c
and F* are known and rounding stays small: least squares with chosen eigenvalues, and logistic regression on real data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rota import rng
from rota.arrays import Array
from rota.data.federation import Federation, Part
from rota.engine import make
from rota.estimate import Unbiased
from rota.experiment import Experiment
from rota.loop import begin, play
from rota.plan import Task
from rota.sampling import Full
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.result import Result, Row, over_seeds

RATES = (0.1, 0.5, 1.0, 1.5, 2.1)
"""The learning rates, in units of 1/L."""
TOLERANCE = 1e-14
"""What rounding may add to F(x_t) - F*: F is of order 1, so that is some 50 units in its last place."""


@dataclass(frozen=True)
class Problem:
    """A linear model's mean loss over examples plus ridge/2 |w|^2; `smooth` is L, `convex` c, `best` F*.

    `loss` takes the model's outputs (prediction, penalty). `mean` is the loss's derivative without the target: d loss / d z = mean(z) - y.
    """

    name: str
    x: Array
    y: Array
    loss: Callable[[Tensor, Tensor], Tensor]
    mean: Callable[[Array], Array]
    ridge: float
    smooth: float
    convex: float
    best: float
    smooth_at_best: float
    """The Hessian's largest eigenvalue at the minimum (L is its largest anywhere)."""
    workers: int

    def gradient(self, w: Array) -> Array:
        """The gradient of F, written out."""
        return np.asarray(
            self.x.T @ (self.mean(self.x @ w) - self.y) / len(self.y) + self.ridge * w
        )


class Linear(nn.Module):
    """Predictions x w, and beside each the penalty ridge/2 |w|^2, so that a loss of one number an example can hold it."""

    def __init__(self, start: Array, ridge: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(start))
        self.ridge = ridge

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.weight
        return torch.stack([z, (self.ridge / 2 * self.weight.square().sum()).expand_as(z)], dim=-1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error, plus the penalty."""
    return (outputs[..., 0] - targets).square() / 2 + outputs[..., 1]


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of one logit with targets 0 and 1, plus the penalty."""
    return (
        F.binary_cross_entropy_with_logits(outputs[..., 0], targets, reduction="none")
        + outputs[..., 1]
    )


def quadratic(
    seed: int = 0, convex: float = 0.2, smooth: float = 10.0, size: int = 20, examples: int = 40
) -> Problem:
    """F(w) = 1/2 (w - w*)' A (w - w*), with A's eigenvalues from c to L evenly on a log scale: least squares, A = X'X / n and y = X w*."""
    generator = rng.generator(rng.key(seed, "gd-bound", "quadratic"))
    eigenvalues = np.geomspace(convex, smooth, size)
    left, _ = np.linalg.qr(generator.standard_normal((examples, size)))
    right, _ = np.linalg.qr(generator.standard_normal((size, size)))
    x = math.sqrt(examples) * left * np.sqrt(eigenvalues) @ right.T
    y = x @ generator.standard_normal(size)
    return Problem(
        "quadratic", x, y, squared, lambda z: z, 0.0, smooth, convex, 0.0, smooth, workers=4
    )


def breast_cancer(ridge: float = 0.05) -> Problem:
    """Logistic regression on scikit-learn's breast cancer data (569 examples, 30 standardised features and a constant).

    The logistic loss's second derivative p (1 - p) is at most 1/4, so L = lambda_max(X'X) / (4n) + ridge; c = ridge.
    """
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    x = np.c_[(features - features.mean(0)) / features.std(0), np.ones(len(features))]
    y = labels.astype(np.float64)
    smooth = float(np.linalg.eigvalsh(x.T @ x)[-1]) / (4 * len(y)) + ridge
    best, curvature = newton(x, y, ridge)
    return Problem(
        "logistic", x, y, logistic, sigmoid, ridge, smooth, ridge, best, curvature, workers=5
    )


def sigmoid(z: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(z / 2)))


def newton(x: Array, y: Array, ridge: float) -> tuple[float, float]:
    """Ridge logistic regression's minimum F* and the Hessian's largest eigenvalue there, by Newton's method with halved steps.

    It shares no code with the engine. It stops at a gradient g of rounding size: F(w) - F* <= |g|^2 / 2c is then far below F's rounding.
    """

    def value(w: Array) -> float:
        z = x @ w
        return float(np.mean(np.logaddexp(0, z) - y * z) + ridge / 2 * (w @ w))

    w = np.zeros(x.shape[1])
    for _ in range(100):
        p = sigmoid(x @ w)
        gradient = x.T @ (p - y) / len(y) + ridge * w
        hessian = (x.T * (p * (1 - p))) @ x / len(y) + ridge * np.eye(len(w))
        if np.linalg.norm(gradient) < 1e-14:
            return value(w), float(np.linalg.eigvalsh(hessian)[-1])
        step = np.linalg.solve(hessian, gradient)
        length = 1.0
        while length > 1e-3 and value(w - length * step) > value(w) + TOLERANCE:
            length /= 2
        w = w - length * step
    raise ArithmeticError("Newton's method did not reach the minimum in 100 steps")


class Trace(NamedTuple):
    """Gradient descent's trace: F(x_t) - F* for t = 0..T, and the iterates [T + 1, size]."""

    gap: Array
    iterates: Array


def start_of(problem: Problem, seed: int) -> Array:
    """A random starting point."""
    return np.asarray(
        rng.generator(rng.key(seed, "gd-bound", "start")).standard_normal(problem.x.shape[1])
    )


def descend(
    problem: Problem,
    lr: float,
    steps: int,
    seed: int = 0,
    workers: int = 1,
    engine: str = "sequential",
) -> Trace:
    """Full-batch gradient descent as rota's rounds: every worker holds an equal piece of the examples and takes one step a round."""
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    cuts = np.linspace(0, len(y), workers + 1).round().astype(np.int64)
    data = Federation(problem.name, Part(x, y, cuts), Part(x, y, cuts[[0, -1]]), classes=0)
    model = Linear(start_of(problem, seed), problem.ridge)
    task = Task(model, data, lr=lr, batch=None, steps=1, loss=problem.loss, score=problem.loss)
    experiment = Experiment([task], Full(), Unbiased(), rounds=steps, seed=seed)
    machine = make(engine, Experiment([task], devices=experiment.devices, seed=seed), "cpu")
    state = begin(experiment, machine)
    value, iterates = [machine.evaluate(state.models)[0].loss], [state.models[0].params.numpy()]
    for _ in range(steps):
        state, record = play(experiment, machine, state)
        value.append(record["loss"])
        iterates.append(state.models[0].params.numpy())
    return Trace(np.array(value) - problem.best, np.stack(iterates))


def by_hand(problem: Problem, lr: float, steps: int, seed: int = 0) -> Array:
    """The same iterates, x <- x - lr grad F(x), in numpy."""
    iterates = [start_of(problem, seed)]
    for _ in range(steps):
        iterates.append(iterates[-1] - lr * problem.gradient(iterates[-1]))
    return np.stack(iterates)


def factor(problem: Problem, lr: float) -> float | None:
    """The factor by which a step must shrink the gap: 1 - lr c where lr <= 1/L, else 1 - 2 c lr (1 - L lr / 2), None from lr = 2/L on."""
    if lr * problem.smooth <= 1 + 1e-12:
        return 1 - lr * problem.convex
    return sharp(problem, lr) if lr * problem.smooth < 2 else None


def sharp(problem: Problem, lr: float) -> float:
    """1 - 2 c lr (1 - L lr / 2): the proof's factor before it assumes lr <= 1/L, under which 1 - lr c is the larger."""
    return 1 - 2 * problem.convex * lr * (1 - problem.smooth * lr / 2)


def worst_ratio(gap: Array, shrink: float) -> float:
    """The largest (F(x_t) - F*) / (shrink^t (F(x_0) - F*) + tolerance) over t >= 1: at most 1 where the bound holds."""
    bound = shrink ** np.arange(1, len(gap)) * gap[0]
    return float(np.max(gap[1:] / (bound + TOLERANCE)))


def worst_step(gap: Array) -> float:
    """The largest factor of one step, (F(x_t+1) - F* - tolerance) / (F(x_t) - F*)."""
    return float(np.max((gap[1:] - TOLERANCE) / np.maximum(gap[:-1], TOLERANCE)))


def gd_bound(quick: bool = False) -> Result:
    """Gradient descent stays under (1 - lr c)^t (F(x_0) - F*), on a quadratic and on logistic regression."""
    steps, seeds = (50, 1) if quick else (150, 3)
    rows: list[Row] = []
    charts: list[Chart] = []
    checks: dict[str, bool] = {}
    problems = quadratic(), breast_cancer()
    for problem in problems:
        rates = {f"{rate:g}/L": rate / problem.smooth for rate in RATES}
        if problem.smooth_at_best < problem.smooth:
            rates[f"{RATES[-1]:g}/L*"] = RATES[-1] / problem.smooth_at_best
        paths = {
            label: [descend(problem, lr, steps, seed) for seed in range(seeds)]
            for label, lr in rates.items()
        }
        gaps = {label: [path.gap for path in some] for label, some in paths.items()}
        for label, lr in rates.items():
            rows += _rows(problem, label, factor(problem, lr), gaps[label])
        same = _same_iterates(problem, paths["1/L"])
        rows += same
        checks |= _checks(problem, rates, gaps)
        claim = f"one client, {problem.workers} workers and gradient descent written out give the same iterates (within 1e-12)"
        checks[f"{problem.name}: {claim}"] = all(row["high"] < 1e-12 for row in same)
        charts.append(_chart(problem, rates, {label: some[0] for label, some in gaps.items()}))
    text = _text(*problems, steps, gaps[f"{RATES[-1]:g}/L*"])
    return Result(
        "gd-bound", "The convergence bound of gradient descent", text, rows, charts, checks, quick
    )


def _rows(problem: Problem, label: str, shrink: float | None, gaps: list[Array]) -> list[Row]:
    """What is reported of one problem at one learning rate."""
    name = f"{problem.name}, lr {label}"
    rows = []
    if shrink is not None:
        rows.append(
            over_seeds(
                f"{name}: gap / bound, largest over t",
                1.0,
                [worst_ratio(gap, shrink) for gap in gaps],
            )
        )
    rows.append(
        over_seeds(
            f"{name}: factor of a step, largest over t", shrink, [worst_step(gap) for gap in gaps]
        )
    )
    final = None if shrink is None else shrink ** (len(gaps[0]) - 1)
    rows.append(
        over_seeds(f"{name}: last gap / first gap", final, [gap[-1] / gap[0] for gap in gaps])
    )
    rows.append(
        over_seeds(
            f"{name}: diverged (last gap > first gap)",
            None if shrink is None else 0.0,
            [gap[-1] > gap[0] for gap in gaps],
        )
    )
    return rows


def _checks(
    problem: Problem, rates: dict[str, float], gaps: dict[str, list[Array]]
) -> dict[str, bool]:
    """The source's claims about one problem, over all starting points."""
    bounded = {
        label: shrink for label, lr in rates.items() if (shrink := factor(problem, lr)) is not None
    }
    under = all(
        worst_ratio(gap, shrink) <= 1 for label, shrink in bounded.items() for gap in gaps[label]
    )
    each = all(
        worst_step(gap) <= sharp(problem, rates[label]) for label in bounded for gap in gaps[label]
    )
    checks = {
        f"{problem.name}: the gap is under the bound at every step, for lr {', '.join(bounded)}": under,
        f"{problem.name}: every single step multiplies the gap by 1 - 2 c lr (1 - L lr / 2) or less": each,
    }
    if (
        problem.smooth_at_best == problem.smooth
    ):  # the curvature is L everywhere, so nothing stops a step that is too long
        beyond = [gap for label in rates.keys() - bounded.keys() for gap in gaps[label]]
        checks[f"{problem.name}: lr {RATES[-1]:g}/L, above 2/L, diverges"] = all(
            gap[-1] > gap[0] for gap in beyond
        )
    return checks


def _same_iterates(problem: Problem, paths: list[Trace]) -> list[Row]:
    """How far one client's iterates at lr 1/L are from those of several workers, and from gradient descent written out."""
    lr, steps = 1 / problem.smooth, len(paths[0].gap) - 1
    apart = []
    for seed, path in enumerate(paths):
        others = (
            descend(problem, lr, steps, seed, problem.workers).iterates,
            by_hand(problem, lr, steps, seed),
        )
        apart.append([float(np.abs(path.iterates - other).max()) for other in others])
    workers, numpy = zip(*apart, strict=True)
    name = f"{problem.name}, lr 1/L: largest difference of the iterates, one client against"
    return [
        over_seeds(f"{name} {problem.workers} workers", 0.0, workers),
        over_seeds(f"{name} x - lr grad F(x) in numpy", 0.0, numpy),
    ]


def _chart(problem: Problem, rates: dict[str, float], gaps: dict[str, Array]) -> Chart:
    """log10 of the gap against t for the first starting point, with the bounds dashed; a line that leaves the picture is cut."""
    lines = []
    for colour, (label, gap) in enumerate(gaps.items()):
        shrink = factor(problem, rates[label])
        bound = (
            np.full(len(gap), np.nan) if shrink is None else shrink ** np.arange(len(gap)) * gap[0]
        )
        for name, values, dashed in ((f"lr {label}", gap, False), ("", bound, True)):
            shown = np.flatnonzero((values > TOLERANCE) & (values < 100 * gap[0]))
            if len(shown):
                lines.append(
                    Line(name, shown.tolist(), np.log10(values[shown]).tolist(), colour, dashed)
                )
    return Chart(
        problem.name,
        f"{problem.name}: measured gap (solid), bound (dashed)",
        "step t",
        "log10 (F(x_t) - F*)",
        lines,
    )


def _text(first: Problem, second: Problem, steps: int, beyond: list[Array]) -> str:
    """What was run, in words."""
    ends = "; ".join(f"{gap[-2]:.4f} and {gap[-1]:.4f}" for gap in beyond)
    return f"""
The theorem of source S0 (the lecture "Distributed Machine Learning", 18786 recitation, 11 April 2025): for a c-strongly convex, L-smooth F
and a learning rate lr <= 1/L, full-batch gradient descent keeps `F(x_t) - F* <= (1 - lr c)^t (F(x_0) - F*)`.
Before that assumption its proof has the factor `1 - 2 c lr (1 - L lr / 2)`, which shrinks
the gap for every lr < 2/L: the bound used here for lr 1.5/L. The source's numbers are upper limits.

Each run is {steps} of rota's own rounds (full participation, one full-batch step a client, unbiased estimate, float64) from a random start:

- **{first.name}**: least squares on {len(first.y)} examples whose Hessian has {first.x.shape[1]} eigenvalues from c = {first.convex:g} to
  L = {first.smooth:g}; F\\* = 0.
- **{second.name}**: ridge logistic regression on scikit-learn's breast cancer data ({len(second.y)} examples, {second.x.shape[1]} weights),
  c = ridge = {second.convex:g}, L = lambda_max(X'X) / 4n + ridge = {second.smooth:.4f}; F\\* = {second.best:.12f} by Newton's method.

"Gap" is F(x_t) - F\\*; comparisons allow it an absolute rounding error of {TOLERANCE:g}.

The logistic loss has the curvature L only at its steepest. At the minimum it is L\\* = {second.smooth_at_best:.4f}, so
lr {RATES[-1]:g}/L = {RATES[-1] / second.smooth:.3f} is still far below 2/L\\* = {2 / second.smooth_at_best:.3f}, and converges.
At lr {RATES[-1]:g}/L\\* gradient descent neither settles at the minimum nor runs off to infinity, because the curvature falls further out:
the last two gaps from each start are {ends}.
"""
