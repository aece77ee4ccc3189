"""The connections between the processes of a run: Python objects over torch.distributed's gloo.

Large arrays travel beside the pickled object, from their own memory into their new one. The
processes of one run trust each other, as those of every program of torch.distributed do.
"""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

Gloo: Any = distributed.ProcessGroupGloo
"""Torch's types leave out most of it."""
SMALL = 1 << 14
"""Arrays of fewer bytes travel inside the pickled object."""
PATIENCE = timedelta(days=30)
"""A process that waits for work is not lost; one that has ended is seen at once."""


class Wire:
    """One process's connections to the other `size` - 1 of a run; this one has number `rank`.

    An object that is sent is received by the other process as the next one from here. An end of
    the other process raises RuntimeError.
    """

    def __init__(self, store: Any, rank: int, size: int, host: str = "") -> None:
        options = Gloo._Options()
        options._timeout = PATIENCE
        device = Gloo.create_device(hostname=host) if host else None
        options._devices = [device or Gloo.create_default_device()]
        self.group = Gloo(store, rank, size, options)
        self.rank, self.size = rank, size

    def send(self, to: int, what: Any) -> int:
        """Send an object, and return its bytes."""
        arrays: list[pickle.PickleBuffer] = []
        body = io.BytesIO()

        def aside(array: pickle.PickleBuffer) -> bool:
            """Whether an array stays inside; a larger one is put aside."""
            if array.raw().nbytes >= SMALL:
                arrays.append(array)
            return array.raw().nbytes < SMALL

        _Pickler(body, protocol=5, buffer_callback=aside).dump(what)
        raws = [array.raw() for array in arrays]
        head = bytearray(pickle.dumps((body.getvalue(), [raw.nbytes for raw in raws])))
        pieces: list[Any] = [head, *(bytearray(raw) if raw.readonly else raw for raw in raws)]
        self._send(to, torch.tensor([len(head)]))
        for piece in pieces:
            self._send(to, torch.frombuffer(piece, dtype=torch.uint8))
        return sum(map(len, pieces))

    def receive(self, source: int) -> Any:
        """The next object from a process."""
        (length,) = self._receive(source, 1, torch.int64).tolist()
        head = self._receive(source, length)
        body, sizes = pickle.loads(head.numpy().tobytes())
        arrays = [self._receive(source, size).numpy() for size in sizes]
        return pickle.loads(body, buffers=arrays)

    def _send(self, to: int, piece: Tensor) -> None:
        self.group.send([piece], to, 0).wait()

    def _receive(self, source: int, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        piece = torch.empty(size, dtype=dtype)
        self.group.recv([piece], source, 0).wait()
        return piece


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes; those of a GPU come from there, and arrive on the CPU."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return NotImplemented
        flat = thing.detach().cpu().contiguous().view(-1)
        if not len(flat):
            return _empty, (thing.dtype, tuple(thing.shape))
        plain: Any = flat.view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(plain), thing.dtype, tuple(thing.shape))


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor from its bytes, in memory that is aligned as torch's own is."""
    small = isinstance(raw, bytes | bytearray)
    flat = torch.frombuffer(bytearray(raw) if small else raw, dtype=torch.uint8)
    return (flat.clone() if small else flat).view(dtype).view(shape)


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype)
