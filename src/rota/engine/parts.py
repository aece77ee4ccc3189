"""Rows that hold parts of models: which of them share a network, and what it takes of the whole.

The clients of one width hold the same part of a model in a round. Which units it keeps changes from
round to round, but how many it keeps of each layer does not. So all parts with these counts, in all
rounds, are trained with one network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.plan import Job, Plan
from rota.submodel.cut import SubModel
from rota.weights import Weights

SHAPES = 16
"""The most shapes of parts whose networks and compiled steps an engine keeps, per task.

Fixed widths are few, and each of their networks is made once. Continuous widths give new shapes in
every round, so old ones must go, the least recently used first. If one round has more shapes than
this, the rows of the rarest ones train one by one. This depends on the round's plan alone and not
on what an earlier round has left here, so a resumed run gives the same bits.
"""

Key = TypeVar("Key")
Kept = TypeVar("Kept")
Shape = tuple[int, ...]
"""How many units a part keeps of each layer."""


def shape(part: SubModel) -> Shape:
    """The shape of a part."""
    return tuple(len(kept) for kept in part.cut.kept)


def by_shape(plan: Plan, rows: Array) -> tuple[Array, list[tuple[SubModel, Array]]]:
    """Split rows of one task by what they hold: whole models, or parts of some shape.

    Each shape comes with one of its parts, and the shape that most rows hold comes first.
    """
    if plan.cut is None:
        return rows, []
    cut = plan.cut[rows]
    found: dict[Shape, tuple[SubModel, list[int]]] = {}
    for k in np.unique(cut[cut > 0]).tolist():
        part = plan.cuts[k - 1]
        found.setdefault(shape(part), (part, []))[1].append(k)
    smaller = [(part, rows[np.isin(cut, some)]) for part, some in found.values()]
    return rows[cut == 0], sorted(smaller, key=lambda each: -len(each[1]))


def recent(kept: dict[Key, Kept], key: Key, make: Callable[[], Kept]) -> Kept:
    """Get what is kept under a key, or make it. The least recently used key makes room for it."""
    value = kept[key] = kept.pop(key) if key in kept else make()
    if len(kept) > SHAPES:
        del kept[next(iter(kept))]
    return value


def held(plan: Plan, rows: Array) -> Array:
    """What rows hold, as numbers that are equal where the model and its part are."""
    if plan.cut is None:
        return plan.model[rows]
    return np.asarray(plan.model[rows] * (len(plan.cuts) + 1) + plan.cut[rows])


def fetched(job: Job, row: int) -> Weights:
    """The weights that a row fetches: its model's, or those of its part."""
    weights, part = job.models[int(job.plan.model[row])].weights, job.plan.held(row)
    return weights if part is None else part.of(weights)


def started(job: Job, rows: Array, start: Callable[[Array], Weights]) -> Weights:
    """Where `start` of local work begins rows of one shape."""
    params, buffers = start(rows)
    return Weights(taken(job.plan, rows, params), taken(job.plan, rows, buffers, buffers=True))


def taken(plan: Plan, rows: Array, whole: Tensor, buffers: bool = False) -> Tensor:
    """What rows of one shape hold of vectors that are as long as a whole model's, a line per row.

    The vectors are parameters, or with `buffers` buffers.
    """
    if plan.cut is None or not plan.cut[rows].any():
        return whole
    cut, order, out = plan.cut[rows], [], []
    for k in np.unique(cut).tolist():
        mine = np.flatnonzero(cut == k)
        lines = whole[torch.from_numpy(mine)]
        if k:
            part = plan.cuts[k - 1]
            lines = lines[:, part.buffer_places if buffers else part.places]
        order.append(mine)
        out.append(lines)
    return torch.cat(out)[torch.from_numpy(np.argsort(np.concatenate(order)))]
