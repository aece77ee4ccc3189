"""The variance E|estimate - D|^2 of each procedure, where D = sum of x_i, x_i = d_i g_i.

`scores` are |x_i| (an array over a model's clients), `total` is |D|, and `products` are all inner
products of the x_i. K-Vib's Lemma 2 compares upper bounds of these variances: independent coins
have the smaller bound, but a cohort of fixed size has the smaller variance wherever the updates
point the same way, |D|^2 > sum |x_i|^2.

All are exact, except that of systematic draws from more than a few clients.
"""

from __future__ import annotations

import itertools

import numpy as np

from rota.arrays import Array
from rota.sampling.draw import Procedure

__all__ = ["fixed", "independent", "multinomial", "of", "sequential", "systematic"]

FEW = 6
"""The largest number of clients whose orders are all tried, for systematic draws."""
DRAWS = 1024
"""How many systematic draws stand for all, where there are more clients."""
PAIRWISE = ("sequential", "systematic")
"""The procedures whose variance needs the inner products."""


def of(
    procedure: Procedure, rates: Array, scores: Array, total: float, products: Array | None = None
) -> float:
    """The variance of `draw.by` for one model; NaN if a procedure of PAIRWISE has no products."""
    draws = round(float(rates.sum()))
    if procedure == "independent":
        return independent(rates, scores)
    if procedure == "fixed":
        return fixed(draws, scores, total)
    if procedure == "multinomial":
        return multinomial(rates, draws, scores, total)
    if products is None:
        return np.nan
    if procedure == "systematic":
        return systematic(rates, products, np.random.default_rng(0))
    return sequential(rates, draws, products)


def independent(probability: Array, scores: Array) -> float:
    """sum (1/p - 1) |x|^2 (K-Vib, eq. 4, with equality)."""
    some = scores > 0
    return float(((1 / probability[some] - 1) * scores[some] ** 2).sum())


def fixed(size: int, scores: Array, total: float) -> float:
    """(N - K) / (K (N - 1)) (N sum |x|^2 - |D|^2)."""
    clients = len(scores)
    if size >= clients:
        return 0.0
    factor = (clients - size) / (size * (clients - 1))
    return float(factor * (clients * (scores**2).sum() - total**2))


def multinomial(probability: Array, draws: int, scores: Array, total: float) -> float:
    """(sum |x|^2 / q - |D|^2) / K."""
    some = scores > 0
    q = probability[some] / probability.sum()
    return float(((scores[some] ** 2 / q).sum() - total**2) / draws)


def sequential(probability: Array, draws: int, products: Array) -> float:
    """sum_{i<j} q_i q_j |x_i / q_i - x_j / q_j|^2 M_ij / K^2.

    M_ij is the expected min(K, turn at which i or j is first drawn). The estimates of the turns are
    uncorrelated, and turn k adds the term of a pair if neither client of it was drawn before.
    Clients arrive as independent exponential clocks of rates q, so M_ij is an integral over the
    first arrival of the two of a function of how many others came before it. Tanh-sinh quadrature
    gives it to about ten digits, in O(N^3 K): for a few hundred clients.
    """
    able = np.flatnonzero(probability)
    q = probability[able] / probability.sum()
    one, two = np.triu_indices(len(able), 1)
    squares, draws = np.diag(products)[able], min(draws, len(able))
    apart = (
        squares[one] / q[one] ** 2
        + squares[two] / q[two] ** 2
        - 2 * products[able[one], able[two]] / (q[one] * q[two])
    )
    return float((q[one] * q[two] * apart * _first_turn(q, one, two, draws)).sum() / draws**2)


def systematic(
    probability: Array, products: Array, stream: np.random.Generator, draws: int = DRAWS
) -> float:
    """The mean of |estimate - D|^2 over systematic draws: all of them, or some of `stream`.

    The formula would need every pair's chance to be drawn, which has no closed form if the order is
    random.
    """
    n = len(probability)
    if n <= FEW:  # between two neighbouring cuts, all starts draw the same cohort
        order = np.array(list(itertools.permutations(range(n))))
        cuts = np.sort(np.cumsum(probability[order], axis=1) % 1, axis=1)
        cuts = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, 1)))
        order = np.repeat(order, n + 1, axis=0)
        start, chance = (cuts[:, 1:] + cuts[:, :-1]) / 2, np.diff(cuts, axis=1) / len(cuts)
    else:
        order = np.argsort(stream.random((draws, n)), axis=1)
        start, chance = stream.random(draws), np.full(draws, 1 / draws)
    p = probability[order]
    ends = np.cumsum(p, axis=1) - start.reshape(-1, 1)
    hits = np.diff(np.ceil(ends), axis=1, prepend=np.ceil(-start.reshape(-1, 1))) > 0
    times = np.full(order.shape, -1.0)
    np.put_along_axis(times, order, np.divide(hits, p, where=hits, out=1.0 * hits) - 1, axis=1)
    return float(chance.ravel() @ ((times @ products) * times).sum(axis=1))


def _first_turn(q: Array, one: Array, two: Array, draws: int) -> Array:
    """M_ij = K - sum_{k < K-1} (K - 1 - k) P(k others before i and j)."""
    pair = q[one] + q[two]
    node = np.linspace(-3.4, 3.4, 69)
    # the logarithm of exp(-pair * time), which is uniform on [0, 1]
    log = -np.log1p(np.exp(-np.pi * np.sinh(node)))
    weight = np.exp(2 * log - np.pi * np.sinh(node)) * np.pi * np.cosh(node) * (node[1] - node[0])
    before = np.zeros((max(draws - 1, 1), len(pair), len(node)))  # P(k others so far)
    before[0] = 1.0
    for client, rate in enumerate(q):
        others = ((one != client) & (two != client))[:, None]
        came = others * -np.expm1((rate / pair)[:, None] * log)
        before[1:] = before[1:] * (1 - came) + before[:-1] * came
        before[0] *= 1 - came
    missing = np.arange(draws - 1, 0, -1) if draws > 1 else np.zeros(1)
    return np.asarray(draws - np.einsum("k,kpn,n->p", missing, before, weight))
