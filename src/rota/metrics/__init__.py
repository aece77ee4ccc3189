"""How good a sampler's draw is: K-Vib's measures, for a run that asks for them.

With pi_i = d_i |g_i| the scores of *all* N clients of a model in this round, p the sampler's rates
(K q for draws with replacement), and K their sum:

    cost         l(p) = sum pi_i^2 / p_i (K-Vib, section 2.2)
    regret       l(p) - min l(p') over 0 < p' <= 1 of the same sum (Lemma 3; eq. 6)
    variance     E|estimate - D|^2 of the unbiased estimate by the sampler's own procedure,
                 exactly (eq. 2), or for systematic draws as a mean over many
    improvement  the least variance of independent coins / the variance of coins of K / N
                 (Definition 12)
    quality      (variance - the least variance) / the variance of coins of K / N; 0 is optimal
                 sampling (Definition 12)

With several models, each measure is a sum over the models, or a ratio of sums. Only clients that
can be reached count. To measure, every client trains from the round's models, with the randomness
that it also has if it is drawn. Nothing else of the run changes, and nothing is charged to it.

A user's own measures of the models are functions (own.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rota.admission import admit
from rota.arrays import Array
from rota.engine import Engine
from rota.errors import BadInput, did_you_mean
from rota.hints import called
from rota.metrics import variance
from rota.plan import Model, Seen, State, whole
from rota.sampling import SAMPLERS, Asking, Sampler, asks, draw
from rota.sampling.waterfill import waterfill

METRICS = ("cost", "regret", "variance", "improvement", "quality")
SUMMED = ("cost", "regret", "variance")
"""Measures that are also summed over the rounds so far: cost_total and so on."""
SIMPLE = {"cost", "regret"}
"""Measures that need only the scores, whatever the procedure."""
PAIRS = 200
"""The largest number of clients for the variance of sequential and systematic draws."""


class Updates(NamedTuple):
    """One model's clients in a round: scores, |D|, and all products of the d_i g_i, if needed."""

    scores: Array
    total: float
    products: Array | None


@dataclass
class Meter:
    """Measures the rounds of one run; its `seconds` are no part of the run's own time."""

    names: Sequence[str]
    sampler: Any
    engine: Engine
    last: Mapping[str, Any] = field(default_factory=dict)
    """The record of the round before the first measured one; the sums continue from it."""
    seconds: float = 0.0

    def __call__(
        self, memory: State, shares: Array, models: list[Model], now: int
    ) -> dict[str, float | None]:
        """The measures of a round in which the sampler draws from `memory` and `shares`."""
        began = time.monotonic()
        rates, procedure = self.sampler.rates(memory, shares), self.sampler.procedure
        pairs = procedure in variance.PAIRWISE and not set(self.names) <= SIMPLE
        updates = look(self.engine, models, shares, now, products=pairs)
        values = measure(procedure, rates, shares, updates)
        out = {name: values[name] for name in METRICS if name in self.names}
        for name in SUMMED:
            if name in out:
                before = self.last.get(f"{name}_total") or 0.0
                out[f"{name}_total"] = before + (out[name] or 0.0)
        self.last = out
        self.seconds += time.monotonic() - began
        return out


def look(
    engine: Engine, models: list[Model], shares: Array, now: int, products: bool = False
) -> list[Updates]:
    """Train all clients. One that fails, or whose norm cannot be squared, counts 0."""
    plan = draw.everybody(shares)
    scores = np.zeros(shares.shape)
    sums = [torch.zeros_like(model.params, dtype=torch.float64) for model in models]
    kept: list[dict[int, Tensor]] = [{} for _ in models]
    job, seen = whole(models, plan, now), Seen.nothing(len(plan))
    for reply in engine.train(job):
        if (chunk := admit(reply, job, seen)) is None:
            continue
        with np.errstate(over="ignore"):
            ok = chunk.ok & np.isfinite(chunk.norm**2)
        client = plan.client[chunk.rows[ok]]
        update = chunk.update[torch.from_numpy(ok).to(chunk.update.device)]
        weighted = update * torch.from_numpy(shares[chunk.model, client]).to(update)[:, None]
        scores[chunk.model, client] = shares[chunk.model, client] * chunk.norm[ok]
        sums[chunk.model] += weighted.sum(dim=0, dtype=torch.float64)
        if products:
            kept[chunk.model] |= dict(zip(client.tolist(), weighted.double(), strict=True))
    out = []
    for s, owners in enumerate(shares > 0):
        gram = None
        if products and owners.any():
            nothing = torch.zeros_like(sums[s])
            rows = [kept[s].get(client, nothing) for client in np.flatnonzero(owners).tolist()]
            stacked = torch.stack(rows)
            gram = (stacked @ stacked.T).cpu().numpy()
        out.append(Updates(scores[s, owners], float(torch.linalg.vector_norm(sums[s])), gram))
    return out


def measure(
    procedure: draw.Procedure, rates: Array, shares: Array, updates: list[Updates]
) -> dict[str, float | None]:
    """All measures of a round, from the sampler's rates and the updates of all clients."""
    cost = best = spread = least = uniform = 0.0
    for row, owners, (scores, total, products) in zip(rates, shares > 0, updates, strict=True):
        number = int(np.count_nonzero(owners))
        if not number:
            continue
        p = row[owners]
        if procedure not in ("multinomial", "sequential"):
            p = np.minimum(p, 1.0)
        budget = min(float(p.sum()), number)
        optimal = waterfill(scores, budget)
        cost, best = cost + _cost(p, scores), best + _cost(optimal, scores)
        spread += variance.of(procedure, p, scores, total, products)
        least += variance.independent(optimal, scores)
        uniform += variance.independent(np.full(number, budget / number), scores)
    ratios = (least / uniform, (spread - least) / uniform) if uniform > 0 else (None, None)
    return dict(zip(METRICS, (cost, cost - best, spread, *ratios), strict=True))


def _cost(p: Array, scores: Array) -> float:
    """l(p), K-Vib section 2.2."""
    some = scores > 0
    return float((scores[some] ** 2 / p[some]).sum())


def check(names: Sequence[Any], sampler: Sampler, shares: Array, rounds: int) -> None:
    """Refuse unknown measures, and samplers that do not draw all clients by rates of their own.

    A user's own measures are functions, and may be anything.
    """
    names = [name for name in names if not callable(name)]
    for name in names:
        if name not in METRICS:
            raise BadInput(f"metrics names an unknown '{name}': {did_you_mean(name, METRICS)}")
    if not names:
        return
    able = hasattr(sampler, "rates") and hasattr(sampler, "procedure")
    # a sampler that first draws a cohort has rates only inside the cohort
    if not able or (isinstance(sampler, Asking) and asks(sampler, shares, rounds) is None):
        raise BadInput(
            f"metrics cannot measure the sampler '{called(sampler, SAMPLERS)}', because it does "
            "not draw all clients by probabilities of its own (rates and a procedure): leave "
            "metrics out, or take kvib, uniform ..."
        )
    procedure = getattr(sampler, "procedure", "")
    pairwise = procedure in variance.PAIRWISE and not set(names) <= SIMPLE
    if pairwise and shares.shape[1] > PAIRS:
        raise BadInput(
            f"metrics can compute the variance of {procedure} draws for up to {PAIRS} clients, and "
            f"there are {shares.shape[1]}: ask for cost and regret only, or draw with "
            'sampler.procedure = "independent"'
        )
