"""How far a more complex model helps where data are non-IID: a grid of widths and depths.

Selective FedAvg's paper finds that FedAvg gets better at 0 % balanced data with three models of
growing complexity, and asks for the trade-off. Here two families of networks grow in both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from rota.data.federation import Federation
from rota.grouping import One, Selective
from rota.world.devices import Devices
from rota_lab.reproduce.complexity_page import report
from rota_lab.reproduce.parts import Found, Runner, chosen, in_time, left, results, run_parts, start
from rota_lab.reproduce.result import Result
from rota_lab.reproduce.three_ways import Data, Work, load, play

NAME = "complexity"
WIDTHS = {"mlp": (10, 30, 100, 300), "cnn": (4, 8, 16, 32)}
DEPTHS = (1, 2, 3)
METHODS: dict[str, Callable[[], Any]] = {
    "fedavg": One,
    "selective": lambda: Selective(alone=5),
}
WORK = Work(lr=0.1, rounds=15)
DATA = Data("mnist", 0, False, seeds=5)
PI = Devices(gflops=5.0, mbps=50.0, latency=0.01)
"""A Raspberry Pi 4: what its four cores sustain in training, on a wireless network."""


def mlp(shape: tuple[int, ...], classes: int, width: int, depth: int) -> nn.Module:
    """Hidden layers of equal width."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (math.prod(shape), *[width] * (depth - 1)):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def cnn(shape: tuple[int, ...], classes: int, width: int, depth: int) -> nn.Module:
    """3x3 convolutions with equal numbers of channels, each pooled by 2; then one linear layer."""
    layers: list[nn.Module] = []
    for inputs in (shape[0], *[width] * (depth - 1)):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    high, wide = (side >> depth for side in shape[1:])
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * high * wide, classes))


FAMILIES: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn}


@cache
def network(family: str, depth: int, width: int) -> Callable[..., nn.Module]:
    """A function of `shape` and `classes`; the same one for the same network."""
    return partial(FAMILIES[family], width=width, depth=depth)


@dataclass(frozen=True)
class Piece:
    """One run of all seeds: a network and a method."""

    family: str
    depth: int
    width: int
    method: str
    data: Data = DATA
    work: Work = WORK

    @property
    def network(self) -> str:
        return f"{self.family}-{self.depth}-{self.width}"

    @property
    def name(self) -> str:
        return f"{self.network}-{self.method}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call it."""
        shape = f"{self.family}-{self.depth}"
        return {self.family, self.method, shape, self.network, self.name}


def pieces() -> list[Piece]:
    """All runs: both families, the corners of the grid first."""
    grid = [(f, d, w) for f, widths in WIDTHS.items() for d in DEPTHS for w in widths]
    grid.sort(key=lambda each: (each[1] == 2, each[2] not in (10, 300, 4, 32)))
    return [Piece(*network, method) for network in grid for method in METHODS]


def quick_pieces() -> list[Piece]:
    """A corner of the grid, on scikit-learn's digits."""
    data = Data("digits", 0, False, seeds=2, validation=200)
    work = Work(lr=0.1, rounds=6, batch=10)
    grid = [("mlp", 1, 10), ("mlp", 2, 10), ("cnn", 1, 4), ("cnn", 1, 8)]
    return [Piece(*network, method, data, work) for network in grid for method in METHODS]


def complexity(
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
) -> Result:
    """FedAvg on non-IID data against the width and depth of the model, alone and with groups."""
    every = quick_pieces() if quick else pieces()
    wanted = every if quick else chosen(only, every)
    files = results(None if quick else out, NAME)
    names = [piece.name for piece in every]
    runner = start(files, names, minutes, device, precision, say)
    run_parts(
        runner,
        wanted,
        group=lambda piece: piece.data,
        load=load,
        run=lambda data, piece: one(data, piece, runner),
    )
    return report(every, runner.found, quick, runner.device)


def estimate(only: str | None, out: Path | None = None) -> list[str]:
    """How many runs are left."""
    waiting = left(results(out, NAME), chosen(only, pieces()))
    passes = sum(piece.work.rounds * piece.data.seeds for piece in waiting)
    return [f"{len(waiting)} runs are left, {passes:,} passes over about 43,000 images"]


def one(data: list[Federation], piece: Piece, runner: Runner) -> tuple[Found, str]:
    """Play one run: the numbers of its last round for each seed, and what a round costs."""
    in_time(runner.deadline)
    model = network(piece.family, piece.depth, piece.width)
    tasks = {f"{seed}": (each, piece.work.lr) for seed, each in enumerate(data)}
    grouping = METHODS[piece.method]()
    found = play(model, tasks, piece.work, grouping, runner.device, runner.precision, devices=PI)
    shape, classes = data[0].shape, data[0].classes
    number = sum(p.numel() for p in model(shape=shape, classes=classes).parameters())
    shared = [each["shared"] for each in found["runs"].values()]
    words = f"{number:,} parameters, on the global test {min(shared):.4f} to {max(shared):.4f}"
    return {**found, "parameters": number}, words
