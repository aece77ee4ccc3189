"""A federation from a CSV file with one line per example."""

from __future__ import annotations

import csv as files
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rota.arrays import Array
from rota.data.arrays import from_arrays
from rota.data.federation import Federation, Partition
from rota.errors import BadInput, did_you_mean


def csv(
    path: str | Path,
    target: str,
    owner: str = "",
    columns: Sequence[str] = (),
    regression: bool = False,
    standardise: bool = True,
    test: float = 0.2,
    partition: Partition | None = None,
    seed: int = 0,
) -> Federation:
    """Your own data: a CSV file with a line of names and then one line per example.

    `target` names the column to predict. It holds classes, as texts or whole numbers, unless it has
    other numbers or `regression` is true. `owner` names the column that says whose an example is;
    without one, give a partition. `columns` are the inputs, by default all other columns, which
    must hold numbers. With `standardise` each input has mean 0 and standard deviation 1. The share
    `test` of the examples, or of each owner's, is for testing.
    """
    file = Path(path).expanduser()
    head, lines = _read(file)
    for name in (target, *([owner] if owner else []), *columns):
        if name not in head:
            raise BadInput(f"{file} has no column '{name}': {did_you_mean(name, head)}")
    chosen = list(columns) or [name for name in head if name not in (target, owner)]
    if not chosen:
        raise BadInput(f"{file} has no column besides '{target}': give it columns of inputs")
    cells = {name: [line[head.index(name)] for line in lines] for name in head}
    x = np.stack([_numbers(file, name, cells[name]) for name in chosen], axis=1)
    if standardise:
        scale = x.std(axis=0)
        x = (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    y = _targets(file, target, cells[target], regression)
    whose = cells[owner] if owner else None
    return from_arrays(x, y, test=test, partition=partition, owner=whose, name=file.stem, seed=seed)


def _read(file: Path) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the lines."""
    if not file.is_file():
        raise BadInput(f"there is no file {file}: give the path of a CSV file")
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            head, *lines = [line for line in files.reader(stream) if line]
    except (OSError, ValueError, files.Error) as error:
        raise BadInput(f"{file} cannot be read as CSV ({error}): write it again") from error
    for number, line in enumerate(lines, start=2):
        if len(line) != len(head):
            raise BadInput(
                f"{file}, line {number} has {len(line)} cells, but there are {len(head)} columns"
            )
    if len(set(head)) < len(head):
        raise BadInput(f"{file} has two columns of one name: rename one of them")
    if len(lines) < 2:
        raise BadInput(f"{file} has {len(lines)} examples: give it at least two lines")
    return head, lines


def _numbers(file: Path, name: str, cells: list[str]) -> Array:
    found = np.empty(len(cells))
    for place, cell in enumerate(cells):
        try:
            found[place] = float(cell)
        except ValueError:
            found[place] = np.nan
        if not np.isfinite(found[place]):
            raise BadInput(
                f"{file} has {cell!r:.40} in column '{name}', line {place + 2}: give numbers, or "
                "name the columns to use (columns)"
            )
    return found


def _targets(file: Path, name: str, cells: list[str], regression: bool) -> Array:
    """Real numbers, or the numbers of classes in sorted order."""
    if regression or any("." in cell or "e" in cell.lower() for cell in cells):
        try:
            [float(cell) for cell in cells]
        except ValueError:
            if regression:
                raise BadInput(
                    f"{file} has texts in column '{name}', and regression is true"
                ) from None
        else:
            return _numbers(file, name, cells)
    try:
        numbers = [int(cell) for cell in cells]
    except ValueError:
        return np.unique(cells, return_inverse=True)[1].astype(np.int64)
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)
