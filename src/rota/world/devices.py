"""The virtual clock: how long a row would take on its client's device.

A member of the kind "devices" makes a Profile: what each client's device can do, and how that
changes from round to round. The time of a row follows from the FLOPs and the bytes of the model, or
of the part of a model, that the row trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import NUMBER, Costs, Job
from rota.world.trace import read

__all__ = ["DEVICES", "Conditions", "Devices", "Phones", "Profile", "SpreadOf4", "Trace"]

FASTEST = 1e12
"""The most GFLOP/s or Mbit/s of a device, and the inverse of the least."""
WIDEST = 20.0
"""The largest spread: a factor of e^20 is one standard deviation."""
LATEST = 1e6
"""The most seconds of a round trip."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What changes from round to round on every client's device.

    A spell is `spell` rounds long. From the second spell on, each client is busy with something
    else with chance `busy`, anew in every spell. Then that takes one of the shares in `load` of the
    device's speed, each as likely as the others. `noise` is the sigma of a log-normal factor
    (median 1) on each client's time in each round.
    """

    load: tuple[float, ...] = ()
    busy: float = 0.2
    spell: int = 10
    noise: float = 0.0

    def check(self) -> None:
        """Refuse conditions that make no sense."""
        if not all(0 < share < 1 for share in self.load):
            raise BadInput(
                f"devices.load is {list(self.load)}: give shares of a device's speed, above 0 and "
                "below 1"
            )
        if not 0 <= self.busy <= 1:
            raise BadInput(f"devices.busy is {self.busy:g}: it must be from 0 to 1")
        if self.spell < 1:
            raise BadInput(f"devices.spell is {self.spell} rounds: it must be at least 1")
        if not 0 <= self.noise <= WIDEST:
            raise BadInput(f"devices.noise is {self.noise:g}: it must be from 0 to {WIDEST:g}")

    def free(self, clients: Array, seed: int, now: int) -> Array | float:
        """The share of its speed that each client has for training in round `now`."""
        spell = (now - 1) // self.spell
        if not self.load or not spell:
            return 1.0
        lot, level = _uniform(rng.key(seed, "load", spell), clients, 2)
        loads = np.array(self.load)[(level * len(self.load)).astype(int)]
        return np.where(lot < self.busy, 1 - loads, 1.0)

    def factor(self, clients: Array, seed: int, now: int) -> Array | float:
        """The noise of each client's time in round `now`."""
        if not self.noise:
            return 1.0
        (lot,) = _uniform(rng.key(seed, "noise", now), clients, 1)
        normal = torch.special.ndtri(torch.from_numpy(lot + 2.0**-25))
        return np.asarray(np.exp(self.noise * normal.numpy()))


def _uniform(key: int, clients: Array, number: int) -> Array:
    """Uniform numbers in [0, 1) of some clients, which do not depend on the others: [number, n]."""
    keys = rng.fold(rng.as_tensor([key]), torch.as_tensor(clients, dtype=torch.int64))
    return np.asarray(rng.uniform(keys, number).double().numpy().T)


@dataclass(frozen=True)
class Profile:
    """What the clients' devices can do: FLOP/s, bytes/s of the link, seconds of a round trip.

    `memory` is the bytes that training may take; None means as many as it needs. The arrays have
    one entry per client, unless `entry` says which entries hold for some clients in a round.
    """

    speed: Array
    link: Array
    latency: Array
    conditions: Conditions = field(default_factory=Conditions)
    seed: int = 0
    entry: Callable[[Array, int], Array] | None = None
    memory: Array | None = None

    def room(self, clients: Array, now: int) -> Array:
        """The bytes that training may take on some clients' devices in round `now`."""
        if self.memory is None:
            return np.full(len(clients), np.inf)
        return np.asarray(self.memory[clients if self.entry is None else self.entry(clients, now)])

    def seconds(self, clients: Array, flops: Array, nbytes: Array, now: int) -> tuple[Array, Array]:
        """How long clients take in round `now`: computing and transfer, and computing alone."""
        at = clients if self.entry is None else self.entry(clients, now)
        factor = self.conditions.factor(clients, self.seed, now)
        speed = self.speed[at] * self.conditions.free(clients, self.seed, now)
        computing = flops / speed * factor
        transfer = (nbytes / self.link[at] + self.latency[at] * (nbytes > 0)) * factor
        return np.asarray(computing + transfer), np.asarray(computing)

    def costs(self, job: Job, rows: Array, flops: float, examples: Array) -> Costs:
        """The costs of rows of one task that processed so many examples, at `flops` per example.

        A row without examples could not train: it sent nothing, and took no time that is known.
        """
        duty, clients = job.duty.of(rows), job.plan.client[rows]
        work = duty.training * examples * flops
        seconds, computing = self.seconds(clients, work, duty.down + duty.up, job.now)
        ran = examples > 0
        return Costs(
            seconds=np.where(ran, seconds, np.nan),
            computing=np.where(ran, computing, np.nan),
            up=np.where(ran, duty.up + NUMBER * duty.numbers, 0),
            down=duty.down,
        )


@dataclass(frozen=True)
class Devices(Conditions):
    """Log-normal speeds: sustained GFLOP/s, and Mbit/s of the link each way.

    `spread` is the sigma of a log-normal factor (median 1) on each client's speed and,
    independently, on its link. `latency` is the seconds of a round trip, which each row pays once.
    A client fails if training needs more than `memory` MB. The defaults are a mid-range phone on a
    home connection.
    """

    gflops: float = 5.0
    mbps: float = 20.0
    spread: float = 0.0
    latency: float = 0.0
    memory: float | None = None

    def check(self) -> None:
        """Refuse speeds that a clock cannot run on."""
        super().check()
        _check_speeds(self.gflops, self.mbps, self.latency, self.memory)
        if not self.spread >= 0:
            raise BadInput(f"devices.spread is {self.spread}: it must be at least 0")
        if self.spread > WIDEST:
            raise BadInput(
                f"devices.spread is {self.spread}: it must be at most {WIDEST:g}, or some clients "
                "would take longer than a clock can tell"
            )

    def profile(self, clients: int, seed: int) -> Profile:
        """Each client's speed and link."""
        generator = rng.generator(rng.key(seed, "devices"))
        factor = np.exp(self.spread * generator.standard_normal((2, clients)))
        speed, link = self.gflops * factor[0], self.mbps * factor[1]
        return _profile(self, seed, speed, link, self.latency, self.memory)


@dataclass(frozen=True)
class SpreadOf4(Conditions):
    """Speeds from half of `gflops` to twice as much, evenly spaced in their logarithm.

    They are dealt out at random. The fastest client is four times as fast as the slowest.
    """

    gflops: float = 5.0
    mbps: float = 20.0
    latency: float = 0.0
    memory: float | None = None

    def check(self) -> None:
        """Refuse speeds that a clock cannot run on."""
        super().check()
        _check_speeds(self.gflops, self.mbps, self.latency, self.memory)

    def profile(self, clients: int, seed: int) -> Profile:
        """Each client's speed and link."""
        factor = 2 ** np.linspace(-1, 1, clients) if clients > 1 else np.ones(1)
        order = rng.generator(rng.key(seed, "devices")).permutation(clients)
        speed = self.gflops * factor[order]
        return _profile(self, seed, speed, self.mbps, self.latency, self.memory)


PHONES = {
    "LG Velvet 5G": ((2.4, 16), (2.2, 16), *[(1.8, 8)] * 6),
    "Google Pixel 3": (*[(2.5, 8)] * 4, *[(1.6, 8)] * 4),
    "Samsung Galaxy S9": (*[(2.8, 8)] * 4, *[(1.7, 8)] * 4),
    "Samsung Galaxy S10": (*[(2.73, 16)] * 2, *[(2.31, 8)] * 2, *[(1.95, 8)] * 4),
    "Google Pixel 4": ((2.84, 16), *[(2.42, 16)] * 3, *[(1.78, 8)] * 4),
}
"""The phones of FLuID (Table 1): each core's GHz, and the FLOPs that it can do per cycle.

Cores of the Cortex-A76 generation and Samsung's Mongoose M4 have two pipelines of 128 bits for
multiply-adds of single precision, which is 16 FLOPs per cycle. The others have half of that.
"""


@dataclass(frozen=True)
class Phones(Conditions):
    """The five phones of FLuID (Table 1), one after the other: client i has phone i modulo 5.

    FLuID's paper shows their times in pictures only. So their relative speeds are what their cores
    can do at most. `gflops` is the sustained speed of the phone in the middle.
    """

    gflops: float = 5.0
    mbps: float = 20.0
    latency: float = 0.0
    memory: float | None = None

    def check(self) -> None:
        """Refuse speeds that a clock cannot run on."""
        super().check()
        _check_speeds(self.gflops, self.mbps, self.latency, self.memory)

    def profile(self, clients: int, seed: int) -> Profile:
        """Each client's speed and link."""
        peak = np.array([sum(ghz * flops for ghz, flops in cores) for cores in PHONES.values()])
        speed = self.gflops * (peak / np.median(peak))[np.arange(clients) % len(peak)]
        return _profile(self, seed, speed, self.mbps, self.latency, self.memory)


@dataclass(frozen=True)
class Trace(Conditions):
    """Devices from a file of JSON lines, one per device, with changes at given rounds.

    Client i has the device of line i, and with more clients than lines they start over.
    """

    file: str | Path

    def check(self) -> None:
        """Refuse a file with mistakes."""
        super().check()
        read(self.file)

    def profile(self, clients: int, seed: int) -> Profile:
        """Each client's device, as the file says."""
        trace = read(self.file)
        values = trace.values
        speed = values["gflops"] * (1 - values["load"])
        return _profile(
            self, seed, speed, values["mbps"], values["latency"], values["memory"], trace.entry
        )


DEVICES: dict[str, type] = {
    "lognormal": Devices,
    "spread-of-4": SpreadOf4,
    "phones": Phones,
    "trace": Trace,
}


def _profile(
    conditions: Conditions,
    seed: int,
    gflops: Array,
    mbps: Array | float,
    latency: Array | float,
    memory: Array | float | None,
    entry: Callable[[Array, int], Array] | None = None,
) -> Profile:
    """A profile in FLOP/s, bytes/s and bytes, from numbers per client or for all of them."""
    link = np.broadcast_to(np.asarray(mbps, float) * 1e6 / 8, gflops.shape)
    trip = np.broadcast_to(np.asarray(latency, float), gflops.shape)
    some = memory is not None and bool(np.isfinite(memory).any())
    room = np.broadcast_to(np.asarray(memory, float) * 1e6, gflops.shape) if some else None
    return Profile(gflops * 1e9, link, trip, conditions, seed, entry, room)


def _check_speeds(gflops: float, mbps: float, latency: float, memory: float | None) -> None:
    for key, value in (("gflops", gflops), ("mbps", mbps)):
        if not value > 0:
            raise BadInput(f"devices.{key} is {value}: it must be above 0")
        if not 1 / FASTEST <= value <= FASTEST:
            raise BadInput(
                f"devices.{key} is {value}: it must be from {1 / FASTEST:g} to {FASTEST:g}"
            )
    if not 0 <= latency <= LATEST:
        raise BadInput(f"devices.latency is {latency:g}: it must be from 0 to {LATEST:g} seconds")
    if memory is not None and not 0 < memory <= FASTEST:
        raise BadInput(
            f"devices.memory is {memory:g}: it must be above 0, and up to {FASTEST:g} MB"
        )
