"""Which model: rates and draws over pairs (model, client), where a client can train only so many models in a round (S0 eq. 5).

`rates` [models, clients] say how often each pair is drawn in a round, on average; they sum to the budget. Client i has B_i processors. In
S0's scheme each of them draws a model, or none, by itself: sum_s rates <= B_i, and a client may draw one model twice, which then
counts twice. The other scheme is `distinct`: a client draws up to B_i different models, so that also every rate is at most 1. Both
minimise sum over pairs of score^2 / rate, which is the estimates' variance but for a constant. Scores are 0 where there is no data.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan
from rota.sampling.waterfill import waterfill

Processors = int | tuple[int, ...] | Literal["mixed"]
"""How many models a client can train in a round: all alike, each its own, or as in S0."""


def capped(scores: Array, most: Array, budget: float) -> Array:
    """The p that minimises sum a^2 / p subject to p <= most and sum p = budget: p = min(most, a / level), exactly.

    A budget beyond what those with a > 0 can take goes to the others, in proportion to their `most`; one beyond all is `most`.
    """
    if (most == 1).all():
        return waterfill(scores, budget)
    positive = scores > 0
    rest = budget - most[positive].sum()
    if rest >= 0:
        idle = np.where(positive, 0.0, most)
        return np.where(
            positive, most, idle * (min(rest, idle.sum()) / idle.sum() if idle.any() else 0.0)
        )
    scores = _scaled(scores)
    a, m, left = scores[positive], most[positive], budget
    while True:  # the level falls from turn to turn, so those who are full stay full; few turns
        level = max(a.sum() / left, np.finfo(float).tiny)
        full = a > m * level
        after = left - m[full].sum()
        if after == left or after <= 0:  # nobody is full; or rounding says that the full use up all
            with np.errstate(over="ignore"):
                return np.asarray(np.minimum(most, scores / level))
        a, m, left = a[~full], m[~full], after


def _scaled(scores: Array) -> Array:
    """In parts of a power of two near the largest: the same rates to the bit, and sums of tiny scores do not underflow."""
    return np.asarray(np.ldexp(scores, -np.frexp(scores.max(initial=0.0))[1]))


def by_processor(scores: Array, most: Array, budget: float, shares: Array) -> Array:
    """S0's rates, each client as its B_i processors (eq. 5): those of a client sum to at most most_i.

    A processor's p are in proportion to its scores / B_i, and a client's processors are alike, so R_i = sum_s rates[s, i] minimises
    sum (sum_s scores)^2 / R under R_i <= most_i: the water-filling of the clients' sums. It is split in proportion to the scores.
    """
    owns = shares > 0
    able, total = owns.any(axis=0), scores.sum(axis=0)
    out = np.divide(scores, total, out=owns / np.maximum(owns.sum(axis=0), 1), where=total > 0)
    out[:, able] *= capped(total[able], most[able], budget)
    return np.asarray(out)


def distinct(scores: Array, most: Array, budget: float, shares: Array) -> Array:
    """The rates of a client that draws each model at most once: min(1, a / level_i), where level_i is the common level, or the one at
    which the client's sum is most_i, if that is higher.

    So a rate is at most what it would be if its client did all that it can, and under those caps the level is common.
    """
    scores = _scaled(scores)
    upper = _alone(scores, most, shares)
    out, owns = np.zeros(shares.shape), shares > 0
    out[owns] = capped(scores[owns], upper[owns], budget)
    return out


def _alone(scores: Array, most: Array, shares: Array) -> Array:
    """Every client's own water-filling of what it can do over its models (S0 eq. 5 by columns)."""
    owns, positive = shares > 0, scores > 0
    number, models = positive.sum(axis=0), len(shares)
    spare = np.maximum(most - number, 0) / np.maximum((owns & ~positive).sum(axis=0), 1)
    out = np.where(positive, 1.0, owns * np.minimum(1.0, spare))
    many = number > most
    some = scores[:, many]
    ascending = np.sort(some, axis=0)
    below = np.cumsum(ascending, axis=0)
    left = (
        most[many] - models + np.arange(1, models + 1)[:, None]
    )  # for the first 1, 2, ... of them, where the others have 1
    fits = (left > 0) & (left * ascending <= below)
    last = models - 1 - np.argmax(fits[::-1], axis=0)  # eq. 5's k: the largest that fits
    at = (last, np.arange(some.shape[1]))
    out[:, many] = np.minimum(1.0, some * (left[at] / below[at]))
    return out


def even(processors: Array, budget: float, shares: Array) -> Array:
    """All processors alike, and each with its client's models in equal parts."""
    owns = shares > 0
    reached = processors[owns.any(axis=0)].sum()
    return np.asarray(
        min(1.0, budget / max(reached, 1)) * processors * (owns / np.maximum(owns.sum(axis=0), 1))
    )


def systematic(rates: Array, most: Array | int, start: Array) -> Array:
    """Which models each client draws: its rates laid end to end are hit at start_i, start_i + 1, ... below most_i.

    The marginals are exact, and a client draws at most the next whole number of its sum. `most` is the sum's bound, which
    rounding must not pass.
    """
    ends = np.zeros((len(rates) + 1, rates.shape[1]))
    np.cumsum(rates, axis=0, out=ends[1:])
    hits = np.ceil(np.minimum(ends, most) - start)
    return np.asarray(hits[1:] > hits[:-1])


def draw_processors(
    rates: Array, processors: Array, shares: Array, generator: np.random.Generator
) -> Plan:
    """Every processor draws a model with the probabilities p = rates / B_i, or none; weight = times drawn * share / (B_i p).

    `Plan.probability` is the chance to be drawn at all.
    """
    ends = np.cumsum(rates / processors, axis=0)
    owner = np.repeat(np.arange(len(processors)), processors)
    start = generator.random(len(owner))
    busy = np.flatnonzero(start < ends[-1, owner])
    client = owner[busy]
    model, client, times = tally(
        (ends[:, client] <= start[busy]).sum(axis=0), client, len(processors)
    )
    rate, count = rates[model, client], processors[client]
    with np.errstate(divide="ignore"):  # log 0 for those that are certain
        once = np.where(
            count == 1, rate, -np.expm1(count * np.log1p(-np.minimum(rate / count, 1.0)))
        )
    return Plan(client, model, once, times * shares[model, client] / rate)


def tally(model: Array, client: Array, clients: int) -> tuple[Array, Array, Array]:
    """Each pair once: its model, its client, and how often it is there."""
    pair, times = np.unique(model * clients + client, return_counts=True)
    return pair // clients, pair % clients, times


def draw_distinct(
    rates: Array, processors: Array, shares: Array, generator: np.random.Generator
) -> Plan:
    """Every client draws different models by systematic sampling; weight = share / rate."""
    model, client = np.nonzero(systematic(rates, processors, generator.random(len(processors))))
    rate = rates[model, client]
    return Plan(client, model, rate, shares[model, client] / rate)


def count(processors: Processors, shares: Array) -> Array:
    """How many models each client can train in a round."""
    clients = shares.shape[1]
    if isinstance(processors, str) and processors == "mixed":
        return mixed(shares)
    found = np.asarray(processors)
    if (
        found.dtype.kind not in "iu"
        or found.shape not in ((), (clients,))
        or not (found >= 1).all()
    ):
        raise BadInput(
            f"sampler.processors must be whole numbers from 1: one, or one for each of the {clients} clients, or 'mixed'"
        )
    return np.broadcast_to(found, clients).astype(np.int64)


def mixed(shares: Array, seed: int | None = None) -> Array:
    """S0's processors: in a round a quarter of the clients can train one model, half of them half of theirs (rounded up), a quarter all.

    Who is who is part of the clients, as their data are: without a seed it is drawn by the shares, so that another split has others.
    """
    if seed is None:
        seed = int.from_bytes(
            hashlib.blake2b(np.ascontiguousarray(shares).tobytes(), digest_size=8).digest(),
            "little",
        )
    owned = np.maximum((shares > 0).sum(axis=0), 1)
    place = rng.generator(rng.key(seed, "processors")).permutation(len(owned)) / len(owned)
    return np.asarray(np.where(place < 0.25, 1, np.where(place < 0.75, -(-owned // 2), owned)))
