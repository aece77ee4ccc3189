"""The user's own data, as files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from rota.arrays import Array
from rota.data.federation import Federation
from rota.data.memory import check_room
from rota.data.own import from_clients
from rota.errors import BadInput, first_line

SHARED = "test.npz"
NAMES = ("x", "y", "x_test", "y_test")

Pair = tuple[Array, Array]


def folder(path: str | Path, classes: int | None = None) -> Federation:
    """Your own data: a folder with one .npz file per client.

    Each file has the arrays `x` [n, ...] and `y` [n], as np.savez(file, x=x, y=y) writes them. The
    test examples are either in each file, as `x_test` and `y_test`, or in one file test.npz, whose
    `x` and `y` all clients share. Real `x` become float32. Bytes are taken for pixels and divided
    by 255. Other integers stay integers (tokens). Clients are in the order of the file names, in
    which 2.npz comes before 10.npz. `classes` defaults to the largest integer label + 1;
    real-valued targets have none.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise BadInput(
            f"{root} is not a folder: give the path of a folder with one .npz file per client"
        )
    clients = sorted((p for p in root.glob("*.npz") if p.name != SHARED), key=in_order)
    if not clients:
        raise BadInput(
            f"{root} has no .npz files: put one per client there, with the arrays x and y"
        )
    shared = (root / SHARED).exists()
    train: list[Pair] = []
    test: list[Pair] = []
    held = 0.0
    for file in [*clients, *([root / SHARED] if shared else [])]:
        arrays = read(file, held)
        own = "x_test" in arrays or "y_test" in arrays
        if shared and own:
            raise BadInput(
                f"{file} has a test set of its own, but {root / SHARED} is there too: "
                "keep only one kind"
            )
        if not shared and not own:
            raise BadInput(
                f"{file} has no test set: add x_test and y_test to it, or put a {SHARED} that all "
                f"share into {root}"
            )
        pair = pair_of(file, arrays, "x", "y")
        (test if file.name == SHARED else train).append(pair)
        if own:
            test.append(pair_of(file, arrays, "x_test", "y_test"))
        held += sum(array.nbytes for array in (*pair, *(test[-1] if own else ())))
    _check_alike(clients, train, clients[0], train[0])
    _check_alike([root / SHARED] if shared else clients, test, clients[0], train[0])
    return from_clients(
        train,
        test[0] if shared else test,
        classes=classes,
        name=root.resolve().name,
        ids=[file.stem for file in clients],
    )


def in_order(path: Path) -> list[tuple[int, str]]:
    """A key that sorts names by the numbers in them."""
    words = re.split(r"([0-9]+)", path.name)
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]


def read(file: Path, held: float) -> dict[str, Array]:
    """The arrays of a file; `held` bytes are in memory already."""
    advice = "write it again with np.savez"
    if not file.is_file():
        raise BadInput(f"{file} is not a file: put an .npz file there, or remove it")
    try:
        # opened here, because np.load leaves a file open that turns out not to be an archive
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            names = [name for name in NAMES if name in archive.files]
            sizes = {info.filename: info.file_size for info in archive.zip.infolist()}
            needed = sum(sizes.get(f"{name}.npy", 0) for name in names)
            check_room(held + needed, f"the data up to {file}", "use less data")
            arrays = {name: archive[name] for name in names}
    except BadInput:
        raise
    # A damaged, encrypted or forged archive may raise nearly anything in zipfile, zlib or NumPy.
    except Exception as error:
        reason = first_line(error)
        raise BadInput(
            f"{file} cannot be read as .npz with plain arrays ({reason}): {advice}"
        ) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # NumPy gives the bytes of what is no array
            raise BadInput(f"{file} has {name}, but not as an array: {advice}")
    return arrays


def pair_of(file: Path, arrays: dict[str, Array], x: str, y: str) -> Pair:
    for name in (x, y):
        if name not in arrays:
            raise BadInput(f"{file} has no array named {name}: add it")
        if arrays[name].dtype.kind not in "fiub" or arrays[name].ndim == 0:
            raise BadInput(
                f"{file} has {name} of kind {arrays[name].dtype}: make it an array of numbers, "
                "one row per example"
            )
    if len(arrays[x]) != len(arrays[y]) or (x == "x" and not len(arrays[x])):
        raise BadInput(
            f"{file} has {len(arrays[x])} rows in {x} and {len(arrays[y])} in {y}: give the same "
            "number of both, and at least one"
        )
    if arrays[y].dtype.kind in "iub" and len(arrays[y]) and arrays[y].min() < 0:
        raise BadInput(f"{file} has negative class labels in {y}: number the classes from 0")
    inputs = arrays[x]
    if inputs.dtype == np.uint8:
        inputs = inputs / np.float32(255)
    return _native(file, inputs, x), _native(file, arrays[y], y)


def _native(file: Path, array: Array, name: str) -> Array:
    """Convert to float32 or int64 in this machine's byte order, which torch takes for sure."""
    if array.dtype.kind != "f":
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise BadInput(f"{file} has a number above 2**63 in {name}: give smaller whole numbers")
        return array.astype(np.int64)
    with np.errstate(over="ignore"):
        native = array.astype(np.float32)
    bad = ~np.isfinite(native).all(axis=tuple(range(1, native.ndim)))
    if bad.any():
        raise BadInput(
            f"{file} has NaN, infinite or too large numbers in {name}, first in row {bad.argmax()} "
            f"({bad.sum()} rows in all): fix or remove them"
        )
    return native


def _check_alike(files: list[Path], pairs: list[Pair], first: Path, like: Pair) -> None:
    """Check that all pairs have the shape and kind of the first client's."""
    for file, pair in zip(files, pairs, strict=True):
        for name, mine, theirs in zip(("x", "y"), pair, like, strict=True):
            if (mine.shape[1:], mine.dtype) != (theirs.shape[1:], theirs.dtype):
                raise BadInput(
                    f"{file} has examples whose {name} is {mine.dtype} of shape {mine.shape[1:]}, "
                    f"but in {first} it is {theirs.dtype} of shape {theirs.shape[1:]}: "
                    "make them agree"
                )
