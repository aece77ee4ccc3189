"""The IDX format of MNIST and its relatives."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch

from rota.arrays import Array
from rota.data import files
from rota.data.federation import Examples
from rota.errors import BadInput

NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
KINDS = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
ADVICE = "replace it by a good copy"


def read_idx(path: str | Path) -> Array:
    """Read an IDX file, gzipped or not, as an array.

    It holds the bytes 0, 0, kind and number of dimensions, then the big-endian sizes, then the
    values.
    """
    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data[:2] != b"\0\0" else data
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} is not a whole IDX or gzip file ({error}): {ADVICE}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in KINDS or len(data) < 4 + 4 * data[3]:
        raise BadInput(f"{path} is not an IDX file of numbers: {ADVICE}")
    shape = np.frombuffer(data, ">u4", data[3], 4).tolist()
    kind = np.dtype(KINDS[data[2]])
    start, size = 4 + 4 * data[3], math.prod(shape) * kind.itemsize
    if len(data) != start + size:
        raise BadInput(
            f"{path} has {len(data) - start} bytes of values, but its header says {size}: {ADVICE}"
        )
    values = np.frombuffer(data, kind, offset=start).reshape(shape)
    return values.astype(kind.newbyteorder("="))


def remotes(md5: tuple[tuple[str, ...], ...], mirrors: tuple[str, ...]) -> tuple[files.Remote, ...]:
    """The four files of a data set that is laid out like MNIST."""
    return tuple(
        files.Remote(name, sums, tuple(mirror + name for mirror in mirrors))
        for name, sums in zip(NAMES, md5, strict=True)
    )


def images(folder: str, remote: tuple[files.Remote, ...]) -> tuple[Examples, Examples]:
    """Train and test examples: x float32 [n, 1, height, width] in 0..1, y int64 [n]."""
    paths = files.find(folder, remote)
    return _examples(paths[NAMES[0]], paths[NAMES[1]]), _examples(paths[NAMES[2]], paths[NAMES[3]])


def _examples(image_path: Path, label_path: Path) -> Examples:
    pixels, labels = read_idx(image_path), read_idx(label_path)
    if pixels.ndim != 3 or labels.shape != pixels.shape[:1]:
        raise BadInput(
            f"{image_path} has shape {pixels.shape} and {label_path} {labels.shape}: they must be "
            "[n, height, width] and [n]"
        )
    x = torch.from_numpy(pixels.astype(np.float32)).div_(255).unsqueeze(1)
    return Examples(x, torch.from_numpy(labels.astype(np.int64)))
