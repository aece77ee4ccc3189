"""Data: federations and rosters, the partitions that deal examples out, and the sources.

Every source is a function that returns a Federation; SOURCES names them for recipes and the command
line. Your own data come in through `from_clients` (arrays or tensors), `folder` (files), `packed`
(files that are mapped) or `from_flower` (Flower's hub).
"""

from __future__ import annotations

from collections.abc import Callable

from rota.data import files, partition
from rota.data.arrays import from_arrays
from rota.data.cifar10 import ARCHIVE, BATCHES, cifar10
from rota.data.digits import digits
from rota.data.fashion_mnist import FILES as FASHION_MNIST
from rota.data.fashion_mnist import fashion_mnist
from rota.data.federation import Examples, Federation, Part, Partition
from rota.data.femnist import at_hand as femnist_at_hand
from rota.data.femnist import femnist
from rota.data.folder import folder
from rota.data.heart import FILES as HEART
from rota.data.heart import heart
from rota.data.hub import from_flower
from rota.data.idx import read_idx
from rota.data.leaf import leaf
from rota.data.mnist import FILES as MNIST
from rota.data.mnist import mnist
from rota.data.mnist_writers import FILES as WRITERS
from rota.data.mnist_writers import mnist_writers
from rota.data.own import from_clients
from rota.data.packed import packed, save
from rota.data.roster import Roster
from rota.data.shakespeare import FILES as PLAYS
from rota.data.shakespeare import shakespeare
from rota.data.synthetic import synthetic, synthetic_kvib
from rota.data.table import csv

SOURCES: dict[str, Callable[..., Federation]] = {
    "digits": digits,
    "synthetic": synthetic,
    "synthetic-kvib": synthetic_kvib,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "mnist-writers": mnist_writers,
    "femnist": femnist,
    "shakespeare": shakespeare,
    "heart": heart,
    "folder": folder,
    "packed": packed,
    "csv": csv,
    "leaf": leaf,
}

_NEEDED: dict[str, Callable[[], bool]] = {
    "mnist": lambda: files.at_hand("mnist", MNIST),
    "fashion-mnist": lambda: files.at_hand("fashion-mnist", FASHION_MNIST),
    "cifar10": lambda: files.at_hand("cifar10", BATCHES) or files.at_hand("cifar10", (ARCHIVE,)),
    "mnist-writers": lambda: all(
        files.at_hand(*each) for each in (("mnist", MNIST), ("qmnist-writers", WRITERS))
    ),
    "femnist": femnist_at_hand,
    "shakespeare": lambda: files.at_hand("shakespeare", PLAYS),
    "heart": lambda: files.at_hand("heart-disease-4-hospitals", HEART),
}


def at_hand(source: str) -> bool:
    """Whether the files that a source needs are on this machine. They are not checked here."""
    return source not in _NEEDED or _NEEDED[source]()


__all__ = [
    "SOURCES",
    "Examples",
    "Federation",
    "Part",
    "Partition",
    "Roster",
    "at_hand",
    "cifar10",
    "csv",
    "digits",
    "fashion_mnist",
    "femnist",
    "folder",
    "from_arrays",
    "from_clients",
    "from_flower",
    "heart",
    "leaf",
    "mnist",
    "mnist_writers",
    "packed",
    "partition",
    "read_idx",
    "save",
    "shakespeare",
    "synthetic",
    "synthetic_kvib",
]
