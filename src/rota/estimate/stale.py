"""Estimators that remember each client's last update h, and weigh how the new one, G, differs.

    estimate = sum over all of d_i beta_i h_i + sum over the drawn of weight_i (G_i - beta_i h_i)

The formula is that of MMFL. The first sum is over all clients and does not depend on the draw. So
the estimate is unbiased for every beta that does not depend on the draw, if the weights are
unbiased given the rounds before. (They are, unless a Markov chain decides which clients can be
reached.) If only k of a model's n rows succeed, the second sum is multiplied by n / k, as with
`unbiased`. The estimate's variance is that of the differences. Each h is 0 at first, and becomes G
when the client's row succeeds. Samplers learn from |G - beta h|, which is what is weighed: with the
sampler mmfl-gvr, FedVARP is MMFL's GVR*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.estimate import memory
from rota.estimate.average import Estimate, Sums, Unbiased
from rota.estimate.memory import Fresh, Place, Tensors
from rota.plan import Chunk, Plan
from rota.weights import Weights


@dataclass
class StaleSums:
    """A round in progress: its first state, its plan, all sums, and what will be remembered."""

    state: Tensors
    plan: Plan
    sums: list[Sums]
    norm: Tensor
    fresh: Fresh


@dataclass(frozen=True)
class FedVarp:
    """FedVARP: weighs differences from each client's last update (Jhunjhunwala et al. 2022).

    beta = 1. With the sampler mmfl-gvr this is MMFL-GVR*. `memory` is where the last updates
    are kept, one vector the size of the model per client: on the device, in main memory ("cpu"), or
    in a memory-mapped file in the temporary folder ("disk").
    """

    memory: Place = "device"

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    costs: ClassVar[str] = "one update per client on the server"
    numbers: ClassVar[int] = 1

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        """The memory, the `norm` of each remembered update (NaN: none yet), and each `beta`."""
        beta = {"beta": _full(shares, self._first()), "norm": _full(shares, torch.nan)}
        return {**memory.init(models, shares, self.memory), **beta, **self._more(shares)}

    def _first(self) -> float:
        """The beta of clients that are not remembered yet."""
        return 1.0

    def _more(self, shares: Array) -> Tensors:
        """More entries of the state before the first round."""
        return {}

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> StaleSums:
        memory.settle(state)
        certain, sums = self._certain(state), Unbiased().begin({}, models, plan)
        for s, model in enumerate(models):
            if self._recalls(state, s):
                known = memory.total(state, s, certain[s], model.params)
                sums[s].certain, sums[s].update = known, known.clone()
        weighed = self._weighed(state, plan)
        return StaleSums(state, weighed, sums, state["norm"].clone(), [[] for _ in models])

    def _certain(self, state: Tensors) -> Tensor:
        """The weights of the h, which do not depend on the draw."""
        return state["share"] * state["beta"]

    def _recalls(self, state: Tensors, s: int) -> bool:
        """Whether any remembered update of model s has a weight."""
        return bool(((state["norm"][s] > 0) & (self._certain(state)[s] != 0)).any())

    def _weighed(self, state: Tensors, plan: Plan) -> Plan:
        """The plan, with the weights of the differences."""
        return plan

    def add(self, sums: StaleSums, plan: Plan, chunk: Chunk) -> Array:
        clients, s = plan.client[chunk.rows], chunk.model
        old = memory.read(sums.state, s, clients, chunk.update)
        away = _away(sums.state, s, clients, chunk.update, old)
        Unbiased().add(sums.sums, sums.plan, replace(chunk, update=away))
        came = np.flatnonzero(chunk.ok)
        sums.norm[s, clients[came]] = torch.from_numpy(chunk.norm[came])
        fresh = chunk.update[came].to(sums.state[f"memory.{s}"].device)
        sums.fresh[s].append((clients[came], fresh))
        return _norms(away)

    def finish(self, state: Tensors, sums: StaleSums) -> tuple[list[Estimate], Tensors]:
        estimates, _ = Unbiased().finish({}, sums.sums)
        for s, estimate in enumerate(estimates):
            if estimate.update is None and self._recalls(state, s):
                # no client trained the model: it steps by the remembered updates alone
                estimates[s] = Estimate(sums.sums[s].update, None)
        new = memory.remember(state, sums.fresh) | {"norm": sums.norm}
        return estimates, new | self._learn(new)

    def _learn(self, state: Tensors) -> Tensors:
        """More entries of the state after the round, in which the new updates still wait."""
        return {}

    def residual(self, state: Tensors, plan: Plan, chunk: Chunk) -> tuple[Array, Tensors]:
        memory.settle(state)
        clients = plan.client[chunk.rows]
        old = memory.read(state, chunk.model, clients, chunk.update)
        state = self._fit(state, plan, chunk, old)
        return _norms(_away(state, chunk.model, clients, chunk.update, old)), state

    def _fit(self, state: Tensors, plan: Plan, chunk: Chunk, old: Tensor) -> Tensors:
        """The state with the beta for updates that are known before the draw."""
        return state


@dataclass(frozen=True)
class FedStale(FedVarp):
    """FedStale: FedVARP with one fixed `beta`, usually below 1; 0 is the plain unbiased sum."""

    beta: float = 0.8

    def _first(self) -> float:
        return _factor("beta", self.beta)


@dataclass(frozen=True)
class StaleVr(FedVarp):
    """StaleVR: FedVARP with each client's best beta, for which every client trains first (MMFL).

    The best beta, <G, h> / |h|^2, minimises |G - beta h|; it is 0 where nothing is remembered. A
    client that cannot be reached keeps its last beta, clipped to b between 0 and 1: it was fitted
    to another h, and if that h was small, it says nothing about the size of the beta for this one.

    Whether a client gets a new beta is then random. So the change by a new beta is weighted by the
    shares of the round, which are d_i / q_i for clients that can be reached (with chance q_i). The
    weight of h_i is d_i b + d_i / q_i (beta_i - b), which is d_i beta_i in expectation.
    """

    needs: ClassVar[str] = "norms of all clients"
    costs: ClassVar[str] = "one update per client on the server; every client trains"
    fits: ClassVar[bool] = True  # to the updates of all clients, so the sampler must ask for norms
    numbers: ClassVar[int] = 2  # the norm and beta

    def _more(self, shares: Array) -> Tensors:
        return {"certain": torch.from_numpy(shares * self._first())}

    def _certain(self, state: Tensors) -> Tensor:
        return state["certain"]

    def _fit(self, state: Tensors, plan: Plan, chunk: Chunk, old: Tensor) -> Tensors:
        came = np.flatnonzero(chunk.ok)
        where = chunk.model, plan.client[chunk.rows[came]]
        best = _best(chunk.update[came], old[came]).nan_to_num(0.0, 0.0, 0.0)
        beta, certain = state["beta"].clone(), state["certain"].clone()
        certain[where] += torch.from_numpy(plan.weight[chunk.rows[came]]) * (best - beta[where])
        beta[where] = best
        return {**state, "beta": beta, "certain": certain}

    def stand_in(self, before: Tensors, after: Tensors, factor: Array) -> Tensors:
        first, change = before["certain"], after["certain"] - before["certain"]
        return {**after, "certain": first + torch.from_numpy(factor)[:, None] * change}

    def _learn(self, state: Tensors) -> Tensors:
        beta = state["beta"].clamp(0.0, 1.0)
        return {"beta": beta, "certain": state["share"] * beta}


@dataclass(frozen=True)
class StaleVre(FedVarp):
    """StaleVRE: StaleVR with a beta that is estimated from drawn clients alone (MMFL's code).

    A client's beta falls as fast as it was last seen to fall. When a client's row succeeds, its
    beta becomes `start`. When it succeeds again, after k rounds, its best beta b = <G, h> / |h|^2
    gives the slope (start - b) / k, at least 0 (and 0 until then). From the next round on, beta
    falls by the slope in every round, down to 0.

    `expected` is what |G - beta h| would be if G were still h: the sampler mmfl-vre draws by it.
    With `start` = 1 it would be 0 for all clients whose beta did not fall, and they would hardly be
    drawn again.
    """

    start: float = 0.9

    def _first(self) -> float:
        return _factor("start", self.start)

    def _more(self, shares: Array) -> Tensors:
        return {"slope": _full(shares, 0.0), "age": _full(shares, 0.0)}

    def _learn(self, state: Tensors) -> Tensors:
        beta, slope, age = (state[name].clone() for name in ("beta", "slope", "age"))
        age += 1
        for s in range(len(beta)):
            clients, update = state[f"waiting_clients.{s}"].numpy(), state[f"waiting.{s}"]
            best = _best(update, memory.read(state, s, clients, update))
            fell = (self.start - best) / age[s, clients]
            known, before = torch.isfinite(fell), slope[s, clients]
            slope[s, clients] = torch.where(known, fell.clamp(min=0), before)
            beta[s, clients] = self.start
            age[s, clients] = 0
        return {"beta": (beta - slope).clamp(min=0), "slope": slope, "age": age}

    def expected(self, state: Tensors, rows: Plan) -> Array:
        norm, beta = (state[name].numpy()[rows.model, rows.client] for name in ("norm", "beta"))
        return np.asarray(np.abs(1 - beta) * norm)


@dataclass(frozen=True)
class Mifa(FedVarp):
    """MIFA: the sum of all clients' last updates, weighted by their shares (Gu et al. 2021).

    That is the sum of d_i h_i after the round. MIFA does not weigh by the chance to be drawn, so it
    is biased: clients that are seldom drawn lag behind. h is 0 until a client is first drawn, which
    makes the first rounds' steps smaller.
    """

    unbiased: ClassVar[bool] = False

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> StaleSums:
        out = super().begin(state, models, plan)
        for sums in out.sums:
            sums.asked = 0  # a client that failed counts by its last update
        return out

    def _weighed(self, state: Tensors, plan: Plan) -> Plan:
        return replace(plan, weight=state["share"].numpy()[plan.model, plan.client])


def _factor(name: str, value: float) -> float:
    if not 0 <= value < np.inf:
        raise BadInput(f"estimator.{name} is {value:g}: it must be at least 0, and finite")
    return value


def _full(shares: Array, value: float) -> Tensor:
    return torch.full(shares.shape, value, dtype=torch.float64)


def _away(state: Tensors, s: int, clients: Array, update: Tensor, old: Tensor) -> Tensor:
    """G - beta h."""
    return update - state["beta"][s, clients].to(update)[:, None] * old


def _norms(vectors: Tensor) -> Array:
    return np.asarray(torch.linalg.vector_norm(vectors, dim=1).double().cpu().numpy())


def _best(update: Tensor, old: Tensor) -> Tensor:
    """<G, h> / |h|^2 of each row; NaN where h is 0."""
    return ((update * old).sum(dim=1).double() / (old * old).sum(dim=1).double()).cpu()
