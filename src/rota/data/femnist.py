"""FEMNIST of LEAF (Caldas et al. 2018): handwritten characters by writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data import files
from rota.data import partition as partitions
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.owners import federate_owned, part, split
from rota.errors import BadInput
from rota.files import read_json

FOLDERS = ("femnist", "femnist-leaf-sample")
CLASSES = 62
PIXELS = 28 * 28
ADVICE = "replace it by a good copy"
Users = list[tuple[str, Array, Array]]  # name, images, labels


def femnist(
    partition: Partition | None = None, matched_test: bool = False, seed: int = 0
) -> Federation:
    """FEMNIST: handwritten digits and letters of 28x28 pixels in 62 classes; writers are clients.

    x is float32 [n, 1, 28, 28], 1 on the background, read from LEAF's JSON files. LEAF's own train
    and test files are used as they are split: if both have the same writers, each client has a test
    set of its own; if writers were set apart for testing, the test set is shared. A folder of JSON
    files alone is split here: a random fifth of each writer's images is for testing.
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
        "femnist is not on this machine, and has no download: make it with LEAF's "
        "data/femnist/preprocess.sh and put its data/train and data/test into $ROTA_DATA/femnist "
        f"or {files.cache('femnist')}, or use the data 'digits' or 'synthetic', which need no files"
    )


def at_hand() -> bool:
    """Whether there are files to read."""
    for folder in FOLDERS:
        for place in files.places(folder):
            if next(place.rglob("*.json"), None):
                return True
    return False


def _users(paths: list[Path]) -> Users:
    """All users of LEAF's files. Some may have no images, but not all."""
    users: Users = []
    for path in paths:
        data = read_json(path, ADVICE).get("user_data")
        try:
            if not isinstance(data, dict):
                raise ValueError("it has no object user_data")
            users += [(name, *_images(name, own)) for name, own in data.items()]
        except ValueError as error:
            raise BadInput(f"{path} is not LEAF's FEMNIST ({error}): {ADVICE}") from error
    if not any(len(y) for _, _, y in users):
        raise BadInput(f"{paths[0].parent} has no images in its JSON files: {ADVICE}")
    return users


def _images(name: str, own: Any) -> tuple[Array, Array]:
    """One user's images [n, 784] and labels [n]."""
    if not isinstance(own, dict) or not {"x", "y"} <= own.keys():
        raise ValueError(f"user {name} has no x and y")
    x = _numbers(own["x"], f"user {name}: x")
    y = _numbers(own["y"], f"user {name}: y")
    if not len(x) and not len(y):
        return np.zeros((0, PIXELS), np.float32), np.zeros(0, np.int64)
    with np.errstate(over="ignore"):
        images = x.astype(np.float32)
    if x.ndim != 2 or x.shape[1] != PIXELS or not np.isfinite(images).all():
        raise ValueError(f"user {name}: x is not a list of images of {PIXELS} numbers each")
    if y.shape != x.shape[:1]:
        raise ValueError(f"user {name} has {len(x)} images and {len(y)} labels")
    if y.dtype.kind != "i" or y.min() < 0 or y.max() >= CLASSES:
        raise ValueError(f"user {name} has labels outside 0..{CLASSES - 1}")
    return images, y


def _numbers(values: Any, what: str) -> Array:
    """A list of numbers, or of lists of one length, as an array."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{what} has rows of different lengths") from error
    if array.ndim == 0 or (array.size and array.dtype.kind not in "if"):
        raise ValueError(f"{what} is not a list of numbers")
    return array


def _examples(users: Users, number: dict[str, int]) -> Examples:
    x = torch.from_numpy(np.concatenate([x for _, x, _ in users])).view(-1, 1, 28, 28)
    y = torch.from_numpy(np.concatenate([y for _, _, y in users]))
    return Examples(x, y, np.concatenate([np.full(len(y), number[name]) for name, _, y in users]))
