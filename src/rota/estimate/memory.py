"""What a server remembers of its clients: a vector the size of the model for every client, on the device, in main memory or on disk.

A round's new vectors wait beside the memory and are written into it when the next round begins, in place, since there may be no room for
a second memory. So of a run's states only the newest can be gone on from, but that one as often as one likes: a round that is
given up, or a checkpoint, says the same whether or not they have been written yet, and writing them twice changes nothing.
"""

from __future__ import annotations

import shutil
import tempfile
import typing
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.weights import Weights

Tensors = dict[str, Tensor]
Place = Literal["device", "cpu", "disk"]
Fresh = list[list[tuple[Array, Tensor]]]
"""A round's new vectors: for each model, some clients and a row for each of them, and again."""


def init(models: list[Weights], shares: Array, place: Place) -> Tensors:
    """Nothing remembered: for model s, memory.s [clients, parameters] of zeros; nothing waits; `share` is d[s, i]."""
    if place not in typing.get_args(Place):
        raise BadInput(
            f"estimator.memory is '{place}', but it takes one of 'device', 'cpu', 'disk'"
        )
    shapes = [(shares.shape[1], len(model.params)) for model in models]
    needed = sum(
        rows * wide * model.params.element_size()
        for (rows, wide), model in zip(shapes, models, strict=True)
    )
    folder = tempfile.gettempdir()
    if (
        place == "disk" and needed > shutil.disk_usage(folder).free
    ):  # a mapped file that finds no room later ends the process
        raise BadInput(
            f"the estimator's memory takes {needed:,} bytes, more than {folder} has: set TMPDIR to a folder with room for them"
        )
    try:
        memories = [
            _zeros(shape, model.params, place) for shape, model in zip(shapes, models, strict=True)
        ]
    except RuntimeError as error:
        raise BadInput(
            f"the estimator's memory takes {needed:,} bytes, too many for '{place}': set estimator.memory to 'disk'"
        ) from error
    nothing = {f"memory.{s}": memory for s, memory in enumerate(memories)} | {
        "share": torch.from_numpy(shares.copy())
    }
    return remember(nothing, [[] for _ in models])


def remember(state: Tensors, fresh: Fresh) -> Tensors:
    """The state in which these vectors wait to be written. What waited in it before must be settled."""
    new = dict(state)
    for s, parts in enumerate(fresh):
        memory = state[f"memory.{s}"]
        new[f"waiting_clients.{s}"] = torch.from_numpy(
            np.concatenate([np.empty(0, np.int64), *(clients for clients, _ in parts)])
        )
        new[f"waiting.{s}"] = torch.cat(
            [memory.new_empty(0, memory.shape[1]), *(vectors for _, vectors in parts)]
        )
    return new


def settle(state: Tensors) -> None:
    """Write what waits into the memory."""
    for s in range(len(state["share"])):
        clients = state[f"waiting_clients.{s}"]
        if len(clients) and int(clients[0]) >= 0:
            memory = state[f"memory.{s}"]
            memory[clients.to(memory.device)] = state[f"waiting.{s}"]
            clients.fill_(-1)  # written


def read(state: Tensors, s: int, clients: Array, like: Tensor) -> Tensor:
    """Some clients' vectors, beside another tensor. The memory must be settled."""
    memory = state[f"memory.{s}"]
    return memory[torch.as_tensor(clients, device=memory.device)].to(like.device)


def total(state: Tensors, s: int, factor: Tensor, like: Tensor) -> Tensor:
    """sum of factor_i memory_i over all clients, beside another tensor. The memory must be settled."""
    memory = state[f"memory.{s}"]
    return (factor.to(memory.device, memory.dtype) @ memory).to(like.device)


def _zeros(shape: tuple[int, int], like: Tensor, place: Place) -> Tensor:
    count = shape[0] * shape[1]
    if place != "disk" or not count:
        return torch.zeros(
            shape, dtype=like.dtype, device=like.device if place == "device" else "cpu"
        )
    with tempfile.NamedTemporaryFile(prefix="rota-memory-", delete=False) as file:
        path = Path(file.name)
        file.truncate(count * like.element_size())
    mapped = torch.from_file(str(path), shared=True, size=count, dtype=like.dtype)
    path.unlink()  # the mapping keeps it until the process ends
    return mapped.view(shape)
