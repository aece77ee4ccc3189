"""Estimators without memory: the weighted sum, and FedAvg's weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.estimate.memory import Tensors
from rota.plan import Chunk, Plan
from rota.weights import Weights


class Estimate(NamedTuple):
    """What one model's clients say together: the update to subtract, and the new buffers. None: nobody has anything to say."""

    update: Tensor | None
    buffers: Tensor | None


@dataclass
class Sums:
    """One model's running sums over the rows that came back."""

    update: Tensor
    buffers: Tensor
    weight: float = 0.0
    rows: int = 0


@dataclass(frozen=True)
class Unbiased:
    """The weighted sum of the updates: in expectation what full participation would have given.

    Rows that failed are left out. Buffers (BatchNorm's running statistics) are always the weighted mean: a sum whose
    weights do not add up to 1 could make a variance negative.
    """

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    costs: ClassVar[str] = "nothing"

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        return {}

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> list[Sums]:
        return [Sums(torch.zeros_like(m.params), torch.zeros_like(m.buffers)) for m in models]

    def add(self, sums: list[Sums], plan: Plan, chunk: Chunk) -> None:
        came = came_back(chunk)
        if not len(came):
            return
        weight = plan.weight[chunk.rows[came]]
        factor = torch.as_tensor(weight, dtype=chunk.update.dtype, device=chunk.update.device)
        whole = len(came) == len(chunk.rows)
        sums[chunk.model].update += factor @ (chunk.update if whole else chunk.update[came])
        if chunk.buffers.shape[1]:
            sums[chunk.model].buffers += factor.to(chunk.buffers.dtype) @ (
                chunk.buffers if whole else chunk.buffers[came]
            )
        sums[chunk.model].weight += float(weight.sum())
        sums[chunk.model].rows += len(came)

    def finish(self, state: Tensors, sums: list[Sums]) -> tuple[list[Estimate], Tensors]:
        return [
            Estimate(s.update, s.buffers / s.weight) if s.rows else Estimate(None, None)
            for s in sums
        ], state


@dataclass(frozen=True)
class FedAvg(Unbiased):
    """The weighted mean of the updates: with uniform sampling McMahan's n_i / sum of n_j over those who came back (S0).

    A ratio estimator: the step's size does not depend on who was drawn, at the price of a small bias.
    """

    unbiased: ClassVar[bool] = False

    def finish(self, state: Tensors, sums: list[Sums]) -> tuple[list[Estimate], Tensors]:
        return [
            Estimate(s.update / s.weight, s.buffers / s.weight) if s.rows else Estimate(None, None)
            for s in sums
        ], state


def came_back(chunk: Chunk) -> Array:
    """The places in a chunk of the rows that did not fail."""
    return np.flatnonzero(chunk.ok)
