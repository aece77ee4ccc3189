"""The machine that results are measured on, in words."""

from __future__ import annotations

import platform

import torch

from rota.engine import machine


def processor() -> str:
    """The processor's model name, or its architecture where the system does not name the model."""
    known = machine.processor().get("model name")
    return known or platform.processor() or platform.machine()


def described(device: str) -> str:
    """The device, the system and the versions that decide a result."""
    name = processor()
    if device.startswith("cuda"):
        name = f"{torch.cuda.get_device_name()} ({name})"
    python = platform.python_version()
    return f"{name}, {platform.system()}, Python {python}, torch {torch.__version__}"
