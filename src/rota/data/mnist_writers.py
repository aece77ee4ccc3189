"""MNIST by its writers, whom QMNIST (Yadav & Bottou 2019) traced."""

from __future__ import annotations

import numpy as np

from rota.data import files, idx
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.mnist import read as read_mnist
from rota.errors import BadInput

FOLDER = "qmnist-writers"
LABELS = "qmnist-train-labels-idx2-int.gz"
FILES = (
    files.Remote(
        LABELS,
        ("0058f8dd561b90ffdd0f734c6a30e5e4",),
        (f"https://raw.githubusercontent.com/facebookresearch/qmnist/master/{LABELS}",),
    ),
)
WRITER = 2  # the column that names the writer; column 0 is the class


def mnist_writers(
    partition: Partition | None = None, matched_test: bool = False, seed: int = 0
) -> Federation:
    """MNIST with its 539 writers as clients, 19 to 131 digits each.

    x is float32 [n, 1, 28, 28] in 0..1. Row i of QMNIST's extended labels describes MNIST's
    training image i. Other people wrote the test digits, so the test images are shared, unless
    `matched_test` deals them out by label.
    """
    path = files.find(FOLDER, FILES)[LABELS]
    rows = idx.read_idx(path)
    train, test = read_mnist()
    if rows.ndim != 2 or not np.array_equal(rows[:, 0], train.labels):
        raise BadInput(
            f"{path} does not describe MNIST's training images: replace it by a good copy"
        )
    owned = Examples(train.x, train.y, np.unique(rows[:, WRITER], return_inverse=True)[1])
    return federate(
        "mnist-writers",
        owned,
        test,
        partition or partitions.natural(),
        classes=10,
        matched_test=matched_test,
        seed=seed,
    )
