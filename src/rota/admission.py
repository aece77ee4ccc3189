"""Admission: a reply becomes part of a round only after it has passed every check here.

A row that fails a check becomes a failed row with a reason, so nothing that could harm a model
reaches an estimator. A reply that nobody asked for is dropped and counted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Chunk, Costs, Job, Seen, State
from rota.weights import Weights

NOT_FINITE = "the update is not finite"
KEPT = 100
"""How many norms per model the limit on norms remembers."""
MOST = 1e15
"""The most seconds or bytes of a row: sums over rounds stay far from what numbers can hold."""
FEWEST = 5
"""The limit on norms applies once this many norms of a model are known."""


@dataclass(frozen=True)
class Admission:
    """A limit on the norms of updates, relative to those seen; all other checks are always on.

    A row fails if its update's norm exceeds `times` times the median of the last 100 admitted norms
    of its model. None sets no limit. Set one for real devices (10 to 100 is a good value), or one
    broken device can replace the model with its own noise.
    """

    times: float | None = None

    def init(self, models: int) -> State:
        """No norm is known yet."""
        if self.times is not None and not self.times > 1:
            raise BadInput(f"admission.times is {self.times:g}: it must be above 1")
        if self.times is None:
            return {}
        return {"norms": np.full((models, KEPT), np.nan), "count": np.zeros(models, np.int64)}

    def limit(self, state: State, model: int) -> float:
        """The largest norm that a row of the model may have."""
        if self.times is None or model >= len(state["count"]) or state["count"][model] < FEWEST:
            return np.inf
        return self.times * float(np.nanmedian(state["norms"][model]))

    def learn(self, state: State, model: int, norms: Array) -> State:
        """The state after a chunk of a model with these admitted norms."""
        if self.times is None or model >= len(state["count"]):
            return state
        recent, count = state["norms"].copy(), state["count"].copy()
        for norm in norms.tolist():
            recent[model, count[model] % KEPT] = norm
            count[model] += 1
        return {"norms": recent, "count": count}


def admit(chunk: Chunk, job: Job, seen: Seen, most: float = np.inf) -> Chunk | None:
    """The rows of a chunk that were asked for and have not replied; None if there are none.

    Rows that cannot be used become failed rows. `most` bounds the norms.
    """
    wanted = _asked_for(chunk, job, seen)
    if not wanted.all():
        logging.getLogger("rota").warning(
            "round %d: dropped %d rows of a reply that were not asked for", job.now, (~wanted).sum()
        )
    if not wanted.any():
        return None
    part = job.plan.held(int(chunk.rows[wanted][0]))
    weights = job.models[chunk.model].weights
    sent = weights if part is None else part.of(weights)
    chunk = _well_formed(chunk, sent)
    chunk = chunk if wanted.all() else chunk.of(np.flatnonzero(wanted))
    wrong = [reason or "" for reason in chunk.reason]
    for bad, why in (
        (~_finite(chunk, sent), NOT_FINITE),
        (_overflows(chunk, job, sent), "the update is too large to be added up"),
        (~(chunk.steps > 0), "it took no step"),
        (chunk.norm > most, f"the update's norm is above the limit of {most:.3g}"),
    ):
        for place in np.flatnonzero(bad).tolist() if bad.any() else ():
            wrong[place] = wrong[place] or why
    return chunk if wrong == chunk.reason else replace(chunk, reason=wrong)


def _asked_for(chunk: Chunk, job: Job, seen: Seen) -> Array:
    """Which rows are in the plan, in this round, and have not replied before."""
    rows = np.asarray(chunk.rows)
    known = rows.ndim == 1 and rows.dtype.kind in "iu" and len(chunk.reason) == len(rows)
    if not known or chunk.now != job.now or not 0 <= chunk.model < len(job.models):
        return np.zeros(np.size(rows), bool)
    wanted = (rows >= 0) & (rows < len(job.plan))
    if len(set(rows.tolist())) < len(rows):  # a row that comes twice counts once
        first = np.zeros(len(rows), bool)
        first[np.unique(rows, return_index=True)[1]] = True
        wanted &= first
    place = rows[wanted]
    wanted[wanted] = seen.waits(place) & (job.plan.model[place] == chunk.model)
    if job.plan.cut is not None and wanted.any():  # the rows of a chunk hold the same part
        part = job.plan.cut[rows[wanted]]
        wanted[wanted] = part == part[0]
    return wanted


def _well_formed(chunk: Chunk, model: Weights) -> Chunk:
    """Replace what has a wrong shape or dtype with zeros, and fail the rows that sent it."""
    number, why, new = len(chunk.rows), "", dict[str, Any]()
    for name, like in (("update", model.params), ("buffers", model.buffers)):
        value: Any = getattr(chunk, name)
        if not isinstance(value, Tensor):
            problem = f"the {name} is a {type(value).__name__}, not a tensor"
        elif tuple(value.shape) != (number, len(like)):
            problem = f"the {name} has shape {tuple(value.shape[1:])}, not ({len(like)},)"
        elif value.dtype != like.dtype:
            problem = f"the {name} has dtype {value.dtype}, not {like.dtype}"
        else:
            continue
        why, new[name] = why or problem, like.new_zeros(number, len(like))
    for name in ("loss", "steps", "examples"):
        if not _numbers(getattr(chunk, name), number):
            why, new[name] = why or f"'{name}' is not one number per row", np.zeros(number)
    costs = vars(chunk.costs)
    if not all(_cost(each, number, name in ("up", "down")) for name, each in costs.items()):
        why, new["costs"] = (
            why or f"the costs are not numbers from 0 to {MOST:g}",
            Costs.nothing(number),
        )
    if not why:
        return chunk
    return replace(chunk, **new, measured=None, reason=[old or why for old in chunk.reason])


def _numbers(column: Any, number: int) -> bool:
    """Whether a column has one number per row; NaN stands for unknown."""
    known = isinstance(column, np.ndarray) and column.shape == (number,)
    return known and column.dtype.kind in "iuf"


def _cost(column: Any, number: int, known: bool) -> bool:
    """Whether a column has one cost per row; NaN stands for an unknown one, if that may be."""
    if not _numbers(column, number):
        return False
    fine = (column >= 0) & (column <= MOST)
    return bool(fine.all()) or (not known and bool(np.isnan(column[~fine]).all()))


def _finite(chunk: Chunk, model: Weights) -> Array:
    """Which rows have finite updates and buffers; constant infinities, as in a mask, are fine."""
    fine = np.isfinite(chunk.norm)  # a norm may overflow although no entry is infinite
    if not fine.all():
        fine = fine | torch.isfinite(chunk.update).all(dim=1).cpu().numpy()
    if chunk.buffers.shape[1]:
        same = torch.isfinite(chunk.buffers) | (chunk.buffers == model.buffers)
        fine = fine & same.all(dim=1).cpu().numpy()
    return np.asarray(fine)


def _overflows(chunk: Chunk, job: Job, model: Weights) -> Array:
    """Which rows are so large that a weighted sum over the plan, or its square, could overflow."""
    largest, weight = torch.finfo(chunk.update.dtype).max, np.abs(job.plan.weight)
    room = (largest**0.5 if largest > 1e30 else largest / 4) / len(weight)
    times = np.maximum(weight[chunk.rows], 1.0)
    over = ~(chunk.norm * times <= room)
    if over.any() and chunk.update.shape[1]:  # the norm only bounds the largest entry
        entry = chunk.update.abs().amax(dim=1).double().cpu().numpy()
        over &= ~(entry * times <= room)
    if chunk.buffers.shape[1]:  # a mean is a sum of weight * buffer before it is divided
        new = chunk.buffers.masked_fill(chunk.buffers == model.buffers, 0.0)
        most = torch.finfo(new.dtype).max / 4 / max(1.0, float(weight.sum()))
        over |= (new.abs() > most).any(dim=1).cpu().numpy()
    return np.asarray(over)
