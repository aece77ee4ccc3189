"""How much of a model each client can take: the width of its part, from 0 (exclusive) to 1.

A width is a fraction of the units of every droppable layer, so the number of parameters falls
roughly with its square.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.hints import shown
from rota.plan import Plan, Seen, State
from rota.submodel.times import Times


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

    Clients are dealt out at random, in equal numbers or in proportion to `parts`. If `each` is
    given, it has the width of each client instead. A width of 0 leaves a client out.
    """

    sizes: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    parts: tuple[float, ...] = ()
    each: tuple[float, ...] = ()

    def init(self, shares: Array, seed: int) -> State:
        if self.each:
            return {"width": self._each(shares.shape[1])}
        _check_sizes(self.sizes, least=0)
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
        return {"width": np.array(self.sizes, float)[dealt][order]}

    def _each(self, clients: int) -> Array:
        if len(self.each) != clients:
            raise BadInput(
                f"capacity.each has {len(self.each)} widths for {clients} clients: give one per "
                "client"
            )
        _check_sizes(self.each, "each", least=0)
        return np.array(self.each, float)

    def widths(self, state: State) -> Array | None:
        return np.asarray(state["width"])


@dataclass(frozen=True)
class Stragglers:
    """FLuID's stragglers: the slowest clients get parts that make them as fast as the others.

    The server estimates how long each client needs for the whole model (`Times`). The slowest
    `share` of the clients whose time is known are candidates. The target is the time of the slowest
    other client, or the `quantile` of all known times, or `seconds`. A candidate becomes a
    straggler if it needs more than (1 + `margin`) times the target, and stays one until it needs no
    more than the target. So the noise of the times does not make it flip. The calibration begins
    after `warmup` rounds and is repeated every `every` rounds.

    A straggler whose time is T gets the width (target / T)^(1/k), or the nearest one of `sizes` if
    there are any. With `clusters`, the stragglers form that many groups of equal size by their
    speeds, and each group gets one width, for the mean of its members' widths.
    """

    share: float = 0.2
    sizes: tuple[float, ...] = (0.95, 0.85, 0.75, 0.65, 0.5)
    quantile: float | None = None
    seconds: float | None = None
    clusters: int | None = None
    margin: float = 0.1
    noise: float = 0.05
    warmup: int = 2
    every: int = 1

    sees: ClassVar[frozenset[str]] = frozenset({"seconds"})

    def init(self, shares: Array, seed: int) -> State:
        self._check()
        clients = shares.shape[1]
        return {
            **vars(Times.unknown(shares.shape)),
            "time": np.full(clients, np.nan),
            "width": np.ones(clients),
            "rounds": np.zeros((), np.int64),
            "target": np.full((), np.nan),
        }

    def widths(self, state: State) -> Array | None:
        return np.asarray(state["width"])

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        rounds, width = int(state["rounds"]) + 1, state["width"]
        rows = np.flatnonzero(seen.seconds > 0)
        times = Times(**{each.name: state[each.name].copy() for each in fields(Times)})
        where = plan.model[rows], plan.client[rows]
        times.learn(where, seen.seconds[rows], width[plan.client[rows]], rounds, self.noise)
        new = {**state, **vars(times), "time": times.of_clients(), "rounds": np.array(rounds)}
        known = np.isfinite(new["time"])
        if rounds < self.warmup or rounds % self.every or known.sum() < 2:
            return new
        slow, target = self._slow(new["time"], width < 1)
        wanted = np.ones(len(width))
        wanted[slow] = (target / new["time"][slow]) ** (1 / times.powers()[slow])
        return {**new, "width": self._sized(wanted, slow), "target": np.array(target)}

    def _slow(self, time: Array, before: Array) -> tuple[Array, float]:
        """The stragglers, fastest first, and the target; `before` are those of the round before."""
        known = np.flatnonzero(np.isfinite(time))
        number = min(max(1, round(self.share * len(known))), len(known) - 1)
        score = time[known] * np.where(before[known], 1 + self.margin, 1.0)
        order = known[np.argsort(score, kind="stable")]
        rest, last = order[:-number], order[-number:]
        if self.seconds is not None:
            target = self.seconds
        elif self.quantile is not None:
            target = float(np.quantile(time[known], self.quantile))
        else:
            target = float(time[rest].max())
        limit = target * np.where(before[last], 1.0, 1 + self.margin)
        return last[time[last] > limit], target

    def _sized(self, wanted: Array, slow: Array) -> Array:
        """The widths that clients get."""
        width = wanted.copy()
        if self.clusters and len(slow):
            order = slow[np.argsort(wanted[slow], kind="stable")]
            for group in np.array_split(order, min(self.clusters, len(order))):
                width[group] = wanted[group].mean()
        if self.sizes:
            sizes = np.array(sorted(self.sizes))
            width[slow] = sizes[np.abs(sizes[:, None] - width[slow]).argmin(axis=0)]
        return width

    def _check(self) -> None:
        _check_sizes(self.sizes or (1.0,))
        for key in ("share", "quantile", "noise"):
            value = getattr(self, key)
            if value is not None and not 0 < value < 1:
                raise BadInput(f"capacity.{key} is {value:g}: it must be above 0 and below 1")
        if not 0 <= self.margin <= 10:
            raise BadInput(f"capacity.margin is {self.margin:g}: it must be from 0 to 10")
        if self.seconds is not None and not self.seconds > 0:
            raise BadInput(f"capacity.seconds is {self.seconds:g}: it must be above 0")
        for name in ("clusters", "warmup", "every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadInput(f"capacity.{name} is {getattr(self, name)}: it must be at least 1")
        if self.quantile is not None and self.seconds is not None:
            raise BadInput(
                "capacity.quantile and capacity.seconds are both given: choose one target"
            )


@dataclass(frozen=True)
class Exclude(Stragglers):
    """Leaves stragglers out, instead of giving them parts: what FLuID is compared with.

    A client that is left out is not measured again, so it stays out.
    """

    def widths(self, state: State) -> Array | None:
        return np.where(state["width"] < 1, 0.0, 1.0)


def _check_sizes(sizes: tuple[float, ...], name: str = "sizes", least: float = 1e-6) -> None:
    """Widths are above 0 and up to 1. With `least` = 0 some may be 0, but not all."""
    if not sizes or not all(least <= size <= 1 for size in sizes) or not any(sizes):
        and_0 = "" if least else ", or 0 to leave clients out"
        raise BadInput(
            f"capacity.{name} is {shown(list(sizes))}: give fractions of a model above 0 and up to "
            f"1{and_0}"
        )
