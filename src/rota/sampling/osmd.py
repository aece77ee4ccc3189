"""OSMD (Zhao et al. 2022): online stochastic mirror descent over sampling probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen, State
from rota.sampling import draw
from rota.sampling.bandits import Bandit
from rota.sampling.feedback import feedback, first_scale
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Osmd(Bandit):
    """OSMD: mirror descent on norms of drawn clients (Zhao et al. 2022).

    With a_i = pi_i^2 and K = budget, each draw of client i makes the step

        q_i <- q_i exp(eta a_i / (K^2 q_i^3))            eq. 6

    and then the Bregman projection onto sum q = 1, q >= alpha / N,

        q_i <- max(alpha / N, c q_i)                     eq. 7

    eta = rate * K^2 alpha^3 / (N^3 a) * sqrt(ln N / (2 T)), where T is the run's number of rounds
    and a is the largest a_i of the first cohort that succeeds. Draws are with replacement in the
    source; with coins, it makes the same step for p = K q, and projects onto sum p = K,
    alpha K / N <= p <= 1 (K-Vib, App. E.3).
    """

    alpha: float = 0.4
    rate: float = 8.0

    def experts(self, clients: int, rounds: int) -> int:
        """How many distributions are followed, each with twice the learning rate of the last."""
        return 1

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        if not 0 < self.alpha <= 1:
            raise BadInput(f"sampler.alpha is {self.alpha:g}: it must be above 0 and at most 1")
        if not self.rate > 0:
            raise BadInput(f"sampler.rate is {self.rate:g}: it must be above 0")
        clients = np.maximum((shares > 0).sum(axis=1), 1.0)
        number = np.arange(1.0, self.experts(shares.shape[1], rounds) + 1)[:, None]
        slowest = self.rate * self.budget**2 * (self.alpha / clients) ** 3
        slowest = slowest * np.sqrt(np.log(clients) / (2 * rounds))
        trust = np.log((1 + 1 / len(number)) / (number * (number + 1))) + np.zeros(len(shares))
        return {
            "q": np.repeat(draw.uniform(shares)[None], len(number), axis=0),
            "eta": 2 ** (number - 1) * slowest,  # in units of 1 / scale
            "trust": trust,
            # in units of 1 / sqrt(scale)
            "gamma": self.alpha / clients * math.sqrt(8 * self.budget / rounds),
            "scale": np.full(len(shares), np.nan),
        }

    def rates(self, state: State, shares: Array) -> Array:
        trust = np.exp(state["trust"] - state["trust"].max(axis=0))
        part = (trust / trust.sum(axis=0)).T[:, None]
        q = (part @ state["q"].swapaxes(0, 1))[:, 0]  # the experts' mean
        if self.procedure in draw.CHANCES:
            return fill(q, self.budget, shares)
        return self.budget * draw.restrict(q, shares)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, seen.norm)
        scale = first_scale(state["scale"], back.model, back.score**2, np.max)
        at = (back.model, back.client)
        # a_i / (K^2 q_i), the draw's estimate of a_i / K, in units of the scale; as long as all
        # a_i are 0 there is no scale, and the estimate is 0
        estimate = np.nan_to_num(back.square / self.budget / scale[back.model])
        fall = state["gamma"] * np.nan_to_num(np.sqrt(scale))
        q, trust = np.empty_like(state["q"]), state["trust"].copy()
        for new, old, eta, faith in zip(q, state["q"], state["eta"], trust, strict=True):
            step, largest = eta[back.model] * estimate / old[at] ** 2, np.zeros(len(scale))
            np.maximum.at(largest, back.model, step)
            # the projection depends on ratios alone, so dividing by the largest step is free, and
            # nothing overflows
            np.multiply(old, np.exp(-largest)[:, None], out=new)
            new[at] = old[at] * np.exp(step - largest[back.model])
            self.project(new, old)
            faith -= fall * np.bincount(back.model, estimate / old[at], minlength=len(scale))
        return {**state, "q": q, "trust": trust, "scale": scale}

    def project(self, q: Array, old: Array) -> None:
        """The Bregman projection, in place, over each model's clients (those above 0 in `old`)."""
        if self.procedure in draw.CHANCES:
            q[:] = fill(q, self.budget, old, self.alpha) / self.budget
            return
        for row, owners in zip(q, old > 0, strict=True):
            if owners.all():
                lift(row, self.alpha / len(row))
            elif owners.any():
                some = row[owners]
                lift(some, self.alpha / len(some))
                row[owners] = some


def lift(q: Array, least: float) -> None:
    """q <- max(least, c q), in place, with the c for which it sums to 1; few passes find it."""
    total, lifted = q.sum(), -1
    c = 1 / total
    while lifted < (lifted := int(np.count_nonzero(low := q < least / c))) < len(q):
        c = (1 - lifted * least) / (total - q[low].sum())
    q *= c if lifted < len(q) else 0.0
    np.maximum(q, least, out=q)


@dataclass(frozen=True)
class OsmdAdaptive(Osmd):
    """Adaptive OSMD: several learning rates at once, trusted by their costs (Zhao et al. 2022).

    There are E = ceil(log2((ln N + 4 (T - 1) ln(N / alpha)) / ln N) / 2) + 1 experts. Expert e
    steps with 2^(e-1) times the eta of rate 1. q is the experts' mean, weighted by trust, which
    starts as (1 + 1/E) / (e (e + 1)) and falls by exp(-gamma loss_e). loss_e sums a_i / (K^2 q_e q)
    over the draws, and gamma = alpha / N sqrt(8 K / (T a)).
    """

    rate: float = 1.0

    costs: ClassVar[str] = "a few numbers per client on the server"

    def experts(self, clients: int, rounds: int) -> int:
        if clients == 1:
            return 1
        ratio = 1 + 4 * (rounds - 1) * math.log(clients / self.alpha) / math.log(clients)
        return math.ceil(math.log2(ratio) / 2) + 1
