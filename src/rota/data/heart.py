"""UCI heart disease (Janosi, Steinbrunn, Pfisterer, Detrano 1988): patients of four hospitals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data import files
from rota.data.federation import Examples, Federation, Partition
from rota.data.owners import federate_owned, part, split
from rota.errors import BadInput

FOLDER = "heart-disease-4-hospitals"
FILES = tuple(
    files.Remote(
        name,
        (md5,),
        (f"https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/{name}",),
    )
    for name, md5 in (
        ("processed.cleveland.data", "2d91a8ff69cfd9616aa47b59d6f843db"),
        ("processed.hungarian.data", "22e96bee155b5973568101c93b3705f6"),
        ("processed.switzerland.data", "9a87f7577310b3917730d06ba9349e20"),
        ("processed.va.data", "4249d03ca7711e84f4444768c9426170"),
    )
)
NEVER_ZERO = (3, 4)
"""The columns of blood pressure and cholesterol, in which 0 was written for "not measured"."""


def heart(
    partition: Partition | None = None, matched_test: bool = False, seed: int = 0
) -> Federation:
    """UCI heart disease: 303, 294, 123 and 200 patients of four hospitals; healthy or ill.

    The hospitals are the clients. x is float32 [n, 23]: the 13 measurements, and for each of the 10
    measurements that are missing somewhere, 1 where it is missing. A missing one is set to the
    median, and the measurements are standardised. Medians, means and deviations are those of all
    hospitals' training patients. (The measurements slope, ca and thal are mostly missing, but they
    tell most where they were taken, so none is left out. That a hospital did not take them is
    itself a difference between clients.) y is 1 for any degree of disease. A random fifth of each
    hospital's patients are its own test set.
    """
    paths = files.find(FOLDER, FILES)
    tables = [_table(paths[file.name]) for file in FILES]
    rows = np.concatenate(tables)
    groups = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    test = split(groups, rng.generator(rng.key(seed, "split", "heart")))
    values, ill = rows[:, :13], rows[:, 13] > 0
    missing = np.isnan(values)
    values = np.where(missing, np.nanmedian(values[~test], axis=0), values)
    values = (values - values[~test].mean(0)) / values[~test].std(0)
    columns = np.concatenate([values, missing[:, missing.any(0)]], axis=1)
    x = torch.from_numpy(columns.astype(np.float32))
    y = torch.from_numpy(ill.astype(np.int64))
    return federate_owned(
        "heart",
        *part(Examples(x, y, groups), test),
        partition,
        classes=2,
        matched_test=matched_test,
        seed=seed,
    )


def _table(path: Path) -> Array:
    rows = np.genfromtxt(path, delimiter=",")  # "?" becomes NaN
    if rows.ndim != 2 or rows.shape[1] != 14:
        raise BadInput(f"{path} does not have 14 columns: replace it by a good copy")
    for column in NEVER_ZERO:
        rows[rows[:, column] == 0, column] = np.nan
    return rows
