"""A file of devices: JSON lines, one per device, with changes at given rounds.

{"name": "old phone", "gflops": 2.5, "mbps": 8}
{"gflops": 5, "latency": 0.1, "changes": [{"round": 20, "load": 0.5}, {"round": 40, "load": 0}]}
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput, did_you_mean, first_line
from rota.hints import shown

NUMBERS: dict[str, tuple[float, float]] = {
    "gflops": (1e-12, 1e12),
    "mbps": (1e-12, 1e12),
    "latency": (0, 1e6),
    "memory": (1e-12, 1e12),
    "load": (0, 0.999999),
}
"""The numbers of a device, and their least and largest values."""
USUAL = {"mbps": 20.0, "latency": 0.0, "memory": math.inf, "load": 0.0}
"""What a device has unless its line says otherwise."""
LAST = 2**31
"""The last round that a change may name."""


@dataclass(frozen=True)
class Trace:
    """The devices of a file. `values` has entries by device, and by round within a device.

    `since` is device * LAST + the first round of each entry.
    """

    devices: int
    since: Array
    values: dict[str, Array]

    def entry(self, clients: Array, now: int) -> Array:
        """Which entries hold for some clients in round `now`."""
        wanted = clients % self.devices * LAST + min(now, LAST - 1)
        return np.asarray(np.searchsorted(self.since, wanted, side="right") - 1)


def read(file: str | Path) -> Trace:
    """Read a file of devices."""
    try:
        path = Path(file).expanduser()
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device never ends
            raise OSError("it is not a file")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise BadInput(f"cannot read the devices of {shown(str(file))} ({why})") from error
    since: list[int] = []
    rows: list[dict[str, float]] = []
    devices = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            for first, values in _entries(line, f"{file}, line {number}"):
                since.append(devices * LAST + first)
                rows.append(values)
            devices += 1
    if not devices:
        raise BadInput(f'{file} has no device: give a line such as {{"gflops": 5, "mbps": 20}}')
    columns = {key: np.array([row[key] for row in rows], float) for key in NUMBERS}
    return Trace(devices, np.array(since, np.int64), columns)


def _entries(line: str, where: str) -> list[tuple[int, dict[str, float]]]:
    """A device's first rounds and numbers: one entry, and one more for each change."""
    try:
        device = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not JSON: {first_line(error)}") from error
    if not isinstance(device, dict):
        raise BadInput(f"{where} is {shown(device)}: give an object in {{...}} per device")
    if "gflops" not in device:
        raise BadInput(f"{where} has no 'gflops': give the device's speed in GFLOP/s")
    if not isinstance(device.get("name", ""), str):
        raise BadInput(f"{where}: name is {shown(device['name'])}, but it takes a string")
    given = {key: value for key, value in device.items() if key not in ("name", "changes")}
    entries = [(0, {**USUAL, **_numbers(given, ["name", "changes"], where)})]
    changes = device.get("changes", [])
    if not isinstance(changes, list) or not all(isinstance(each, dict) for each in changes):
        example = '[{"round": 20, "load": 0.5}]'
        raise BadInput(f"{where}: changes are {shown(changes)}: give a list such as {example}")
    for change in changes:
        before, values = entries[-1]
        first = change.get("round")
        if type(first) is not int or not max(before, 1) <= first < LAST or first == before:
            raise BadInput(
                f"{where}: a change has the round {shown(first)}: give whole numbers from 1 on, "
                "in ascending order"
            )
        new = {key: value for key, value in change.items() if key != "round"}
        entries.append((first, {**values, **_numbers(new, ["round"], where)}))
    return entries


def _numbers(given: dict[str, Any], others: list[str], where: str) -> dict[str, float]:
    for key, value in given.items():
        if key not in NUMBERS:
            hint = did_you_mean(key, [*NUMBERS, *others])
            raise BadInput(f"{where} has an unknown key {shown(key)}: {hint}")
        low, high = NUMBERS[key]
        if type(value) not in (int, float) or not low <= value <= high:
            raise BadInput(
                f"{where}: {key} is {shown(value)}, but it takes a number from {low:g} to {high:g}"
            )
    return {key: float(value) for key, value in given.items()}
