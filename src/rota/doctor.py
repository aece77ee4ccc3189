"""What is on this machine: versions, devices, data."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from rota import data

PACKAGES = ("rota", "torch", "numpy", "safetensors", "scikit-learn", "plotly", "typer", "flwr", "flwr-datasets")


def examine() -> dict[str, dict[str, str]]:
    """Topic -> name -> finding."""
    return {
        "machine": {"python": platform.python_version(), "system": platform.platform(), "cores": str(os.cpu_count())},
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": {"cpu": f"{torch.get_num_threads()} threads", **_gpus()},
        "data": {name: "at hand" if data.at_hand(name) else "would be downloaded" for name in data.SOURCES},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"cuda": "none"}
    return {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
