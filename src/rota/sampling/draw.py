"""Sampling procedures: from probabilities over pairs (model, client) to a plan whose weighted sum is unbiased.

All take and return the whole matrix [models, clients]; the weights make E[sum of weight * update] = sum of share * update
for every model.
"""

from __future__ import annotations

import numpy as np

from rota.data.federation import Array
from rota.errors import BadInput
from rota.plan import Plan


def independent(probability: Array, shares: Array, generator: np.random.Generator) -> Plan:
    """Poisson sampling: every pair by its own coin; weight = share / p. Variance sum (1/p - 1) share^2 |g|^2.

    The cohort's size is random, and an empty one leaves the models as they are.
    """
    model, client = np.nonzero(generator.random(shares.shape) < probability)
    p = probability[model, client]
    return Plan(client, model, p, shares[model, client] / p)


def fixed(size: int, shares: Array, generator: np.random.Generator) -> Plan:
    """For every model, `size` of its clients uniformly without replacement; weight = share * N / size.

    A model with fewer clients than that gets all of them.
    """
    plans = []
    for model, row in enumerate(shares):
        owners = np.flatnonzero(row)
        drawn = np.sort(generator.choice(owners, min(size, len(owners)), replace=False))
        p = len(drawn) / len(owners)
        plans.append(Plan(drawn, np.full(len(drawn), model), np.full(len(drawn), p), row[drawn] / p))
    return concatenate(plans)


def multinomial(probability: Array, draws: int, shares: Array, generator: np.random.Generator) -> Plan:
    """For every model, `draws` clients with replacement from its row of probabilities q, which sums to 1.

    A client drawn c times is one row of weight c * share / (draws * q). `Plan.probability` is the chance to be drawn at all.
    """
    plans = []
    for model, (q, row) in enumerate(zip(probability, shares, strict=True)):
        drawn, count = np.unique(generator.choice(len(q), draws, p=q), return_counts=True)
        weight = count * row[drawn] / (draws * q[drawn])
        plans.append(Plan(drawn, np.full(len(drawn), model), 1 - (1 - q[drawn]) ** draws, weight))
    return concatenate(plans)


def concatenate(plans: list[Plan]) -> Plan:
    """The rows of several plans as one."""
    return Plan(*(np.concatenate([getattr(plan, name) for plan in plans]) for name in ("client", "model", "probability", "weight")))


def check_budget(budget: float, clients: int) -> None:
    """Every sampler's budget: at least one client, at most all of them."""
    if not 1 <= budget <= clients:
        raise BadInput(f"sampler.budget is {budget:g} clients a round, but there are {clients}: give a number from 1 to {clients}")
