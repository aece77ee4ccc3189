"""Which model: rates and draws over pairs (model, client) under limits per client (MMFL, eq. 5).

`rates` [models, clients] are the expected numbers of draws of each pair in a round. They sum to the
budget. Client i has B_i processors, and there are two schemes:

- MMFL's: each processor draws a model, or none, by itself. Then sum_s rates <= B_i, and a client
  may draw one model twice, which then counts twice.
- `distinct`: a client draws up to B_i different models. Then every rate is also at most 1.

Both minimise the sum over pairs of score^2 / rate, which is the estimates' variance up to a
constant. Scores are 0 where there is no data.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.data.memory import check_room
from rota.errors import BadInput
from rota.plan import Plan
from rota.sampling.waterfill import waterfill

Processors = int | tuple[int, ...] | Literal["mixed"]
"""The number of models that a client can train in a round: one for all, one each, or MMFL's mix."""


def capped(scores: Array, most: Array, budget: float) -> Array:
    """The p that minimises sum a^2 / p with p <= most and sum p = budget, exactly.

    It is p = min(most, a / level). What those with a > 0 cannot take of the budget goes to the
    others, in proportion to their `most`. If the budget is more than all can take, p is `most`.
    """
    if (most == 1).all():
        return waterfill(scores, budget)
    positive = scores > 0
    rest = budget - most[positive].sum()
    if rest >= 0:
        idle = np.where(positive, 0.0, most)
        part = min(rest, idle.sum()) / idle.sum() if idle.any() else 0.0
        return np.where(positive, most, idle * part)
    scores = _scaled(scores)
    a, m, left = scores[positive], most[positive], budget
    while True:  # the level falls in every pass, so what is full stays full; few passes are needed
        level = max(a.sum() / left, np.finfo(float).tiny)
        full = a > m * level
        after = left - m[full].sum()
        if after == left or after <= 0:  # none is full; or, by rounding, the full use up everything
            with np.errstate(over="ignore"):
                return np.asarray(np.minimum(most, scores / level))
        a, m, left = a[~full], m[~full], after


def _scaled(scores: Array) -> Array:
    """Scores of about 1 that give the same rates to the bit; sums of tiny ones would underflow."""
    return np.asarray(np.ldexp(scores, -np.frexp(scores.max(initial=0.0))[1]))


def by_processor(scores: Array, most: Array, budget: float, shares: Array) -> Array:
    """MMFL's rates, with each client as its B_i processors (eq. 5).

    A client's rates sum to at most most_i. A processor's p are in proportion to its scores / B_i,
    and a client's processors are alike, so R_i = sum_s rates[s, i] minimises
    sum (sum_s scores)^2 / R with R_i <= most_i: the water-filling of the clients' sums. Each R_i is
    split in proportion to the client's scores.
    """
    owns = shares > 0
    able, total = owns.any(axis=0), scores.sum(axis=0)
    out = np.divide(scores, total, out=owns / np.maximum(owns.sum(axis=0), 1), where=total > 0)
    out[:, able] *= capped(total[able], most[able], budget)
    return np.asarray(out)


def distinct(scores: Array, most: Array, budget: float, shares: Array) -> Array:
    """The rates for clients that draw each model at most once: min(1, a / level_i).

    level_i is the common level, or the level at which the client's sum is most_i if that is higher.
    """
    scores = _scaled(scores)
    upper = _alone(scores, most, shares)
    out, owns = np.zeros(shares.shape), shares > 0
    out[owns] = capped(scores[owns], upper[owns], budget)
    return out


def _alone(scores: Array, most: Array, shares: Array) -> Array:
    """Each client's own water-filling of most_i over its models (MMFL, eq. 5 by columns)."""
    owns, positive = shares > 0, scores > 0
    number, models = positive.sum(axis=0), len(shares)
    spare = np.maximum(most - number, 0) / np.maximum((owns & ~positive).sum(axis=0), 1)
    out = np.where(positive, 1.0, owns * np.minimum(1.0, spare))
    many = number > most
    some = scores[:, many]
    ascending = np.sort(some, axis=0)
    below = np.cumsum(ascending, axis=0)
    # what is left for the first 1, 2, ... models, where each of the others takes 1
    left = most[many] - models + np.arange(1, models + 1)[:, None]
    fits = (left > 0) & (left * ascending <= below)
    last = models - 1 - np.argmax(fits[::-1], axis=0)  # eq. 5's k: the largest that fits
    at = (last, np.arange(some.shape[1]))
    out[:, many] = np.minimum(1.0, some * (left[at] / below[at]))
    return out


def even(processors: Array, budget: float, shares: Array) -> Array:
    """Equal rates for all processors, split equally over the models of each client."""
    owns = shares > 0
    reached = processors[owns.any(axis=0)].sum()
    chance = min(1.0, budget / max(reached, 1))
    return np.asarray(chance * processors * (owns / np.maximum(owns.sum(axis=0), 1)))


def systematic(rates: Array, most: Array | int, start: Array) -> Array:
    """Which models each client draws, by systematic sampling.

    A client's rates are laid end to end, and hit at start_i, start_i + 1, ... below most_i. The
    marginals are exact, and a client draws at most its sum rounded up. `most` bounds the sum, which
    rounding must not exceed.
    """
    ends = np.zeros((len(rates) + 1, rates.shape[1]))
    np.cumsum(rates, axis=0, out=ends[1:])
    hits = np.ceil(np.minimum(ends, most) - start)
    return np.asarray(hits[1:] > hits[:-1])


def draw_processors(
    rates: Array, processors: Array, shares: Array, generator: np.random.Generator
) -> Plan:
    """Every processor draws a model with the probabilities p = rates / B_i, or none.

    weight = times drawn * share / (B_i p). `Plan.probability` is the chance to be drawn at all.
    """
    ends = np.cumsum(rates / processors, axis=0)
    owner = np.repeat(np.arange(len(processors)), processors)
    start = generator.random(len(owner))
    busy = np.flatnonzero(start < ends[-1, owner])
    client = owner[busy]
    drawn = (ends[:, client] <= start[busy]).sum(axis=0)
    model, client, times = tally(drawn, client, len(processors))
    rate, count = rates[model, client], processors[client]
    with np.errstate(divide="ignore"):  # log 0 where a pair is certain
        missed = count * np.log1p(-np.minimum(rate / count, 1.0))
    once = np.where(count == 1, rate, -np.expm1(missed))
    return Plan(client, model, once, times * shares[model, client] / rate)


def tally(model: Array, client: Array, clients: int) -> tuple[Array, Array, Array]:
    """Each distinct pair once: its model, its client, and its number of occurrences."""
    pair, times = np.unique(model * clients + client, return_counts=True)
    return pair // clients, pair % clients, times


def draw_distinct(
    rates: Array, processors: Array, shares: Array, generator: np.random.Generator
) -> Plan:
    """Every client draws different models, by systematic sampling; weight = share / rate."""
    model, client = np.nonzero(systematic(rates, processors, generator.random(len(processors))))
    rate = rates[model, client]
    return Plan(client, model, rate, shares[model, client] / rate)


def count(processors: Processors, shares: Array) -> Array:
    """The number of models that each client can train in a round."""
    clients = shares.shape[1]
    if isinstance(processors, str) and processors == "mixed":
        return mixed(shares)
    found = np.asarray(processors)
    whole = found.dtype.kind in "iu" and found.shape in ((), (clients,))
    if not whole or not (found >= 1).all():
        raise BadInput(
            "sampler.processors takes whole numbers from 1: give one, or one for each of the "
            f"{clients} clients, or 'mixed'"
        )
    number = float(np.broadcast_to(found, clients).sum(dtype=np.float64))
    check_room(64 * number, f"sampler.processors: {number:,.0f} draws per round", "set it lower")
    return np.broadcast_to(found, clients).astype(np.int64)


def mixed(shares: Array, seed: int | None = None) -> Array:
    """MMFL's processors, for a quarter, half and a quarter of the clients.

    In a round, a quarter of the clients can train one model, half of them half of their models
    (rounded up), and a quarter all of their models. Which client belongs to which part is a
    property of the clients, as their data are: without a seed, a hash of the shares decides.
    """
    if seed is None:
        told = np.ascontiguousarray(shares).tobytes()
        seed = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
    owned = np.maximum((shares > 0).sum(axis=0), 1)
    place = rng.generator(rng.key(seed, "processors")).permutation(len(owned)) / len(owned)
    return np.asarray(np.where(place < 0.25, 1, np.where(place < 0.75, -(-owned // 2), owned)))
