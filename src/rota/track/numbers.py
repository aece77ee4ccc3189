"""A round's record as plain numbers, and what trackers keep in a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rota.files import write
from rota.running.record import Record


def numbers(record: Record, join: str = "/") -> dict[str, float]:
    """All numbers of a round by name, such as accuracy and digits/train_loss.

    Lists are left out, except that clients who were drawn and rows that failed are counted.
    """
    rest = {k: v for k, v in record.items() if k not in ("models", "cohort", "failures")}
    out = _flat({**rest, "failures": len(record["failures"])}, "", join)
    for name, entry in record["models"].items():
        drawn = len(record["cohort"].get(name, []))
        out |= _flat({**entry, "drawn": drawn}, f"{name}{join}", join)
    return out


def _flat(values: dict[str, Any], prefix: str, join: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{name}{join}", join)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[prefix + name] = value
    return out


def kept(path: Path, make: Callable[[], str]) -> str:
    """The text of a file; where there is none yet, it is made and written."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, make())
    return path.read_text(encoding="utf-8")
