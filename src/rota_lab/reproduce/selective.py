"""Selective FedAvg (its Figs. 3-8 and Table II): nine nodes in three partitions of MNIST.

The paper gives no optimiser, learning rate, mini-batch, local epochs or number of rounds, so these
are rota's choice (WORK), and the page names them. The parts called "sweep" show how much they
decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

import rota
from rota.data.federation import Federation
from rota.grouping import Cfl, Ifca, Local, One, Pacfl, Selective
from rota_lab.reproduce.parts import Found, Runner, chosen, in_time, left, results, run_parts, start
from rota_lab.reproduce.result import Result
from rota_lab.reproduce.selective_page import report
from rota_lab.reproduce.three_ways import Data, Work, load, play

NAME = "selective"
SEEDS = 5
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
MODELS: dict[str, Callable[..., nn.Module]] = {
    "small": rota.models.s2_small,
    "classic": rota.models.s2_classic,
    "wide": rota.models.s2_wide,
    "digits": rota.models.s2_small,
}
WORK = {
    "small": Work(lr=0.1, rounds=20),
    "classic": Work(lr=0.1, rounds=10),
    "wide": Work(lr=0.05, rounds=10),
    "digits": Work(lr=0.1, rounds=12, batch=10),
}
"""For the paper's models 1, 2 and 3, and for the short version."""
ALONE = ("wide",)
"""The models whose runs have one seed each."""
RATES = (0.01, 0.03, 0.1, 0.3)
VARIED = ((1, 32), (5, 32), (1, 128))
"""Local epochs and sizes of mini-batches in the sweep. The epochs of all rounds together stay, so
that there is also a line in which all are in one round."""
SWEEP = 3
"""Seeds of the sweep."""


@dataclass(frozen=True)
class Piece:
    """One run of all seeds: a model, the percentage of balanced data, a method, and the work.

    A piece of the sweep has all learning rates in RATES. A piece with a `seed` has only that one:
    the model is so large that all seeds together would take hours on a few cores.
    """

    model: str
    balance: int
    method: str
    work: Work
    rates: tuple[float, ...] = ()
    seed: int | None = None

    @property
    def place(self) -> str:
        if not self.rates:
            return f"{self.model}-{self.balance}"
        return f"sweep-{self.model}-E{self.work.epochs}-B{self.work.batch}"

    @property
    def name(self) -> str:
        alone = "" if self.seed is None else f"-seed{self.seed}"
        return f"{self.place}-{self.method}{alone}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call it."""
        if self.rates:
            return {"sweep", f"sweep-{self.model}", self.place, self.name}
        return {self.model, self.method, self.place, f"{self.place}-{self.method}", self.name}

    @property
    def data(self) -> Data:
        if self.model == "digits":
            return Data("digits", self.balance, False, 2, validation=200)
        central = self.method == CENTRAL
        if self.seed is not None:
            return Data("mnist", self.balance, central, 1, first=self.seed)
        return Data("mnist", self.balance, central, SWEEP if self.rates else SEEDS)


def pieces() -> list[Piece]:
    """All runs, those that tell most first."""
    out = []
    for balances in ((0, 100, 50), (20, 80, 10, 30, 40, 60, 70, 90)):
        for model in ("small", "classic", "wide"):
            for balance in balances:
                rivals = RIVALS if balance in (0, 50, 100) else {}
                central = [CENTRAL] if balance == 100 else []
                seeds = range(SEEDS) if model in ALONE else [None]
                for seed, method in product(seeds, (*METHODS, *rivals, *central)):
                    out.append(Piece(model, balance, method, WORK[model], seed=seed))
    for model in ("small", "classic", "wide"):
        for epochs, batch in (*VARIED, (WORK[model].rounds, 32)):
            rounds = WORK[model].rounds // epochs
            work = replace(WORK[model], rounds=rounds, batch=batch, epochs=epochs)
            out += [Piece(model, 0, method, work, RATES) for method in ("fedavg", "selective")]
    return out


def quick_pieces() -> list[Piece]:
    """Two balances of digits, and a part of the sweep."""
    methods = (*METHODS, *RIVALS)
    out = [Piece("digits", b, m, WORK["digits"]) for b in (0, 100) for m in methods]
    return out + [Piece("digits", 0, m, WORK["digits"], RATES) for m in ("fedavg", "selective")]


def selective(
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
) -> Result:
    """Selective FedAvg against FedAvg, local and centralised training, and its rivals."""
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
    """How many runs are left, and how much they train."""
    waiting = left(results(out, NAME), chosen(only, pieces()))
    lines = [f"{len(waiting)} runs are left"]
    for model in ("small", "classic", "wide"):
        mine = [piece for piece in waiting if piece.model == model]
        passes = sum(
            p.work.rounds * p.work.epochs * p.data.seeds * len(p.rates or "1") for p in mine
        )
        lines.append(f"{model}: {len(mine)} runs, {passes:,} passes over about 45,000 images")
    return lines


def one(data: list[Federation], piece: Piece, runner: Runner) -> tuple[Found, str]:
    """Play one run: the numbers of its last round for each seed (and each learning rate)."""
    in_time(runner.deadline)
    grouping = {**METHODS, **RIVALS}.get(piece.method, One)()
    tasks = {
        f"lr {lr:g} seed {seed}" if piece.rates else f"{seed}": (each, lr)
        for lr in piece.rates or (piece.work.lr,)
        for seed, each in enumerate(data, start=piece.data.first)
    }
    found = play(
        MODELS[piece.model],
        tasks,
        piece.work,
        grouping,
        runner.device,
        runner.precision,
        tests=min(4, piece.work.rounds) if piece.rates else 1,
        seed=piece.data.first,
    )
    shared = [each["shared"] for each in found["runs"].values()]
    return found, f"on the global test {min(shared):.4f} to {max(shared):.4f}"
