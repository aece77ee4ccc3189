"""What a server remembers of its clients: a vector the size of the model for every client.

The memory is on the device, in main memory or on disk. A round's new vectors wait outside the
memory, and are written into it, in place, when the next round begins: there may be no room for a
second memory. So a run can continue only from its newest state, but from that one any number of
times. An abandoned round or a checkpoint means the same whether or not the waiting vectors have
been written, and writing them twice changes nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import typing
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.data.memory import check_room
from rota.errors import BadInput
from rota.weights import Weights

Tensors = dict[str, Tensor]
Place = Literal["device", "cpu", "disk"]
Fresh = list[list[tuple[Array, Tensor]]]
"""A round's new vectors: for each model, a list of parts (clients, one row for each of them)."""


def init(models: list[Weights], shares: Array, place: Place, kind: str = "estimator") -> Tensors:
    """A state with memory.s [clients, parameters] of zeros for model s; `share` is d[s, i]."""
    if place not in typing.get_args(Place):
        raise BadInput(f"{kind}.memory is '{place}', but it takes one of 'device', 'cpu', 'disk'")
    clients = shares.shape[1]
    sizes = [clients * len(model.params) * model.params.element_size() for model in models]
    needed = f"{kind}.memory takes {sum(sizes):,} bytes"
    if place != "disk" and (place == "cpu" or models[0].params.device.type == "cpu"):
        what = f"{kind}.memory of {clients:,} clients"
        check_room(sum(sizes), what, f"set {kind}.memory to 'disk'")
    if place == "disk":
        try:
            folder = tempfile.gettempdir()
        except OSError as error:
            raise BadInput(
                f"{needed}, and there is no folder for temporary files: set TMPDIR to a folder "
                "with room for them"
            ) from error
        if sum(sizes) > shutil.disk_usage(folder).free:
            raise BadInput(
                f"{needed}, more than {folder} has: set TMPDIR to a folder with room for them"
            )
    state = {}
    try:
        for s, model in enumerate(models):
            state[f"memory.{s}"] = _zeros((clients, len(model.params)), model.params, place, kind)
    except RuntimeError as error:
        raise BadInput(f"{needed}, too many for '{place}': set {kind}.memory to 'disk'") from error
    state["share"] = torch.from_numpy(shares.copy())
    return remember(state, [[] for _ in models])


def remember(state: Tensors, fresh: Fresh) -> Tensors:
    """The state in which these vectors wait to be written; the given state must be settled."""
    new = dict(state)
    for s, parts in enumerate(fresh):
        memory = state[f"memory.{s}"]
        clients = [np.empty(0, np.int64), *(some for some, _ in parts)]
        vectors = [memory.new_empty(0, memory.shape[1]), *(rows for _, rows in parts)]
        new[f"waiting_clients.{s}"] = torch.from_numpy(np.concatenate(clients))
        new[f"waiting.{s}"] = torch.cat(vectors)
    return new


def settle(state: Tensors) -> None:
    """Write the waiting vectors into the memory."""
    for s in range(len(state["share"])):
        clients = state[f"waiting_clients.{s}"]
        if len(clients) and int(clients[0]) >= 0:
            memory = state[f"memory.{s}"]
            memory[clients.to(memory.device)] = state[f"waiting.{s}"]
            clients.fill_(-1)  # written


def read(state: Tensors, s: int, clients: Array, like: Tensor) -> Tensor:
    """Some clients' vectors, on the device of `like`. The memory must be settled."""
    memory = state[f"memory.{s}"]
    return memory[torch.as_tensor(clients, device=memory.device)].to(like.device)


def total(state: Tensors, s: int, factor: Tensor, like: Tensor) -> Tensor:
    """sum of factor_i memory_i over all clients, where `like` is. The memory must be settled."""
    memory = state[f"memory.{s}"]
    return (factor.to(memory.device, memory.dtype) @ memory).to(like.device)


def _zeros(shape: tuple[int, int], like: Tensor, place: Place, kind: str) -> Tensor:
    count = shape[0] * shape[1]
    if place != "disk" or not count:
        device = like.device if place == "device" else "cpu"
        return torch.zeros(shape, dtype=like.dtype, device=device)
    nbytes = count * like.element_size()
    with tempfile.NamedTemporaryFile(prefix="rota-memory-", delete=False) as file:
        path = Path(file.name)
        try:
            file.truncate(nbytes)
            if hasattr(os, "posix_fallocate"):  # or a full disk would end the process later
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            path.unlink()
            raise BadInput(
                f"{kind}.memory takes {nbytes:,} bytes, and {path.parent} has no room for "
                f"them ({error.strerror}): set TMPDIR to a folder with room for them"
            ) from error
    mapped = torch.from_file(str(path), shared=True, size=count, dtype=like.dtype)
    path.unlink()  # the mapping keeps it until the process ends
    return mapped.view(shape)
