"""Checkpoints: a State as safetensors and JSON.

checkpoint/00000042/ holds the state after round 42: arrays in state.safetensors; plain numbers, the
run's configuration and a digest of everything in state.json. The folder is written aside and
renamed. The last two are kept: if the newest one is damaged, the one before is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.estimate.memory import Tensors
from rota.experiment import State
from rota.files import sync
from rota.plan import Model
from rota.weights import Weights

KEPT = 2
TENSORS, NUMBERS = "state.safetensors", "state.json"
PLAIN = ("round", "seconds", "bytes_up", "bytes_down")


def save(folder: Path, state: State, wall_seconds: float, config: dict[str, Any]) -> None:
    """Write the state's checkpoint with its run's configuration, and drop all but the last two."""
    target = folder / f"{state.round:08d}"
    if not target.exists():
        aside = folder / f".{target.name}.part"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(_tensors(state), aside / TENSORS)
        numbers = {key: getattr(state, key) for key in PLAIN}
        tasks = [model.task for model in state.models]
        numbers |= {"tasks": tasks, "arrays": _arrays(state), "config": config}
        numbers["wall_seconds"] = wall_seconds
        whole = numbers | {"digest": _digest(aside, numbers)}
        (aside / NUMBERS).write_text(json.dumps(whole) + "\n")
        for path in (aside / TENSORS, aside / NUMBERS, aside):
            sync(path)
        aside.rename(target)
        sync(folder)
    for old in (*_rounds(folder)[:-KEPT], *folder.glob(".*.part")):
        shutil.rmtree(old, ignore_errors=True)


def load(
    folder: Path, like: State, check: Callable[[dict[str, Any]], None]
) -> tuple[State, float] | None:
    """The newest whole checkpoint's state and wall-clock seconds; None if there is no checkpoint.

    `like` is the run's first state: the checkpoint must have its models' sizes, and goes to its
    device. `check` may refuse the checkpoint's configuration, before anything is read into `like`.
    Damaged checkpoints are removed, or `save` would take their rounds as saved.
    """
    damaged, found = [], None
    for path in reversed(_rounds(folder)):
        numbers = _numbers(path)
        if numbers is not None:
            check(numbers["config"])
            state = _state(load_file(path / TENSORS), numbers, like, path)
            found = state, float(numbers["wall_seconds"])
            break
        damaged.append(path)
    for path in damaged:
        now = found[0].round if found else 0
        logging.getLogger(__name__).warning(
            "the checkpoint %s is damaged: resuming from round %d", path, now
        )
        shutil.rmtree(path)
    return found


def _rounds(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def _digest(path: Path, numbers: dict[str, Any]) -> str:
    with (path / TENSORS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(numbers).encode())
    return digest.hexdigest()


def _numbers(path: Path) -> dict[str, Any] | None:
    """A checkpoint's plain numbers; None if a part of it is missing or damaged."""
    try:
        numbers = json.loads((path / NUMBERS).read_bytes())
        if not isinstance(numbers, dict):
            return None
        digest = numbers.pop("digest")
        return numbers if digest == _digest(path, numbers) else None
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def _named(state: State) -> dict[str, Tensor | Array]:
    """All of the state's arrays and tensors under one level of names."""
    named: dict[str, Tensor | Array] = {"shares": state.shares}
    for s, model in enumerate(state.models):
        named |= {f"model.{s}.params": model.params, f"model.{s}.buffers": model.buffers}
    for kind, remembered in state.policies.items():
        named |= {f"{kind}.{name}": value for name, value in remembered.items()}
    return named


def _arrays(state: State) -> list[str]:
    """The names of numpy arrays, sorted: a loaded state has another order."""
    return sorted(name for name, value in _named(state).items() if not isinstance(value, Tensor))


def _tensors(state: State) -> dict[str, Tensor]:
    """The state's arrays as tensors, each in memory of its own, as safetensors requires."""
    out: dict[str, Tensor] = {}
    taken = set()
    for name, value in _named(state).items():
        if not isinstance(value, Tensor):
            value = torch.from_numpy(np.array(value, order="C"))
        tensor = value.detach().cpu().contiguous()
        memory = tensor.untyped_storage()
        shared = memory.nbytes() != tensor.nbytes or memory.data_ptr() in taken
        out[name] = tensor.clone() if shared else tensor
        taken.add(memory.data_ptr())
    return out


def _state(tensors: dict[str, Tensor], numbers: dict[str, Any], like: State, path: Path) -> State:
    def under(prefix: str) -> dict[str, Tensor]:
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}

    sizes = {model.task: _sizes(model.weights) for model in like.models}
    device, models = like.models[0].params.device, []
    for s, task in enumerate(numbers["tasks"]):
        weights = Weights(**_placed(under(f"model.{s}"), {}, device))
        if _sizes(weights) != sizes.get(task):
            raise BadInput(
                f"the checkpoint {path} holds other models than this run's: use another --out, or "
                "the recipe it was made with"
            )
        models.append(Model(task, weights))
    arrays, policies = set(numbers["arrays"]), {}
    for kind, begun in like.policies.items():
        mine = under(kind)
        found: dict[str, Any] = {
            n: v.numpy().copy() for n, v in mine.items() if f"{kind}.{n}" in arrays
        }
        known = {n: v for n, v in begun.items() if isinstance(v, Tensor)}
        rest = {n: v for n, v in mine.items() if n not in found}
        found |= _placed(rest, known, device)
        policies[kind] = {name: found[name] for name in mine}
    shares = tensors["shares"].numpy().copy()
    plain = {key: numbers[key] for key in PLAIN}
    return State(models=models, shares=shares, policies=policies, **plain)


def _sizes(weights: Weights) -> tuple[int, int]:
    return len(weights.params), len(weights.buffers)


def _placed(tensors: Tensors, like: Tensors, device: torch.device) -> Tensors:
    """Copy tensors to where the run has those of the same name, or to its device.

    Scalars stay on the CPU, where torch's optimisers count their steps. The tensors are copies
    because a file's bytes are not aligned as torch's own are, and the last bit of a product may
    depend on that. A tensor goes into the run's own one of the same name if there is one, since a
    memory of all clients may fill the device or lie in a mapped file.
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
