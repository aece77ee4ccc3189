"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017)."""

from __future__ import annotations

from rota.data import idx
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate

FOLDER = "fashion-mnist"
FILES = idx.remotes(
    # The second sum of each pair is that of Debian's package, which compresses the same images
    # anew.
    (
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "cf8536b0aa1a6ac5fa3f23001093305c"),
        ("25c81989df183df01b3e8a0aad5dffbe", "10bea18fdb374794d4bb42e356e600c9"),
        ("bef4ecab320f06d8554ea6380940ec79", "f78720b4224f21cce2f2ccf2d7a94c9a"),
        ("bb300cfdad3c16e7a12a480ee83cd310", "0d30e22e447f3c33dab9ed536400ac01"),
    ),
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
)


def read() -> tuple[Examples, Examples]:
    """The training and the test images."""
    return idx.images(FOLDER, FILES)


def fashion_mnist(
    partition: Partition | None = None,
    matched_test: bool = False,
    validation: int = 0,
    seed: int = 0,
) -> Federation:
    """Fashion-MNIST: 60,000 pictures of clothes, 28x28 pixels, 10 classes, and 10,000 for testing.

    x is float32 [n, 1, 28, 28] in 0..1. 100 clients share the training images evenly, unless
    `partition` says otherwise.
    """
    return federate(
        "fashion-mnist",
        *read(),
        partition or partitions.iid(),
        classes=10,
        matched_test=matched_test,
        validation=validation,
        seed=seed,
    )
