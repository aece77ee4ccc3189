"""Which clients of a fleet can be reached, and the weights that make up for those that cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.flower.fleet import Fleet
from rota.plan import State
from rota.world.availability import Availability

NOBODY = 600.0
"""Seconds to wait for a client when there is none at all."""


class Present:
    """Only clients whose nodes are online, and that are not put aside, are drawn.

    As with `Availability`, a client that can be reached in a round has the share d / q. Here q is
    the fraction of the rounds so far, including this one, in which it could be reached. What the
    recipe simulates is counted besides.
    """

    def __init__(self, recipe: Availability, fleet: Fleet, ids: Sequence[str]) -> None:
        self.recipe, self.fleet, self.ids = recipe, fleet, ids

    def init(self, clients: int) -> State:
        """The state before the first round."""
        return {**self.recipe.init(clients), "present": np.zeros(clients)}

    def step(self, state: State, shares: Array, seed: int, now: int) -> tuple[Array, State]:
        """The round's matrix of shares, and the state after it."""
        before = {key: value for key, value in state.items() if key != "present"}
        shares, after = self.recipe.step(before, shares, seed, now)
        self.fleet.refresh()
        if not self.fleet.wait(lambda: bool(self.here(now).any()), NOBODY):
            raise BadInput(
                f"no client could be reached for {NOBODY:.0f} seconds: see that some run, and go "
                "on with --resume"
            )
        here = self.here(now)
        present = state["present"] + here
        weight = np.divide(now, present, out=np.zeros(len(here)), where=here)
        return shares * weight, {**after, "present": present}

    def here(self, now: int) -> Array:
        """Which clients can be asked in a round."""
        return np.array([not self.fleet.absent(name, now) for name in self.ids])
