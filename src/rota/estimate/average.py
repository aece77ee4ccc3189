"""Estimators without memory: the weighted sum, and FedAvg's weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.estimate.memory import Tensors
from rota.plan import Chunk, Plan
from rota.submodel.coverage import Coverage, cover
from rota.submodel.cut import add_at
from rota.weights import Weights


class Estimate(NamedTuple):
    """One model's update to subtract, and its new buffers; None where no client contributed.

    `owned` says which scalars any row held, if some rows held only a part of the model: the other
    scalars keep their values. None means all scalars.
    """

    update: Tensor | None
    buffers: Tensor | None
    owned: Tensor | None = None


@dataclass
class Sums:
    """One model's running sums over the rows that succeeded, of the `asked` ones.

    `certain` is the part of `update` that no row sent, if there is one.
    """

    update: Tensor
    buffers: Tensor
    asked: int
    weight: float = 0.0
    rows: int = 0
    parts: Coverage | None = None
    certain: Tensor | None = None

    def make_up(self) -> Tensor:
        """The sum of updates, in which the rows that succeeded stand for those that failed."""
        if self.rows >= self.asked:
            return self.update
        sent = self.update if self.certain is None else self.update - self.certain
        return self.update + (self.asked / self.rows - 1) * sent


@dataclass(frozen=True)
class Unbiased:
    """The weighted sum of the updates: in expectation, the step of full participation.

    If only k of a model's n rows succeed, their sum is multiplied by n / k. If all rows are equally
    likely to fail, whatever their updates are, the expectation stays the same in every round in
    which a row succeeds. Buffers (BatchNorm's running statistics) are always the weighted mean: a
    sum whose weights do not add up to 1 could make a variance negative.

    If some clients hold only a part of the model, the sum of each scalar is divided by the share of
    the data whose clients could hold it in this round. In expectation this is the average over
    those clients. A scalar that no row held keeps its value.
    """

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset()
    costs: ClassVar[str] = "nothing"
    parts: ClassVar[bool] = True

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        return {}

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> list[Sums]:
        out, asked = [], np.bincount(plan.model, minlength=len(models)).tolist()
        for s, model in enumerate(models):
            update, buffers = map(torch.zeros_like, model)
            out.append(Sums(update, buffers, asked[s], parts=cover(plan, s, model)))
        return out

    def add(self, sums: list[Sums], plan: Plan, chunk: Chunk) -> None:
        came = np.flatnonzero(chunk.ok)
        if not len(came):
            return
        mine = sums[chunk.model]
        weight = plan.weight[chunk.rows[came]]
        factor = torch.as_tensor(weight, dtype=chunk.update.dtype, device=chunk.update.device)
        some = chunk if len(came) == len(chunk.rows) else chunk.of(came)
        update, buffers = factor @ some.update, factor.to(some.buffers.dtype) @ some.buffers
        total, part = float(weight.sum()), plan.held(int(chunk.rows[0]))
        add_at(mine.update, part.places if part else None, update)
        add_at(mine.buffers, part.buffer_places if part else None, buffers)
        if mine.parts is not None:
            mine.parts.add(part, total)
        mine.weight += total
        mine.rows += len(came)

    def finish(self, state: Tensors, sums: list[Sums]) -> tuple[list[Estimate], Tensors]:
        return [self._estimate(each) for each in sums], state

    def _estimate(self, sums: Sums) -> Estimate:
        if not sums.rows:
            return Estimate(None, None)
        if sums.parts is not None:
            update, parts = sums.make_up(), sums.parts
            return Estimate(*parts.divide(update, sums.buffers, parts.share))
        return Estimate(sums.make_up(), sums.buffers / sums.weight)


@dataclass(frozen=True)
class FedAvg(Unbiased):
    """FedAvg: the weighted mean of the updates (McMahan et al. 2017).

    With uniform sampling the weights are McMahan's n_i / sum of n_j over the clients that
    succeeded. This is a ratio estimator: the size of the step does not depend on the cohort, at the
    price of a small bias. If some clients hold only a part of the model, each scalar is averaged
    over the rows that held it.
    """

    unbiased: ClassVar[bool] = False

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> list[Sums]:
        total = np.bincount(plan.model, plan.weight, minlength=len(models))
        for s in np.unique(plan.model).tolist():
            if not total[s] > 0:
                raise BadInput(
                    f"the weights of model {s}'s rows sum to {total[s]:g}, and fedavg divides by "
                    "that: draw rows with positive weights, or use the estimator unbiased"
                )
        return super().begin(state, models, plan)

    def _estimate(self, sums: Sums) -> Estimate:
        if not sums.rows or not sums.weight > 0:
            return Estimate(None, None)
        if sums.parts is not None:
            return Estimate(*sums.parts.divide(sums.update, sums.buffers, sums.parts.weight))
        return Estimate(sums.update / sums.weight, sums.buffers / sums.weight)
