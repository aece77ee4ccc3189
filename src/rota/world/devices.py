"""The virtual clock: how long a row would take on its client's device, from a device profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import NUMBER, Costs, Job

FASTEST = 1e12
"""The most GFLOP/s or Mbit/s of a device, and the inverse of the least."""
WIDEST = 20.0
"""The largest spread: a factor of e^20 is one standard deviation."""


@dataclass(frozen=True)
class Profile:
    """Each client's device: FLOP/s, and bytes/s of its link."""

    speed: Array
    link: Array

    def seconds(self, clients: Array, flops: Array, nbytes: Array, now: int) -> tuple[Array, Array]:
        """How long clients take in round `now`: computing and transfer, and computing alone."""
        computing = flops / self.speed[clients]
        return np.asarray(computing + nbytes / self.link[clients]), np.asarray(computing)

    def costs(self, job: Job, rows: Array, flops: float, examples: Array) -> Costs:
        """What rows of one task report that processed so many examples, at `flops` per example.

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
class Devices:
    """The clients' devices: sustained speed in GFLOP/s, and link speed in Mbit/s each way.

    `spread` is the sigma of a log-normal factor (median 1) on each client's speed and,
    independently, on its link. The defaults are a mid-range phone on a home connection.
    """

    gflops: float = 5.0
    mbps: float = 20.0
    spread: float = 0.0

    def check(self) -> None:
        """Refuse speeds that a clock cannot run on."""
        for key in ("gflops", "mbps"):
            value = getattr(self, key)
            if not value > 0:
                raise BadInput(f"devices.{key} is {value}: it must be above 0")
            if not 1 / FASTEST <= value <= FASTEST:
                raise BadInput(
                    f"devices.{key} is {value}: it must be from {1 / FASTEST:g} to {FASTEST:g}"
                )
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
        return Profile(self.gflops * 1e9 * factor[0], self.mbps * 1e6 / 8 * factor[1])
