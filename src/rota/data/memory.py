"""Refuse data that cannot fit into memory before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

from rota.errors import BadInput

LIMIT = Path("/sys/fs/cgroup/memory.max")  # a container's limit, on Linux


def total() -> float:
    """The bytes of memory that this process may use at most."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * float(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return float("inf")
    try:
        return min(machine, float(LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine


def check_room(nbytes: float, what: str, advice: str) -> None:
    """Refuse `what` if it needs more memory than there is."""
    if nbytes > total():
        raise BadInput(
            f"{what} would take {nbytes / 1e9:,.0f} GB, and there are {total() / 1e9:,.0f} GB of "
            f"memory: {advice}"
        )
