"""How much of a model each client can take: the width of its part, from 0 (exclusive) to 1.

A width is a fraction of the units of every droppable layer, so the number of parameters falls
roughly with its square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen, State

LESSONS = 5
"""A client's power k is the mean over this many rows at widths below 1."""


class Capacity(Protocol):
    """Decides how much of its model each client trains. A value: what it learns is in the state."""

    def init(self, shares: Array, seed: int) -> State:
        """The state before the first round."""

    def widths(self, state: State) -> Array | None:
        """Each client's width in (0, 1]; 0 leaves it out. None: all clients take whole models."""

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        """The state after the round."""


@dataclass(frozen=True)
class Whole:
    """Every client trains whole models."""

    sees: ClassVar[frozenset[str]] = frozenset()

    def init(self, shares: Array, seed: int) -> State:
        return {}

    def widths(self, state: State) -> Array | None:
        return None

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state


@dataclass(frozen=True)
class Fixed(Whole):
    """Fixed capacities: each client has one of these `sizes` for the whole run.

    Clients are dealt out at random, in equal numbers or in proportion to `parts`.
    """

    sizes: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    parts: tuple[float, ...] = ()

    def init(self, shares: Array, seed: int) -> State:
        _check_sizes(self.sizes)
        parts = np.array(self.parts or [1.0] * len(self.sizes))
        if len(parts) != len(self.sizes) or not (parts >= 0).all() or not parts.sum() > 0:
            raise BadInput(
                f"capacity.parts has {len(parts)} numbers for {len(self.sizes)} sizes: give one "
                "per size, from 0 on, or none"
            )
        clients = shares.shape[1]
        ends = np.round(np.cumsum(parts) / parts.sum() * clients).astype(int)
        dealt = np.searchsorted(ends, np.arange(clients), side="right")
        order = rng.generator(rng.key(seed, "capacity")).permutation(clients)
        return {"width": np.array(self.sizes)[dealt][order]}

    def widths(self, state: State) -> Array | None:
        return np.asarray(state["width"])


@dataclass(frozen=True)
class Stragglers:
    """FLuID's stragglers: the slowest clients get parts that make them as fast as the others (S3).

    The server keeps an estimate of each client's time for the whole model, averaged with weight
    `pace` for the newest. What a row took at width r counts as seconds / r^k for the whole model.
    FLuID has k = 1; here k is learned for each client from its first rows at widths below 1,
    because transfer and layers that keep all their units do not shrink, and layers between two
    others shrink twice.

    Every `every` rounds, once
    clients have taken part in `warmup` rounds, the slowest `share` of the clients that are known
    become stragglers, if they are slower than the target by more than `margin`. A straggler stops
    being one when its time for the whole model is within `margin` / 4 of the target, so noise does
    not make it flip. The target is the time of the slowest client that is no straggler, or the
    `quantile` of all known times, or `seconds`. A straggler's width is the one of `sizes` that is
    nearest to (target / time)^(1/k), or exactly that where `sizes` is empty.
    """

    share: float = 0.2
    sizes: tuple[float, ...] = (0.95, 0.85, 0.75, 0.65, 0.5)
    quantile: float | None = None
    seconds: float | None = None
    margin: float = 0.1
    pace: float = 0.3
    warmup: int = 2
    every: int = 1

    sees: ClassVar[frozenset[str]] = frozenset({"seconds"})

    def init(self, shares: Array, seed: int) -> State:
        _check_sizes(self.sizes or (1.0,))
        for key, low, high in (("share", 0, 1), ("margin", 0, 10), ("pace", 0, 1)):
            value = getattr(self, key)
            if not low <= value <= high or (key != "margin" and not value):
                raise BadInput(f"capacity.{key} is {value:g}: it must be above {low}, up to {high}")
        if self.quantile is not None and self.seconds is not None:
            raise BadInput(
                "capacity.quantile and capacity.seconds are both given: choose one target"
            )
        clients = shares.shape[1]
        return {
            "time": np.full(clients, np.nan),
            "power": np.ones(clients),
            "parts": np.zeros(clients, np.int64),
            "width": np.ones(clients),
            "rounds": np.zeros((), np.int64),
            "target": np.full((), np.nan),
        }

    def widths(self, state: State) -> Array | None:
        return np.asarray(state["width"])

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        rounds, width = np.array(state["rounds"] + 1), state["width"]
        new = {**state, **self._learn(state, plan, seen), "rounds": rounds}
        time = new["time"]
        if rounds < self.warmup or rounds % self.every:
            return new
        known = np.isfinite(time)
        if known.sum() < 2:
            return new
        target = self._target(time[known])
        slow = np.zeros(len(time), bool)
        number = max(1, round(self.share * int(known.sum())))
        order = np.argsort(np.where(known, -time, np.inf), kind="stable")[:number]
        slow[order] = True
        limit = np.where(width < 1, 1 + self.margin / 4, 1 + self.margin)
        slow &= known & (time > target * limit)
        ratio = np.divide(target, time, out=np.ones_like(time), where=slow)
        wanted = ratio ** (1 / new["power"])
        if self.sizes:
            sizes = np.array(sorted(self.sizes))
            nearest = sizes[np.abs(sizes[:, None] - wanted).argmin(axis=0)]
            wanted = nearest
        wanted = np.where(slow, wanted, 1.0)
        return {**new, "width": wanted, "target": np.array(target)}

    def _learn(self, state: State, plan: Plan, seen: Seen) -> State:
        """Each client's time for whole models, and its power k.

        A client's rows count together, because it trains them one after the other.
        """
        time, power, width = state["time"].copy(), state["power"].copy(), state["width"]
        rows = np.flatnonzero(np.isfinite(seen.seconds))
        took = np.zeros(len(time), bool)
        took[plan.client[rows]] = True
        measured = np.bincount(plan.client[rows], seen.seconds[rows], minlength=len(time))
        part = took & (width < 1)
        number = state["parts"].copy()
        new = part & np.isfinite(time) & (number < LESSONS)
        number[new] += 1
        lesson = np.clip(np.log(measured[new] / time[new]) / np.log(width[new]), 0.3, 3.0)
        power[new] += (lesson - power[new]) / number[new]
        measured[part] /= width[part] ** power[part]
        first = took & np.isnan(time)
        later = took & ~first & ~new  # what teaches the power teaches nothing about the time
        time[first] = measured[first]
        time[later] += self.pace * (measured[later] - time[later])
        return {"time": time, "power": power, "parts": number}

    def _target(self, time: Array) -> float:
        if self.seconds is not None:
            return self.seconds
        if self.quantile is not None:
            return float(np.quantile(time, self.quantile))
        number = max(1, round(self.share * len(time)))
        return float(np.sort(time)[-number - 1])


def _check_sizes(sizes: tuple[float, ...]) -> None:
    if not sizes or not all(0 < size <= 1 for size in sizes):
        raise BadInput(
            f"capacity.sizes is {list(sizes)}: give fractions of a model above 0 and up to 1"
        )
