"""Checkpoints: a State as safetensors + JSON, written aside and renamed, so that a half-written one never counts.

checkpoint/00000042/ holds the state after round 42: its arrays in state.safetensors, its plain numbers in state.json, with a
digest of both. The last two are kept; one that was damaged later (its digest says so) falls back to the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rota.errors import BadInput
from rota.estimate.memory import Tensors
from rota.loop import State
from rota.weights import Weights

KEPT = 2
TENSORS, NUMBERS = "state.safetensors", "state.json"


def save(folder: Path, state: State, wall_seconds: float) -> None:
    """Write the state's checkpoint, and drop all but the last two."""
    target = folder / f"{state.round:08d}"
    if not target.exists():
        aside = folder / f".{target.name}.part"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(_tensors(state), aside / TENSORS)
        numbers = {
            "round": state.round,
            "seconds": state.seconds,
            "bytes_up": state.bytes_up,
            "bytes_down": state.bytes_down,
        }
        more = {"digest": _digest(aside, numbers), "wall_seconds": wall_seconds}
        (aside / NUMBERS).write_text(json.dumps(numbers | more) + "\n")
        for path in (aside / TENSORS, aside / NUMBERS, aside):
            sync(path)
        aside.rename(target)
        sync(folder)
    for old in (*_rounds(folder)[:-KEPT], *folder.glob(".*.part")):
        shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, like: State) -> tuple[State, float] | None:
    """The newest checkpoint that is whole, and the wall-clock seconds spent until it; None where there is none.

    `like` is the run's beginning state: the checkpoint must have its models' sizes, and goes to its device. Damaged
    checkpoints are removed, or `save` would take their rounds for saved.
    """
    damaged, found = [], None
    for path in reversed(_rounds(folder)):
        numbers = _numbers(path)
        if numbers is not None:
            wall = numbers.pop("wall_seconds")
            found = replace(_state(load_file(path / TENSORS), like, path), **numbers), wall
            break
        damaged.append(path)
    for path in damaged:
        logging.getLogger(__name__).warning(
            "the checkpoint %s is damaged: going on from round %d",
            path,
            found[0].round if found else 0,
        )
        shutil.rmtree(path)
    return found


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rounds(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def _digest(path: Path, numbers: dict[str, Any]) -> str:
    with (path / TENSORS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(numbers).encode())
    return digest.hexdigest()


def _numbers(path: Path) -> dict[str, Any] | None:
    """A checkpoint's plain numbers; None where something of it is missing or not as it was written."""
    try:
        numbers: dict[str, Any] = json.loads((path / NUMBERS).read_text())
        wall, digest = numbers.pop("wall_seconds"), numbers.pop("digest")
        return numbers | {"wall_seconds": wall} if digest == _digest(path, numbers) else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _tensors(state: State) -> dict[str, Tensor]:
    """The state's arrays under one level of names, each in memory of its own, as safetensors wants them."""
    named: dict[str, Tensor] = {}
    for s, (model, moments) in enumerate(zip(state.models, state.server, strict=True)):
        named |= {f"model.{s}.params": model.params, f"model.{s}.buffers": model.buffers}
        named |= {f"server.{s}.{name}": value for name, value in moments.items()}
    for policy, arrays in (("sampler", state.sampler), ("availability", state.availability)):
        for name, value in arrays.items():
            named[f"{policy}.{name}"] = (
                value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
            )
    named |= {f"estimator.{name}": value for name, value in state.estimator.items()}
    out: dict[str, Tensor] = {}
    taken = set()
    for name, value in named.items():
        value = value.detach().cpu().contiguous()
        memory = value.untyped_storage()
        out[name] = (
            value.clone()
            if memory.nbytes() != value.nbytes or memory.data_ptr() in taken
            else value
        )
        taken.add(memory.data_ptr())
    return out


def _state(tensors: dict[str, Tensor], like: State, path: Path) -> State:
    def under(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    expected = {
        f"{s}.{part}": value.shape
        for s, model in enumerate(like.models)
        for part, value in model._asdict().items()
    }
    if {name: value.shape for name, value in under("model.").items()} != expected:
        raise BadInput(
            f"the checkpoint {path} holds other models than this run's: use another --out, or the recipe it was made with"
        )
    device = like.models[0].params.device
    return replace(
        like,
        models=[
            Weights(**_placed(under(f"model.{s}."), {}, device)) for s in range(len(like.models))
        ],
        server=[_placed(under(f"server.{s}."), {}, device) for s in range(len(like.models))],
        sampler={name: value.numpy().copy() for name, value in under("sampler.").items()},
        availability={name: value.numpy().copy() for name, value in under("availability.").items()},
        estimator=_placed(under("estimator."), like.estimator, device),
    )


def _placed(tensors: Tensors, like: Tensors, device: torch.device) -> Tensors:
    """The tensors where the run has them: beside those of the same name, else on its device, but for scalars, since torch's optimisers
    count their steps on the CPU.

    They are copies: a file's bytes are not aligned as torch's own are, and the last bit of a product may depend on that. Where the run
    has a tensor to hold one it goes there, for a memory of all clients may fill the device, or lie in a mapped file.
    """
    held = Counter(tensor.untyped_storage().data_ptr() for tensor in like.values())
    out = {}
    for name, value in tensors.items():
        mine = like.get(name)
        home = mine.device if mine is not None else device if value.dim() else "cpu"
        if (
            mine is not None
            and (mine.shape, mine.dtype) == (value.shape, value.dtype)
            and held[mine.untyped_storage().data_ptr()] == 1
        ):
            out[name] = mine.copy_(value)
        else:
            out[name] = value.to(home, copy=True)
    return out
