"""rota's own sampler: by each client's last norms, trusted by the rule of succession.

With p chosen before the draw, coins have the variance sum (1/p - 1) x^2 with x_i = d_i |g_i|. Its
minimiser is p = waterfill(x, K), and p does not change if all scores change by one factor. So
scores a_i need only be right relative to each other:

1. Errors. If x_i / c <= a_i <= C x_i for all clients, waterfill(a) has p_i >= p*_i / (c C), because
   the level of a is at most C times that of x. So sum x^2 / p <= c C * its least value.
2. What a client's own norms say. Norms change slowly between rounds, so a client's newest norm
   counts as much as all its older ones together, and nothing is divided by p. K-Vib, Vrb, Mabs and
   OSMD follow sums of pi^2 / p instead, where one unlikely draw outweighs many rounds.
3. What they do not say. The best score is the root of the expected square of the next norm. After
   n norms, a client sends something new in the next round with chance 1 / (n + 1), by the rule of
   succession. What is new has the mean square m^2 of all clients that were seen, and what is not
   has the client's own mean square s^2:

       a_i^2 = d_i^2 (m^2 + n_i s_i^2) / (n_i + 1)

   So a client that was never seen counts as the mean, and the first round is proportional to the
   data. Where clients are alike and their norms are noise, scores stay close to each other.
4. The start. As K = sum min(1, a / level) <= sum a / level, the level is at most sum a / K. In the
   first round a = d, so no x^2 / p is above the larger of x^2 and x |g| / K. If norms are at most
   G, that round costs at most sum x_i G / K <= G^2 / K, besides the x_i^2 of clients with p = 1.
5. Clients that change. If norms are at most G and m >= b G, the level is at most G / K, and a
   client with n norms has p >= min(1, b K d / sqrt(n + 1)), whatever they were. So a client that
   sends nothing is drawn about (3/2 b K d t)^(2/3) times in t rounds. If it wakes then, it costs
   x^2 / p per round, for 1 / p rounds on average: of the order of t^(2/3) in all. Uniform sampling
   pays x^2 N / K for it in every round, so in the long run a change costs a vanishing part of that.

No p is 0, because each client keeps a part of m^2, and no number has to be tuned.

The draw is systematic: it has these p, and a cohort of fixed size. Where updates point the same
way, that has less variance than coins (K-Vib compares bounds in Lemma 2). Where all scores are
equal, it is uniform sampling without replacement, so nothing is lost to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Seen, State
from rota.sampling import draw
from rota.sampling.bandits import Bandit
from rota.sampling.feedback import feedback
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Succession(Bandit):
    """Succession: each client by its last norms, trusted more the more often it was seen.

    p = waterfill(share * sqrt((m^2 + n s^2) / (n + 1)), budget) for a client with n norms. s is the
    root of their mean square, in which a new norm counts as much as all older ones together, and
    m^2 is the mean of s^2 over the clients that were seen. Nothing has to be tuned.
    """

    procedure: draw.Weighted = "systematic"

    costs: ClassVar[str] = "two numbers per client on the server"

    def init(self, shares: Array, rounds: int) -> State:
        zeros = {"norm": np.zeros(shares.shape), "times": np.zeros(shares.shape)}
        return super().init(shares, rounds) | zeros

    def rates(self, state: State, shares: Array) -> Array:
        times, largest = state["times"], state["norm"].max(axis=1, keepdims=True)
        # in units of the largest norm nothing overflows, and no score becomes 0
        square = (state["norm"] / np.where(largest > 0, largest, 1.0)) ** 2
        seen = np.maximum(np.count_nonzero(times, axis=1, keepdims=True), 1)
        mean = np.where(largest > 0, square.sum(axis=1, keepdims=True) / seen, 1.0)
        scores = shares * np.sqrt((mean + times * square) / (times + 1))
        whole = self.budget if self.procedure in draw.CHANCES else 1.0
        return self.budget / whole * fill(scores, whole, shares)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, seen.norm)
        at, new = (back.model, back.client), seen.norm[back.row]
        norm, times = state["norm"].copy(), state["times"].copy()
        norm[at] = np.where(times[at] > 0, np.hypot(norm[at], new) / np.sqrt(2), new)
        times[at] += 1
        return {"norm": norm, "times": times}
