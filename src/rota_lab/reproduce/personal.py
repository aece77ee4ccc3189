"""PFLlib's two settings on Fashion-MNIST: what 20 clients get from personal and grouped models.

PFLlib merges the training and the test images, deals them to 20 clients by label, and splits each
client's images 75/25. All clients train in every round: one epoch, mini-batches of 10, lr 0.005.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import rota
from rota import rng
from rota.arrays import Array
from rota.data.fashion_mnist import read
from rota.data.federation import Federation
from rota.estimate import FedAvg
from rota.grouping import Cfl, Ifca, Local, Pacfl, Selective
from rota.grouping.gets import over
from rota.personal import Ditto, FedPer, FedRep, FineTuning
from rota.running.record import Record, tested
from rota.sampling import Full
from rota_lab.reproduce.parts import Found, Runner, chosen, in_time, left, results, run_parts, start
from rota_lab.reproduce.personal_page import report
from rota_lab.reproduce.result import Result

NAME = "personal"
CLIENTS, CLASSES = 20, 10
VALIDATION = 1000
"""Images that Selective FedAvg's server keeps. They are left out for all methods."""
SPLITS = ("pathological", "dirichlet")
LABELS, ALPHA, LEAST = 2, 0.1, 20
METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "fedavg": dict,
    "ditto": lambda: {"personal": Ditto(strength=0.1)},
    "fedper": lambda: {"personal": FedPer()},
    "fedrep": lambda: {"personal": FedRep()},
    "fine-tuning": lambda: {"personal": FineTuning()},
    "local": lambda: {"grouping": Local()},
    "selective": lambda: {"grouping": Selective(alone=2)},
    "ifca": lambda: {"grouping": Ifca(groups=5)},
    "cfl": lambda: {"grouping": Cfl()},
    "pacfl": lambda: {"grouping": Pacfl()},
}


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """PFLlib's network: two 5x5 convolutions without padding. 582,026 parameters."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 100 units, for the small setting."""
    inputs = int(np.prod(shape))
    hidden = nn.Linear(inputs, 100)
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(100, classes))


@dataclass(frozen=True)
class Setting:
    """A network, how many of the images there are, and how long it trains.

    It has `seeds` seeds, from `first` on.
    """

    model: Callable[..., nn.Module]
    images: int
    rounds: int
    seeds: int
    lr: float = 0.005
    tests: int = 5
    first: int = 0

    @property
    def network(self) -> str:
        """What the page calls the network."""
        return "one hidden layer of 100 units" if self.model is mlp else "PFLlib's network"


SETTINGS = {
    "small": Setting(mlp, 4000, rounds=40, seeds=12, lr=0.05, tests=4, first=3),
    "early": Setting(cnn, 70_000, rounds=20, seeds=1),
    "whole": Setting(cnn, 70_000, rounds=2000, seeds=1, tests=20),
    "tiny": Setting(mlp, 1200, rounds=6, seeds=2, lr=0.05, tests=2),
}
"""For two cores; PFLlib's in its first rounds, and as long as PFLlib trains; and the short one."""


@dataclass(frozen=True)
class Piece:
    """One run of all seeds."""

    setting: str
    split: str
    method: str

    @property
    def place(self) -> str:
        return f"{self.setting}-{self.split}"

    @property
    def name(self) -> str:
        return f"{self.place}-{self.method}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call it."""
        return {self.setting, self.split, self.method, self.place, self.name}


def pieces() -> list[Piece]:
    """All runs; in each setting those that PFLlib has too first."""
    methods = [list(METHODS)[:4], list(METHODS)[4:]]
    settings = ("small", "early", "whole")
    return [Piece(s, d, m) for s in settings for some in methods for d in SPLITS for m in some]


def quick_pieces() -> list[Piece]:
    """A few methods on a few images."""
    return [Piece("tiny", d, m) for d in SPLITS for m in ("fedavg", "ditto", "fedrep", "selective")]


def personal(
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    only: str | None = None,
    minutes: float | None = None,
    device: str = "auto",
    precision: str = "fp32",
) -> Result:
    """PFLlib's settings on Fashion-MNIST: personal models, personal heads and groups."""
    every = quick_pieces() if quick else pieces()
    wanted = every if quick else chosen(only, every)
    files = results(None if quick else out, NAME)
    runner = start(files, [piece.name for piece in every], minutes, device, precision, say)
    run_parts(
        runner,
        wanted,
        group=lambda piece: (piece.setting, piece.split),
        load=lambda place: load(SETTINGS[place[0]], place[1]),
        run=lambda data, piece: one(data, piece, runner),
    )
    return report(every, SETTINGS, runner.found, quick, runner.device)


def estimate(only: str | None, out: Path | None = None) -> list[str]:
    """How many runs are left, and how much they train."""
    waiting = left(results(out, NAME), chosen(only, pieces()))
    lines = [f"{len(waiting)} runs are left"]
    for name in ("small", "early", "whole"):
        setting = SETTINGS[name]
        rounds = sum(piece.setting == name for piece in waiting) * setting.rounds * setting.seeds
        lines.append(f"{name}: {rounds:,} passes over {setting.images * 3 // 4:,} images")
    return lines


# ---- data


@cache
def images() -> tuple[Tensor, Tensor]:
    """All 70,000 images in -1..1, and their labels; read once."""
    train, test = read()
    return torch.cat([train.x, test.x]) * 2 - 1, torch.cat([train.y, test.y])


def load(setting: Setting, split: str) -> list[Federation]:
    """One federation per seed."""
    return [_federation(setting, split, setting.first + k) for k in range(setting.seeds)]


def _federation(setting: Setting, split: str, seed: int) -> Federation:
    generator = rng.generator(rng.key(seed, "personal", 0))
    x, y = images()
    some = generator.permutation(len(y))[: setting.images]
    kept, some = np.split(some, [VALIDATION * setting.images // len(y)])
    owners = deal(y[some].numpy(), split, generator)
    train, test = [], []
    for client in range(CLIENTS):
        mine = generator.permutation(some[owners == client])
        part = len(mine) * 3 // 4
        train.append((x[mine[:part]], y[mine[:part]]))
        test.append((x[mine[part:]], y[mine[part:]]))
    held = (x[kept], y[kept])
    return rota.from_clients(train, test, classes=CLASSES, name="fashion", validation=held)


def deal(labels: Array, split: str, generator: np.random.Generator) -> Array:
    """The owner of each image, as PFLlib deals them."""
    if split == "pathological":
        return _by_labels(labels, generator)
    while True:
        owners = _dirichlet(labels, generator)
        if np.bincount(owners, minlength=CLIENTS).min() >= LEAST:
            return owners


def _by_labels(labels: Array, generator: np.random.Generator) -> Array:
    """Two labels for each client: a label goes to the next four clients, in unequal parts."""
    owners, takers = np.empty(len(labels), np.int64), CLIENTS * LABELS // CLASSES
    for label in range(CLASSES):
        mine = generator.permutation(np.flatnonzero(labels == label))
        most = len(mine) / takers
        sizes = generator.integers(int(most / 10), int(most), takers - 1)
        first = label // LABELS * takers
        for k, some in enumerate(np.split(mine, np.cumsum(sizes))):
            owners[some] = first + k
    return owners


def _dirichlet(labels: Array, generator: np.random.Generator) -> Array:
    """Each label in parts by Dirichlet's distribution; clients with their part get no more."""
    owners, sizes = np.empty(len(labels), np.int64), np.zeros(CLIENTS, np.int64)
    for label in range(CLASSES):
        mine = generator.permutation(np.flatnonzero(labels == label))
        parts = generator.dirichlet(np.full(CLIENTS, ALPHA)) * (sizes < len(labels) / CLIENTS)
        cuts = (np.cumsum(parts / parts.sum()) * len(mine)).astype(int)[:-1]
        for client, some in enumerate(np.split(mine, cuts)):
            owners[some] = client
            sizes[client] += len(some)
    return owners


# ---- runs


def one(data: list[Federation], piece: Piece, runner: Runner) -> tuple[Found, str]:
    """Play one run of all seeds: the numbers of each test."""
    in_time(runner.deadline)
    setting = SETTINGS[piece.setting]
    seeds = range(setting.first, setting.first + setting.seeds)
    tasks = [
        rota.Task(setting.model, each, lr=setting.lr, batch=10, name=str(seed))
        for seed, each in zip(seeds, data, strict=True)
    ]
    run = rota.run(
        tasks,
        Full(),
        estimator=FedAvg(),
        rounds=setting.rounds,
        evaluate=setting.rounds // setting.tests,
        seed=setting.first,
        device=runner.device,
        precision=runner.precision,
        watch=lambda record: in_time(runner.deadline),
        **METHODS[piece.method](),
    )
    told = [record for record in run.records if tested(record)]
    curves = {
        str(seed): [numbers(r, seed, each) for r in told]
        for seed, each in zip(seeds, data, strict=True)
    }
    found = {
        "runs": {seed: curve[-1] for seed, curve in curves.items()},
        "curves": curves,
        "rounds": [record["round"] for record in told],
        "bytes": (run.state.bytes_up + run.state.bytes_down) / len(data),
        "client_seconds": run.summary["client_seconds"] / len(data),
    }
    last = [each["accuracy"] for each in found["runs"].values()]
    return found, f"{min(last):.4f} to {max(last):.4f} of all test images"


def numbers(record: Record, seed: int, data: Federation) -> Found:
    """What clients get: PFLlib's accuracy counts test images, the others count clients."""
    name = str(seed)
    mine = [m for m in record["groups_of_clients"] if m == name or m.startswith(f"{name}.")]
    own = np.full(CLIENTS, np.nan)
    for model in mine:
        for client, accuracy in record["groups_of_clients"][model].get("own", {}).items():
            own[int(client)] = accuracy
    known = np.isfinite(own)
    counted = float(np.average(own[known], weights=data.test.sizes[known]))
    return {"accuracy": counted, **over(own), "groups": len(mine)}
