"""Checkpoints: a State as safetensors + JSON, written aside and renamed, so that a half-written one never counts.

checkpoint/00000042/ holds the state after round 42; the last two are kept, and a damaged newest one falls back to the other.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rota.errors import BadInput
from rota.loop import State
from rota.weights import Weights

KEPT = 2


def save(folder: Path, state: State, wall_seconds: float) -> None:
    """Write the state's checkpoint, and drop all but the last two."""
    target = folder / f"{state.round:08d}"
    if target.exists():
        return
    aside = folder / f".{target.name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(_tensors(state), aside / "state.safetensors")
    numbers = {
        "round": state.round,
        "seconds": state.seconds,
        "bytes_up": state.bytes_up,
        "bytes_down": state.bytes_down,
        "wall_seconds": wall_seconds,
    }
    (aside / "state.json").write_text(json.dumps(numbers) + "\n")
    for path in (*aside.iterdir(), aside):
        _sync(path)
    aside.rename(target)
    _sync(folder)
    for old in _rounds(folder)[:-KEPT]:
        shutil.rmtree(old)


def load(folder: Path, like: State) -> tuple[State, float] | None:
    """The newest checkpoint that can be read, and the wall-clock seconds spent until it; None where there is none.

    `like` is the run's beginning state: the checkpoint must have its models' sizes, and goes to its device.
    """
    for path in reversed(_rounds(folder)):
        try:
            numbers = json.loads((path / "state.json").read_text())
            tensors = load_file(path / "state.safetensors")
        except (OSError, ValueError, SafetensorError):
            continue
        wall = numbers.pop("wall_seconds")
        return replace(_state(tensors, like, path), **numbers), wall
    return None


def _rounds(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensors(state: State) -> dict[str, Tensor]:
    """The state's arrays under one level of names."""
    out: dict[str, Tensor] = {}
    for s, (model, moments) in enumerate(zip(state.models, state.server, strict=True)):
        out |= {f"model.{s}.params": model.params, f"model.{s}.buffers": model.buffers}
        out |= {f"server.{s}.{name}": value for name, value in moments.items()}
    out |= {f"sampler.{name}": torch.as_tensor(value) for name, value in state.sampler.items()}
    out |= {f"estimator.{name}": value for name, value in state.estimator.items()}
    return {name: value.detach().cpu().contiguous() for name, value in out.items()}


def _state(tensors: dict[str, Tensor], like: State, path: Path) -> State:
    device = like.models[0].params.device

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value.to(device) for name, value in tensors.items() if name.startswith(prefix)}

    models = []
    for s, model in enumerate(like.models):
        saved = under(f"model.{s}.")
        if "params" not in saved or saved["params"].shape != model.params.shape:
            raise BadInput(f"the checkpoint {path} holds other models than this run's: use another --out, or the recipe it was made with")
        models.append(Weights(saved["params"], saved["buffers"]))
    return replace(
        like,
        models=models,
        server=[under(f"server.{s}.") for s in range(len(models))],
        sampler={name: value.cpu().numpy() for name, value in under("sampler.").items()},
        estimator=under("estimator."),
    )
