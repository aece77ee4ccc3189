"""Roster: what the server knows of one task's clients, without any of their examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.hints import check_fields


class Numbered(Sequence[str]):
    """The texts "0", "1", ... up to a count, made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.numbers = range(count)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        found = self.numbers[place]
        return str(found) if isinstance(found, int) else [str(number) for number in found]


@dataclass(frozen=True, eq=False)
class Roster:
    """One task's clients as the server sees them: their sizes, and the shape of their examples.

    The server reads this and never the examples, which may lie on other machines. `ids` are the
    clients' stable names; they default to "0", "1", ...
    """

    name: str
    sizes: Array
    """The number of training examples per client: int64 [clients]."""
    shape: tuple[int, ...]
    """The shape of one example."""
    classes: int
    """The number of classes, or 0 where the targets are not class labels."""
    ids: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields("roster.", self)
        sizes = np.asarray(self.sizes)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not len(sizes) or sizes.min() < 0:
            raise BadInput(
                f"roster '{self.name}': sizes must be one whole number from 0 on per client"
            )
        ids = self.ids or Numbered(len(sizes))
        if len(ids) != len(sizes):
            raise BadInput(
                f"roster '{self.name}' has {len(ids)} ids and {len(sizes)} sizes: give one of each "
                "per client"
            )
        if not isinstance(ids, Numbered) and len(set(ids)) < len(ids):
            raise BadInput(f"roster '{self.name}': two clients share an id: give each its own")
        object.__setattr__(self, "sizes", sizes.astype(np.int64, copy=False))
        object.__setattr__(self, "ids", ids)

    def __repr__(self) -> str:
        """One line, however many clients there are."""
        examples = f"{self.sizes.sum()} examples of shape {self.shape}"
        return f"Roster({self.name!r}, {self.clients} clients, {examples}, {self.classes} classes)"

    @property
    def clients(self) -> int:
        return len(self.sizes)
