"""A client's data on its own disk.

    DIR/ID.npz          the examples of client ID, as arrays x and y (`rota.data.folder` reads the
                        same files)
    DIR/TASK/ID.npz     its examples of one task, where a run has several with different data

A folder may hold several clients. Their ids are the names of the files, and must be unique in the
whole fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rota.data.federation import Federation, Part
from rota.data.folder import SHARED, pair_of, read
from rota.errors import BadInput, first_line
from rota.flower.letter import Refused


def files_of(root: Path, task: str) -> dict[str, Path]:
    """The file of each client that has data for a task."""
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder: give the folder with the client's .npz files")
    own = root / task
    place = own if task and Path(task).name == task and own.is_dir() else root
    return {file.stem: file for file in sorted(place.glob("*.npz")) if file.name != SHARED}


def count(file: Path) -> int:
    """How many examples a file has, without reading them."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return len(archive["y"])
    except Exception as error:  # a damaged archive may raise nearly anything
        raise BadInput(
            f"{file} cannot be read ({first_line(error)}): write it again with np.savez"
        ) from error


def sizes(root: Path, tasks: Sequence[str]) -> dict[str, list[int]]:
    """How many examples of each task each client has."""
    found: dict[str, list[int]] = {}
    for t, task in enumerate(tasks):
        for name, file in files_of(root, task).items():
            found.setdefault(name, [0] * len(tasks))[t] = count(file)
    return found


def federation(
    root: Path, task: str, numbers: dict[str, int], total: int, like: tuple[list[int], str, int]
) -> Federation:
    """This folder's clients as a federation in which all others have no data.

    `numbers` are the clients' numbers among the `total`. `like` is the shape and the dtype of the
    examples, and the number of classes.
    """
    shape, dtype, classes = like
    files = files_of(root, task)
    mine = sorted((number, name) for name, number in numbers.items() if name in files)
    counts = np.zeros(total, np.int64)
    pairs: list[tuple[Tensor, Tensor]] = []
    for number, name in mine:
        file = files[name]
        x, y = map(torch.from_numpy, pair_of(file, read(file, 0.0), "x", "y"))
        if list(x.shape[1:]) != shape or str(x.dtype) != f"torch.{dtype}":
            raise Refused(
                f"client '{name}' has examples of shape {tuple(x.shape[1:])} and {x.dtype}, and "
                f"the task takes {tuple(shape)} and {dtype}"
            )
        if classes and (y.is_floating_point() or int(y.max()) >= classes):
            raise Refused(f"client '{name}' has labels that are not the classes 0 to {classes - 1}")
        counts[number] = len(y)
        pairs.append((x, y))
    if not pairs:  # an example that is nobody's tells the engine the shapes
        kind = torch.int64 if classes else torch.float32
        blank = torch.zeros(2, *shape, dtype=getattr(torch, dtype))
        pairs = [(blank, torch.zeros(2, dtype=kind))]
    x, y = (torch.cat(side) for side in zip(*pairs, strict=True))
    part = Part(x, y, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    return Federation(task, part, Part(x[:2], y[:2], np.array([0, len(y[:2])])), classes)


def write(data: Federation, root: Path, nodes: int, task: str = "") -> list[Path]:
    """Deal a federation's clients out to folders of nodes, one after the other: root/0, root/1 ...

    With a `task` they are written as the data of that task.
    """
    folders = [root / str(node) / task if task else root / str(node) for node in range(nodes)]
    ids = data.roster.ids
    for client in range(data.clients):
        folder = folders[client % nodes]
        folder.mkdir(parents=True, exist_ok=True)
        x, y = data.train.of(client)
        if len(y):
            np.savez(folder / f"{ids[client]}.npz", x=x.numpy(), y=y.numpy())
    return [root / str(node) for node in range(nodes)]
