"""Invariant dropout (FLuID, section 5): drop the units that training hardly changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Chunk, Job, State
from rota.submodel.choice import Wanted, per_unit, split
from rota.submodel.cut import SubModel
from rota.submodel.units import Units


@dataclass
class Votes:
    """What the rows of a round that hold whole models say about each layer's units.

    `below` counts for each layer of a model, and each scalar that its units own, the rows that
    changed it by at most the layer's threshold. `change` is the largest relative change that any
    row made to each scalar of a model.
    """

    thresholds: dict[int, Array]
    parts: tuple[SubModel, ...]
    rows: dict[int, int] = field(default_factory=dict)
    units: dict[int, Units] = field(default_factory=dict)
    below: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    change: dict[int, Tensor] = field(default_factory=dict)

    def add(self, s: int, units: Units, change: Tensor) -> None:
        """Add one row's relative changes of all scalars."""
        self.rows[s], self.units[s] = self.rows.get(s, 0) + 1, units
        self.change[s] = torch.maximum(self.change.get(s, change), change)
        named = split(units, change)
        for at, layer in enumerate(units.layers):
            counts = self.below.setdefault((s, at), {})
            for name in {each.tensor for each in layer.slices}:  # units may own two of its axes
                if name in named:
                    below = (named[name] <= float(self.thresholds[s][at])).to(torch.int32)
                    counts[name] = below + counts.get(name, 0)


@dataclass(frozen=True)
class Invariant:
    """Invariant dropout: parts drop the units whose weights change least on other clients (FLuID).

    A scalar is invariant if at least `vote` of the rows with whole models changed it by at most
    threshold |w|. A unit is invariant if all scalars that it owns are. Each layer has its own
    threshold: the smallest change of a unit (its largest |update| / |w|) over the first `warmup`
    rounds, averaged, unless `threshold` is given. While a layer has fewer invariant units than it
    must drop, its threshold grows by `growth` of its first value per round.

    A part drops first the units that it dropped in the round before and that are still invariant,
    then other invariant units at random, then any others at random.
    """

    vote: float = 0.75
    threshold: float | None = None
    growth: float = 0.1
    warmup: int = 2

    sees: ClassVar[frozenset[str]] = frozenset({"update"})

    def init(self, units: list[Units]) -> State:
        if not 0 < self.vote <= 1:
            raise BadInput(f"submodel.vote is {self.vote:g}: it must be above 0 and at most 1")
        if self.warmup < 1:
            raise BadInput(f"submodel.warmup is {self.warmup}: it must be at least 1")
        if not self.growth >= 0:
            raise BadInput(f"submodel.growth is {self.growth:g}: it must be at least 0")
        state: State = {"rounds": np.zeros(len(units), np.int64)}
        for s, each in enumerate(units):
            number = len(each.layers)
            state[f"threshold.{s}"] = np.full(number, self.threshold or 0.0)
            state[f"first.{s}"] = np.full(number, self.threshold or 0.0)
            for at, layer in enumerate(each.layers):
                state[f"invariant.{s}.{at}"] = np.zeros(layer.size, bool)
                state[f"dropped.{s}.{at}"] = np.zeros(layer.size, bool)
        return state

    def keep(self, state: State, wanted: Wanted, generator: np.random.Generator) -> list[Array]:
        kept = []
        for at, layer in enumerate(wanted.units.layers):
            invariant = state[f"invariant.{wanted.number}.{at}"]
            again = invariant & state[f"dropped.{wanted.number}.{at}"]
            class_ = np.where(again, 0, np.where(invariant, 1, 2))
            order = np.lexsort((generator.random(layer.size), class_))
            gone = layer.size - wanted.counts[at]
            kept.append(np.sort(order[gone:]))
        return kept

    def watch(self, state: State, job: Job) -> Votes:
        models = range(len(job.models)) if job.units else ()
        thresholds = {s: state[f"threshold.{s}"] for s in models}
        return Votes(thresholds, job.plan.cuts)

    def see(self, watched: Votes, job: Job, chunk: Chunk) -> None:
        """Count the votes of the rows that hold whole models; stragglers have no vote."""
        if not job.units or job.plan.held(int(chunk.rows[0])) is not None:
            return
        s = chunk.model
        units, size = job.units[job.models[s].task], job.models[s].params.abs()
        for place in np.flatnonzero(chunk.ok).tolist():
            update = chunk.update[place].abs()
            change = torch.where(update == 0, torch.zeros_like(update), update / size)
            watched.add(s, units, change)

    def learn(self, state: State, watched: Votes) -> State:
        if not state:  # everybody trains whole models
            return state
        new = dict(state)
        new["rounds"] = state["rounds"].copy()
        # the narrowest part of a model is the last one, so it counts
        for part in sorted(watched.parts, key=lambda part: -part.width):
            kept = zip(part.cut.units.layers, part.cut.kept, strict=True)
            for at, (layer, units) in enumerate(kept):
                new[f"dropped.{part.model}.{at}"] = ~np.isin(np.arange(layer.size), units)
        for s, rows in watched.rows.items():
            new["rounds"][s] += 1
            threshold, first = state[f"threshold.{s}"].copy(), state[f"first.{s}"].copy()
            changes = split(watched.units[s], watched.change[s])
            for at, layer in enumerate(watched.units[s].layers):
                votes = {name: count / rows for name, count in watched.below[s, at].items()}
                invariant = (per_unit(layer, votes, "amin") >= self.vote).cpu().numpy()
                new[f"invariant.{s}.{at}"] = invariant
                change = per_unit(layer, changes, "amax").double().cpu().numpy()
                some = change[np.isfinite(change) & (change > 0)]
                least = float(some.min()) if len(some) else 0.0
                rounds = int(new["rounds"][s])
                if self.threshold is None and rounds <= self.warmup:
                    first[at] += (least - first[at]) / rounds
                    threshold[at] = first[at]
                elif invariant.sum() < new[f"dropped.{s}.{at}"].sum():
                    threshold[at] += self.growth * max(first[at], least)
            new[f"threshold.{s}"], new[f"first.{s}"] = threshold, first
        return new
