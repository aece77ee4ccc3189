"""Any data set in LEAF's JSON: files with `user_data`, which has x and y for each user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota import rng
from rota.data.arrays import texts
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.owners import federate_owned, part, split
from rota.data.partition import natural
from rota.errors import BadInput
from rota.files import read_json

Users = list[tuple[str, list[Any], list[Any]]]
"""Name, examples, targets."""
ADVICE = "write it as LEAF does"


def leaf(
    path: str | Path,
    shape: Sequence[int] = (),
    text: int | None = None,
    partition: Partition | None = None,
    matched_test: bool = False,
    seed: int = 0,
) -> Federation:
    """A folder of LEAF's JSON files; users are clients.

    The files lie in `train` and `test`, or in `data/train` and `data/test`, or all in the folder;
    then a random fifth of each user's examples is for testing. An example is a list of numbers,
    which gets the `shape`, such as (1, 28, 28), or a text, which becomes one token per letter: 0
    fills short texts, and letters count from 1 in sorted order. If examples are lists with a text
    among others, as in Sent140, `text` is its place (4 there). Targets are whole numbers (classes
    from 0), other numbers, or texts (classes in sorted order).
    """
    root = Path(path).expanduser()
    train, test = _files(root)
    users, others = _users(train), _users(test)
    names = sorted({name for name, _, _ in users})
    number = {name: n for n, name in enumerate(names)}
    x = _inputs(users + others, tuple(shape), text, root)
    y, classes = _targets(users + others, root)
    cut = sum(len(each) for _, each, _ in users)
    groups = np.concatenate([np.full(len(each), number[name]) for name, each, _ in users])
    mine = Examples(x[:cut], y[:cut], groups)
    how: dict[str, Any] = {"classes": classes, "matched_test": matched_test, "seed": seed}
    name = root.resolve().name
    if others and not all(each in number for each, _, _ in others):
        made = federate(name, mine, Examples(x[cut:], y[cut:]), partition or natural(), **how)
    else:
        if others:
            owned = np.concatenate([np.full(len(each), number[n]) for n, each, _ in others])
            parts = mine, Examples(x[cut:], y[cut:], owned)
        else:
            generator = rng.generator(rng.key(seed, "split", name))
            parts = part(mine, split(groups, generator))
        made = federate_owned(name, *parts, partition, **how)
    ids = names if partition is None and made.clients == len(names) else []
    return Federation(name, made.train, made.test, classes, ids)


def _files(root: Path) -> tuple[list[Path], list[Path]]:
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder: give the path of a folder of LEAF's JSON files")
    for base in (root / "data", root):
        train, test = sorted(base.glob("train/*.json")), sorted(base.glob("test/*.json"))
        if train and test:
            return train, test
    alone = sorted(root.glob("*.json"))
    if not alone:
        raise BadInput(f"{root} has no JSON files, alone or in train and test: put LEAF's there")
    return alone, []


def _users(paths: list[Path]) -> Users:
    found: Users = []
    for path in paths:
        data = read_json(path, ADVICE).get("user_data")
        if not isinstance(data, dict):
            raise BadInput(f"{path} has no object user_data: {ADVICE}")
        for name, own in data.items():
            x, y = (own.get(key) if isinstance(own, dict) else None for key in "xy")
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise BadInput(f"{path}: user {name} has no lists x and y of one length: {ADVICE}")
            if x:
                found.append((name, x, y))
    if paths and not found:
        raise BadInput(f"{paths[0].parent} has no examples in its JSON files: {ADVICE}")
    return found


def _inputs(users: Users, shape: tuple[int, ...], text: int | None, root: Path) -> Tensor:
    values = [each for _, x, _ in users for each in x]
    if text is not None:
        if not all(isinstance(each, list) and len(each) > text >= 0 for each in values):
            raise BadInput(f"text is {text}, but not all examples in {root} have such a place")
        values = [each[text] for each in values]
    if all(isinstance(each, str) for each in values):
        return texts(values)
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "if":
        raise BadInput(
            f"the examples in {root} are neither texts nor lists of numbers of one length: make "
            "them one of these first, or name the place of a text in them (text)"
        )
    if shape:
        try:
            array = array.reshape(len(array), *shape)
        except ValueError as error:
            size = array[0].size
            raise BadInput(f"shape is {shape}, but examples have {size} numbers") from error
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _targets(users: Users, root: Path) -> tuple[Tensor, int]:
    values = [each for _, _, y in users for each in y]
    if all(isinstance(each, str) for each in values):
        known = sorted(set(values))
        place = {each: n for n, each in enumerate(known)}
        return torch.tensor([place[each] for each in values]), len(known)
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "if" or not np.isfinite(array).all():
        raise BadInput(f"the targets in {root} are neither numbers nor texts: {ADVICE}")
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32)), 0
    if array.min() < 0:
        raise BadInput(f"{root} has class {array.min()}: number the classes from 0")
    return torch.from_numpy(array.astype(np.int64)), int(array.max()) + 1
