"""What is on this machine: versions, devices, data."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from rota import data
from rota.engine.native import build
from rota.errors import BadInput

PACKAGES = (
    "rota",
    "torch",
    "numpy",
    "safetensors",
    "scikit-learn",
    "plotly",
    "pydantic",
    "rich",
    "typer",
    "flwr",
    "flwr-datasets",
)


def examine() -> dict[str, dict[str, str]]:
    """Topic -> name -> finding."""
    return {
        "machine": {"python": platform.python_version(), "system": platform.platform()},
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": {
            "cpu": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
            "kernels": _kernels(),
            **_gpus(),
        },
        "data": _data(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> str:
    """Whether small models train at full speed on the CPU."""
    try:
        build.library(torch.float32)
    except build.Unavailable as reason:
        return f"CPU kernels not compiled: {reason}; models train several times slower in torch operators"
    return f"CPU kernels compiled with {build.compiler()}"


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"cuda": "none"}
    return {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}


def _data() -> dict[str, str]:
    """Each source whose files have a place, and the folder that is asked first."""
    found = {"ROTA_DATA": os.environ.get("ROTA_DATA") or "not set"}
    try:
        return found | {
            name: "at hand" if data.at_hand(name) else "not here yet"
            for name in data.SOURCES
            if name != "folder"
        }
    except (
        BadInput
    ) as mistake:  # a ROTA_DATA that is not a folder: that is what a doctor should say
        return {"ROTA_DATA": str(mistake)}
