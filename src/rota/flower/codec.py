"""Tensors as bytes, by safetensors."""

from __future__ import annotations

import safetensors.torch
import torch
from torch import Tensor

from rota.flower.letter import Refused


def pack(tensors: dict[str, Tensor]) -> bytes:
    """Named tensors as bytes."""
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    packed: bytes = safetensors.torch.save(whole)
    return packed


def unpack(packed: object) -> dict[str, Tensor]:
    """Named tensors from bytes that may come from anybody."""
    if not isinstance(packed, bytes):
        raise Refused("tensors are missing")
    try:
        return safetensors.torch.load(packed)
    except Exception as error:  # damaged or forged bytes may raise nearly anything
        raise Refused(f"the tensors cannot be read ({type(error).__name__})") from error


def vector(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """The tensor of this name, which must have the length and the dtype of another one."""
    found = tensors.get(name)
    if found is None:
        raise Refused(f"the tensor '{name}' is missing")
    if found.shape != like.shape or found.dtype != like.dtype:
        raise Refused(
            f"the tensor '{name}' is {found.dtype} of shape {tuple(found.shape)}, not {like.dtype} "
            f"of shape {tuple(like.shape)}"
        )
    return found if found.device.type == "cpu" else found.to(torch.device("cpu"))
