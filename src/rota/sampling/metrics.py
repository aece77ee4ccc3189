"""How good a sampler's draw is: S1's measures, for a run that asks for them.

With pi_i = d_i |g_i| the scores of *all* of a model's N clients in this round, p the sampler's rates (for draws with replacement K q),
and K their sum:

    cost         l(p) = sum pi_i^2 / p_i                                                                   S1 section 2.2
    regret       l(p) - min l(p'), over 0 < p' <= 1 of the same sum (Lemma 3)                              eq. 6
    variance     E|estimate - D|^2 of the unbiased estimate by the sampler's own procedure, exactly        eq. 2
    improvement  the least variance of independent coins / that of coins of K / N                          Definition 12
    quality      (variance - that least one) / that of coins of K / N; 0 is the optimal sampling           Definition 12

With several models each is a sum over them, or a ratio of sums. Where clients cannot be reached, the others are all there is. Every
client trains to know it, from the round's models and with the randomness that it has if it is drawn: nothing else of the run changes,
and none of this is charged to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.engine import Engine
from rota.errors import BadInput, did_you_mean
from rota.hints import called
from rota.plan import State, admit
from rota.sampling import SAMPLERS, Asking, Sampler, asks, draw, variance
from rota.sampling.waterfill import waterfill
from rota.weights import Weights

METRICS = ("cost", "regret", "variance", "improvement", "quality")
SUMMED = ("cost", "regret", "variance")
"""Those that are also written as sums over the rounds so far, as cost_total, regret_total and variance_total."""
SIMPLE = {"cost", "regret"}
"""Those that need the scores alone, whatever the procedure."""
PAIRS = 200
"""The most clients for which the variance of sequential draws is computed: it takes O(N^3 K)."""


class Updates(NamedTuple):
    """One model's clients in a round: their scores, |D|, and where they are needed all inner products of the d_i g_i."""

    scores: Array
    total: float
    products: Array | None


@dataclass
class Meter:
    """Measures the rounds of one run, and counts the seconds that this takes: they are not the run's."""

    names: Sequence[str]
    sampler: Any
    engine: Engine
    last: Mapping[str, Any] = field(default_factory=dict)
    """The round's line before the first that is measured: the sums go on from it."""
    seconds: float = 0.0

    def __call__(
        self, memory: State, shares: Array, models: list[Weights], now: int
    ) -> dict[str, float | None]:
        """The round's measures; `memory` and `shares` are what the sampler draws by, `models` those that are trained."""
        began = time.monotonic()
        rates, procedure = self.sampler.rates(memory, shares), self.sampler.procedure
        exact = procedure == "sequential" and not set(self.names) <= SIMPLE
        values = measure(
            procedure, rates, shares, look(self.engine, models, shares, now, products=exact)
        )
        out = {name: values[name] for name in METRICS if name in self.names}
        out |= {
            f"{name}_total": (self.last.get(f"{name}_total") or 0.0) + (out[name] or 0.0)
            for name in SUMMED
            if name in out
        }
        self.last = out
        self.seconds += time.monotonic() - began
        return out


def look(
    engine: Engine, models: list[Weights], shares: Array, now: int, products: bool = False
) -> list[Updates]:
    """Train everybody, each model's clients in order; one that fails, or whose norm cannot be squared, counts 0."""
    plan = draw.everybody(shares)
    scores = np.zeros(shares.shape)
    sums = [
        torch.zeros(model.params.shape, dtype=torch.float64, device=model.params.device)
        for model in models
    ]
    kept: list[dict[int, Tensor]] = [{} for _ in models]
    for chunk in engine.train(models, plan, now):
        with np.errstate(over="ignore"):
            ok = admit(chunk).ok & np.isfinite(chunk.norm**2)
        client, update = (
            plan.client[chunk.rows[ok]],
            chunk.update[torch.from_numpy(ok).to(chunk.update.device)],
        )
        weighted = update * torch.from_numpy(shares[chunk.model, client]).to(update)[:, None]
        scores[chunk.model, client] = shares[chunk.model, client] * chunk.norm[ok]
        sums[chunk.model] += weighted.sum(dim=0, dtype=torch.float64)
        if products:
            kept[chunk.model] |= dict(zip(client.tolist(), weighted.double(), strict=True))
    out = []
    for s, owners in enumerate(shares > 0):
        nothing = torch.zeros_like(sums[s])
        rows = (
            [kept[s].get(client, nothing) for client in np.flatnonzero(owners).tolist()]
            if products
            else []
        )
        gram = (torch.stack(rows) @ torch.stack(rows).T).cpu().numpy() if rows else None
        out.append(Updates(scores[s, owners], float(torch.linalg.vector_norm(sums[s])), gram))
    return out


def measure(
    procedure: draw.Procedure, rates: Array, shares: Array, updates: list[Updates]
) -> dict[str, float | None]:
    """All measures of a round, from the sampler's matrix of rates and what every client would send."""
    cost = best = spread = least = uniform = 0.0
    for row, owners, (scores, total, products) in zip(rates, shares > 0, updates, strict=True):
        number = int(np.count_nonzero(owners))
        if not number:
            continue
        p = (
            row[owners]
            if procedure in ("multinomial", "sequential")
            else np.minimum(row[owners], 1.0)
        )
        budget = min(float(p.sum()), number)
        optimal = waterfill(scores, budget)
        cost, best = cost + _cost(p, scores), best + _cost(optimal, scores)
        spread += variance.of(procedure, p, scores, total, products)
        least += variance.independent(optimal, scores)
        uniform += variance.independent(np.full(number, budget / number), scores)
    ratios = (least / uniform, (spread - least) / uniform) if uniform > 0 else (None, None)
    return {
        "cost": cost,
        "regret": cost - best,
        "variance": spread,
        "improvement": ratios[0],
        "quality": ratios[1],
    }


def _cost(p: Array, scores: Array) -> float:
    """l(p), S1 section 2.2."""
    some = scores > 0
    return float((scores[some] ** 2 / p[some]).sum())


def check(names: Sequence[str], sampler: Sampler, shares: Array, rounds: int) -> None:
    """Refuse what is not a measure, and samplers that have none: those that do not draw everybody by rates of their own."""
    for name in names:
        if name not in METRICS:
            raise BadInput(f"metrics names '{name}', which is none: {did_you_mean(name, METRICS)}")
    if not names:
        return
    able = hasattr(sampler, "rates") and hasattr(sampler, "procedure")
    if able and isinstance(
        sampler, Asking
    ):  # one that draws from a cohort has rates inside it alone
        able = asks(sampler, shares, rounds) is not None
    if not able:
        why = "does not draw all clients by probabilities of its own (rates and a procedure)"
        name = called(sampler, SAMPLERS)
        raise BadInput(
            f"metrics are asked for, but the sampler '{name}' {why}: leave them out, or take kvib, uniform ..."
        )
    if (
        getattr(sampler, "procedure", "") == "sequential"
        and not set(names) <= SIMPLE
        and shares.shape[1] > PAIRS
    ):
        raise BadInput(
            f"metrics: the variance of sequential draws is for up to {PAIRS} clients: ask for cost and regret alone"
        )
