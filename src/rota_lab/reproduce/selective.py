"""Selective FedAvg (its Figs. 3-8 and Table II): nine nodes in three partitions of MNIST.

The paper gives no optimiser, learning rate, mini-batch, local epochs or number of rounds, so these
are rota's choice (SETTINGS), and the page names them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import rota
from rota.arrays import Array
from rota.data import partition
from rota.data.federation import Examples, Federation, Partition
from rota.estimate import FedAvg
from rota.grouping import Cfl, Ifca, Local, One, Pacfl, Selective
from rota.sampling import Full
from rota_lab.reproduce.parts import Found, Runner, chosen, left, results, run_parts, start
from rota_lab.reproduce.result import Result
from rota_lab.reproduce.selective_page import report

NAME = "selective"
NODES = 9
THIRDS = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
METHODS: dict[str, Callable[[], Any]] = {
    "fedavg": One,
    "selective": lambda: Selective(alone=5),
    "local": Local,
}
RIVALS: dict[str, Callable[[], Any]] = {
    "ifca": lambda: Ifca(groups=3),
    "cfl": Cfl,
    "pacfl": Pacfl,
}
CENTRAL = "centralised"


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open, for one of its models."""

    model: Callable[..., nn.Module]
    lr: float
    rounds: int
    batch: int = 32
    images: int | None = None
    """How many training images the nodes share; None: all that are left."""
    validation: int = 10_000


SETTINGS = {
    "small": Settings(rota.models.s2_small, lr=0.1, rounds=20),
    "classic": Settings(rota.models.s2_classic, lr=0.1, rounds=15, images=9000),
    "wide": Settings(rota.models.s2_wide, lr=0.05, rounds=15, images=9000),
}
"""The paper's models 1, 2 and 3. On two cores the convolutional ones get a part of the images."""
QUICK = Settings(rota.models.s2_small, lr=0.1, rounds=12, batch=10, validation=200)
"""scikit-learn's digits, which need no files."""


@dataclass(frozen=True)
class Piece:
    """One run: a model, the percentage of balanced data, a method, and a seed."""

    model: str
    balance: int
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.balance}-{self.method}-{self.seed}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call it."""
        place = f"{self.model}-{self.balance}"
        return {self.model, self.method, place, f"{place}-{self.method}"}


def pieces() -> list[Piece]:
    """All runs, those that tell most first."""
    out = []
    for model, seeds in (("small", 5), ("classic", 3), ("wide", 3)):
        for balances in ((0, 100, 50), (20, 80, 10, 30, 40, 60, 70, 90)):
            for seed in range(seeds):
                for balance in balances:
                    rivals = RIVALS if balance in (0, 50, 100) else {}
                    central = [CENTRAL] if balance == 100 else []
                    for method in (*METHODS, *rivals, *central):
                        out.append(Piece(model, balance, method, seed))
    return out


def quick_pieces() -> list[Piece]:
    """Two balances and two seeds of digits."""
    methods = (*METHODS, *RIVALS)
    return [Piece("digits", b, m, s) for s in range(2) for b in (0, 100) for m in methods]


def selective(
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
) -> Result:
    """Selective FedAvg against FedAvg, local and centralised training, and its rivals."""
    every = quick_pieces() if quick else pieces()
    wanted = every if quick else chosen(only, every)
    names = [piece.name for piece in every]
    files = results(None if quick else out, NAME)
    runner = start(files, names, minutes, device, "fp32", say)
    play(runner, wanted)
    return report(every, runner.found, quick, runner.device, SETTINGS)


def play(runner: Runner, wanted: list[Piece]) -> None:
    """Run the unfinished pieces."""
    run_parts(
        runner,
        wanted,
        group=lambda piece: (piece.model, piece.balance, piece.method == CENTRAL, piece.seed),
        load=lambda key: load(*key),
        run=lambda data, piece: one(data, piece, runner.device),
    )


def estimate(only: str | None, out: Path | None = None) -> list[str]:
    """How many runs are left."""
    waiting = left(results(out, NAME), chosen(only, pieces()))
    lines = [f"{len(waiting)} runs are left"]
    for model in SETTINGS:
        number = sum(piece.model == model for piece in waiting)
        lines.append(f"{model}: {number} runs of {SETTINGS[model].rounds} rounds")
    return lines


def settings_of(model: str) -> Settings:
    return SETTINGS.get(model, QUICK)


def load(model: str, balance: int, central: bool, seed: int) -> Federation:
    """The nodes' data, or all in one place."""
    settings = settings_of(model)
    source = rota.data.mnist if model in SETTINGS else rota.data.digits
    split = partition.iid(1) if central else partition.three_way(balance / 100, NODES)
    if settings.images is not None:
        split = few(split, settings.images)
    return source(split, matched_test=not central, validation=settings.validation, seed=seed)


def few(split: Partition, number: int) -> Partition:
    """The same partition of a number of random examples; the others are left out."""

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        rows = np.sort(generator.permutation(len(examples))[:number])
        some, clients = split(Examples(examples.x[rows], examples.y[rows]), generator)
        owner = np.full(len(examples), -1, np.int64)
        owner[rows] = some
        return owner, clients

    return deal


def one(data: Federation, piece: Piece, device: str) -> tuple[Found, str]:
    """Play one run: the numbers of its last round."""
    settings = settings_of(piece.model)
    grouping = {**METHODS, **RIVALS}.get(piece.method, One)()
    task = rota.Task(settings.model, data, lr=settings.lr, batch=settings.batch, name="mnist")
    run = rota.run(
        [task],
        Full(),
        estimator=FedAvg(),
        grouping=grouping,
        rounds=settings.rounds,
        evaluate=settings.rounds,
        seed=piece.seed,
        device=device,
    )
    last, shares = run.records[-1], run.state.shares
    members = [np.flatnonzero(row).tolist() for row in shares if row.any()]
    shared = last.get("shared_mean", last["accuracy"])
    found: Found = {
        "shared": shared,
        **{key: last[f"own_{key}"] for key in ("mean", "worst", "p10") if f"own_{key}" in last},
        "groups": len(members),
        "recovered": sorted(members) == THIRDS,
        "bytes": run.state.bytes_up + run.state.bytes_down,
        "client_seconds": run.summary["client_seconds"],
    }
    return found, f"own {found.get('mean', float('nan')):.4f}, shared {shared:.4f}"
