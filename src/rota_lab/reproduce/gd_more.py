"""Gradient descent with compressed gradients, and on a function with two minima."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rota.channel import Channel, Half, Quantised, RandomK, TopK, Whole
from rota.data.federation import Federation, Part
from rota.estimate import Unbiased
from rota.plan import Task
from rota.running.run import run
from rota.sampling import Full
from rota_lab.reproduce.gd_distributed import NEAR, Run, kept, train
from rota_lab.reproduce.interval import FAILS, HOLDS, Claim, Statement, log_ratios
from rota_lab.reproduce.result import Row, over_seeds

if TYPE_CHECKING:
    from rota_lab.reproduce.gd_bound import Problem

WORKERS = 4
CHANNELS: dict[str, Channel] = {
    "whole": Whole(),
    "in half precision": Half(),
    "quantised to 8 bits": Quantised(8),
    "quantised to 4 bits": Quantised(4),
    "cut to a random half of their numbers": RandomK(0.5),
    "cut to the largest half of their numbers": TopK(0.5),
}
STARTS, TILT = (-1.5, 1.5), 0.2
"""Where gradient descent starts on the two wells, and how much the right one is higher."""
SETTLED = 150
"""The steps in which it comes to rest there; they take no time, so the quick run has them too."""


def compressed(
    problem: Problem,
    model: Callable[[int], nn.Module],
    rounds: int,
    seeds: int,
    file: Path | None = None,
) -> tuple[list[Row], list[Statement]]:
    """Full-batch steps of four workers, whose updates go through a channel."""
    rows, statements, sent = list[Row](), list[Statement](), dict[str, list[float]]()
    for name, channel in CHANNELS.items():

        def made(channel: Channel = channel) -> list[Run]:
            return train(problem, model, rounds, seeds, WORKERS, batch=None, channel=channel)

        paths = kept(file, f"channel, {name}", made)
        each = channel.nbytes(problem.x.shape[1], 8)
        sent[name] = [WORKERS * each * path.near() for path in paths]
        words = f"logistic, {WORKERS} workers, full batches, updates {name}"
        rows.append(
            over_seeds(f"{words}: gap over the last rounds", None, [p.floor for p in paths])
        )
        if max(sent[name]) < math.inf:
            near = f"bytes up until the gap is {NEAR:g} of the first"
            rows.append(over_seeds(f"{words}: {near}", None, sent[name]))
            if name != "whole":
                words = f"gradient compression: updates {name} take fewer bytes to a near gap"
                logs = log_ratios(sent["whole"], sent[name])
                statements.append(
                    Statement(f"{words} than whole ones, by a factor", logs, log=True)
                )
    return rows, statements


class Place(nn.Module):
    """One number, times the input, which is 1."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.place * x


def wells(place: Tensor, _: Tensor) -> Tensor:
    """F(x) = (x^2 - 1)^2 / 4 + TILT x: a minimum near -1, and a higher one near 1."""
    return (place.square() - 1).square() / 4 + TILT * place


def two_minima(steps: int) -> tuple[list[Row], Claim]:
    """Gradient descent from both sides."""
    one = torch.ones(1, dtype=torch.float64)
    data = Federation(
        "wells", Part(one, one, np.array([0, 1])), Part(one, one, np.array([0, 1])), 0
    )
    ends = []
    for start in STARTS:
        task = Task(Place(start), data, lr=0.1, batch=None, steps=1, loss=wells, score=wells)
        done = run([task], Full(), estimator=Unbiased(), rounds=steps, engine="sequential")
        (model,) = done.models.values()
        ends.append(next(model.parameters()).item())
    values = [float(wells(torch.tensor(end), one)) for end in ends]
    slopes = [abs(end**3 - end + TILT) for end in ends]
    rows = [
        over_seeds(f"two wells, from x = {start:g}: F at the end", None, [value])
        for start, value in zip(STARTS, values, strict=True)
    ]
    words = (
        f"in a non-convex problem, gradient descent can end in a local minimum: from {STARTS[1]:g}"
    )
    words += f" it ends at x = {ends[1]:.4f} with F = {values[1]:.4f}, and from {STARTS[0]:g} at"
    words += f" x = {ends[0]:.4f} with F = {values[0]:.4f}; both slopes are below 1e-6"
    held = max(slopes) < 1e-6 and values[1] > values[0] + 0.1
    return rows, Claim(words, HOLDS if held else FAILS)
