"""Sampling procedures: from rates over pairs (model, client) to a plan whose sum is unbiased.

Every procedure takes the whole matrix [models, clients]. Its weights satisfy, for every model,
E[sum of weight * update] = sum of share * update. `rota.metrics.variance` has the variance of
each procedure (K-Vib, Lemma 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from rota.arrays import Array
from rota.plan import Plan

__all__ = ["Procedure", "Weighted", "by", "concatenate", "everybody", "fixed", "independent"]
__all__ += ["mean", "mix", "multinomial", "restrict", "sequential", "systematic", "uniform"]

Procedure = Literal["fixed", "independent", "multinomial", "sequential", "systematic"]
Weighted = Literal["independent", "multinomial", "sequential", "systematic"]
CHANCES = ("independent", "systematic")
"""The procedures whose rates are each client's chance to be drawn, so that none exceeds 1."""


def by(procedure: Procedure, rates: Array, shares: Array, generator: np.random.Generator) -> Plan:
    """Draw a plan from rates; a model's row of rates sums to the number of clients it wants.

    "independent" and "systematic" take the rates as probabilities, "multinomial" and "sequential"
    draw in proportion to them, and "fixed" draws uniformly.
    """
    if procedure in CHANCES:
        return (independent if procedure == "independent" else systematic)(rates, shares, generator)
    draws = round(float(rates.sum(axis=1).max()))
    if procedure == "fixed":
        return fixed(draws, shares, generator)
    weighted = multinomial if procedure == "multinomial" else sequential
    return weighted(rates, draws, shares, generator)


def everybody(shares: Array) -> Plan:
    """Every pair that has data; weight = share."""
    model, client = np.divmod(np.flatnonzero(shares), shares.shape[1])
    return Plan(client, model, np.ones(len(client)), shares[model, client])


def independent(probability: Array, shares: Array, generator: np.random.Generator) -> Plan:
    """Poisson sampling: one coin for each pair; weight = share / p. The cohort's size is random."""
    heads = np.flatnonzero(generator.random(shares.shape) < probability)
    model, client = np.divmod(heads, shares.shape[1])
    p = probability[model, client]
    return Plan(client, model, p, shares[model, client] / p)


def systematic(probability: Array, shares: Array, generator: np.random.Generator) -> Plan:
    """For every model, a cohort whose size is sum p, rounded up or down; weight = share / p.

    The clients' p are laid end to end in random order, and hit at u, u + 1, u + 2 ... with one u in
    [0, 1) (Madow 1949). If all p are equal, every cohort of this size is equally likely (`fixed`).
    """

    def drawn_for(model: int) -> Plan:
        order = generator.permutation(np.flatnonzero(probability[model]))
        ends = np.append(0.0, np.cumsum(probability[model, order]))
        drawn = np.sort(order[np.diff(np.ceil(ends - generator.random())) > 0])
        p = probability[model, drawn]
        return Plan(drawn, np.full(len(drawn), model), p, shares[model, drawn] / p)

    return _every_model(drawn_for, probability)


def fixed(size: int, shares: Array, generator: np.random.Generator) -> Plan:
    """For every model, `size` of its clients (or all) without replacement; share * N / size."""

    def drawn_for(model: int) -> Plan:
        owners = np.flatnonzero(shares[model])
        drawn = np.sort(generator.choice(owners, min(size, len(owners)), replace=False))
        p = np.full(len(drawn), len(drawn) / len(owners))
        return Plan(drawn, np.full(len(drawn), model), p, shares[model, drawn] / p)

    return _every_model(drawn_for, shares)


def multinomial(
    probability: Array, draws: int, shares: Array, generator: np.random.Generator
) -> Plan:
    """For every model, `draws` clients with replacement, with chances q in proportion to its row.

    A client drawn c times is one row of weight c * share / (draws * q). `Plan.probability` is its
    chance to be drawn at least once.
    """

    def drawn_for(model: int) -> Plan:
        ends = np.cumsum(probability[model])
        place = np.searchsorted(ends, ends[-1] * generator.random(draws), side="right")
        last = np.searchsorted(ends, ends[-1])
        drawn, count = np.unique(np.minimum(place, last), return_counts=True)
        q = probability[model, drawn] / ends[-1]
        weight = count * shares[model, drawn] / (draws * q)
        return Plan(drawn, np.full(len(drawn), model), 1 - (1 - q) ** draws, weight)

    return _every_model(drawn_for, probability)


def sequential(
    probability: Array, draws: int, shares: Array, generator: np.random.Generator
) -> Plan:
    """For every model, `draws` clients one after another, without replacement.

    Each draw is in proportion to the model's row among the clients that are left. The weights are
    those of the ordered estimator (Raj 1956): the k-th client, drawn with chance q among those
    left, counts share / draws * (1/q + draws - k). The chance to be drawn at all has no closed
    form (it is not draws * q), so `Plan.probability` is NaN.
    """

    def drawn_for(model: int) -> Plan:
        able = np.flatnonzero(probability[model])
        size, q = min(draws, len(able)), probability[model, able]
        # exponential clocks of rates q go off in an order with the distribution of these draws
        arrival = generator.standard_exponential(len(able)) / q
        first = np.argpartition(arrival, size - 1)[:size]
        first = first[np.argsort(arrival[first])]
        left = np.delete(q, first).sum() + np.cumsum(q[first][::-1])[::-1]  # before each turn
        weight = shares[model, able[first]] / size * (left / q[first] + np.arange(size)[::-1])
        return Plan(able[first], np.full(size, model), np.full(size, np.nan), weight)

    return _every_model(drawn_for, probability)


def _every_model(drawn_for: Callable[[int], Plan], chances: Array) -> Plan:
    """The rows of every model that has clients to draw from."""
    return concatenate([drawn_for(model) for model in np.flatnonzero(chances.any(axis=1)).tolist()])


def concatenate(plans: list[Plan]) -> Plan:
    """The rows of several plans, as one plan."""
    nothing = Plan(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))

    def joined(name: str) -> Array:
        return np.concatenate([getattr(plan, name) for plan in (nothing, *plans)])

    return Plan(joined("client"), joined("model"), joined("probability"), joined("weight"))


def mean(plan: Plan) -> Plan:
    """The same rows with the weights of a plain mean, for samplers that are biased by design."""
    return replace(plan, weight=1 / np.bincount(plan.model)[plan.model])


def uniform(shares: Array) -> Array:
    """For every model, 1 / N for each of its N clients."""
    owns = shares > 0
    return np.asarray(owns / np.maximum(owns.sum(axis=1, keepdims=True), 1))


def mix(rates: Array, theta: Array, budget: float, shares: Array) -> Array:
    """(1 - theta) rates + theta min(1, budget / N), with a theta for each model of N clients."""
    owns = shares > 0
    level = theta * np.minimum(1.0, budget / np.maximum(owns.sum(axis=1), 1))
    mixed: Array = (1 - theta)[:, None] * rates
    np.add(mixed, level[:, None], out=mixed, where=owns)
    return mixed


def restrict(rates: Array, shares: Array) -> Array:
    """For every model, the rates of the clients that have data, scaled to sum to 1."""
    kept = rates * (shares > 0)
    return np.asarray(kept / np.maximum(kept.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny))
