"""What a client's owner allows: the hours of work, the charge of the battery, and bytes per day."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rota import files
from rota.errors import BadInput
from rota.flower.letter import Refused

POWER = Path("/sys/class/power_supply")
"""Where Linux tells of batteries."""


@dataclass
class Limits:
    """Hours as "22-6" (from 22:00 to 6:00 local time), a battery from 0 to 100, bytes per day.

    None is no limit. A machine without a battery passes every limit on it.
    """

    hours: str | None = None
    battery: float | None = None
    bytes: float | None = None
    clock: Callable[[], datetime.datetime] = field(default=datetime.datetime.now, repr=False)
    power: Path = POWER
    day: datetime.date | None = None
    used: float = 0.0
    """How many bytes were sent and received on that day."""
    file: Path | None = None
    """Where they are remembered, so that a restart does not begin the day again."""

    def __post_init__(self) -> None:
        if self.hours is not None:
            self._hours()
        with suppress(OSError, ValueError, KeyError, TypeError):  # nothing is remembered
            told = json.loads(self.file.read_text()) if self.file else {}
            self.day, self.used = datetime.date.fromisoformat(told["day"]), float(told["used"])

    def check(self, kind: str, nbytes: int) -> None:
        """Refuse work that is not allowed now, with a reply of so many bytes.

        A query is always answered.
        """
        if kind == "query":
            return
        now = self.clock()
        if self.hours is not None:
            begin, end = self._hours()
            inside = begin <= now.hour < end if begin < end else not end <= now.hour < begin
            if not inside:
                raise Refused(f"the client's owner allows work in the hours {self.hours} alone")
        if self.battery is not None:
            charge = self._charge()
            if charge is not None and charge < self.battery:
                raise Refused(
                    f"the client's battery is at {charge:.0f} %, and its owner asks for "
                    f"{self.battery:.0f} %"
                )
        if self.bytes is not None and self._today(now) + nbytes > self.bytes:
            raise Refused(f"the client's owner allows {self.bytes:,.0f} bytes per day")

    def count(self, nbytes: int) -> None:
        """Count what has travelled."""
        self._today(self.clock())
        self.used += nbytes
        if self.file is not None:
            with suppress(OSError):  # a full disk must not keep us from working
                files.write(self.file, json.dumps({"day": str(self.day), "used": self.used}))

    def _today(self, now: datetime.datetime) -> float:
        if self.day != now.date():
            self.day, self.used = now.date(), 0.0
        return self.used

    def _hours(self) -> tuple[int, int]:
        found = re.fullmatch(r"(\d{1,2})-(\d{1,2})", self.hours or "")
        if not found or any(int(hour) > 24 for hour in found.groups()):
            raise BadInput(f"hours is '{self.hours}': give two hours of the day, such as 22-6")
        begin, end = map(int, found.groups())
        return begin % 24, end

    def _charge(self) -> float | None:
        """The battery's charge in percent; None where it is being charged, or there is none."""
        for battery in sorted(self.power.glob("*/capacity")):
            try:
                state = battery.with_name("status").read_text().strip()
                charge = float(battery.read_text())
            except (OSError, ValueError):
                continue
            return None if state in ("Charging", "Full") else charge
        return None
