"""The user's own data, as files."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np

from rota.arrays import Array
from rota.data.federation import Federation, from_clients
from rota.errors import BadInput

SHARED = "test.npz"


def folder(path: str | Path, classes: int | None = None) -> Federation:
    """Your own data: a folder with one .npz file for each client.

    Each file has the arrays `x` [n, ...] and `y` [n], as np.savez(file, x=x, y=y) writes them. For testing, either each has
    `x_test` and `y_test` too, or one file test.npz has the `x` and `y` that all share. Real `x` become float32, bytes are
    taken for pixels and divided by 255, other integers stay integers (tokens). Clients are numbered in the order of the
    file names, in which 2.npz comes before 10.npz. `classes` defaults to the largest integer label + 1; real-valued targets
    have none.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise BadInput(
            f"{root} is not a folder: give the path of a folder with one .npz file for each client"
        )
    clients = sorted(
        (p for p in root.glob("*.npz") if p.name != SHARED),
        key=lambda p: [_number(w) for w in re.split(r"(\d+)", p.name)],
    )
    if not clients:
        raise BadInput(
            f"{root} has no .npz files: put one for each client there, with the arrays x and y"
        )
    shared = (root / SHARED).is_file()
    train: list[tuple[Array, Array]] = []
    test: list[tuple[Array, Array]] = []
    for file in [*clients, *([root / SHARED] if shared else [])]:
        arrays = _load(file)
        own = "x_test" in arrays or "y_test" in arrays
        if shared and own:
            raise BadInput(
                f"{file} has a test set of its own, but {root / SHARED} is there too: keep only one kind"
            )
        if not shared and not own:
            raise BadInput(
                f"{file} has no test set: add x_test and y_test to it, or put a {SHARED} that all share into {root}"
            )
        (test if file.name == SHARED else train).append(_pair(file, arrays, "x", "y"))
        if own:
            test.append(_pair(file, arrays, "x_test", "y_test"))
    first = train[0]
    for pairs in (train, test):
        for file, pair in zip(
            clients if len(pairs) == len(clients) else [root / SHARED], pairs, strict=True
        ):
            for name, array, like in zip(("x", "y"), pair, first, strict=True):
                if array.shape[1:] != like.shape[1:] or array.dtype.kind != like.dtype.kind:
                    ours, theirs = (f"{a.dtype} of shape {a.shape[1:]}" for a in (array, like))
                    raise BadInput(
                        f"{file} has examples whose {name} is {ours}, but in {clients[0]} it is {theirs}: make them agree"
                    )
    return from_clients(
        train, test[0] if shared else test, classes=classes, name=root.resolve().name
    )


def _number(word: str) -> tuple[int, str]:
    return (int(word), "") if word.isdigit() else (-1, word)


def _load(file: Path) -> dict[str, Array]:
    try:
        # opened here, because np.load leaves a file open that turns out not to be an archive
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {
                name: archive[name]
                for name in archive.files
                if name in ("x", "y", "x_test", "y_test")
            }
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise BadInput(
            f"{file} cannot be read as .npz with plain arrays ({error}): write it again with np.savez"
        ) from error


def _pair(file: Path, arrays: dict[str, Array], x: str, y: str) -> tuple[Array, Array]:
    for name in (x, y):
        if name not in arrays:
            raise BadInput(f"{file} has no array named {name}: add it")
        if arrays[name].dtype.kind not in "fiub" or arrays[name].ndim == 0:
            raise BadInput(
                f"{file} has {name} of kind {arrays[name].dtype}: make it an array of numbers, one row an example"
            )
        bad = np.flatnonzero(
            ~np.isfinite(arrays[name]).all(axis=tuple(range(1, arrays[name].ndim)))
        )
        if len(bad):
            raise BadInput(
                f"{file} has NaN or infinite numbers in {name}, first in row {bad[0]} ({len(bad)} rows in all): mend or remove them"
            )
    if len(arrays[x]) != len(arrays[y]) or (x == "x" and not len(arrays[x])):
        raise BadInput(
            f"{file} has {len(arrays[x])} rows in {x} and {len(arrays[y])} in {y}: give as many of each, and at least one"
        )
    if arrays[y].dtype.kind in "iub" and len(arrays[y]) and arrays[y].min() < 0:
        raise BadInput(f"{file} has negative class labels in {y}: number the classes from 0")
    inputs, targets = arrays[x], arrays[y]
    if inputs.dtype == np.uint8:
        inputs = inputs / np.float32(255)
    return _native(inputs), _native(targets)


def _native(array: Array) -> Array:
    """float32 or int64 in this machine's byte order: torch takes no others of numpy's many kinds for granted."""
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
