"""CIFAR-10 (Krizhevsky 2009).

It is read from the binary version. The Python version is pickled, and unpickling a file can run
code that is in it.
"""

from __future__ import annotations

import hashlib
import tarfile

import numpy as np
import torch

from rota.data import files
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate
from rota.errors import BadInput

FOLDER = "cifar10"
INSIDE = "cifar-10-batches-bin/"
BATCHES = tuple(
    files.Remote(name + ".bin", (md5,), aliases=(INSIDE + name + ".bin",))
    for name, md5 in (
        ("data_batch_1", "5dd7e06a14cb22eb9f671a540d1b7c25"),
        ("data_batch_2", "5ea93a67294ea407fff1d09f752e9692"),
        ("data_batch_3", "942cd6a4bcdd0dd3c604fbe906cb4421"),
        ("data_batch_4", "ae636b3ba5c66a11e91e8cb52e771fcb"),
        ("data_batch_5", "53f37980c15c3d472c316c40844f3f0d"),
        ("test_batch", "803d5f7f4d78ea53de84dbe85f74fb6d"),
    )
)
ARCHIVE = files.Remote(
    "cifar-10-binary.tar.gz",
    ("c32a1d4ab5d03f1284b67883e8d87530",),
    (
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
    ),
)
MEAN = (0.4914, 0.4822, 0.4465)  # of the training images' red, green and blue
DEVIATION = (0.2470, 0.2435, 0.2616)


def cifar10(
    partition: Partition | None = None,
    matched_test: bool = False,
    validation: int = 0,
    seed: int = 0,
) -> Federation:
    """CIFAR-10: 50,000 colour photographs of 32x32 pixels in 10 classes, and 10,000 for testing.

    x is float32 [n, 3, 32, 32], each channel with mean 0 and deviation 1. 100 clients share the
    training images evenly, unless `partition` says otherwise. The images are read from the six .bin
    files, or straight from cifar-10-binary.tar.gz.
    """
    batches = _batches()
    parts = decoded(b"".join(batches[:5])), decoded(batches[5])
    return federate(
        "cifar10",
        *parts,
        partition or partitions.iid(),
        classes=10,
        matched_test=matched_test,
        validation=validation,
        seed=seed,
    )


def _batches() -> list[bytes]:
    found = files.on_disk(FOLDER, BATCHES)
    if len(found) == len(BATCHES):
        return [found[batch.name].read_bytes() for batch in BATCHES]
    path = files.find(FOLDER, (ARCHIVE,))[ARCHIVE.name]
    members = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.removeprefix(INSIDE)
            stream = archive.extractfile(member) if name.endswith(".bin") else None
            if stream:
                members[name] = stream.read()
    for batch in BATCHES:
        md5 = hashlib.md5(members.get(batch.name, b""), usedforsecurity=False)
        if md5.hexdigest() not in batch.md5:
            raise BadInput(
                f"{batch.name} in {path} is missing or damaged: remove the archive to have it "
                "downloaded again"
            )
    return [members[batch.name] for batch in BATCHES]


def decoded(data: bytes) -> Examples:
    """Each row is a label and 3 x 1024 bytes: red, green, blue, each line by line."""
    rows = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, 3073).copy())
    x = rows[:, 1:].float().div_(255).view(-1, 3, 32, 32)
    x.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(DEVIATION).view(3, 1, 1))
    return Examples(x, rows[:, 0].long())
