"""Data that need not fit into memory: a federation's arrays as files that are mapped."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.data.federation import Federation, Part
from rota.errors import BadInput, first_line

EXAMPLES, OFFSETS = ("float32", "float64", "int64"), ("int64",)
"""The types that files may have: mapped numbers cannot be converted."""


def packed(path: str | Path, classes: int | None = None) -> Federation:
    """Your own data: a folder of .npy files, which are read as they are needed (memory-mapped).

    x.npy and y.npy hold all clients' training examples, one client after the other. offsets.npy
    [clients + 1] says where each client's begin, and ends with their number. x_test.npy and
    y_test.npy hold the test examples, which all clients share; with offsets_test.npy each client
    has its own. `x` and `y` are float32, float64 or int64, and offsets int64. `rota.data.save`
    writes such a folder. `classes` defaults to the largest integer label + 1.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder: give the path of a folder with x.npy and y.npy")
    x, y, offsets = (_map(root / f"{name}.npy") for name in ("x", "y", "offsets"))
    x_test, y_test = (_map(root / f"{name}_test.npy") for name in ("x", "y"))
    begins = np.array([0, len(y_test)])
    if (root / "offsets_test.npy").exists():
        begins = np.array(_map(root / "offsets_test.npy"))
    train = Part(_tensor(x), _tensor(y), np.array(offsets))
    test = Part(_tensor(x_test), _tensor(y_test), begins)
    if classes is None:
        most = max((int(part.y.max()) for part in (train, test) if len(part.y)), default=-1)
        classes = 0 if train.y.is_floating_point() else most + 1
    return Federation(root.resolve().name, train, test, classes)


def save(federation: Federation, path: str | Path) -> None:
    """Write a federation as a folder that `packed` reads."""
    root = Path(path).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    for part, end in ((federation.train, ""), (federation.test, "_test")):
        np.save(root / f"x{end}.npy", part.x.numpy())
        np.save(root / f"y{end}.npy", part.y.numpy())
        if not end or not federation.shared_test:
            np.save(root / f"offsets{end}.npy", part.offsets)


def _map(file: Path) -> Array:
    """A file's array, of which nothing is in memory yet."""
    kinds = OFFSETS if file.stem.startswith("offsets") else EXAMPLES
    if not file.is_file():
        raise BadInput(f"there is no {file}: write it with rota.data.save or np.save")
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged file may raise nearly anything in NumPy
        raise BadInput(
            f"{file} cannot be mapped as an array ({first_line(error)}): write it with np.save"
        ) from error
    if not isinstance(array, np.ndarray) or str(array.dtype) not in kinds or not array.ndim:
        kind = array.dtype if isinstance(array, np.ndarray) else "no single array"
        raise BadInput(f"{file} holds {kind}: write it as one array of {' or '.join(kinds)}")
    return array


def _tensor(array: Array) -> Tensor:
    """A mapped array as a tensor. Nobody writes to it, and nobody could."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array))
