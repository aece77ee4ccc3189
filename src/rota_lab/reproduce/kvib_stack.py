"""Logistic regression for many samplers at once, as K-Vib's theory needs it.

The runs of one seed differ only in who is drawn, so in a round a client trains all of them on the
same mini-batches. Their weights lie side by side, and a local step of all is two matrix products.
All clients train in every round, because the measures need all updates. The numbers are those of
rota's engines and of its loop, up to rounding; tests/test_reproduce_kvib_stack.py compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rota import models, rng
from rota.arrays import Array
from rota.data.federation import Federation
from rota.engine.schedule import batches
from rota.metrics import variance
from rota.plan import Plan, Seen, State, Task
from rota.sampling import ClusteredSize, Sampler, draw
from rota.sampling.bandits import Bandit
from rota.sampling.draw import Procedure
from rota.sampling.waterfill import waterfill
from rota_lab.reproduce.parts import in_time

DRAWS = 32
"""How many sequential draws stand for all: their exact variance takes O(N^3 K)."""
SYSTEMATIC = 128
"""How many systematic draws stand for all: their exact variance has no formula."""
BATCH = 64


@dataclass(frozen=True)
class Lane:
    """One run of a stack: a sampler, its learning rate, and its name on the page.

    `start` are the norms that the server knows before the first round (Avare's first pass), as a
    function of the true ones.
    """

    name: str
    sampler: Sampler
    lr: float = 0.0
    start: Callable[[Array], Array] | None = None


@dataclass
class Row:
    """What all clients would send in a round: |x_i| with x_i = d_i g_i, |D|, the inner products."""

    scores: Array
    total: float
    products: Array | None = None
    ideal: dict[float, float] = field(default_factory=dict)

    def least(self, budget: float) -> float:
        """The least l(p) over p <= 1, sum p = budget (Lemma 3)."""
        key = round(budget, 9)
        if key not in self.ideal:
            self.ideal[key] = least_cost(self.scores, key)
        return self.ideal[key]


def least_cost(scores: Array, budget: float) -> float:
    """The least l(p) = sum pi^2 / p over p <= 1, sum p = budget."""
    some = scores > 0
    best = waterfill(scores, min(budget, len(scores)))
    return float((scores[some] ** 2 / best[some]).sum())


def softmax_twice(z: Tensor, y: Tensor) -> Tensor:
    """The loss of K-Vib's published code, whose network ends in a softmax of its own."""
    return cross_entropy(z.softmax(dim=-1), y, reduction="none")


class Stack:
    """The clients, and the local training of models that lie side by side.

    Weights are [inputs + 1, classes, lanes], and the last input is 1. Softmax is fastest so. With
    `twice`, softmax is applied twice, as in K-Vib's published code.
    """

    def __init__(
        self, data: Federation, lanes: Sequence[Lane], seed: int, twice: bool = False
    ) -> None:
        self.task = Task(models.logistic, data, batch=BATCH)
        self.lanes, self.seed, self.twice = lanes, seed, twice
        self.x, self.y = [], []
        for client in range(data.clients):
            x, y = data.train.of(client)
            self.x.append(_with_ones(x))
            self.y.append(torch.nn.functional.one_hot(y.long(), data.classes).float())
        self.test = _with_ones(data.test.x), data.test.y.long()
        sizes = np.array([len(x) for x in self.x], np.float64)
        self.shares = (sizes / sizes.sum())[None]
        rates = torch.tensor([lane.lr for lane in lanes], dtype=torch.float32)
        self.rates = rates.repeat(data.classes)
        net = self.task.build(rng.key(seed, "model", 0))
        weight, bias = (p.detach() for p in net.parameters())
        first = torch.cat([weight.T, bias[None]])
        self.first = first[:, :, None].repeat(1, 1, len(lanes))

    def updates(self, weights: Tensor, now: int) -> Tensor:
        """g_i of all clients and lanes: [clients, inputs + 1, classes, lanes]."""
        shape = weights.shape
        before = weights.reshape(shape[0], -1)
        out = torch.empty(len(self.x), *before.shape)
        for client, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            key = torch.tensor(_signed(rng.key(self.seed, "train", now, client, 0)))
            chosen = batches(self.task, len(x), key)
            order, sizes = torch.cat(chosen), [len(each) for each in chosen]
            mine = out[client].copy_(before)
            for some, right in zip(x[order].split(sizes), y[order].split(sizes), strict=True):
                z = (some @ mine).view(-1, *shape[1:])
                step = self.slope(z, right[:, :, None]).view(len(some), -1)
                mine.addmm_(some.T, step.mul_(self.rates), alpha=-1 / len(some))
            torch.sub(before, mine, out=mine)
        return out.view(-1, *shape)

    def slope(self, z: Tensor, right: Tensor) -> Tensor:
        """The derivative of the summed losses by the network's outputs."""
        u = z.softmax(dim=1)
        if not self.twice:
            return u.sub_(right)
        v = u.softmax(dim=1).sub_(right)
        return u.mul_(v.sub_((u * v).sum(dim=1, keepdim=True)))

    def gradients(self, weights: Tensor) -> tuple[Array, Array]:
        """Each client's mean loss and full gradient for one model [inputs + 1, classes]."""
        losses, slopes = [], []
        for x, y in zip(self.x, self.y, strict=True):
            z = x @ weights
            losses.append(self.loss(z, y.argmax(dim=1)))
            slopes.append((x.T @ self.slope(z, y) / len(x)).numpy())
        return np.array(losses), np.stack(slopes).astype(np.float64)

    def loss(self, z: Tensor, y: Tensor) -> float:
        """The mean loss of one model."""
        return float((softmax_twice(z, y) if self.twice else cross_entropy(z, y)).mean())

    def tested(self, weights: Tensor) -> list[dict[str, float]]:
        """The test loss and accuracy of every lane."""
        x, y = self.test
        out = []
        for lane in range(len(self.lanes)):
            z = x @ weights[:, :, lane]
            right = float((z.argmax(dim=1) == y).float().mean())
            out.append({"loss": self.loss(z, y), "accuracy": right})
        return out


def _with_ones(x: Tensor) -> Tensor:
    x = x.reshape(len(x), -1).float()
    return torch.cat([x, torch.ones(len(x), 1)], dim=1)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


class Meter:
    """A sampler's state and measures over the rounds of one lane."""

    def __init__(
        self, lane: Lane, shares: Array, rounds: int, seed: int, draws: int = SYSTEMATIC
    ) -> None:
        self.lane, self.shares, self.seed, self.draws = lane, shares, seed, draws
        self.sampler: Any = lane.sampler
        self.state: State = self.sampler.init(shares, rounds)
        self.asks, self.learns = (hasattr(self.sampler, name) for name in ("ask", "observe"))
        self.procedure: Procedure | None = getattr(lane.sampler, "procedure", None)
        self.cost, self.best = list[float](), list[float]()
        self.variance = list[float]()

    @property
    def needs_products(self) -> bool:
        """Whether the variance depends on the angles between the updates."""
        clustered = isinstance(self.sampler, ClusteredSize)
        return clustered or self.procedure in variance.PAIRWISE

    def round(self, now: int, row: Row) -> Array:
        """Measure and play one round; returns each client's weight in the estimate."""
        norms = row.scores / self.shares[0]
        if now == 1 and self.lane.start:
            self.state = {**self.state, "norm": self.lane.start(norms)[None]}
        stream = rng.generator(rng.key(self.seed, "draw", now))
        if self.asks:
            asked = self.sampler.ask(self.state, self.shares, stream).rows
            self.state = self.sampler.hear(self.state, asked, seen(asked, norms))
        rates = self.measure(now, row)
        if self.learns and isinstance(self.sampler, Bandit):  # its rates are not computed twice
            plan = draw.by(self.sampler.procedure, rates, self.shares, stream)
        else:
            plan = self.sampler.draw(self.state, self.shares, stream)
        if self.learns:
            self.state = self.sampler.observe(self.state, self.shares, plan, seen(plan, norms))
        weight = np.zeros(self.shares.shape[1])
        weight[plan.client] = plan.weight
        return weight

    def measure(self, now: int, row: Row) -> Array:
        """Add l(p), the least l and the variance of a round; returns the sampler's rates."""
        if isinstance(self.sampler, ClusteredSize):
            assert row.products is not None
            line = self.sampler.strata(self.state, 0, self.shares[0])
            self.variance.append(clustered(*line, self.shares[0], row.products))
            return self.shares
        if self.procedure is None:  # full participation
            self.variance.append(0.0)
            return self.shares
        applied = self.sampler.rates(self.state, self.shares)
        rates = applied[0]
        if self.procedure in ("independent", "fixed", "systematic"):
            rates = np.minimum(rates, 1.0)
        some = row.scores > 0
        self.cost.append(float((row.scores[some] ** 2 / rates[some]).sum()))
        self.best.append(row.least(float(rates.sum())))
        if self.procedure in variance.PAIRWISE:
            assert row.products is not None
            stream = rng.generator(rng.key(self.seed, self.procedure, now))
            if self.procedure == "sequential":
                spread = sequential(rates, row.products, stream)
            else:
                spread = variance.systematic(rates, row.products, stream, self.draws)
            self.variance.append(spread)
        else:
            self.variance.append(variance.of(self.procedure, rates, row.scores, row.total))
        return np.asarray(applied)

    def totals(self) -> dict[str, Any]:
        """Sums over the rounds, and a curve of the variance."""
        spread = np.array(self.variance)
        rounds = len(spread)
        out: dict[str, Any] = {
            "variance": float(spread.sum()),
            "late": float(spread[rounds // 2 :].sum()),
        }
        if self.cost:
            cost, best = np.array(self.cost), np.array(self.best)
            out["relative"] = float((np.abs(cost - best) / best).mean())
            out["regret"] = float((cost - best).sum())
            out["cost"] = float(cost.sum())
        return out

    def curve(self, points: int) -> list[float]:
        """The mean variance of equal parts of the rounds."""
        parts = np.array_split(np.array(self.variance), min(points, len(self.variance)))
        return [float(f"{part.mean():.4g}") for part in parts]


def seen(plan: Plan, norms: Array) -> Seen:
    """What the server sees if all rows of a plan succeed."""
    out = Seen.nothing(len(plan))
    out.norm[:] = norms[plan.client]
    out.reason[:] = ""
    return out


def sequential(rates: Array, products: Array, stream: np.random.Generator) -> float:
    """The variance of sequential draws, as the mean over DRAWS of them (draw.sequential)."""
    draws, q = round(float(rates.sum())), rates / rates.sum()
    arrival = stream.standard_exponential((DRAWS, len(q))) / q
    first = np.argpartition(arrival, draws - 1, axis=1)[:, :draws]
    turn = np.argsort(np.take_along_axis(arrival, first, axis=1), axis=1)
    first = np.take_along_axis(first, turn, axis=1)
    left = 1 - np.cumsum(q[first], axis=1) + q[first]
    times = np.full((DRAWS, len(q)), -1.0)
    own = (left / q[first] + np.arange(draws)[::-1]) / draws - 1
    np.put_along_axis(times, first, own, axis=1)
    return float(((times @ products) * times).sum() / DRAWS)


def clustered(client: Array, mass: Array, shares: Array, products: Array) -> float:
    """The variance of one client from each stratum of a line that is cut at 1, 2, 3 ..."""
    ends = np.cumsum(mass)
    strata = round(float(ends[-1]))
    cuts = np.arange(strata)[:, None]
    inside = np.minimum(ends, cuts + 1) - np.maximum(ends - mass, cuts)
    chance = np.zeros((strata, len(shares)))
    np.add.at(chance.T, client, np.maximum(inside, 0.0).T)
    chance /= chance.sum(axis=1, keepdims=True)
    each = products / (strata**2 * np.outer(shares, shares))
    return float((chance @ np.diag(each)).sum() - np.einsum("ki,ij,kj->", chance, each, chance))


def own_updates(
    stack: Stack,
    rounds: int,
    deadline: float = math.inf,
    watch: Callable[[int, Tensor, Tensor], None] = lambda *_: None,
) -> tuple[list[Meter], Tensor, list[Row]]:
    """Train every lane on its own updates; also records what the first lane's clients sent."""
    lanes = stack.lanes
    meters = [Meter(lane, stack.shares, rounds, stack.seed) for lane in lanes]
    weights, recorded, d = stack.first.clone(), list[Row](), stack.shares[0]
    for now in range(1, rounds + 1):
        in_time(deadline)
        updates = stack.updates(weights, now)
        flat = updates.view(len(d), -1, len(lanes))
        norms = flat.square().sum(dim=1).double().sqrt().numpy()  # [clients, lanes]
        whole = torch.tensordot(torch.from_numpy(d).float(), flat, dims=1)
        watch(now, weights, whole.view_as(weights))
        totals = whole.double().norm(dim=0).tolist()
        steps = np.zeros((len(d), len(lanes)), np.float32)
        for place, meter in enumerate(meters):
            row = Row(d * norms[:, place], totals[place])
            if meter.needs_products or place == 0:
                mine = flat[:, :, place].double() * torch.from_numpy(d)[:, None]
                row.products = (mine @ mine.T).numpy()
            steps[:, place] = meter.round(now, row)
            if place == 0:
                recorded.append(row)
        weights -= (flat * torch.from_numpy(steps)[:, None]).sum(dim=0).view_as(weights)
    return meters, weights, recorded


def shared_updates(
    lane: Lane, shares: Array, recorded: Sequence[Row], seed: int, draws: int = SYSTEMATIC
) -> Meter:
    """What a sampler does on a recorded sequence of updates, without any training."""
    meter = Meter(lane, shares, len(recorded), seed, draws)
    for now, row in enumerate(recorded, start=1):
        meter.round(now, row)
    return meter
