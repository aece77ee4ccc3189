"""Optimistic coins: last norms, hope for clients that were never seen, and no constants to tune.

With p chosen before the coins, the estimate's variance is sum (1/p - 1) x^2 with x_i = d_i |g_i|.
Its minimiser is p = waterfill(x, K), and p does not change if all scores change by one factor. So
scores a_i need only be right relative to each other:

1. Errors. If x_i / c <= a_i <= C x_i for all clients, waterfill(a) has p_i >= p*_i / (c C), because
   the level of a is at most C times that of x. So sum x^2 / p <= c C * its least value.
2. Clients that were seen. Norms change slowly between rounds, so a client's newest norm counts as
   much as all its older ones together, and nothing is divided by p. K-Vib, Vrb, Mabs and OSMD
   follow sums of pi^2 / p instead, where one unlikely draw outweighs many rounds.
3. Clients that were not seen. The server knows d_i. If no norm is above the largest G that was
   seen, a_i = d_i G is an upper bound, so C >= 1 and c = 1: hope may waste budget on a client, but
   does not starve it. Where all a_i <= d_i G, the level is at most G / (K - 1), and the clients
   that were not seen cost at most sum x_i G / (K - 1) <= G^2 / (K - 1) in a round, besides the
   x_i^2 of those with p = 1. A client is not seen for 1 / p_i rounds on average, so with constant
   norms all of the start costs at most sum max(x_i, G / (K - 1))^2, however long the run.
4. The floor. A score may be wrong by more than a factor: an update of 0 says nothing about the
   next. The floors of N clients spend N / (N + t) of one client in round t. This falls to 0, but
   its sum over t is infinite, so every client is drawn again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Seen, State
from rota.sampling import draw
from rota.sampling.bandits import Bandit
from rota.sampling.feedback import feedback
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Optimistic(Bandit):
    """Optimistic coins: by each client's last norms; who was never seen has the largest norm.

    In round t, p = waterfill(share * norm, budget) with p >= 1 / (N + t). A client's norm is the
    root of its mean square, in which a new norm counts as much as all older ones together. A
    client that was never seen has the largest norm of all that were. Nothing has to be tuned.
    """

    procedure: draw.Weighted = "independent"

    def init(self, shares: Array, rounds: int) -> State:
        return super().init(shares, rounds) | {
            "norm": np.full(shares.shape, np.nan),
            "round": np.ones(1),
        }

    def rates(self, state: State, shares: Array) -> Array:
        known = ~np.isnan(state["norm"])
        largest = np.max(state["norm"], axis=1, keepdims=True, where=known, initial=0.0)
        hope = np.where(largest > 0, largest, 1.0)
        # all floors together, as a part of the budget
        floor = 1 / (1 + state["round"].item() / shares.shape[1]) / self.budget
        whole = self.budget if self.procedure == "independent" else 1.0
        scores = shares * np.where(known, state["norm"], hope)
        return self.budget / whole * fill(scores, whole, shares, floor)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, seen.norm)
        at, new, norm = (back.model, back.client), seen.norm[back.row], state["norm"].copy()
        known = ~np.isnan(norm[at])
        norm[at] = np.where(known, np.hypot(norm[at], new) / np.sqrt(2), new)
        return {"norm": norm, "round": state["round"] + 1}
