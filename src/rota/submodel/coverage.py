"""Means over rows that may hold only a part of their model: each scalar has its own divisor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rota.plan import Plan
from rota.submodel.cut import SubModel, add_at
from rota.weights import Weights


@dataclass
class Coverage:
    """Who could hold each scalar of a model in a round, and who did.

    `share` is the share of the data whose clients could hold the scalar. `weight` and
    `buffer_weight` are the weights of the rows that held it.
    """

    share: Tensor
    weight: Tensor
    buffer_weight: Tensor
    buffers: Tensor
    """The model's own buffers, for scalars that no row held."""

    def add(self, part: SubModel | None, weight: float) -> None:
        """Count rows of this weight that held a part of the model, or all of it."""
        add_at(self.weight, part.places if part else None, weight)
        add_at(self.buffer_weight, part.buffer_places if part else None, weight)

    def divide(self, update: Tensor, buffers: Tensor, by: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means from sums, and which scalars any row held; the others do not change."""
        owned, known = self.weight > 0, self.buffer_weight > 0
        update = torch.where(owned, update / by, torch.zeros_like(by))
        return update, torch.where(known, buffers / self.buffer_weight, self.buffers), owned


def cover(plan: Plan, s: int, model: Weights) -> Coverage | None:
    """The coverage of model s before any row has replied; None if no client holds a part of it."""
    mine = [part for part in plan.cuts if part.model == s]
    if not mine:
        return None
    params, buffers = model
    share = torch.full_like(params, 1.0 - sum(part.share for part in mine))
    for part in mine:
        add_at(share, part.places, part.share)
    return Coverage(share, torch.zeros_like(params), torch.zeros_like(buffers), buffers)
