"""The smaller studies of kvib-theory.

Learning rates, the growth of K-Vib's regret in K, N and T, other federations, made-up updates, and
who holds how much (K-Vib's Figure 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rota import data, models, partition
from rota.arrays import Array
from rota.data.federation import Federation
from rota.data.partition import unbalanced
from rota.engine import make
from rota.experiment import Experiment
from rota.metrics import variance
from rota.plan import Task, whole
from rota.sampling import Full, KVib, draw
from rota.weights import Weights
from rota_lab.reproduce.kvib_parts import (
    BUDGET,
    ENDS,
    SEEDS,
    SETTINGS,
    Piece,
    finite,
    of,
    tested,
)
from rota_lab.reproduce.kvib_stack import (
    Lane,
    Row,
    Stack,
    least_cost,
    own_updates,
    shared_updates,
)
from rota_lab.reproduce.parts import Found, in_time

RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
SWEPT = ("full", "uniform-fixed", "osmd-multinomial", "kvib-independent")
SWEEP_BUDGET = 5
"""The smallest budget: there the noise is largest."""
CLIENTS = (25, 50, 100, 200)
GROWTH_BUDGETS = (5, 10, 20, 40)
FRACTIONS = (0.05, 0.1, 0.2)
"""The budgets on other federations, as parts of the clients."""
OTHER_ROUNDS, MADE_ROUNDS, GROWTH_ROUNDS = 50, 100, 250
DRAWS, QUICK_DRAWS = 5, 2
"""The runs of each sampler on one recorded sequence."""
COINS = (
    "uniform-independent",
    "proportional-independent",
    "avare-independent",
    "kvib-independent",
    "succession-independent",
    "optimal",
)
"""The samplers on made-up updates: those whose variance does not depend on the updates' angles."""
RIVALS = (
    *("uniform-fixed", "vrb-multinomial", "avare-multinomial"),
    *("proportional-systematic", "succession-systematic"),
    *COINS,
)
"""The samplers on other federations."""
LARGEST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Figure 6: how much the clients with most data hold, for these parts of the clients."""


def sweep(part: Piece, federation: Federation, deadline: float) -> Found:
    """Learning rates on logits at K = 5."""
    lanes = []
    for rate in RATES:
        for name in SWEPT:
            sampler = Full() if name == "full" else of(name, SWEEP_BUDGET)
            lanes.append(Lane(f"{name}-{rate:g}", sampler, rate))
    stack = Stack(federation, lanes, part.seed)
    meters, weights, _ = own_updates(stack, part.rounds, deadline)
    return {"own": tested(stack, meters, weights)}


def growth(part: Piece, _: Federation, deadline: float) -> Found:
    """K-Vib's static regret over T, and over K, on updates of N clients of Synthetic(0, 0).

    G is the largest pi of the sequence, as Theorem 8 needs it, and the regret is in units of G^2.
    """
    clients = int(part.which.removeprefix("N"))
    rate, _twice = SETTINGS["logits"]
    federation = data.synthetic(0.0, 0.0, clients=clients)
    stack = Stack(federation, [Lane("full", Full(), rate)], 0)
    recorded = own_updates(stack, part.rounds, deadline)[2]
    draws, out = QUICK_DRAWS if part.quick else DRAWS, dict[str, Any](T={}, K={})
    ends = [end for end in ENDS if end < part.rounds] if clients == 100 else []
    for end in [*ends, part.rounds]:
        out["T"][str(end)] = static(recorded[:end], stack.shares, BUDGET, draws, deadline)
    for budget in GROWTH_BUDGETS if clients == 100 else ():
        out["K"][str(budget)] = static(recorded, stack.shares, budget, draws, deadline)
    return out


def static(
    rows: Sequence[Row], shares: Array, budget: int, draws: int, deadline: float
) -> list[float | None]:
    """K-Vib's static regret (eq. 7) by draw, in units of G^2."""
    scores = np.array([row.scores for row in rows])
    largest = float(scores.max())
    fixed = least_cost(np.sqrt((scores**2).sum(axis=0)), budget)
    out = []
    for seed in SEEDS[:draws]:
        in_time(deadline)
        meter = shared_updates(Lane("kvib", KVib(budget, bound=largest)), shares, rows, seed)
        out.append(finite((float(np.sum(meter.cost)) - fixed) / largest**2))
    return out


def on_recorded(
    names: Sequence[str], shares: Array, rows: Sequence[Row], draws: int, deadline: float
) -> dict[str, dict[str, list[float | None]]]:
    """Cumulative variances by budget, sampler and draw."""
    clients, out = shares.shape[1], dict[str, dict[str, list[float | None]]]()
    for fraction in FRACTIONS:
        budget = max(2, round(fraction * clients))
        out[str(budget)] = {}
        for name in names:
            totals = list[float | None]()
            for seed in SEEDS[:draws]:
                in_time(deadline)
                if not totals or hasattr(of(name, budget), "observe"):
                    lane = Lane(name, of(name, budget))
                    meter = shared_updates(lane, shares, rows, seed, variance.DRAWS)
                totals.append(finite(float(np.sum(meter.variance))))
            out[str(budget)][name] = totals
    return out


def other(part: Piece, _: Federation, deadline: float) -> Found:
    """Another federation's updates under full participation, and the samplers on them."""
    task = TASKS[part.which]()
    experiment = Experiment([task], Full(), rounds=part.rounds, seed=SEEDS[0])
    engine = make("auto", experiment, "cpu")
    shares, (model,), recorded = experiment.shares, engine.initial(), list[Row]()
    for now in range(1, part.rounds + 1):
        in_time(deadline)
        plan, scores = draw.everybody(shares), np.zeros(shares.shape[1])
        weighted = model.params.new_zeros(shares.shape[1], len(model.params))
        for chunk in engine.train(whole([model], plan, now)):
            d = plan.weight[chunk.rows]
            scores[plan.client[chunk.rows]] = d * chunk.norm
            weighted[plan.client[chunk.rows]] = torch.from_numpy(d).to(weighted)[:, None] * (
                chunk.update
            )
        full = weighted.sum(dim=0)
        products = (weighted @ weighted.T).double().numpy()
        recorded.append(Row(scores, float(full.norm()), products))
        model = replace(model, weights=Weights(model.params - full, model.weights.buffers))
    (score,) = engine.evaluate([model])
    found = on_recorded(RIVALS, shares, recorded, DRAWS, deadline)
    return {"clients": shares.shape[1], "budgets": found, "accuracy": finite(score.accuracy)}


def writers(version: int) -> Task:
    """Digits by writer, in one of K-Vib's three degrees of imbalance."""
    federation = data.mnist_writers(unbalanced(version), seed=0)
    return Task(models.logistic, federation, lr=0.01, batch=20, epochs=3)


TASKS: dict[str, Callable[[], Task]] = {
    "writers-v1": partial(writers, 1),
    "writers-v2": partial(writers, 2),
    "writers-v3": partial(writers, 3),
    "digits": lambda: Task(
        models.two_nn,
        data.digits(partition=partition.dirichlet(clients=50, alpha=0.3), seed=0),
        lr=0.05,
        batch=10,
    ),
    "fashion": lambda: Task(
        models.logistic,
        data.fashion_mnist(partition=partition.shards(clients=100), seed=0),
        lr=0.01,
        batch=64,
        steps=5,
    ),
}


def made(part: Piece, federation: Federation, deadline: float) -> Found:
    """Updates that are made up to find where rota's sampler fails, with Synthetic's shares."""
    sizes = federation.roster.sizes.astype(np.float64)
    shares = (sizes / sizes.sum())[None]
    norms = MADE[part.which](shares[0], part.rounds)
    rows = [Row(shares[0] * norm, 0.0) for norm in norms]
    draws = QUICK_DRAWS if part.quick else DRAWS
    return {"budgets": on_recorded(COINS, shares, rows, draws, deadline)}


def inverse(shares: Array, rounds: int) -> Iterator[Array]:
    """Clients with little data have large updates, so that all x_i are equal."""
    for _ in range(rounds):
        yield 1 / shares


def waking(shares: Array, rounds: int) -> Iterator[Array]:
    """The tenth of the clients with most data sends almost nothing until the middle of the run."""
    norm = np.ones(len(shares))
    asleep = np.argsort(-shares)[: len(shares) // 10]
    for now in range(rounds):
        norm[asleep] = 1e-6 if now < rounds // 2 else 1.0
        yield norm.copy()


def noisy(shares: Array, rounds: int) -> Iterator[Array]:
    """Norms that say nothing about the next round's."""
    stream = np.random.default_rng(0)
    for _ in range(rounds):
        yield stream.lognormal(0, 1, len(shares))


MADE: dict[str, Callable[[Array, int], Iterator[Array]]] = {
    "inverse": inverse,
    "waking": waking,
    "noisy": noisy,
}


def holds(part: Piece, federation: Federation, deadline: float) -> Found:
    """K-Vib's Figure 6: the part of all examples that the clients with most data hold."""
    sizes = {"synthetic": federation.roster.sizes}
    if not part.quick:
        for name in ("writers-v1", "writers-v2", "writers-v3"):
            in_time(deadline)
            sizes[name] = TASKS[name]().roster.sizes
    return {"of": {name: held(each) for name, each in sizes.items()}}


def held(sizes: Array) -> dict[str, Any]:
    """How many clients and examples there are, and what the largest clients hold."""
    largest = np.sort(sizes)[::-1].astype(np.float64)
    parts = [max(1, round(part * len(largest))) for part in LARGEST]
    shares = [finite(float(largest[:count].sum() / largest.sum())) for count in parts]
    return {
        "clients": len(largest),
        "examples": int(largest.sum()),
        "shares": shares,
        "median": float(np.median(largest)),
        "most": int(largest[0]),
    }
