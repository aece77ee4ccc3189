"""Lemmas and identities of the lecture and of K-Vib's paper, by enumeration on small instances.

A cohort's chance and its estimate follow the textbook; the probabilities are rota's. That a form is
optimal is measured by moving some of each probability to each other one. The objectives are
convex, so a better place anywhere shows as a fall nearby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data.federation import Examples
from rota.data.partition import high_low, shards
from rota.metrics import variance
from rota.sampling import assign
from rota.sampling.waterfill import waterfill
from rota_lab.reproduce.interval import FAILS, HOLDS, Claim
from rota_lab.reproduce.result import Result, Row, over_seeds

CLIENTS, BUDGET, SIZE = 6, 3, 4
STEPS = (0.001, 0.03, 0.9)
"""The parts of what a probability can give to another one that are tried."""
ROUNDING = 1e-9
FLOOR, THETA = 0.1, 0.3


class Instance(NamedTuple):
    """Weighted updates x_i, their norms a_i, and unequal probabilities that sum to the budget."""

    x: Array
    a: Array
    p: Array
    generator: np.random.Generator


def instance(seed: int) -> Instance:
    """A random instance. Norms are log-normal, and updates partly agree."""
    generator = rng.generator(rng.key(seed, "exact"))
    x = generator.normal(size=(CLIENTS, SIZE)) + generator.uniform(0, 2) * np.ones(SIZE)
    x = x * generator.lognormal(0, 1, (CLIENTS, 1))
    return Instance(x, np.linalg.norm(x, axis=1), feasible(generator, CLIENTS, BUDGET), generator)


def feasible(generator: np.random.Generator, size: int, budget: float) -> Array:
    """Random probabilities from 0.01 to 1 that sum to the budget."""
    return waterfill(generator.lognormal(0, 1, size), budget, 0.01)


def coins(p: Array) -> Iterator[tuple[float, Array]]:
    """Each cohort of independent coins: its chance, and the weights of its estimate."""
    for heads in product((0.0, 1.0), repeat=len(p)):
        drawn = np.array(heads)
        yield float(np.where(drawn > 0, p, 1 - p).prod()), drawn / p


def cohorts() -> Iterator[tuple[float, Array]]:
    """Each cohort of a fixed size, likewise."""
    some = list(combinations(range(CLIENTS), BUDGET))
    for cohort in some:
        yield 1 / len(some), np.isin(np.arange(CLIENTS), cohort) * CLIENTS / BUDGET


def moments(outcomes: Iterator[tuple[float, Array]], x: Array) -> tuple[Array, float]:
    """The mean of the estimate, and its variance."""
    mean, spread, total = np.zeros(x.shape[1]), 0.0, x.sum(axis=0)
    for chance, weights in outcomes:
        mean += chance * (weights @ x)
        spread += chance * float(((weights @ x - total) ** 2).sum())
    return mean, spread


def least_nearby(cost: Callable[[Array], float], best: Array, floor: float = 0.0) -> float:
    """The least cost if some of one rate goes to another one, in units of the cost of `best`.

    Rates are [models, clients]; each is at least `floor`, and a client's sum is at most 1. All
    steps between two rates are tried, and every feasible direction is a sum of such steps.
    """
    costs = []
    pairs = list(np.ndindex(best.shape))
    for one, two in product(pairs, pairs):
        room = np.inf if one[1] == two[1] else 1 - best[:, two[1]].sum()
        for part in STEPS:
            moved = part * min(best[one] - floor, room)
            if one != two and moved > 0:
                there = best.copy()
                there[one] -= moved
                there[two] += moved
                costs.append(cost(there))
    return min(costs) / cost(best)


def by_models(seed: int) -> dict[str, float]:
    """MMFL: clients with one processor draw one of two models or none (slides on sampling)."""
    generator = rng.generator(rng.key(seed, "exact", "models"))
    clients, budget = 4, 2.0
    shares = generator.dirichlet(np.ones(clients), size=2)
    norms = generator.lognormal(0, 1, shares.shape) * shares
    one = np.ones(clients)
    p = assign.by_processor(norms, one, budget, shares)
    mean, certain = np.zeros_like(shares), 0.0
    for choice in product((0, 1, None), repeat=clients):
        chance, weights = 1.0, np.zeros_like(shares)
        for client, model in enumerate(choice):
            chance *= 1 - p[:, client].sum() if model is None else p[model, client]
            if model is not None:
                weights[model, client] = shares[model, client] / p[model, client]
        mean, certain = mean + chance * weights, certain + chance

    def cost(rates: Array) -> float:
        return float((norms**2 / rates).sum())

    order = np.argsort(norms.sum(axis=0))
    return {
        "mean": float(np.abs(mean - shares).max()) + abs(certain - 1),
        "least": least_nearby(cost, p),
        "rises": float(np.diff(p.sum(axis=0)[order]).min()),
    }


def procedures(seed: int) -> dict[str, float]:
    """K-Vib's Lemmas 2, 3, 7 and 18, eqs. 2 to 5 and 9, and Definition 12."""
    x, a, p, generator = instance(seed)
    uniform, total = np.full(CLIENTS, BUDGET / CLIENTS), x.sum(axis=0)
    coin_mean, coin_spread = moments(coins(p), x)
    cohort_mean, cohort_spread = moments(cohorts(), x)
    factor = (CLIENTS - BUDGET) / (CLIENTS - 1)
    best, floored = waterfill(a, BUDGET), waterfill(a, BUDGET, FLOOR)
    gamma = float(generator.lognormal())
    led = waterfill(np.sqrt(a**2 + gamma), BUDGET)

    def least(scores: Array, q: Array, floor: float = 0.0) -> float:
        return least_nearby(lambda rates: float((scores**2 / rates).sum()), q[None], floor)

    mixed = (1 - THETA) * best + THETA * BUDGET / CLIENTS
    feedback = sum(chance * weights * a**2 for chance, weights in coins(mixed))
    scale = float(np.abs(total).max())
    return {
        "mean": max(np.abs(coin_mean - total).max(), np.abs(cohort_mean - total).max()) / scale,
        "eq. 3": cohort_spread / (factor * float((a**2 / uniform).sum())),
        "eq. 4": abs(coin_spread / variance.independent(p, a) - 1),
        "bounds": variance.independent(uniform, a) / (factor * float((a**2 / uniform).sum())),
        "bounds, unequal": variance.independent(p, a) / (factor * float((a**2 / p).sum())),
        "variances": variance.independent(uniform, a) / cohort_spread,
        "Lemma 3": least(a, best),
        "Lemma 18": least(a, floored, FLOOR),
        "Lemma 7": least(np.sqrt(a**2 + gamma), led),
        "eq. 9": float(mixed.min()) / (THETA * BUDGET / CLIENTS),
        "feedback": float(np.abs(feedback / a**2 - 1).max()),
        "improvement": variance.independent(best, a) / variance.independent(uniform, a),
    }


def splits(seed: int) -> dict[str, float]:
    """The lecture's splits, dealt from labels whose classes differ in size, as MNIST's do."""
    generator = rng.generator(rng.key(seed, "exact", "labels"))
    labels = torch.from_numpy(generator.integers(10, size=60_000))
    examples = Examples(torch.zeros(len(labels), 1), labels)
    owner, clients = high_low()(examples, generator)
    sizes = np.bincount(owner[owner >= 0], minlength=clients)
    owner, clients = shards()(examples, generator)
    seen = np.unique(np.stack([owner, labels.numpy()]), axis=1)[0]
    return {
        "share": float(np.sort(sizes)[-round(0.1 * clients) - 2 :].sum() / sizes.sum()),
        "labels": float(np.bincount(seen).max()),
        "more": float((np.bincount(seen) > 2).sum()),
    }


def slopes(number: int) -> list[float]:
    """How far |F'(x) - F'(y)| / |x - y| is from 1 for F(x) = x²/2, differentiated by torch."""
    generator = rng.generator(rng.key(0, "exact", "points"))
    x = torch.from_numpy(generator.normal(size=(number, 2))).requires_grad_()
    (slope,) = torch.autograd.grad((x**2 / 2).sum(), x)
    ratio = (slope[:, 0] - slope[:, 1]).abs() / (x[:, 0] - x[:, 1]).abs()
    return [float(each) for each in (ratio - 1).abs().detach()]


def exact(quick: bool = False) -> Result:
    """Lemmas and identities of the lecture and of K-Vib's paper, by enumeration."""
    number = 3 if quick else 30
    found: dict[str, list[float]] = {}
    for name, measured in (("MMFL", by_models), ("K-Vib", procedures), ("split", splits)):
        for seed in range(number):
            for key, value in measured(seed).items():
                found.setdefault(f"{name}, {key}", []).append(value)
    found["F(x) = x²/2, slopes"] = slopes(number)
    rows: list[Row] = [over_seeds(name, None, values) for name, values in found.items()]
    claims = _claims(found, number)
    title = "Lemmas and identities, by enumeration"
    return Result("exact", title, TEXT, rows, quick=quick, claims=claims)


def _claims(found: dict[str, list[float]], number: int) -> list[Claim]:
    def claim(held: bool, words: str) -> Claim:
        return Claim(f"{words}, over {number} instances", HOLDS if held else FAILS)

    def tiny(key: str, words: str) -> Claim:
        most = max(found[key])
        bound = f"within {ROUNDING:g}" if most < ROUNDING else f"but for {most:.2g}"
        return claim(most < ROUNDING, f"{words}, {bound}")

    def below(key: str, words: str) -> Claim:
        values = np.array(found[key])
        more = f"{values.min():.3g} to {values.max():.3g}"
        above = int((values > 1 + ROUNDING).sum())
        return claim(not above, f"{words}: the ratio is {more}, and above 1 in {above}")

    def least(key: str, words: str) -> Claim:
        value = min(found[key])
        same = "none is less" if value >= 1 - ROUNDING else f"one is {value:.6g} times as large"
        return claim(value >= 1 - ROUNDING, f"{words}: of all probabilities nearby, {same}")

    share, more = found["split, share"], found["split, more"]
    return [
        tiny("F(x) = x²/2, slopes", "F(x) = x²/2: slopes differ by as much as x and y"),
        tiny("MMFL, mean", "MMFL's weights: the mean of the estimate is full participation's"),
        least("MMFL, least", "MMFL's equation (5) has the least variance"),
        claim(
            min(found["MMFL, rises"]) >= -ROUNDING,
            "MMFL's equation (5) draws clients with larger updates at least as often",
        ),
        claim(
            abs(float(np.mean(share)) - 0.526) < 0.02,
            f"10 % of the clients hold 52.6 %: here {np.mean(share):.1%} "
            f"({min(share):.1%} to {max(share):.1%})",
        ),
        claim(
            max(found["split, labels"]) <= 2,
            f"two shards are at most two labels: here {min(more):.0f} to {max(more):.0f} of 100 "
            "clients have more, where classes are no multiples of a shard",
        ),
        tiny("K-Vib, mean", "eq. 2: coins and cohorts of a fixed size are unbiased"),
        below("K-Vib, eq. 3", "eq. 3 bounds the variance of uniform cohorts of a fixed size"),
        tiny("K-Vib, eq. 4", "eq. 4 is the variance of coins"),
        below("K-Vib, bounds", "the upper bound of coins / that of fixed cohorts, equal p"),
        below("K-Vib, bounds, unequal", "the upper bound of eq. 4 / that of eq. 3, unequal p"),
        below(
            "K-Vib, variances", "Lemma 2: the variance of coins / that of fixed cohorts, equal p"
        ),
        least("K-Vib, Lemma 3", "Lemma 3's probabilities have the least variance"),
        least("K-Vib, Lemma 18", "Lemma 18's probabilities have the least variance"),
        least("K-Vib, Lemma 7", "Lemma 7's probabilities minimise eq. 8"),
        tiny("K-Vib, feedback", "the mean of the estimated feedback is every client's"),
        claim(
            min(found["K-Vib, eq. 9"]) >= 1 - ROUNDING,
            f"eq. 9's mixture is at least theta K / N: at least {min(found['K-Vib, eq. 9']):.3g} "
            "times",
        ),
        below("K-Vib, improvement", "Definition 12's improvement factor over uniform coins"),
    ]


TEXT = f"""
Sentences of the lecture and of K-Vib's paper that are true or false without any training. Each is
measured on small random instances: {CLIENTS} clients, a budget of {BUDGET}, updates with
{SIZE} numbers, and norms that differ as log-normal numbers do. Means and variances are sums over
all cohorts that can be drawn. That a form is optimal is measured by moving a part of each
probability to each other one: a little, somewhat, and most of it. Since the objectives are convex,
a better place anywhere would show as a fall nearby.

Two sentences do not hold as they stand:

- Lemma 2 concludes that independent sampling always minimises the upper bound, whatever the
  probabilities are. With equal probabilities it does. Eq. 3's factor belongs to these; with unequal
  ones a client with a small p has a larger factor in eq. 4. And the bound is not the variance:
  where updates agree, cohorts of a fixed size vary less than coins.
- The lecture's two shards of 300 images are more than two digits where a shard lies across the
  border of two classes.
"""
