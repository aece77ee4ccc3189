"""The works: what is trained, on whose data, with how much local work per round.

`prepare` writes a work as files that every system reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
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
WARMUP = 2
"""Rounds before the measured ones, in which compilers compile."""


@dataclass(frozen=True)
class Work:
    """FedAvg with plain SGD: `cohort` clients per round, `epochs` passes in batches of `batch`.

    `rounds` are the measured rounds per pass, on a CPU and on a GPU. `clients` and `examples` (per
    client) apply to data that are dealt out or made up; data with natural clients have their own.
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
        model = MODELS[self.model]
        return Task(model, federation, lr=self.lr, batch=self.batch, epochs=self.epochs)


@dataclass(frozen=True)
class Size:
    """How much work the measured rounds are, as arrays over rounds; `params` are the network's."""

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
    """Shakespeare by role, or made-up text by as many authors."""
    if data.at_hand("shakespeare"):
        return data.shakespeare()
    total = work.clients * work.examples
    letters = text(total + 500)
    x, y = torch.from_numpy(letters[:, :-1]), torch.from_numpy(letters[:, -1])
    train, test = Examples(x[:total], y[:total]), Examples(x[total:], y[total:])
    return federate("made-up text", train, test, _even(work), classes=80)


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
    """The same number of examples for each client, at random."""

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        owner = np.full(len(examples), -1)
        dealt = generator.permutation(len(examples))[: work.clients * work.examples]
        owner[dealt] = np.repeat(np.arange(work.clients), work.examples)
        return owner, work.clients

    return deal


def images(n: int, shape: tuple[int, ...], strength: float) -> Examples:
    """Images that can be learnt: a coarse pattern per class, under noise of deviation 1.

    There are 10 classes, whose patterns have norm `strength`. At 3.5, about one image in twenty
    lies nearer to another class. Convolutions see only a few pixels at a time and need more.
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


_DIGITS = Work(
    name="2nn",
    summary="McMahan's 2NN on 28x28 digits: 100 clients x 600, 10 per round",
    model="two_nn",
    data=digits,
    clients=100,
    examples=600,
    cohort=10,
    lr=0.1,
)
_WORKS = (
    _DIGITS,
    replace(
        _DIGITS,
        name="cnn",
        summary="McMahan's CNN on the same digits",
        model="cnn",
        rounds=(3, 20),
    ),
    replace(
        _DIGITS,
        name="2nn-100",
        summary="McMahan's 2NN with all 100 clients in every round",
        cohort=100,
        rounds=(5, 50),
    ),
    replace(
        _DIGITS,
        name="cnn-100",
        summary="McMahan's CNN with all 100 clients in every round",
        model="cnn",
        cohort=100,
        rounds=(1, 20),
    ),
    Work(
        name="cifar10",
        summary="pfl's own benchmark: CIFAR-10, 1000 x 50, 50 per round",
        model="pfl_cnn",
        data=photographs,
        clients=1000,
        examples=50,
        cohort=50,
        lr=0.1,
        rounds=(3, 50),
    ),
    Work(
        name="logistic",
        summary="Logistic regression on K-Vib's Synthetic: 100 unequal clients, 10 per round",
        model="logistic",
        data=kvib,
        clients=100,
        examples=0,
        cohort=10,
        lr=0.05,
    ),
    Work(
        name="lstm",
        summary="Two LSTM layers on Shakespeare by role, 10 roles per round",
        model="lstm_shakespeare",
        data=roles,
        clients=859,
        examples=48,
        cohort=10,
        lr=1.0,
        rounds=(3, 20),
    ),
    Work(
        name="transformer",
        summary="A small transformer on Shakespeare by role, 10 roles per round",
        model="transformer",
        data=roles,
        clients=859,
        examples=48,
        cohort=10,
        lr=0.1,
        rounds=(3, 20),
    ),
    Work(
        name="resnet8",
        summary="A ResNet with GroupNorm on CIFAR-10, 100 clients x 500, 10 per round",
        model="resnet8",
        data=photographs,
        clients=100,
        examples=500,
        cohort=10,
        lr=0.1,
        rounds=(2, 20),
    ),
    Work(
        name="lenet",
        summary="LeNet-5 on digits: 10 clients x 600, all in every round, B = 64, E = 10",
        model="lenet",
        data=digits,
        clients=10,
        examples=600,
        cohort=10,
        lr=0.05,
        batch=64,
        epochs=10,
        rounds=(3, 20),
    ),
)
WORKS = {work.name: work for work in _WORKS}


def prepare(work: Work, folder: Path, rounds: int, device: str) -> Size:
    """Write a work for the systems' scripts (see peers/work.py), and return its size.

    The cohorts are those that rota's uniform sampler draws. So every system trains the same clients
    in the same rounds, and starts from the same weights.
    """
    federation = work.data(work)
    task = work.task(federation)
    sampler, d = Uniform(work.cohort), shares([task])
    drawn = []
    for now in range(1, WARMUP + rounds + 1):
        drawn.append(sampler.draw({}, d, rng.generator(rng.key(SEED, "draw", now))).client)
    cohorts = np.stack(drawn)
    engine = make("sequential", Experiment([task], seed=SEED), "cpu")
    params = engine.initial()[0].params
    shapes = [parameter.shape for parameter in task.build().parameters()]
    pieces = params.split([shape.numel() for shape in shapes])
    start = {}
    for place, (values, shape) in enumerate(zip(pieces, shapes, strict=True)):
        start[f"{place:02d}"] = values.view(shape).numpy()
    np.savez(folder / "start.npz", **start)
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
