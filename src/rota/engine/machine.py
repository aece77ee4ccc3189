"""The processor of this machine."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def processor() -> dict[str, str]:
    """What /proc/cpuinfo says about the first core, by name; empty if there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    entries = [[side.strip() for side in line.partition(":")[::2]] for line in reversed(lines)]
    return {name: value for name, value in entries if name}
