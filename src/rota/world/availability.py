"""Which clients can be reached in a round (K-Vib, App. E.1): a process, and what is known of it.

Availability enters the round in one place, the matrix of shares. Client i's share in a round is
d_i / q_i if it can be reached, and 0 otherwise; q_i is its chance to be reached. In expectation
that is d_i. So a sampler that is unbiased for the matrix it is given, with weights d_i / (q_i p_i),
is unbiased for full participation. To every sampler a client that cannot be reached looks like one
without data. A client that is rarely reached has the larger score d_i |g_i| / q_i, as the variance
sum pi_i^2 / (q_i p_i) demands.

With `memory` the expectation is over the whole process, as in K-Vib's paper. Given the round
before, the chance is a different one: memory * (it was reached) + (1 - memory) q. Weights by that
chance would be unbiased given the past, which estimators with a memory would need, but they would
be 1 / (1 - memory) times as large for every client that returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import State


@dataclass(frozen=True)
class Availability:
    """Client i can be reached in round t with chance q_i(t).

    logit q_i(t) = logit(chance) + spread z_i + swing sin(2 pi (t / day + phase_i))

    `chance` is the chance of the median client (1: everybody, always). z_i ~ N(0, 1) makes clients
    unequal, and uniform phases give each client its own hours. From one round to the next a client
    keeps its luck with probability `memory`: this is a two-state Markov chain, whose spells are
    1 / (1 - memory) times as long as those of independent coins. So `chance` alone gives
    independent coins, `swing` a daily rhythm of `day` rounds, and `memory` a Markov chain.

    If the chances are not `known`, q_i is the fraction of the rounds so far, including this one, in
    which the client could be reached. With independent coins the expected weight is then off by a
    factor of 1 - (1 - q_i)^t. With `memory` the fraction settles more slowly, and the
    expected weight is too large for a while: docs/samplers.md has an example.
    """

    chance: float = 1.0
    spread: float = 0.0
    swing: float = 0.0
    day: int = 24
    memory: float = 0.0
    known: bool = True

    def init(self, clients: int) -> State:
        """The state before the first round."""
        for name, value in (("spread", self.spread), ("swing", self.swing)):
            if not value >= 0:
                raise BadInput(f"availability.{name} is {value:g}: it must be at least 0")
        if not 0 < self.chance <= 1:
            raise BadInput(
                f"availability.chance is {self.chance:g}: it must be above 0 and at most 1"
            )
        if not 0 <= self.memory < 1:
            raise BadInput(
                f"availability.memory is {self.memory:g}: it must be at least 0 and below 1"
            )
        if self.day < 2:
            raise BadInput(f"availability.day is {self.day} rounds: it must be at least 2")
        return {} if self.chance == 1 else {"luck": np.zeros(clients), "reached": np.zeros(clients)}

    def step(self, state: State, shares: Array, seed: int, now: int) -> tuple[Array, State]:
        """The round's matrix of shares, and the state after it."""
        if self.chance == 1:
            return shares, state
        clients = shares.shape[1]
        keep, fresh = rng.generator(rng.key(seed, "availability", now)).random((clients, 2)).T
        luck = np.where((keep < self.memory) & (now > 1), state["luck"], fresh)
        chances = self.chances(clients, seed, now)
        reachable = luck < chances
        reached = state["reached"] + reachable
        weight = np.divide(
            reachable,
            chances if self.known else reached / now,
            out=np.zeros(clients),
            where=reachable,
        )
        return shares * weight, {"luck": luck, "reached": reached}

    def chances(self, clients: int, seed: int, now: int) -> Array:
        """q_i in round `now`."""
        z = rng.generator(rng.key(seed, "availability", "spread")).standard_normal(clients)
        phase = rng.generator(rng.key(seed, "availability", "phase")).random(clients)
        rhythm = self.swing * np.sin(2 * np.pi * (now / self.day + phase))
        logit = math.log(self.chance) - math.log1p(-self.chance) + self.spread * z + rhythm
        return np.asarray(np.exp(-np.logaddexp(0.0, -logit)))
