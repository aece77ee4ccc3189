"""Logistic regression for many samplers at once, as K-Vib's theory needs it.

The runs of one seed differ only in who is drawn, so in a round a client trains all of them on the
same mini-batches. Their weights lie side by side, and a local step of all is two matrix products.
All clients train in every round, because the measures need all updates. The numbers are those of
rota's engines and of its loop, up to rounding; tests/test_reproduce_kvib.py compares them.
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
from rota.sampling import Asking, ClusteredSize, Sampler
from rota.sampling.draw import Procedure
from rota.sampling.waterfill import waterfill
from rota_lab.reproduce.parts import in_time

DRAWS = 32
"""How many sequential draws stand for all: their exact variance takes O(N^3 K)."""
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
class Recorded:
    """What happened in the rounds of one lane: x_i = d_i g_i of all clients."""

    scores: list[Array] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    products: list[Array | None] = field(default_factory=list)

    def add(self, scores: Array, total: float, products: Array | None) -> None:
        """One more round."""
        self.scores.append(scores)
        self.total.append(total)
        self.products.append(products)

    def first(self, rounds: int) -> Recorded:
        """The first rounds of it."""
        return Recorded(self.scores[:rounds], self.total[:rounds], self.products[:rounds])


def softmax_twice(z: Tensor, y: Tensor) -> Tensor:
    """The loss of K-Vib's published code, whose network ends in a softmax of its own."""
    return cross_entropy(z.softmax(dim=-1), y, reduction="none")


class Stack:
    """The clients, and the local training of models that lie side by side.

    Weights are [inputs + 1, classes, lanes], and the last input is 1. Softmax is fastest so.
    """

    def __init__(self, data: Federation, rates: Sequence[float], seed: int, twice: bool) -> None:
        self.task = Task(models.logistic, data, batch=BATCH)
        self.seed, self.twice, self.number = seed, twice, len(rates)
        self.x, self.y, self.batches = [], [], list[int]()
        for client in range(data.clients):
            x, y = data.train.of(client)
            self.x.append(_with_ones(x))
            self.y.append(torch.nn.functional.one_hot(y.long(), data.classes).float())
        self.test = _with_ones(data.test.x), data.test.y.long()
        sizes = np.array([len(x) for x in self.x], np.float64)
        self.shares = (sizes / sizes.sum())[None]
        self.rates = torch.tensor(rates, dtype=torch.float32).repeat(data.classes)
        net = self.task.build(rng.key(seed, "model", 0))
        weight, bias = (p.detach() for p in net.parameters())
        first = torch.cat([weight.T, bias[None]])
        self.first = first[:, :, None].repeat(1, 1, len(rates))

    def updates(self, weights: Tensor, now: int) -> Tensor:
        """g_i of all clients and lanes: [clients, inputs + 1, classes, lanes]."""
        shape = weights.shape
        before = weights.reshape(shape[0], -1)
        out = torch.empty(len(self.x), *before.shape)
        for client, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            key = torch.tensor(_signed(rng.key(self.seed, "train", now, client, 0)))
            mine = before.clone()
            for chosen in batches(self.task, len(x), key):
                some, right = x[chosen], y[chosen][:, :, None]
                slope = self.slope((some @ mine).view(len(chosen), *shape[1:]), right)
                mine -= (some.T @ slope.view(len(chosen), -1)) * (self.rates / len(chosen))
            torch.sub(before, mine, out=out[client])
        return out.view(-1, *shape)

    def slope(self, z: Tensor, right: Tensor) -> Tensor:
        """The derivative of the summed losses by the network's outputs."""
        u = z.softmax(dim=1)
        if not self.twice:
            return u.sub_(right)
        v = u.softmax(dim=1).sub_(right)
        return u * (v - (u * v).sum(dim=1, keepdim=True))

    def gradients(self, weights: Tensor) -> tuple[Array, Array]:
        """Each client's mean loss and full gradient for one model [inputs + 1, C]."""
        losses, slopes = [], []
        for x, y in zip(self.x, self.y, strict=True):
            z = x @ weights
            losses.append(self.loss(z, y.argmax(dim=1)))
            slopes.append((x.T @ self.slope(z, y) / len(x)).numpy())
        return np.array(losses), np.stack(slopes).astype(np.float64)

    def loss(self, z: Tensor, y: Tensor) -> float:
        return float((softmax_twice(z, y) if self.twice else cross_entropy(z, y)).mean())

    def tested(self, weights: Tensor) -> list[dict[str, float]]:
        """The test loss and accuracy of every lane."""
        x, y = self.test
        out = []
        for lane in range(self.number):
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

    def __init__(self, lane: Lane, shares: Array, rounds: int, seed: int) -> None:
        self.lane, self.shares, self.seed = lane, shares, seed
        self.state: State = lane.sampler.init(shares, rounds)
        self.procedure: Procedure | None = getattr(lane.sampler, "procedure", None)
        self.cost, self.best = list[float](), list[float]()
        self.variance, self.least = list[float](), list[float]()

    @property
    def needs_products(self) -> bool:
        """Whether the variance depends on the angles between the updates."""
        clustered = isinstance(self.lane.sampler, ClusteredSize)
        return clustered or self.procedure == "sequential"

    def round(self, now: int, scores: Array, total: float, products: Array | None) -> Array:
        """Measure and play one round; returns each client's weight in the estimate."""
        sampler, shares = self.lane.sampler, self.shares
        norms = scores / shares[0]
        if now == 1 and self.lane.start:
            self.state = {**self.state, "norm": self.lane.start(norms)[None]}
        stream = rng.generator(rng.key(self.seed, "draw", now))
        if isinstance(sampler, Asking):
            asked = sampler.ask(self.state, shares, stream).rows
            self.state = sampler.hear(self.state, asked, seen(asked, norms))
        self.measure(scores, total, products, now)
        plan = sampler.draw(self.state, shares, stream)
        if hasattr(sampler, "observe"):
            self.state = sampler.observe(self.state, shares, plan, seen(plan, norms))
        weight = np.zeros(shares.shape[1])
        weight[plan.client] = plan.weight
        return weight

    def measure(self, scores: Array, total: float, products: Array | None, now: int) -> None:
        sampler, squares = self.lane.sampler, scores**2
        if isinstance(sampler, ClusteredSize):
            assert products is not None
            line = sampler.strata(self.state, 0, self.shares[0])
            self.variance.append(clustered(*line, self.shares[0], products))
            return
        if self.procedure is None:  # full participation
            self.variance.append(0.0)
            return
        rates = sampler.rates(self.state, self.shares)[0]  # type: ignore[attr-defined]
        if self.procedure in ("independent", "fixed"):
            rates = np.minimum(rates, 1.0)
        some = scores > 0
        optimal = waterfill(scores, min(float(rates.sum()), len(scores)))
        self.cost.append(float((squares[some] / rates[some]).sum()))
        self.best.append(float((squares[some] / optimal[some]).sum()))
        self.least.append(variance.independent(optimal, scores))
        if self.procedure == "sequential":
            assert products is not None
            stream = rng.generator(rng.key(self.seed, "sequential", now))
            self.variance.append(sequential(rates, products, stream))
        else:
            self.variance.append(variance.of(self.procedure, rates, scores, total))

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
        return out

    def curve(self, points: int) -> list[float]:
        """The mean variance of equal parts of the rounds."""
        parts = np.array_split(np.array(self.variance), min(points, len(self.variance)))
        return [float(f"{part.mean():.4g}") for part in parts]


def seen(plan: Plan, norms: Array) -> Seen:
    """What the server sees if all rows of a plan succeed."""
    out = Seen.nothing(len(plan))
    out.norm[:] = norms[plan.client]
    out.reason[:] = ["" if math.isfinite(norm) else "not finite" for norm in out.norm]
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
    lanes: Sequence[Lane],
    rounds: int,
    deadline: float = math.inf,
    watch: Callable[[int, Tensor, Tensor], None] = lambda *_: None,
) -> tuple[list[Meter], Tensor, Recorded]:
    """Train every lane on its own updates; also records what the first lane's clients sent."""
    meters = [Meter(lane, stack.shares, rounds, stack.seed) for lane in lanes]
    weights, recorded, d = stack.first.clone(), Recorded(), stack.shares[0]
    for now in range(1, rounds + 1):
        in_time(deadline)
        updates = stack.updates(weights, now)
        flat = updates.view(len(d), -1, len(lanes))
        norms = flat.square().sum(dim=1).double().sqrt().numpy()  # [clients, lanes]
        whole = torch.tensordot(torch.from_numpy(d).float(), flat, dims=1)
        watch(now, weights, whole.view_as(weights))
        totals = whole.double().norm(dim=0).tolist()
        steps = np.zeros((len(d), len(lanes)), np.float32)
        for s, meter in enumerate(meters):
            products = None
            if meter.needs_products or s == 0:
                mine = flat[:, :, s].double() * torch.from_numpy(d)[:, None]
                products = (mine @ mine.T).numpy()
            steps[:, s] = meter.round(now, d * norms[:, s], totals[s], products)
            if s == 0:
                assert products is not None
                recorded.add(d * norms[:, 0], totals[0], products.astype(np.float32))
        weights -= (flat * torch.from_numpy(steps)[:, None]).sum(dim=0).view_as(weights)
    return meters, weights, recorded


def shared_updates(lane: Lane, shares: Array, recorded: Recorded, seed: int) -> Meter:
    """What a sampler does on a recorded sequence of updates, without any training."""
    rounds = len(recorded.scores)
    meter = Meter(lane, shares, rounds, seed)
    rows = zip(recorded.scores, recorded.total, recorded.products, strict=True)
    for now, (scores, total, products) in enumerate(rows, start=1):
        meter.round(now, scores, total, products)
    return meter
