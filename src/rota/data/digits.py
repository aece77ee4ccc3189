"""scikit-learn's handwritten digits."""

from __future__ import annotations

import numpy as np
import torch

from rota import rng
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.owners import part, split


def digits(
    partition: Partition | None = None,
    matched_test: bool = False,
    validation: int = 0,
    seed: int = 0,
) -> Federation:
    """1,797 handwritten digits of 8x8 pixels; needs no files.

    x is float32 [n, 1, 8, 8] in 0..1. A random fifth of each class is for testing, and 20 clients
    share the rest evenly, unless `partition` says otherwise. scikit-learn brings these digits along
    (UCI, Alpaydin & Kaynak 1998).
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy((pixels / 16).astype(np.float32)).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels.astype(np.int64))
    parts = part(Examples(x, y), split(labels, rng.generator(rng.key(seed, "split", "digits"))))
    return federate(
        "digits",
        *parts,
        partition or partitions.iid(clients=20),
        classes=10,
        matched_test=matched_test,
        validation=validation,
        seed=seed,
    )
