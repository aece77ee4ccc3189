"""MNIST (LeCun, Cortes, Burges)."""

from __future__ import annotations

from rota.data import idx
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate

FOLDER = "mnist"
FILES = idx.remotes(
    (
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873",),
        ("d53e105ee54ea40749a09fcbcd1e9432",),
        ("9fb629c4189551a2d022fa330f9573f3",),
        ("ec29112dd5afa0611ce80d1b7f02629c",),
    ),
    # LeCun's own page answers 403 now. These are the mirrors that PyTorch and TensorFlow use.
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)


def read() -> tuple[Examples, Examples]:
    """The training and the test images."""
    return idx.images(FOLDER, FILES)


def mnist(
    partition: Partition | None = None,
    matched_test: bool = False,
    validation: int = 0,
    seed: int = 0,
) -> Federation:
    """MNIST: 60,000 handwritten digits of 28x28 pixels, and 10,000 for testing.

    x is float32 [n, 1, 28, 28] in 0..1. 100 clients share the training images evenly, unless
    `partition` says otherwise (FedAvg's pathological split is partition.shards).
    """
    return federate(
        "mnist",
        *read(),
        partition or partitions.iid(),
        classes=10,
        matched_test=matched_test,
        validation=validation,
        seed=seed,
    )
