"""What an engine gives back: Chunks with their Costs; and what the server has Seen of each row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array


@dataclass(frozen=True)
class Costs:
    """What each row costs, as arrays over rows: measured by real devices, computed by simulators.

    `seconds` is the time for computing and transfer together, `computing` for computing alone; both
    are NaN where the row did not train. `up` and `down` are bytes.
    """

    seconds: Array
    computing: Array
    up: Array
    down: Array

    @classmethod
    def nothing(cls, rows: int) -> Costs:
        """Rows that have cost nothing yet."""
        seconds, computing = np.full((2, rows), np.nan)
        up, down = np.zeros((2, rows), np.int64)
        return cls(seconds, computing, up, down)

    def of(self, places: Array) -> Costs:
        """The costs of some rows, in the given order."""
        return Costs(*(getattr(self, each.name)[places] for each in fields(self)))


@dataclass(frozen=True)
class Chunk:
    """What came back for some rows of a plan, all of one model, stacked.

    `now` is the round that the rows were trained in. `update` [rows, params] is start - end of
    local training, so it includes the learning rate; `buffers` [rows, buffers] are the new values.
    `loss` is the mean training loss over the local steps, `steps` counts them, `examples` counts
    the examples that were processed, and `lr` is the learning rate of all steps.

    A row with a `reason` failed: its update and its loss mean nothing, but its costs count.
    """

    rows: Array
    model: int
    now: int
    lr: float
    update: Tensor
    buffers: Tensor
    loss: Array
    steps: Array
    examples: Array
    costs: Costs
    reason: list[str]
    measured: tuple[Tensor, Array] | None = None
    """The updates, and their norms where the engine knows them already."""

    @cached_property
    def ok(self) -> Array:
        """Which rows succeeded."""
        return np.array([not reason for reason in self.reason], bool)

    @cached_property
    def norm(self) -> Array:
        """The norms of the updates."""
        if self.measured is not None and self.measured[0] is self.update:
            return self.measured[1]
        return np.asarray(torch.linalg.vector_norm(self.update, dim=1).double().cpu().numpy())

    def of(self, places: Array) -> Chunk:
        """Some of the rows: `places` are positions in this chunk, not rows of the plan."""
        if len(places) == len(self.rows) and (places == np.arange(len(places))).all():
            return self
        known = self.measured is not None and self.measured[0] is self.update
        update = self.update[places]
        return replace(
            self,
            rows=self.rows[places],
            update=update,
            buffers=self.buffers[places],
            loss=self.loss[places],
            steps=self.steps[places],
            examples=self.examples[places],
            costs=self.costs.of(places),
            reason=[self.reason[place] for place in places.tolist()],
            measured=(update, self.norm[places]) if known else None,
        )


NO_REPLY = "no reply"
COLUMNS = {"norm", "loss", "examples", "seconds"}
"""Columns of Seen that a policy may declare in `sees`; "update" means that it watches chunks."""


@dataclass
class Seen:
    """What the server learned about each plan row, as arrays over rows.

    `norm` and `loss` are NaN for rows that failed, `examples` for rows that did not train. A row
    that trained and failed still has its costs. `norm` is the norm of what the estimator weighs:
    the update, or its difference from a remembered one. `pace` is the row's learning rate relative
    to the largest one of all models.
    """

    norm: Array
    loss: Array
    examples: Array
    costs: Costs
    reason: list[str]
    pace: Array | float = 1.0

    @classmethod
    def nothing(cls, rows: int, pace: Array | float = 1.0) -> Seen:
        """Nobody has replied yet."""
        norm, loss, examples = np.full((3, rows), np.nan)
        return cls(norm, loss, examples, Costs.nothing(rows), [NO_REPLY] * rows, pace)

    @property
    def seconds(self) -> Array:
        """Each row's time, computing and transfer; NaN where it did not train."""
        return self.costs.seconds

    @property
    def ok(self) -> Array:
        """Which rows succeeded."""
        return np.array([not reason for reason in self.reason], bool)

    def waits(self, rows: Array) -> Array:
        """Which of these rows have not replied."""
        return np.array([self.reason[row] == NO_REPLY for row in rows.tolist()], bool)

    def add(self, chunk: Chunk, norm: Array | None = None) -> None:
        """Write a chunk's rows, with `norm` in place of the norms of their updates."""
        ok, ran = chunk.ok, chunk.steps > 0
        rows = chunk.rows[ok]
        self.norm[rows] = (chunk.norm if norm is None else norm)[ok]
        self.loss[rows] = chunk.loss[ok]
        self.examples[chunk.rows[ran]] = chunk.examples[ran]
        self.costs.seconds[chunk.rows[ran]] = chunk.costs.seconds[ran]
        self.costs.computing[chunk.rows[ran]] = chunk.costs.computing[ran]
        self.costs.up[chunk.rows], self.costs.down[chunk.rows] = chunk.costs.up, chunk.costs.down
        for row, reason in zip(chunk.rows.tolist(), chunk.reason, strict=True):
            self.reason[row] = reason

    def only(self, sees: Collection[str]) -> Seen:
        """The columns that a policy declares in `sees`; the others are NaN."""
        rows = len(self.reason)
        unknown = np.full(rows, np.nan)
        return Seen(
            norm=self.norm if "norm" in sees else unknown,
            loss=self.loss if "loss" in sees else unknown,
            examples=self.examples if "examples" in sees else unknown,
            costs=self.costs if "seconds" in sees else Costs.nothing(rows),
            reason=self.reason,
            pace=self.pace,
        )
