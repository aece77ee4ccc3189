"""Channels: what an update goes through on its way from a client to the server.

A channel turns an update into a few arrays, which travel, and turns these back into an update.
Engines that simulate clients do both, so a run sees what the server would have seen, and the rows
report the bytes of the arrays. What comes back is the whole update (`none`), or an estimate of it:
unbiased ones leave the expectation of every estimate as it is and add to its variance.

Buffers and SCAFFOLD's controls travel as they are. A client that is asked for its update's norm
reports the norm of the update itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from rota import rng
from rota.channel.codes import Half, Quantised, RandomK, TopK, Whole

if TYPE_CHECKING:
    from rota.plan import Chunk, Job

__all__ = ["CHANNELS", "Channel", "Half", "Quantised", "RandomK", "TopK", "Whole", "carry"]

CHANNELS: dict[str, type] = {
    "none": Whole,
    "half": Half,
    "top-k": TopK,
    "random-k": RandomK,
    "quantised": Quantised,
}


class Channel(Protocol):
    """Encodes and decodes an update. `stream` is a key of rota.rng that both sides know."""

    unbiased: ClassVar[bool]
    """Whether the expectation of what is decoded is the update."""

    def check(self) -> None:
        """Raise BadInput if an option makes no sense."""

    def encode(self, update: Tensor, stream: int) -> dict[str, Tensor]:
        """The arrays that travel, for one update [params]."""

    def decode(self, sent: dict[str, Tensor], stream: int, like: Tensor) -> Tensor:
        """The update that the server takes: as long as `like`, of its dtype, on its device."""

    def nbytes(self, params: int, itemsize: int) -> int:
        """The bytes of what `encode` returns for so many parameters of `itemsize` bytes."""


def carry(job: Job, seed: int, chunk: Chunk) -> Chunk:
    """A chunk as it arrives at the server. Engines that simulate clients call this."""
    channel = job.channel
    if channel is None:
        return chunk
    found = torch.empty_like(chunk.update)
    for place, row in enumerate(chunk.rows.tolist()):
        update = chunk.update[place]
        stream = address(job, seed, row)
        found[place] = channel.decode(channel.encode(update, stream), stream, update)
    return replace(chunk, update=found, measured=None)


def address(job: Job, seed: int, row: int) -> int:
    """The key of a row's channel, which the client and the server make alike."""
    return rng.key(seed, "channel", job.now, int(job.plan.client[row]), int(job.task[row]))
