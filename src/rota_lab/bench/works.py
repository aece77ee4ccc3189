"""The works: what is trained, on whose data, with how much local work a round; and one of them as files that every system reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rota import data, rng
from rota.arrays import Array
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.mnist import read as read_mnist
from rota.engine import make
from rota.engine.flops import step_flops
from rota.engine.schedule import local_steps
from rota.experiment import Experiment
from rota.models import MODELS
from rota.plan import Task, shares
from rota.sampling import Uniform

SEED = 0
WARMUP = 2  # rounds before the measured ones: compilers compile in them


@dataclass(frozen=True)
class Work:
    """FedAvg with plain SGD: `cohort` clients a round, `epochs` passes each in mini-batches of `batch`.

    `rounds` are the measured ones of one pass, on a CPU and on a GPU. `clients` and `examples` (of each client) are those of the
    data that are dealt out or made up; data with natural clients have their own.
    """

    name: str
    summary: str
    model: str
    data: Callable[[Work], Federation]
    clients: int
    examples: int
    cohort: int
    lr: float
    batch: int = 10
    epochs: int = 1
    rounds: tuple[int, int] = (20, 50)

    def task(self, federation: Federation) -> Task:
        return Task(
            MODELS[self.model], federation, lr=self.lr, batch=self.batch, epochs=self.epochs
        )


@dataclass(frozen=True)
class Size:
    """How much work the measured rounds are: arrays over them. `params` are the network's."""

    data: str
    clients: int
    params: int
    steps: Array
    examples: Array
    flops: Array
    example_bytes: int


def digits(work: Work) -> Federation:
    """MNIST, or images of its shape."""
    parts = read_mnist() if data.at_hand("mnist") else None
    return _dealt(work, "mnist", parts, (1, 28, 28), strength=3.5)


def photographs(work: Work) -> Federation:
    """CIFAR-10, or images of its shape."""
    if data.at_hand("cifar10"):
        return data.cifar10(_even(work))
    return _dealt(work, "cifar10", None, (3, 32, 32), strength=12.0)


def kvib(work: Work) -> Federation:
    """The Synthetic(0, 0) of the K-Vib experiments: 100 clients of 45 to 5,169 examples."""
    return data.synthetic_kvib()


def roles(work: Work) -> Federation:
    """Shakespeare by role, or text of as many made-up authors."""
    if data.at_hand("shakespeare"):
        return data.shakespeare()
    total = work.clients * work.examples
    letters = text(total + 500)
    x, y = torch.from_numpy(letters[:, :-1]), torch.from_numpy(letters[:, -1])
    return federate(
        "made-up text",
        Examples(x[:total], y[:total]),
        Examples(x[total:], y[total:]),
        _even(work),
        classes=80,
    )


def _dealt(
    work: Work,
    name: str,
    parts: tuple[Examples, Examples] | None,
    shape: tuple[int, ...],
    strength: float,
) -> Federation:
    if parts is None:
        total = work.clients * work.examples
        name, made = f"made-up {name}", images(total + 2000, shape, strength)
        parts = Examples(made.x[:total], made.y[:total]), Examples(made.x[total:], made.y[total:])
    return federate(name, *parts, _even(work), classes=10, seed=SEED)


def _even(work: Work) -> Partition:
    """The same number of examples for everyone, at random."""

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        owner = np.full(len(examples), -1)
        owner[generator.permutation(len(examples))[: work.clients * work.examples]] = np.repeat(
            np.arange(work.clients), work.examples
        )
        return owner, work.clients

    return deal


def images(n: int, shape: tuple[int, ...], strength: float) -> Examples:
    """Images that can be learnt: a coarse pattern for each of 10 classes, of norm `strength`, under noise of deviation 1.

    At 3.5 about one image in twenty lies nearer to another class. Convolutions see a few pixels at a time and need more.
    """
    generator = rng.generator(rng.key(SEED, "bench images"))
    channels, height, width = shape
    patterns = np.kron(
        generator.standard_normal((10, channels, height // 4, width // 4)), np.ones((1, 1, 4, 4))
    )
    patterns *= strength / np.sqrt(np.prod(shape))
    y = generator.integers(10, size=n)
    x = generator.standard_normal((n, *shape), np.float32)
    x += patterns.astype(np.float32)[y]
    return Examples(torch.from_numpy(x), torch.from_numpy(y))


def text(n: int, length: int = 81, letters: int = 80) -> Array:
    """Windows of text in which each letter has a few likely successors: int64 [n, length]."""
    generator = rng.generator(rng.key(SEED, "bench text"))
    successors = generator.integers(letters, size=(letters, 4))
    out = np.empty((n, length), np.int64)
    out[:, 0] = generator.integers(letters, size=n)
    for t in range(1, length):
        out[:, t] = successors[out[:, t - 1], generator.choice(4, size=n, p=(0.7, 0.1, 0.1, 0.1))]
    return out


WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Work(
            "2nn",
            "McMahan's 2NN on 28x28 digits: 100 clients x 600, 10 a round",
            "two_nn",
            digits,
            100,
            600,
            10,
            0.1,
        ),
        Work(
            "cnn",
            "McMahan's CNN on the same digits",
            "cnn",
            digits,
            100,
            600,
            10,
            0.1,
            rounds=(3, 20),
        ),
        Work(
            "2nn-100",
            "McMahan's 2NN with all 100 clients in every round",
            "two_nn",
            digits,
            100,
            600,
            100,
            0.1,
            rounds=(5, 50),
        ),
        Work(
            "cnn-100",
            "McMahan's CNN with all 100 clients in every round",
            "cnn",
            digits,
            100,
            600,
            100,
            0.1,
            rounds=(1, 20),
        ),
        Work(
            "cifar10",
            "pfl's own benchmark: CIFAR-10, 1000 x 50, 50 a round",
            "pfl_cnn",
            photographs,
            1000,
            50,
            50,
            0.1,
            rounds=(3, 50),
        ),
        Work(
            "logistic",
            "Logistic regression on K-Vib's Synthetic: 100 unequal clients, 10 a round",
            "logistic",
            kvib,
            100,
            0,
            10,
            0.05,
        ),
        Work(
            "lstm",
            "Two LSTM layers on Shakespeare by role, 10 roles a round",
            "lstm_shakespeare",
            roles,
            859,
            48,
            10,
            1.0,
            rounds=(3, 20),
        ),
    )
}


def prepare(work: Work, folder: Path, rounds: int, device: str) -> Size:
    """Write a work for the systems' scripts (see peers/work.py) and say how large it is.

    The cohorts are those that rota's uniform sampler draws, so that every system trains the same clients in the same rounds, from
    the same weights on.
    """
    federation = work.data(work)
    task = work.task(federation)
    d = shares([task])
    cohorts = np.stack(
        [
            Uniform(work.cohort).draw({}, d, rng.generator(rng.key(SEED, "draw", now))).client
            for now in range(1, WARMUP + rounds + 1)
        ]
    )
    engine = make("sequential", Experiment([task], seed=SEED), "cpu")
    params = engine.initial()[0].params
    start = params.split([p.numel() for p in task.build().parameters()])
    parts = zip(start, task.build().parameters(), strict=True)
    np.savez(
        folder / "start.npz",
        **{f"{i:02d}": value.view_as(like).numpy() for i, (value, like) in enumerate(parts)},
    )
    train, test = federation.train, federation.test
    arrays = {
        "x": train.x.numpy(),
        "y": train.y.numpy(),
        "offsets": train.offsets,
        "test_x": test.x.numpy(),
        "test_y": test.y.numpy(),
    }
    for name, array in {**arrays, "cohorts": cohorts}.items():
        np.save(folder / f"{name}.npy", array)
    numbers = {
        "model": work.model,
        "classes": federation.classes,
        "batch": work.batch,
        "epochs": work.epochs,
        "lr": work.lr,
    }
    (folder / "work.json").write_text(
        json.dumps({**numbers, "warmup": WARMUP, "device": device, "seed": SEED})
    )
    measured = cohorts[WARMUP:]
    examples = train.sizes[measured].sum(1) * work.epochs
    return Size(
        data=federation.name,
        clients=federation.clients,
        params=params.numel(),
        steps=local_steps(task, train.sizes, 1)[measured].sum(1),
        examples=examples,
        flops=examples * step_flops(task, task.federation.train.x),
        example_bytes=train.x[0].nbytes,
    )
