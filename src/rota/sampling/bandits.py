"""Samplers that learn from the drawn clients' norms alone, as those in kvib.py and osmd.py do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen, State
from rota.sampling import draw, leader
from rota.sampling.cohort import Cohort
from rota.sampling.feedback import feedback, first_scale
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Bandit(Cohort):
    """Draws by `rates` that sum to the budget for each model, and learns from the drawn clients."""

    procedure: draw.Weighted = "multinomial"

    needs: ClassVar[str] = "norms of the drawn clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "one number per client on the server"

    def rates(self, state: State, shares: Array) -> Array:
        """The expected number of draws of each pair."""
        raise NotImplementedError

    def mixed(self, scores: Array, theta: Array, shares: Array) -> Array:
        """1 - theta of the budget by the scores (for coins: as p <= 1 allows), theta evenly."""
        if self.procedure in draw.CHANCES:
            return draw.mix(fill(scores, self.budget, shares), theta, self.budget, shares)
        return self.budget * draw.mix(draw.restrict(scores, shares), theta, 1.0, shares)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.by(self.procedure, self.rates(state, shares), shares, generator)


@dataclass(frozen=True)
class Vrb(Bandit):
    """Vrb: learns from the norms of drawn clients (Borsos et al. 2018).

    q = (1 - theta) sqrt(omega + gamma) / sum + theta / N, with `budget` draws per round, and
    omega_i += pi_i^2 / q_i for each draw, which is with replacement in the source. `theta` defaults
    to (N / T)^(1/3), where T is the run's number of rounds, or to 0.3 where N > T (K-Vib, App. F).
    `gamma` defaults to G^2 N / theta if `bound` gives G, a bound on pi, and otherwise to the sum of
    omega / (t budget) after t rounds.
    """

    theta: float | None = None
    gamma: float | None = None
    bound: float | None = None

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        clients = (shares > 0).sum(axis=1)
        usual = np.where(clients > rounds, 0.3, np.cbrt(clients / rounds))
        return leader.begin(shares, 1, usual, self.theta, self.gamma, self.bound)

    def rates(self, state: State, shares: Array) -> Array:
        return self.mixed(np.sqrt(leader.sums(state)), state["theta"], shares)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, seen.norm)
        return leader.learn(state, back, self.budget * back.square, self.budget)


@dataclass(frozen=True)
class Mabs(Bandit):
    """Mabs: exponential weights over norms of drawn clients (Salehi et al. 2017).

    q = (1 - eta) softmax(w) + eta / N, with `budget` draws per round, and
    w_i += delta pi_i^2 / q_i^3 for each draw, with delta = sqrt(eta^4 ln N / (N^5 T)) / a. Draws
    are with replacement in the source. The sources guess the scale a; here it is the mean pi^2 of
    the first cohort that succeeds. The state keeps w, the logarithms of the weights, because the
    weights themselves would overflow.
    """

    eta: float = 0.4

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
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
        return self.mixed(weight, np.full(len(shares), self.eta), shares)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back, rates = feedback(shares, plan, seen.norm), self.rates(state, shares)
        scale = first_scale(state["scale"], back.model, back.score**2)
        q = rates[back.model, back.client] / self.budget
        delta = self.budget * state["delta"][back.model]
        gain = delta * back.square / q**2 / scale[back.model]
        log = state["log"].copy()
        log[back.model, back.client] += np.minimum(np.nan_to_num(gain), 1e100)
        return {**state, "log": log, "scale": scale}


@dataclass(frozen=True)
class Avare(Bandit):
    """Avare: draws by the last known norms, above a falling floor (El Hanchi, Stephens 2020).

    In round t, q minimises sum a_i^2 / q_i subject to sum q = 1 and
    q_i >= (least + (1 - least) / t^decay) / N (K-Vib, Lemma 18), where a_i is share * norm of the
    client's last update (for coins: sum p = K, p <= 1). So the first round is uniform. This is our
    reading: K-Vib, App. F has p_min = 1/(5N), C = 1/(1/N - p_min) and delta = 1, and the floor
    p_min + 1/(C t^delta); no code is public. A client without a known norm counts as much as the
    client with the largest a_i.
    """

    least: float = 0.2
    decay: float = 1.0

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        if not 0 < self.least <= 1:
            raise BadInput(f"sampler.least is {self.least:g}: it must be above 0 and at most 1")
        if not self.decay >= 0:
            raise BadInput(f"sampler.decay is {self.decay:g}: it must be at least 0")
        return {"norm": np.full(shares.shape, np.nan), "round": np.ones(1)}

    def rates(self, state: State, shares: Array) -> Array:
        scores = shares * state["norm"]
        known = ~np.isnan(scores)
        largest = np.max(scores, axis=1, keepdims=True, where=known, initial=0.0)
        floor = self.least + (1 - self.least) / state["round"].item() ** self.decay
        scores = np.where(known, scores, np.where(largest > 0, largest, 1.0))
        whole = self.budget if self.procedure in draw.CHANCES else 1.0
        return self.budget / whole * fill(scores, whole, shares, floor)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        back = feedback(shares, plan, seen.norm)
        norm = state["norm"].copy()
        norm[back.model, back.client] = seen.norm[back.row]
        return {"norm": norm, "round": state["round"] + 1}
