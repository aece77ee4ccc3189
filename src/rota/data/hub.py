"""Data from Flower's hub: an adapter for flwr_datasets.FederatedDataset (pip install rota[hub])."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rota.arrays import Array
from rota.data.federation import Federation
from rota.data.own import from_clients
from rota.errors import BadInput

LABELS = ("label", "labels", "y", "target", "fine_label", "character")
FEATURES = ("image", "img", "x", "features", "pixels")


def from_flower(
    dataset: Any,
    features: str | Sequence[str] | None = None,
    label: str | None = None,
    *,
    train: str = "train",
    test: str = "test",
    classes: int | None = None,
    name: str = "flower",
) -> Federation:
    """A federation from a `flwr_datasets.FederatedDataset`.

    The partitions of the split `train` are the clients. The split `test` is the test set: one per
    client if the dataset has a partitioner for it, else a shared one. `features` is the column of
    the inputs, or several numeric columns to put side by side. It defaults to the first of image,
    img, x, features, pixels, or else to all numeric columns except the label. `label` defaults to
    the first of label, labels, y, target, fine_label, character. Images become float32
    [channels, height, width] in 0..1.
    """
    partitioners = dataset.partitioners
    if train not in partitioners:
        raise BadInput(
            f"the dataset has no partitioner for the split '{train}', but for "
            f"{sorted(partitioners)}: name one of them as train"
        )

    def part(split: str) -> list[tuple[Array, Array]]:
        return [
            _arrays(dataset.load_partition(i, split), features, label)
            for i in range(partitioners[split].num_partitions)
        ]

    shared = test not in partitioners
    tested = _arrays(dataset.load_split(test), features, label) if shared else part(test)
    return from_clients(part(train), tested, classes=classes, name=name)


def _arrays(
    rows: Any, features: str | Sequence[str] | None, label: str | None
) -> tuple[Array, Array]:
    columns = list(rows.column_names)
    target = label or next((word for word in LABELS if word in columns), None)
    if target not in columns:
        raise BadInput(
            f"the dataset has no column '{label or 'label'}': name one of its columns as label: "
            f"{', '.join(columns)}"
        )
    table = {name: np.asarray(values) for name, values in rows.with_format("numpy")[:].items()}
    known = next((word for word in FEATURES if word in columns), None)
    if isinstance(features, str):
        chosen = [features]
    elif features:
        chosen = list(features)
    elif known:
        chosen = [known]
    else:
        flat = [name for name in columns if name != target and table[name].ndim == 1]
        chosen = [name for name in flat if table[name].dtype.kind in "fiub"]
    for name in chosen or [""]:
        if name not in columns or table[name].dtype.kind not in "fiub":
            raise BadInput(
                f"the dataset has no numeric column '{name}' with rows of one shape: name features "
                f"among {', '.join(columns)}"
            )
    if len(chosen) == 1 and table[chosen[0]].ndim > 1:
        return _image(table[chosen[0]]), table[target]
    return np.stack([table[name] for name in chosen], axis=1).astype(np.float32), table[target]


def _image(x: Array) -> Array:
    """Convert images: bytes of shape [n, height, width] or [n, height, width, channels].

    Anything else stays as it is.
    """
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return x
    x = x[..., None] if x.ndim == 3 else x
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2), np.float32) / np.float32(255)
