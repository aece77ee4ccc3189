"""What the page on gradient descent says in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.arrays import Array
from rota_lab.reproduce.gd_distributed import BATCH, LAST
from rota_lab.reproduce.gd_more import TILT

if TYPE_CHECKING:
    from rota_lab.reproduce.gd_bound import Problem


def bound_text(
    first: Problem,
    second: Problem,
    steps: int,
    beyond: list[Array],
    top: float,
    tolerance: float,
) -> str:
    """What was run, in words."""
    ends = "; ".join(f"{gap[-2]:.4f} and {gap[-1]:.4f}" for gap in beyond)
    return f"""
The theorem of the lecture "Distributed Machine Learning" (18786 recitation, 11 April 2025): for a
c-strongly convex, L-smooth F and a learning rate lr <= 1/L, full-batch gradient descent keeps
`F(x_t) - F* <= (1 - lr c)^t (F(x_0) - F*)`. Before the proof uses the limit on lr, its factor is
`1 - 2 c lr (1 - L lr / 2)`, which shrinks the gap for every lr < 2/L. That is the bound used here
for lr 1.5/L. The source's numbers are upper limits.

Each run is {steps} of rota's own rounds (full participation, one full-batch step per client,
unbiased estimate, float64) from a random start:

- **{first.name}**: least squares on {len(first.y)} examples. The Hessian has {first.x.shape[1]}
  eigenvalues from c = {first.convex:g} to L = {first.smooth:g}; F\\* = 0.
- **{second.name}**: ridge logistic regression on scikit-learn's breast cancer data ({len(second.y)}
  examples, {second.x.shape[1]} weights); c = ridge = {second.convex:g}, L = lambda_max(X'X) / 4n +
  ridge = {second.smooth:.4f}; F\\* = {second.best:.12f} by Newton's method.

"Gap" is F(x_t) - F\\*. Comparisons allow it an absolute rounding error of {tolerance:g}.

The logistic loss has the curvature L only where it is steepest. At the minimum the curvature is
L\\* = {second.smooth_at_best:.4f}, so lr {top:g}/L = {top / second.smooth:.3f} is still far below
2/L\\* = {2 / second.smooth_at_best:.3f}, and converges. At lr {top:g}/L\\* gradient descent neither
settles at the minimum nor runs off to infinity, because the curvature is lower further out. The
last two gaps from each start are {ends}.

The inequalities that the proof needs are measured between the iterates of all runs below 2/L: the
curvature between two points, the PL inequality at each of them, and the fall of F in each step.
A function with two minima, F(x) = (x^2 - 1)^2 / 4 + {TILT:g} x, shows what happens without them.
"""


def distributed_text(rounds: int, seeds: int) -> str:
    """What was run, in words."""
    return f"""\

## Synchronous and local-update SGD
The lecture goes on to workers with parts of the data. Here the logistic problem is dealt to workers
(at random, or sorted by label, so that their data differ). They make one or several local steps of
lr 1/L per round, with mini-batches of {BATCH} or with all their data. There are {rounds} rounds
from each of {seeds} starts; shades in the charts span the starts. A floor is the mean gap over the
last {LAST:.0%} of the rounds. Where runs are compared they have the same start, and the verdicts
are Student's t-tests with Holm's correction.

- The server averages the workers' gradients, so more workers have less noise, and end lower.
- Compressed updates (rota's [channels](../channels.md)) take less traffic to come near the minimum.
- Local steps take fewer rounds. But the round's step is then not the gradient of F: with different
  data each worker moves towards its own minimum, and the gap stops falling even without noise.
"""
