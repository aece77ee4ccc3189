"""Gradient descent's convergence bound (the lecture's first theorem), checked on rota's own round.

    F c-strongly convex and L-smooth, lr <= 1/L:   F(x_t) - F* <= (1 - lr c)^t (F(x_0) - F*)

Gradient descent is FedAvg with one client that takes one full-batch step per round. With m workers
that take one such step each it is synchronous distributed SGD, whose average step is the same. Both
problems are linear models with float64 weights, so that L, c and F* are known and rounding stays
small: least squares with chosen eigenvalues, and logistic regression on real data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
from rota_lab.reproduce.gd_distributed import distributed
from rota_lab.reproduce.gd_inequalities import inequalities
from rota_lab.reproduce.gd_more import SETTLED, compressed, two_minima
from rota_lab.reproduce.gd_text import bound_text, distributed_text
from rota_lab.reproduce.interval import FAILS, HOLDS, Claim
from rota_lab.reproduce.parts import results
from rota_lab.reproduce.result import Result, Row, over_seeds

RATES = (0.1, 0.5, 1.0, 1.5, 2.1)
"""The learning rates, in units of 1/L."""
TOLERANCE = 1e-14
"""What rounding may add to F(x_t) - F*: some 50 units in the last place, as F is of order 1."""


@dataclass(frozen=True)
class Problem:
    """A linear model's mean loss over examples, plus ridge/2 |w|^2.

    `smooth` is L, `convex` is c, `best` is F*. `loss` takes the model's outputs (prediction,
    penalty). `mean` gives the loss's derivative by the prediction: d loss / d z = mean(z) - y.
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
        error = self.mean(self.x @ w) - self.y
        return np.asarray(self.x.T @ error / len(self.y) + self.ridge * w)


class Linear(nn.Module):
    """Predictions x w, each with the penalty ridge/2 |w|^2, which the loss of an example adds."""

    def __init__(self, start: Array, ridge: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(start))
        self.ridge = ridge

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.weight
        penalty = self.ridge / 2 * self.weight.square().sum()
        return torch.stack([z, penalty.expand_as(z)], dim=-1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error, plus the penalty."""
    return (outputs[..., 0] - targets).square() / 2 + outputs[..., 1]


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of one logit with targets 0 and 1, plus the penalty."""
    z, penalty = outputs[..., 0], outputs[..., 1]
    return F.binary_cross_entropy_with_logits(z, targets, reduction="none") + penalty


def quadratic(
    seed: int = 0, convex: float = 0.2, smooth: float = 10.0, size: int = 20, examples: int = 40
) -> Problem:
    """F(w) = 1/2 (w - w*)' A (w - w*), with A's eigenvalues from c to L, evenly on a log scale.

    It is least squares with A = X'X / n and y = X w*.
    """
    generator = rng.generator(rng.key(seed, "gd-bound", "quadratic"))
    eigenvalues = np.geomspace(convex, smooth, size)
    left, _ = np.linalg.qr(generator.standard_normal((examples, size)))
    right, _ = np.linalg.qr(generator.standard_normal((size, size)))
    x = math.sqrt(examples) * left * np.sqrt(eigenvalues) @ right.T
    y = x @ generator.standard_normal(size)
    return Problem(
        name="quadratic",
        x=x,
        y=y,
        loss=squared,
        mean=lambda z: z,
        ridge=0.0,
        smooth=smooth,
        convex=convex,
        best=0.0,
        smooth_at_best=smooth,
        workers=4,
    )


def breast_cancer(ridge: float = 0.05) -> Problem:
    """Logistic regression on scikit-learn's breast cancer data.

    There are 569 examples of 30 standardised features and a constant. The second derivative of the
    logistic loss, p (1 - p), is at most 1/4, so L = lambda_max(X'X) / (4n) + ridge; c = ridge.
    """
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    x = np.c_[(features - features.mean(0)) / features.std(0), np.ones(len(features))]
    y = labels.astype(np.float64)
    smooth = float(np.linalg.eigvalsh(x.T @ x)[-1]) / (4 * len(y)) + ridge
    best, curvature = newton(x, y, ridge)
    return Problem(
        name="logistic",
        x=x,
        y=y,
        loss=logistic,
        mean=sigmoid,
        ridge=ridge,
        smooth=smooth,
        convex=ridge,
        best=best,
        smooth_at_best=curvature,
        workers=5,
    )


def sigmoid(z: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(z / 2)))


def newton(x: Array, y: Array, ridge: float) -> tuple[float, float]:
    """Ridge logistic regression's minimum F*, and the Hessian's largest eigenvalue there.

    Newton's method with halved steps, which shares no code with the engine. It stops when the
    gradient g is of rounding size: F(w) - F* <= |g|^2 / 2c is then far below F's rounding.
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
    """What gradient descent passes: F(x_t) - F* for t = 0..T, and the iterates [T + 1, size]."""

    gap: Array
    iterates: Array


def start_of(problem: Problem, seed: int) -> Array:
    """A random starting point."""
    generator = rng.generator(rng.key(seed, "gd-bound", "start"))
    return np.asarray(generator.standard_normal(problem.x.shape[1]))


def descend(
    problem: Problem,
    lr: float,
    steps: int,
    seed: int = 0,
    workers: int = 1,
    engine: str = "sequential",
) -> Trace:
    """Full-batch gradient descent as rota's rounds.

    Each worker holds an equal piece of the examples, and takes one step per round.
    """
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    cuts = np.linspace(0, len(y), workers + 1).round().astype(np.int64)
    data = Federation(problem.name, Part(x, y, cuts), Part(x, y, cuts[[0, -1]]), classes=0)
    model = Linear(start_of(problem, seed), problem.ridge)
    task = Task(model, data, lr=lr, batch=None, steps=1, loss=problem.loss, score=problem.loss)
    experiment = Experiment([task], Full(), Unbiased(), rounds=steps, seed=seed)
    trainer = make(engine, experiment, "cpu")
    state = begin(experiment, trainer)
    value, iterates = [trainer.evaluate(state.models)[0].loss], [state.models[0].params.numpy()]
    for _ in range(steps):
        state, record = play(experiment, trainer, state)
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
    """The factor by which a step must shrink the gap.

    It is 1 - lr c where lr <= 1/L, else 1 - 2 c lr (1 - L lr / 2), and None from lr = 2/L on.
    """
    if lr * problem.smooth <= 1 + 1e-12:
        return 1 - lr * problem.convex
    return sharp(problem, lr) if lr * problem.smooth < 2 else None


def sharp(problem: Problem, lr: float) -> float:
    """1 - 2 c lr (1 - L lr / 2): the proof's factor before it assumes lr <= 1/L.

    Where that assumption holds, 1 - lr c is the larger of the two factors.
    """
    return 1 - 2 * problem.convex * lr * (1 - problem.smooth * lr / 2)


def worst_ratio(gap: Array, shrink: float) -> float:
    """The largest (F(x_t) - F*) / (shrink^t (F(x_0) - F*) + tolerance) over t >= 1.

    It is at most 1 where the bound holds.
    """
    bound = shrink ** np.arange(1, len(gap)) * gap[0]
    return float(np.max(gap[1:] / (bound + TOLERANCE)))


def worst_step(gap: Array) -> float:
    """The largest factor of one step, (F(x_t+1) - F* - tolerance) / (F(x_t) - F*)."""
    return float(np.max((gap[1:] - TOLERANCE) / np.maximum(gap[:-1], TOLERANCE)))


def gd_bound(quick: bool = False, *, out: Path | None = None) -> Result:
    """Gradient descent stays under its bound (1 - lr c)^t (F(x_0) - F*), on two problems.

    The runs of distributed SGD are kept in `out`, and are not run again.
    """
    steps, seeds = (50, 1) if quick else (150, 3)
    rounds, starts = (40, 2) if quick else (200, 5)
    rows: list[Row] = []
    claims: list[Claim] = []
    charts: list[Chart] = []
    checks: dict[str, bool] = {}
    problems = quadratic(), breast_cancer()
    for problem in problems:
        rates = {f"{rate:g}/L": rate / problem.smooth for rate in RATES}
        if problem.smooth_at_best < problem.smooth:
            rates[f"{RATES[-1]:g}/L*"] = RATES[-1] / problem.smooth_at_best
        traces = {}
        for label, lr in rates.items():
            traces[label] = [descend(problem, lr, steps, seed) for seed in range(seeds)]
        gaps = {label: [trace.gap for trace in some] for label, some in traces.items()}
        for label, lr in rates.items():
            rows += _rows(problem, label, factor(problem, lr), gaps[label])
        same = _same_iterates(problem, traces["1/L"])
        rows += same
        checks |= _checks(problem, rates, gaps)
        who = f"one client, {problem.workers} workers and gradient descent written out"
        claim = f"{problem.name}: {who} give the same iterates (within 1e-12)"
        checks[claim] = all(row["high"] < 1e-12 for row in same)
        below = [(lr, label) for label, lr in rates.items() if factor(problem, lr) is not None]
        paths = [(lr, trace.iterates) for lr, label in below for trace in traces[label]]
        more, judged = inequalities(problem, paths)
        rows += more
        claims += judged
        charts.append(_chart(problem, rates, {label: some[0] for label, some in gaps.items()}))
    known = problems[1]

    def start(seed: int) -> Linear:
        return Linear(start_of(known, seed), known.ridge)

    files = results(None if quick else out, "gd-bound")
    file = files[0] if files else None
    sent, shorter = compressed(known, start, rounds, starts, file)
    others = distributed(known, start, rounds, starts, file, shorter)
    ends, local = two_minima(max(rounds, SETTLED))
    beyond = gaps[f"{RATES[-1]:g}/L*"]
    text = bound_text(*problems, steps, beyond, RATES[-1], TOLERANCE)
    text += distributed_text(rounds, starts)
    title = "The convergence bound of gradient descent"
    claims += [Claim(words, HOLDS if held else FAILS) for words, held in checks.items()]
    return Result(
        name="gd-bound",
        title=title,
        text=text,
        rows=[*rows, *ends, *others.rows, *sent],
        charts=charts + others.charts,
        quick=quick,
        claims=[*claims, local, *others.claims],
    )


def _rows(problem: Problem, label: str, shrink: float | None, gaps: list[Array]) -> list[Row]:
    """The rows of one problem at one learning rate; without a bound where `shrink` is None."""
    name = f"{problem.name}, lr {label}"
    rows = []
    if shrink is not None:
        ratios = [worst_ratio(gap, shrink) for gap in gaps]
        rows.append(over_seeds(f"{name}: gap / bound, largest over t", 1.0, ratios))
    factors = [worst_step(gap) for gap in gaps]
    rows.append(over_seeds(f"{name}: factor of a step, largest over t", shrink, factors))
    final = None if shrink is None else shrink ** (len(gaps[0]) - 1)
    ends = [gap[-1] / gap[0] for gap in gaps]
    rows.append(over_seeds(f"{name}: last gap / first gap", final, ends))
    never = None if shrink is None else 0.0
    diverged = [gap[-1] > gap[0] for gap in gaps]
    rows.append(over_seeds(f"{name}: diverged (last gap > first gap)", never, diverged))
    return rows


def _checks(
    problem: Problem, rates: dict[str, float], gaps: dict[str, list[Array]]
) -> dict[str, bool]:
    """The source's claims about one problem, over all starting points."""
    bounded: list[str] = []
    under = each = True
    for label, lr in rates.items():
        shrink = factor(problem, lr)
        if shrink is None:
            continue
        bounded.append(label)
        under &= all(worst_ratio(gap, shrink) <= 1 for gap in gaps[label])
        each &= all(worst_step(gap) <= sharp(problem, lr) for gap in gaps[label])
    name, bound = problem.name, "1 - 2 c lr (1 - L lr / 2)"
    checks = {
        f"{name}: the gap is under the bound at every step, for lr {', '.join(bounded)}": under,
        f"{name}: every single step multiplies the gap by {bound} or less": each,
    }
    # where the curvature is L everywhere, nothing stops a step that is too long
    if problem.smooth_at_best == problem.smooth:
        beyond = [gap for label in rates if label not in bounded for gap in gaps[label]]
        diverged = all(gap[-1] > gap[0] for gap in beyond)
        checks[f"{name}: lr {RATES[-1]:g}/L, above 2/L, diverges"] = diverged
    return checks


def _same_iterates(problem: Problem, traces: list[Trace]) -> list[Row]:
    """How far one client's iterates at lr 1/L are from those of workers, and of numpy."""
    lr, steps = 1 / problem.smooth, len(traces[0].gap) - 1
    from_workers, from_numpy = list[float](), list[float]()
    for seed, trace in enumerate(traces):
        workers = descend(problem, lr, steps, seed, problem.workers).iterates
        from_workers.append(float(np.abs(trace.iterates - workers).max()))
        numpy = by_hand(problem, lr, steps, seed)
        from_numpy.append(float(np.abs(trace.iterates - numpy).max()))
    name = f"{problem.name}, lr 1/L: largest difference of the iterates, one client against"
    return [
        over_seeds(f"{name} {problem.workers} workers", 0.0, from_workers),
        over_seeds(f"{name} x - lr grad F(x) in numpy", 0.0, from_numpy),
    ]


def _chart(problem: Problem, rates: dict[str, float], gaps: dict[str, Array]) -> Chart:
    """log10 of the gap against t for the first starting point, with the bounds dashed.

    A line ends where it leaves the picture.
    """
    lines = []
    for colour, (label, gap) in enumerate(gaps.items()):
        shrink = factor(problem, rates[label])
        bound = np.full(len(gap), np.nan)
        if shrink is not None:
            bound = shrink ** np.arange(len(gap)) * gap[0]
        for name, values, dashed in ((f"lr {label}", gap, False), ("", bound, True)):
            shown = np.flatnonzero((values > TOLERANCE) & (values < 100 * gap[0]))
            if len(shown):
                y = np.log10(values[shown]).tolist()
                lines.append(Line(name, shown.tolist(), y, colour, dashed))
    title = f"{problem.name}: measured gap (solid), bound (dashed)"
    return Chart(problem.name, title, "step t", "log10 (F(x_t) - F*)", lines)
