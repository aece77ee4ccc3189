"""Mabs (Salehi, Thiran, Celis 2017): sampling as a bandit, by exponential weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen, State
from rota.sampling import draw
from rota.sampling.feedback import feedback, first_scale, times


@dataclass(frozen=True)
class Mabs:
    """Mabs: exponential weights over norms of drawn clients, with replacement (Salehi et al. 2017).

    q = (1 - eta) softmax(w) + eta / N, with `budget` draws per round, and
    w_i += delta pi_i^2 / q_i^3 for each draw, with delta = sqrt(eta^4 ln N / (N^5 T)) / a.
    The sources guess the scale a; here it is the mean pi^2 of the first cohort that succeeds. The
    state keeps w, the logarithms of the weights, because the weights themselves would overflow.
    """

    budget: float = 10
    eta: float = 0.4

    procedure: ClassVar[draw.Procedure] = "multinomial"
    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "norms of the drawn clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "one number per client on the server"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        if not 0 < self.eta <= 1:
            raise BadInput(f"sampler.eta is {self.eta:g}: it must be above 0 and at most 1")
        clients = np.maximum((shares > 0).sum(axis=1), 1.0)
        delta = np.sqrt(self.eta**4 * np.log(clients) / (clients**5 * rounds))
        return {
            "log": np.zeros(shares.shape),
            "delta": delta,
            "scale": np.full(len(shares), np.nan),
        }

    def rates(self, state: State, shares: Array) -> Array:
        highest = np.max(state["log"], axis=1, keepdims=True, where=shares > 0, initial=-np.inf)
        weight = np.exp(np.minimum(state["log"] - highest, 0.0))
        eta = np.full(len(shares), self.eta)
        return self.budget * draw.mix(draw.restrict(weight, shares), eta, 1.0, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.by(self.procedure, self.rates(state, shares), shares, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back, rates = feedback(shares, plan, seen.norm), self.rates(state, shares)
        scale = first_scale(state["scale"], back.model, back.score**2)
        q = rates[back.model, back.client] / self.budget
        drawn, delta = times(plan, back, rates, shares), state["delta"][back.model]
        gain = drawn * delta * back.score**2 / q**3 / scale[back.model]
        log = state["log"].copy()
        log[back.model, back.client] += np.minimum(np.nan_to_num(gain), 1e100)
        return {**state, "log": log, "scale": scale}
