"""The lecture's inequalities on L-smooth, c-strongly convex F, along gradient descent's path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import torch

from rota.arrays import Array
from rota_lab.reproduce.interval import FAILS, HOLDS, Claim
from rota_lab.reproduce.result import Row, over_seeds

if TYPE_CHECKING:
    from rota_lab.reproduce.gd_bound import Problem

EVERY = 10
"""Pairs are of every tenth iterate."""
APART, ABOVE = 1e-6, 1e-9
"""Pairs nearer than this (squared), and gaps below this, are rounding more than curvature."""
ROUNDING = 1e-4
"""What rounding may change of a ratio: 1e-14 / c APART is 2e-7 at the most, and its square root."""


def value(problem: Problem, w: Array) -> float:
    """F, by the loss that the engine trains with."""
    z = torch.from_numpy(problem.x @ w)
    penalty = torch.full_like(z, problem.ridge / 2 * float(w @ w))
    losses = problem.loss(torch.stack([z, penalty], dim=-1), torch.from_numpy(problem.y))
    return float(losses.mean())


def curvatures(problem: Problem, iterates: Array) -> Array:
    """2 (F(x) - F(y) - grad F(y)'(x - y)) / |x - y|^2 of all pairs: from c to L."""
    some = iterates[::EVERY]
    values = [value(problem, w) for w in some]
    slopes = [problem.gradient(w) for w in some]
    out = []
    for x, y in permutations(range(len(some)), 2):
        step = some[x] - some[y]
        if step @ step > APART:
            above = values[x] - values[y] - slopes[y] @ step
            out.append(2 * float(above) / float(step @ step))
    return np.array(out)


def polyak(problem: Problem, iterates: Array) -> Array:
    """|grad F(x)|^2 / (2 c (F(x) - F*)) along the path: at least 1."""
    out = []
    for w in iterates:
        gap = value(problem, w) - problem.best
        if gap > ABOVE:
            slope = problem.gradient(w)
            out.append(float(slope @ slope) / (2 * problem.convex * gap))
    return np.array(out)


def descents(problem: Problem, iterates: Array, lr: float) -> Array:
    """(F(x_t) - F(x_t+1)) / (lr (1 - L lr / 2) |grad F(x_t)|^2): at least 1, for lr < 2/L."""
    values = np.array([value(problem, w) for w in iterates])
    out = []
    for t, w in enumerate(iterates[:-1]):
        slope = problem.gradient(w)
        least = lr * (1 - problem.smooth * lr / 2) * float(slope @ slope)
        if least > ABOVE:
            out.append(float(values[t] - values[t + 1]) / least)
    return np.array(out)


def inequalities(
    problem: Problem, paths: Sequence[tuple[float, Array]]
) -> tuple[list[Row], list[Claim]]:
    """The rows and the claims of one problem, over paths (learning rate, iterates)."""
    curved = np.concatenate([curvatures(problem, iterates) for _, iterates in paths])
    polyaks = np.concatenate([polyak(problem, iterates) for _, iterates in paths])
    falls = np.concatenate([descents(problem, iterates, lr) for lr, iterates in paths])
    most, least = float(curved.max()), float(curved.min())
    words = "2 (F(x) - F(y) - grad F(y)'(x - y)) / ‖x - y‖²"
    name, pairs = problem.name, f"{len(curved):,} pairs of iterates"
    rows = [
        over_seeds(f"{name}, {pairs}: largest {words}", problem.smooth, [most]),
        over_seeds(f"{name}, {pairs}: smallest {words}", problem.convex, [least]),
        over_seeds(f"{name}: smallest ‖grad F‖² / (2 c (F - F*))", 1.0, [float(polyaks.min())]),
        over_seeds(f"{name}: smallest fall of a step / its bound", 1.0, [float(falls.min())]),
    ]
    L, c = f"L = {problem.smooth:.4g}", f"c = {problem.convex:.4g}"
    found = (
        (
            most <= problem.smooth * (1 + ROUNDING),
            f"the smoothness bound between {pairs}: the largest curvature is {most:.4g}, and {L}",
        ),
        (
            least >= problem.convex * (1 - ROUNDING),
            f"the strong-convexity bound between {pairs}: the least curvature is {least:.4g}, "
            f"and {c}",
        ),
        (
            float(polyaks.min()) >= 1 - ROUNDING,
            f"the PL inequality at {len(polyaks):,} iterates: the left side is at most "
            f"{1 / float(polyaks.min()):.3g} times the right one",
        ),
        (
            float(falls.min()) >= 1 - ROUNDING,
            f"the descent lemma at {len(falls):,} steps: F falls at least {float(falls.min()):.3g} "
            "times as far as it must",
        ),
        (
            problem.smooth >= problem.convex and most >= least,
            f"L is at least c: {L}, {c}, and the curvatures on the path are from {least:.4g} to "
            f"{most:.4g}",
        ),
    )
    return rows, [Claim(f"{name}: {words}", HOLDS if held else FAILS) for held, words in found]
