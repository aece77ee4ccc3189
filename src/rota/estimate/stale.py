"""Estimators that remember each client's last update h, and weigh what the new one, G, differs by (S0, multi-model FL).

    estimate = sum_i d_i beta_i h_i  +  sum over the drawn of weight_i (G_i - beta_i h_i)

The first sum is over all clients and certain, so with weights that are unbiased given the rounds before (all but those of clients that
are reached by a Markov chain) the estimate is unbiased for every beta that does not depend on the draw, and its variance is that of the
differences. The h are 0 at first, and are set to G for those who came back.
A sampler learns from |G - beta h|, which is what is weighed: with the sampler mmfl-gvr FedVARP is S0's GVR*.
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
from rota.estimate.average import Estimate, Sums, Unbiased, came_back
from rota.estimate.memory import Fresh, Place, Tensors
from rota.plan import Chunk, Plan
from rota.weights import Weights


@dataclass
class Round:
    """The state that a round began from, its plan, all models' sums, and what will be remembered."""

    state: Tensors
    plan: Plan
    sums: list[Sums]
    norm: Tensor
    fresh: Fresh


@dataclass(frozen=True)
class FedVarp:
    """FedVARP: remembers each client's last update, and weighs what the new ones differ by (beta = 1; Jhunjhunwala et al. 2022).

    With the sampler mmfl-gvr it is S0's MMFL-GVR*. `memory` is a vector the size of the model for every client: on the device, in main
    memory ("cpu"), or in a memory-mapped file in the temporary folder ("disk").
    """

    memory: Place = "device"

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    costs: ClassVar[str] = "an update a client on the server"
    numbers: ClassVar[int] = 1

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        """With the memory: its vectors' `norm` (NaN: none yet), and `beta`."""
        beta = {"beta": _full(shares, self._first()), "norm": _full(shares, torch.nan)}
        return {**memory.init(models, shares, self.memory), **beta, **self._more(shares)}

    def _first(self) -> float:
        """The beta of those who are not remembered yet, of all clients where it stays."""
        return 1.0

    def _more(self, shares: Array) -> Tensors:
        """What else is in the state before the first round."""
        return {}

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> Round:
        memory.settle(state)
        certain, sums = self._certain(state), Unbiased().begin({}, models, plan)
        for s, model in enumerate(models):
            if self._recalls(state, s):
                sums[s].update = memory.total(state, s, certain[s], model.params)
        return Round(
            state, self._weighed(state, plan), sums, state["norm"].clone(), [[] for _ in models]
        )

    def _certain(self, state: Tensors) -> Tensor:
        """What the h count whoever is drawn."""
        return state["share"] * state["beta"]

    def _recalls(self, state: Tensors, s: int) -> bool:
        """Whether anything that is remembered of model s counts."""
        return bool(((state["norm"][s] > 0) & (self._certain(state)[s] != 0)).any())

    def _weighed(self, state: Tensors, plan: Plan) -> Plan:
        """The plan with the weights of the differences."""
        return plan

    def add(self, sums: Round, plan: Plan, chunk: Chunk) -> Array:
        clients, s = plan.client[chunk.rows], chunk.model
        away = _away(
            sums.state, s, clients, chunk.update, memory.read(sums.state, s, clients, chunk.update)
        )
        Unbiased().add(sums.sums, sums.plan, replace(chunk, update=away))
        came = came_back(chunk)
        sums.norm[s, clients[came]] = torch.from_numpy(chunk.norm[came])
        sums.fresh[s].append(
            (clients[came], chunk.update[came].to(sums.state[f"memory.{s}"].device))
        )
        return _norms(away)

    def finish(self, state: Tensors, sums: Round) -> tuple[list[Estimate], Tensors]:
        estimates, _ = Unbiased().finish({}, sums.sums)
        for s, estimate in enumerate(estimates):
            if estimate.update is None and self._recalls(state, s):
                estimates[s] = Estimate(
                    sums.sums[s].update, None
                )  # nobody trained it: it goes on by what is remembered
        new = memory.remember(state, sums.fresh) | {"norm": sums.norm}
        return estimates, new | self._learn(new)

    def _learn(self, state: Tensors) -> Tensors:
        """What else is remembered after the round, in whose state the new updates wait and the old ones are in the memory."""
        return {}

    def residual(self, state: Tensors, plan: Plan, chunk: Chunk) -> tuple[Array, Tensors]:
        memory.settle(state)
        clients = plan.client[chunk.rows]
        old = memory.read(state, chunk.model, clients, chunk.update)
        state = self._fit(state, plan, chunk, old)
        return _norms(_away(state, chunk.model, clients, chunk.update, old)), state

    def _fit(self, state: Tensors, plan: Plan, chunk: Chunk, old: Tensor) -> Tensors:
        """The state with the beta for updates that are known before anybody is drawn."""
        return state


@dataclass(frozen=True)
class FedStale(FedVarp):
    """FedStale: FedVARP with one fixed `beta` for what is remembered, as a rule below 1; 0 is the plain unbiased sum."""

    beta: float = 0.8

    def _first(self) -> float:
        return _factor("beta", self.beta)


@dataclass(frozen=True)
class StaleVr(FedVarp):
    """StaleVR: FedVARP with each client's best beta, <G, h> / |h|^2; every client trains to know it before anybody is drawn (S0).

    That beta makes |G - beta h| least; it is 0 where nothing is remembered. Clients that cannot be reached keep the beta of the last time,
    as b, between 0 and 1: it was fitted to another h, and where that was small it says nothing of how large this one's should be.
    Since whether it is fitted is then a matter of chance, what a new one changes counts by the shares of the round, d_i / q_i for
    those who can be reached, where q_i is their chance: d_i b h_i + d_i / q_i (beta_i - b) h_i, in expectation d_i beta_i h_i.
    """

    needs: ClassVar[str] = "norms of all"
    costs: ClassVar[str] = "an update a client on the server; every client trains"
    fits: ClassVar[bool] = True  # from what all clients would send, which the sampler must ask for
    numbers: ClassVar[int] = 2  # with beta

    def _more(self, shares: Array) -> Tensors:
        return {"certain": torch.from_numpy(shares * self._first())}

    def _certain(self, state: Tensors) -> Tensor:
        return state["certain"]

    def _fit(self, state: Tensors, plan: Plan, chunk: Chunk, old: Tensor) -> Tensors:
        came = came_back(chunk)
        where = chunk.model, plan.client[chunk.rows[came]]
        best = _best(chunk.update[came], old[came]).nan_to_num(0.0, 0.0, 0.0)
        beta, certain = state["beta"].clone(), state["certain"].clone()
        certain[where] += torch.from_numpy(plan.weight[chunk.rows[came]]) * (best - beta[where])
        beta[where] = best
        return {**state, "beta": beta, "certain": certain}

    def _learn(self, state: Tensors) -> Tensors:
        beta = state["beta"].clamp(0.0, 1.0)
        return {"beta": beta, "certain": state["share"] * beta}


@dataclass(frozen=True)
class StaleVre(FedVarp):
    """StaleVRE: StaleVR with a beta that is estimated from the drawn alone: it falls as fast as it was last seen to fall (S0's code).

    A client that came back has beta = `start`. When it comes back again, after k rounds, its best beta b = <G, h> / |h|^2 gives the slope
    (start - b) / k, at least 0 (0 until then), by which its beta falls in every round from the next one on, down to 0.
    `expected` is what |G - beta h| would be if G were still h: the sampler mmfl-vre draws by it. With `start` = 1 it would be 0 for all
    whose beta did not fall, and they would hardly be drawn again.
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
            fell = (self.start - _best(update, memory.read(state, s, clients, update))) / age[
                s, clients
            ]
            slope[s, clients] = torch.where(
                torch.isfinite(fell), fell.clamp(min=0), slope[s, clients]
            )
            beta[s, clients] = self.start
            age[s, clients] = 0
        return {"beta": (beta - slope).clamp(min=0), "slope": slope, "age": age}

    def expected(self, state: Tensors, rows: Plan) -> Array:
        norm, beta = (state[name].numpy()[rows.model, rows.client] for name in ("norm", "beta"))
        return np.asarray(np.abs(1 - beta) * norm)


@dataclass(frozen=True)
class Mifa(FedVarp):
    """MIFA: the sum of all clients' last updates by their shares, new ones in the place of old (Gu et al. 2021).

    That is sum of d_i h_i after the round. It does not weigh by the chance to be drawn, so it is biased: those seldom drawn lag behind.
    The h are 0 until a client is first drawn, which shrinks the first rounds' steps.
    """

    unbiased: ClassVar[bool] = False

    def _weighed(self, state: Tensors, plan: Plan) -> Plan:
        return replace(plan, weight=state["share"].numpy()[plan.model, plan.client])


def _factor(name: str, value: float) -> float:
    if not 0 <= value < np.inf:
        raise BadInput(f"estimator.{name} is {value:g}, but it takes a number from 0 on")
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
