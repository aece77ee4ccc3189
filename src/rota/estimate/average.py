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
    """One model's update to subtract, and its new buffers; None where no client contributed."""

    update: Tensor | None
    buffers: Tensor | None


@dataclass
class Sums:
    """One model's running sums over the rows that succeeded."""

    update: Tensor
    buffers: Tensor
    weight: float = 0.0
    rows: int = 0


@dataclass(frozen=True)
class Unbiased:
    """The weighted sum of the updates: in expectation, the step of full participation.

    Failed rows are left out. Buffers (BatchNorm's running statistics) are always the weighted mean:
    a sum whose weights do not add up to 1 could make a variance negative.
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
            buffers = chunk.buffers if whole else chunk.buffers[came]
            sums[chunk.model].buffers += factor.to(buffers.dtype) @ buffers
        sums[chunk.model].weight += float(weight.sum())
        sums[chunk.model].rows += len(came)

    def finish(self, state: Tensors, sums: list[Sums]) -> tuple[list[Estimate], Tensors]:
        return [self._estimate(each) for each in sums], state

    def _estimate(self, sums: Sums) -> Estimate:
        if not sums.rows:
            return Estimate(None, None)
        return Estimate(sums.update, sums.buffers / sums.weight)


@dataclass(frozen=True)
class FedAvg(Unbiased):
    """FedAvg: the weighted mean of the updates (S0).

    With uniform sampling the weights are McMahan's n_i / sum of n_j over the clients that
    succeeded. This is a ratio estimator: the size of the step does not depend on the cohort, at the
    price of a small bias.
    """

    unbiased: ClassVar[bool] = False

    def _estimate(self, sums: Sums) -> Estimate:
        if not sums.rows:
            return Estimate(None, None)
        return Estimate(sums.update / sums.weight, sums.buffers / sums.weight)


def came_back(chunk: Chunk) -> Array:
    """The places in a chunk of the rows that succeeded."""
    return np.flatnonzero(chunk.ok)
