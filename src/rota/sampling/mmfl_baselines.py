"""The samplers that MMFL compares its own with: at random, in turn, by loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Question, Seen, State
from rota.sampling import assign, draw
from rota.sampling.assign import Processors, count
from rota.sampling.cohort import Cohort
from rota.sampling.feedback import HUGE, matrix
from rota.sampling.waterfill import fill


@dataclass(frozen=True)
class Random(Cohort):
    """MMFL's Random: `budget` processors at random, each with a random model of its client.

    The processors of all clients are drawn uniformly, without replacement.
    weight = times drawn * share / (B_i p), with p = budget / processors / the client's models.
    (MMFL's code leaves out B_i and the missing models, and is biased where there are any.) A budget
    that is not whole is rounded, as in the other samplers of this file.
    """

    budget: float = 12
    processors: Processors = 1

    def init(self, shares: Array, rounds: int) -> State:
        processors = count(self.processors, shares)
        if not 1 <= self.budget <= processors.sum():
            most = processors.sum()
            raise BadInput(
                f"sampler.budget is {self.budget:g} processors per round, but there are {most}: "
                f"give a number from 1 to {most}"
            )
        return {"processors": processors}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        owned, processors = (shares > 0).sum(axis=0), state["processors"]
        owner = np.repeat(np.arange(len(owned)), np.where(owned > 0, processors, 0))
        size = min(round(self.budget), len(owner))
        client = np.sort(generator.choice(owner, size, replace=False))
        place = (generator.random(size) * owned[client]).astype(np.int64)
        # for each client, the models that it has data for come first
        first = np.argsort(shares[:, client] <= 0, axis=0, kind="stable")
        model, client, times = assign.tally(first[place, np.arange(size)], client, len(owned))
        rate = assign.even(processors, size, shares)[model, client]
        probability = np.where(processors[client] == 1, rate, np.nan)
        return Plan(client, model, probability, times * shares[model, client] / rate)


@dataclass(frozen=True)
class RoundRobin(Cohort):
    """Round robin by clients: each client turns from model to model, one per round (MMFL).

    `budget` clients are drawn uniformly. The clients form S blocks, and those of block j begin with
    model j. A drawn client trains the model of its turn, if it has data for it, and each model
    takes the plain mean. That is biased: in a round a model hears only some blocks, and clients
    with unequal data count the same.
    """

    budget: float = 12

    unbiased: ClassVar[bool] = False

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        return {"turn": np.zeros(1, np.int64)}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        models, clients = shares.shape
        client, chance = cohort(self.budget, shares, generator)
        model = (client * models // clients + state["turn"][0]) % models
        able = np.flatnonzero(shares[model, client])
        plan = Plan(client, model, np.full(len(client), chance), np.ones(len(client)))
        return draw.mean(plan.of(able))

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return {"turn": state["turn"] + 1}


def cohort(budget: float, shares: Array, generator: np.random.Generator) -> tuple[Array, float]:
    """`budget` clients that have any data, drawn uniformly, and the chance to be one of them."""
    able = np.flatnonzero((shares > 0).any(axis=0))
    size = min(round(budget), len(able))
    return np.sort(generator.choice(able, size, replace=False)), size / max(len(able), 1)


@dataclass(frozen=True)
class RoundRobinServer(Cohort):
    """Round robin by the server: each round spends the whole budget on one model in turn (MMFL).

    p = waterfill(share * norm, budget) among the model's clients, which all train it to report
    their norms. The estimate is unbiased for the model of the turn; the other models wait.
    """

    budget: float = 12

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "norms of all clients"
    sees: ClassVar[frozenset[str]] = frozenset({"norm"})
    costs: ClassVar[str] = "every client trains the model of the turn"

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        return {"turn": np.zeros(1, np.int64), "norm": np.full(shares.shape, np.nan)}

    def _turn(self, state: State, shares: Array) -> Array:
        """The shares of the model of the turn; 0 for the others."""
        mine = np.arange(len(shares)) == state["turn"][0] % len(shares)
        return np.asarray(shares * mine[:, None])

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        return Question(draw.everybody(self._turn(state, shares)), "norm")

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        return {**state, "norm": matrix(state["norm"].shape, plan, np.minimum(seen.norm, HUGE))}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        mine = self._turn(state, shares)
        p = fill(np.nan_to_num(mine * state["norm"]), self.budget, mine)
        return draw.independent(p, mine, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return {**state, "turn": state["turn"] + 1}


@dataclass(frozen=True)
class FedFair(Cohort):
    """FedFairMMFL: uniform clients, which draw models by loss^(alpha - 1) (Siew et al. 2024).

    `budget` clients are drawn, and each draws one of the models that it has data for. A model's
    loss is the training loss that its clients reported when it was last trained; before that, it
    counts as the highest loss of the other models. With alpha = 1 all models are alike; a higher
    alpha favours the worst model. Each model takes the mean of its clients by their shares, as
    FedAvg does, which is biased.
    """

    budget: float = 12
    alpha: float = 3.0

    unbiased: ClassVar[bool] = False
    needs: ClassVar[str] = "losses of the drawn clients"
    sees: ClassVar[frozenset[str]] = frozenset({"loss"})
    costs: ClassVar[str] = "one number per model on the server"

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        if not 1 <= self.alpha < np.inf:
            raise BadInput(
                f"sampler.alpha is {self.alpha:g}: it must be at least 1, which treats all "
                "models alike"
            )
        return {"loss": np.full(len(shares), np.nan)}

    def chances(self, state: State, shares: Array) -> Array:
        """P[s, i], the chance of model s if client i is drawn."""
        highest = np.fmax.reduce(state["loss"], initial=0.0)
        loss = np.where(np.isnan(state["loss"]), highest, state["loss"])
        power = (self.alpha - 1) * np.log(np.maximum(loss, np.finfo(float).tiny))
        own = np.where(shares > 0, power[:, None], -np.inf)
        # relative to the client's likeliest model: the powers themselves may underflow
        chance = np.exp(own - np.maximum(own.max(axis=0), np.finfo(float).min))
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
