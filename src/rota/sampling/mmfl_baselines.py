"""What S0 compares its samplers over pairs (model, client) with: at random, in turn, or by how the models do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Question, Seen, State
from rota.sampling import assign, draw
from rota.sampling.assign import Processors, count
from rota.sampling.feedback import HUGE, matrix
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Random:
    """S0's Random: `budget` of all clients' processors uniformly without replacement, each with one of its client's models uniformly.

    weight = times drawn * share / (B_i p), p = budget / processors / the client's models. (S0's code leaves B_i and the missing models
    out, and is biased where there are any.) A budget that is not whole is rounded, as in the others of this file.
    """

    budget: float = 12
    processors: Processors = 1

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    costs: ClassVar[str] = "nothing"

    def init(self, shares: Array, rounds: int) -> State:
        processors = count(self.processors, shares)
        if not 1 <= self.budget <= processors.sum():
            most = processors.sum()
            raise BadInput(
                f"sampler.budget is {self.budget:g} processors a round, but there are {most}: give a number from 1 to {most}"
            )
        return {"processors": processors}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        owned, processors = (shares > 0).sum(axis=0), state["processors"]
        owner = np.repeat(np.arange(len(owned)), np.where(owned > 0, processors, 0))
        size = min(round(self.budget), len(owner))
        client = np.sort(generator.choice(owner, size, replace=False))
        place = (generator.random(size) * owned[client]).astype(np.int64)
        first = np.argsort(
            shares[:, client] <= 0, axis=0, kind="stable"
        )  # each client's models before the others
        model, client, times = assign.tally(first[place, np.arange(size)], client, len(owned))
        rate = assign.even(processors, size, shares)[model, client]
        return Plan(
            client,
            model,
            np.where(processors[client] == 1, rate, np.nan),
            times * shares[model, client] / rate,
        )

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state


@dataclass(frozen=True)
class RoundRobin:
    """Round robin by clients: each of them turns from model to model, one a round; `budget` clients are drawn uniformly (S0).

    The clients are S blocks; those of block j begin with model j. The drawn train the model of their turn, if they have data for it, and
    each model takes their mean, which is biased: in a round a model hears some blocks alone, and unequal data count the same.
    """

    budget: float = 12

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "nothing"
    costs: ClassVar[str] = "nothing"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        return {"turn": np.zeros(1, np.int64)}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        models, clients = shares.shape
        client, chance = cohort(self.budget, shares, generator)
        model = (client * models // clients + state["turn"][0]) % models
        able = np.flatnonzero(shares[model, client])
        return draw.mean(
            Plan(client, model, np.full(len(client), chance), np.ones(len(client))).of(able)
        )

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return {"turn": state["turn"] + 1}


def cohort(budget: float, shares: Array, generator: np.random.Generator) -> tuple[Array, float]:
    """`budget` of the clients that have any data, uniformly, and the chance to be one of them."""
    able = np.flatnonzero((shares > 0).any(axis=0))
    size = min(round(budget), len(able))
    return np.sort(generator.choice(able, size, replace=False)), size / max(len(able), 1)


@dataclass(frozen=True)
class RoundRobinServer:
    """Round robin by the server: each round spends the whole budget on one model in turn, with that model's best probabilities (S0).

    p = waterfill(share * norm, budget) among the model's clients, who all train it to say their norms. For the model of the turn
    the estimate is unbiased; the others wait.
    """

    budget: float = 12

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "norms of all"
    costs: ClassVar[str] = "every client trains the model of the turn"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        return {"turn": np.zeros(1, np.int64), "norm": np.full(shares.shape, np.nan)}

    def _turn(self, state: State, shares: Array) -> Array:
        """The shares of the model of the turn; 0 for the others."""
        return np.asarray(
            shares * (np.arange(len(shares)) == state["turn"][0] % len(shares))[:, None]
        )

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(self._turn(state, shares)), "norm")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {**state, "norm": matrix(state["norm"].shape, plan, np.minimum(seen.norm, HUGE))}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        mine = self._turn(state, shares)
        return draw.independent(
            fill(np.nan_to_num(mine * state["norm"]), self.budget, mine), mine, generator
        )

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return {**state, "turn": state["turn"] + 1}


@dataclass(frozen=True)
class FedFair:
    """FedFairMMFL: `budget` clients drawn uniformly, each with a model drawn in proportion to loss^(alpha - 1) (Siew et al. 2024).

    The loss is the training loss that the model's clients reported when it was last trained; before that it counts as the highest of
    the others. With alpha = 1 all models are alike, and the higher it is, the more the worst gets. A client draws among the models it
    has data for. Each model takes the mean of its clients by their shares, as FedAvg does, which is biased.
    """

    budget: float = 12
    alpha: float = 3.0

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "losses of the drawn"
    costs: ClassVar[str] = "a number a model on the server"

    def init(self, shares: Array, rounds: int) -> State:
        draw.check_budget(self.budget, shares.shape[1])
        if not 1 <= self.alpha < np.inf:
            raise BadInput(
                f"sampler.alpha is {self.alpha:g}: it must be at least 1, which treats all models alike"
            )
        return {"loss": np.full(len(shares), np.nan)}

    def chances(self, state: State, shares: Array) -> Array:
        """P[s, i], the chance of model s if client i is drawn."""
        loss = np.where(
            np.isnan(state["loss"]), np.fmax.reduce(state["loss"], initial=0.0), state["loss"]
        )
        power = (self.alpha - 1) * np.log(np.maximum(loss, np.finfo(float).tiny))
        own = np.where(shares > 0, power[:, None], -np.inf)
        chance = np.exp(
            own - np.maximum(own.max(axis=0), np.finfo(float).min)
        )  # by the client's likeliest: a power may underflow
        return np.asarray(chance / np.maximum(chance.sum(axis=0), 1.0))

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        client, chance = cohort(self.budget, shares, generator)
        chances = self.chances(state, shares[:, client])
        model, place = np.nonzero(assign.systematic(chances, 1, generator.random(len(client))))
        client, p = client[place], chance * chances[model, place]
        share = shares[model, client]
        return Plan(client, model, p, share / np.bincount(model, share)[model])

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        loss = state["loss"].copy()
        told = np.isfinite(seen.loss)
        for s in np.unique(plan.model[told]).tolist():
            rows = told & (plan.model == s)
            loss[s] = np.average(seen.loss[rows], weights=plan.weight[rows])
        return {"loss": loss}
