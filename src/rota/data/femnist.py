"""FEMNIST of LEAF (Caldas et al. 2018): handwritten characters by writer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data import files
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.owners import federate_owned, part, split
from rota.errors import BadInput

FOLDERS = ("femnist", "femnist-leaf-sample")
CLASSES = 62
Users = list[tuple[str, Array, Array]]  # name, images, labels


def femnist(
    partition: Partition | None = None, matched_test: bool = False, seed: int = 0
) -> Federation:
    """FEMNIST: handwritten digits and letters of 28x28 pixels in 62 classes, with their writers as clients (LEAF's JSON files).

    x is float32 [n, 1, 28, 28], 1 on the background. LEAF's own train and test files are used as they are split: where
    both have the same writers, each client has its own test set, and where writers were set apart for testing, the test
    set is shared. A folder of JSON files alone is split here, a random fifth of each writer's images for testing.
    """
    train, test = _parts()
    names = sorted({name for name, _, _ in train})
    known = {name: number for number, name in enumerate(names)}
    owned = _examples(train, known)
    if test is None:
        assert owned.groups is not None
        parts = part(owned, split(owned.groups, rng.generator(rng.key(seed, "split", "femnist"))))
    elif all(name in known for name, _, _ in test):
        parts = owned, _examples(test, known)
    else:
        others = _examples(test, {name: 0 for name, _, _ in test})
        return federate(
            "femnist",
            owned,
            others,
            partition or partitions.natural(),
            classes=CLASSES,
            matched_test=matched_test,
            seed=seed,
        )
    return federate_owned(
        "femnist", *parts, partition, classes=CLASSES, matched_test=matched_test, seed=seed
    )


def _parts() -> tuple[Users, Users | None]:
    """LEAF's train and test users, or all users and None."""
    for base in (place for folder in FOLDERS for place in files.places(folder)):
        for root in (base / "data", base):
            train, test = sorted(root.glob("train/*.json")), sorted(root.glob("test/*.json"))
            if train and test:
                return _users(train), _users(test)
        alone = sorted(base.glob("*.json"))
        if alone:
            return _users(alone), None
    raise BadInput(
        "femnist is not on this machine, and has no download: make it with LEAF's data/femnist/preprocess.sh and put its data/train "
        f"and data/test into $ROTA_DATA/femnist or {files.cache('femnist')}, or use the data 'digits' or 'synthetic', which need no files"
    )


def at_hand() -> bool:
    """Whether there are files to read."""
    return any(
        True for folder in FOLDERS for place in files.places(folder) for _ in place.rglob("*.json")
    )


def _users(paths: list[Path]) -> Users:
    users: Users = []
    for path in paths:
        try:
            data = json.loads(path.read_bytes())["user_data"]
            for name, own in data.items():
                x, y = (
                    np.asarray(own["x"], np.float32).reshape(-1, 784),
                    np.asarray(own["y"], np.int64),
                )
                if len(x) != len(y) or not ((y >= 0) & (y < CLASSES)).all():
                    raise ValueError(f"the images and labels of user {name} do not fit")
                users.append((name, x, y))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{path} is damaged or not LEAF's FEMNIST ({error}): replace it by a good copy"
            ) from error
    return users


def _examples(users: Users, number: dict[str, int]) -> Examples:
    x = torch.from_numpy(np.concatenate([x for _, x, _ in users])).view(-1, 1, 28, 28)
    y = torch.from_numpy(np.concatenate([y for _, _, y in users]))
    return Examples(x, y, np.concatenate([np.full(len(y), number[name]) for name, _, y in users]))
