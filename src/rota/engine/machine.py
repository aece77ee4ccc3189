"""The processor of this machine, and the devices that torch sees here."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import torch

from rota.errors import BadInput


def cores() -> int:
    """How many cores this process may use; at most ROTA_CORES, if that is set."""
    here, most = os.cpu_count() or 1, os.environ.get("ROTA_CORES", "")
    if hasattr(os, "sched_getaffinity"):
        here = len(os.sched_getaffinity(0))
    return max(1, min(here, int(most))) if most.isdecimal() else here


@functools.cache
def processor() -> dict[str, str]:
    """What /proc/cpuinfo says about the first core, by name; empty if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    entries = [[side.strip() for side in line.partition(":")[::2]] for line in reversed(lines)]
    return {name: value for name, value in entries if name}


def where(device: str) -> str:
    """The name of a device that exists here; "auto" is a GPU if there is one.

    "cuda" is the first GPU, "cuda:1" the second.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    named = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if not named:
        raise BadInput(f"unknown device '{device}': use cuda (a GPU), cuda:1, cpu, or auto")
    if device != "cpu" and not torch.cuda.is_available():
        raise BadInput(f"device is '{device}', but torch sees no GPU here: use --device cpu")
    if device != "cpu" and int(named[1] or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise BadInput(f"device is '{device}', but the last GPU here is cuda:{last}")
    return device
