"""What a round costs in which a fifth of the clients hold parts of the model: rota alone.

All clients take part in every round. Runs of several widths take turns, a round each, in one
process, so that a busy machine slows them all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rota import loop
from rota.engine import make
from rota.estimate import FedAvg
from rota.experiment import Experiment, State
from rota.sampling import Full
from rota.submodel import Fixed, Random
from rota_lab.bench.works import WORKS

NETWORKS = {"cpu": ("2nn-100",), "cuda": ("2nn-100", "cnn-100")}
"""By device: on two cores a round of the CNN takes minutes."""
WIDTHS = (1.0, 0.95, 0.85, 0.75, 0.5)
"""The first one is the yardstick: whole models alone."""
SHARE = 0.2
"""The share of clients that hold parts."""
WARMUP = 2


def measure(device: str, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rounds for each width, and their time relative to whole models."""
    return [row for name in NETWORKS[device] for row in _measure(name, device, rounds, say)]


def _measure(
    name: str, device: str, rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    work = WORKS[name]
    task = work.task(work.data(work))
    total = WARMUP + rounds
    engine = make("batched", Experiment([task]), device)
    runs: dict[float, tuple[Experiment, State]] = {}
    seconds: dict[float, list[float]] = {width: [] for width in WIDTHS}
    for width in WIDTHS:
        experiment = Experiment(
            [task],
            Full(),
            FedAvg(),
            capacity=Fixed(sizes=(1.0, width), parts=(1 - SHARE, SHARE)),
            submodel=Random(),  # other units in every round
            rounds=total + 1,
            evaluate=total + 1,
        )
        runs[width] = experiment, loop.begin(experiment, engine)
    for turn in range(total):
        say(f"parts: {name}, round {turn + 1} of {total}, {len(WIDTHS)} widths")
        for width, (experiment, state) in runs.items():
            began = time.perf_counter()
            after, _ = loop.play(experiment, engine, state)
            seconds[width].append(time.perf_counter() - began)
            runs[width] = experiment, after
    medians = {width: float(np.median(taken[WARMUP:])) for width, taken in seconds.items()}
    rows = []
    for width, (_, state) in runs.items():
        (score,) = engine.evaluate(state.models)
        rows.append(
            {
                "work": "parts",
                "system": "rota-batched",
                "device": device,
                "seconds_per_round": medians[width],
                "accuracy": score.accuracy,
                "loss": score.loss,
                "model": work.model,
                "clients": task.roster.clients,
                "share": SHARE if width < 1 else 0.0,
                "width": width,
                "ratio": medians[width] / medians[1.0],
                "first_round_seconds": seconds[width][0],
            }
        )
    return rows
