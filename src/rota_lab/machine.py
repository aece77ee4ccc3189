"""The machine that results are measured on, in words."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor() -> str:
    """The processor's model name, or its architecture where the system does not name the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def described(device: str) -> str:
    """The device, the system and the versions that decide a result."""
    name = processor()
    if device.startswith("cuda"):
        name = f"{torch.cuda.get_device_name()} ({name})"
    python = platform.python_version()
    return f"{name}, {platform.system()}, Python {python}, torch {torch.__version__}"
