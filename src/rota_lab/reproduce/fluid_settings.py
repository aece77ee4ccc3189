"""The settings of FLuID's accuracy studies: data, networks, and the clients' local work.

"small" settings are for two cores; the others have FLuID's networks, and are for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import nn

from rota import data, models
from rota.arrays import Array
from rota.data import files
from rota.data.cifar10 import BATCHES, FOLDER, decoded
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.partition import iid
from rota.plan import Task
from rota.sampling import Full, Sampler, Uniform


@dataclass(frozen=True)
class Setting:
    """Data, a network, and the clients' local work. `words` is the setting's row on the page.

    An accuracy is the mean over the last `last` rounds. `cohort` clients train in each round
    (None: all). With `joint`, the seeds are models of one run, so that a GPU trains them together.
    """

    name: str
    words: str
    load: Callable[[int], Federation]
    model: Callable[..., nn.Module]
    rounds: int
    lr: float
    batch: int
    optimizer: Literal["sgd", "adam"] = "sgd"
    seeds: int = 5
    cohort: int | None = None
    last: int = 5
    joint: bool = False

    @property
    def sampler(self) -> Sampler:
        return Full() if self.cohort is None else Uniform(self.cohort)

    def task(self, seed: int) -> Task:
        return Task(
            self.model,
            self.load(seed),
            lr=self.lr,
            batch=self.batch,
            optimizer=self.optimizer,
            name=self.name,
        )


def grouped(clients: int, writers: int) -> Partition:
    """Each client has the images of some writers, who are chosen at random."""

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        known, writer = np.unique(np.asarray(examples.groups), return_inverse=True)
        place = generator.permutation(len(known))
        owner = place[writer] // writers
        return np.where(owner < clients, owner, -1), clients

    return deal


def halved(clients: int) -> Partition:
    """Each client has one half of a writer's images; writers are chosen at random."""

    def deal(examples: Examples, generator: np.random.Generator) -> tuple[Array, int]:
        known, writer = np.unique(np.asarray(examples.groups), return_inverse=True)
        place = generator.permutation(len(known))
        half = generator.integers(2, size=len(writer))
        owner = 2 * place[writer] + half
        return np.where(owner < clients, owner, -1), clients

    return deal


def writers(partition: Partition, tests: int | None = None) -> Callable[[int], Federation]:
    """Digits by writer, and all test images or the first `tests` of them."""

    def load(seed: int) -> Federation:
        whole = data.mnist_writers(partition, seed=seed)
        if tests is None:
            return whole
        x, y = whole.test.x[:tests], whole.test.y[:tests]
        return replace(whole, test=replace(whole.test, x=x, y=y, offsets=np.array([0, tests])))

    return load


def small_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """FLuID's FEMNIST network at half its width: 5x5 convolutions with 8 and 32 channels."""
    colours, height, width = shape
    return nn.Sequential(
        nn.Conv2d(colours, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 60),
        nn.ReLU(),
        nn.Linear(60, classes),
    )


def first_batch(partition: Partition) -> Callable[[int], Federation]:
    """The 10,000 images of CIFAR-10's first batch; the last 2,000 are for testing."""

    def load(seed: int) -> Federation:
        batch = BATCHES[0]
        every = decoded(files.find(FOLDER, (batch,))[batch.name].read_bytes())
        train, test = (
            Examples(every.x[some], every.y[some]) for some in (slice(8000), slice(8000, None))
        )
        return federate("cifar10", train, test, partition, classes=10, seed=seed)

    return load


QUICK = Setting(
    name="digits",
    words="handwritten digits of 8x8 pixels, 10 clients",
    load=lambda seed: data.digits(iid(10), seed=seed),
    model=models.two_nn,
    rounds=3,
    lr=0.1,
    batch=20,
    seeds=2,
    last=1,
)
"""The setting of the short versions; its data are at hand everywhere."""
FEW = 2000
"""The test images of small settings."""
SMALL = Setting(
    name="small",
    words="digits of 10 writers on 5 clients, and 2,000 test digits",
    load=writers(grouped(5, 2), FEW),
    model=models.two_nn,
    rounds=60,
    lr=0.05,
    batch=10,
    seeds=40,
)
CONVOLUTIONS = replace(SMALL, name="small-cnn", model=small_cnn, rounds=30, lr=0.02, seeds=5)
DIGITS = Setting(
    name="writers",
    words="digits of 500 writers on 5 clients",
    load=writers(grouped(5, 100)),
    model=models.fluid_femnist,
    rounds=250,
    lr=0.004,
    batch=10,
    joint=True,
)
LEAF = Setting(
    name="leaf",
    words="LEAF's sample of FEMNIST, 62 classes, 25 writers on 5 clients",
    load=lambda seed: data.femnist(grouped(5, 5), seed=seed),
    model=models.fluid_femnist,
    rounds=250,
    lr=0.004,
    batch=10,
    seeds=10,
    joint=True,
)
CIFAR = Setting(
    name="cifar10",
    words="CIFAR-10, dealt evenly to 5 clients",
    load=lambda seed: data.cifar10(iid(5), seed=seed),
    model=models.vgg9,
    rounds=100,
    lr=0.01,
    batch=20,
    joint=True,
)
CIFAR_BATCH = Setting(
    name="cifar10-batch",
    words="8,000 images of CIFAR-10's first batch, dealt evenly to 5 clients; the other 2,000 test",
    load=first_batch(iid(5)),
    model=models.vgg9,
    rounds=50,
    lr=0.0001,
    batch=20,
    optimizer="adam",
    joint=True,
)
"""The local work is that of FLuID's program: its paper has SGD."""
SHAKESPEARE = Setting(
    name="shakespeare",
    words="Shakespeare, 100 roles on 5 clients",
    load=lambda seed: data.shakespeare(grouped(5, 20), least=16, seed=seed),
    model=models.lstm_shakespeare,
    rounds=65,
    lr=0.001,
    batch=128,
    optimizer="adam",
    joint=True,
)


MANY = replace(
    SMALL,
    words="digits of 50 writers, each a client, and 2,000 test digits",
    load=writers(grouped(50, 1), FEW),
    rounds=40,
    seeds=10,
)
"""The small setting with many clients."""
DIGITS100 = replace(
    DIGITS, words="digits of 500 writers on 100 clients", load=writers(grouped(100, 5))
)
CIFAR100 = replace(
    CIFAR,
    words="CIFAR-10, dealt evenly to 100 clients",
    load=lambda seed: data.cifar10(iid(100), seed=seed),
)
RESNET = replace(
    CIFAR100,
    name="cifar10-resnet18",
    model=models.resnet18,
)
SHAKESPEARE50 = replace(
    SHAKESPEARE,
    words="Shakespeare, 100 roles on 50 clients",
    load=lambda seed: data.shakespeare(grouped(50, 2), least=16, seed=seed),
)
