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
class Parts:
    """Who could hold each scalar of a model, and who did, if some rows hold only a part of it.

    `share` is the share of the data whose clients could hold the scalar in this round. `weight` and
    `buffer_weight` are the weights of the rows that held it.
    """

    share: Tensor
    weight: Tensor
    buffer_weight: Tensor
    buffers: Tensor
    """The model's own buffers, for scalars that no row held."""


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
    parts: Parts | None = None
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
        for s, (params, buffers) in enumerate(models):
            sums = Sums(torch.zeros_like(params), torch.zeros_like(buffers), asked[s])
            mine = [part for part in plan.cuts if part.model == s]
            if mine:
                share = torch.full_like(params, 1.0 - sum(part.share for part in mine))
                for part in mine:
                    share[part.places] += part.share
                nobody = torch.zeros_like(params), torch.zeros_like(buffers)
                sums.parts = Parts(share, *nobody, buffers)
            out.append(sums)
        return out

    def add(self, sums: list[Sums], plan: Plan, chunk: Chunk) -> None:
        came = came_back(chunk)
        if not len(came):
            return
        mine = sums[chunk.model]
        weight = plan.weight[chunk.rows[came]]
        factor = torch.as_tensor(weight, dtype=chunk.update.dtype, device=chunk.update.device)
        some = chunk if len(came) == len(chunk.rows) else chunk.of(came)
        update, buffers = factor @ some.update, factor.to(some.buffers.dtype) @ some.buffers
        total, part = float(weight.sum()), plan.held(int(chunk.rows[0]))
        if part is None:
            mine.update += update
            mine.buffers += buffers
        else:
            mine.update[part.places] += update
            mine.buffers[part.buffer_places] += buffers
        if mine.parts is not None:
            mine.parts.weight[slice(None) if part is None else part.places] += total
            mine.parts.buffer_weight[slice(None) if part is None else part.buffer_places] += total
        mine.weight += total
        mine.rows += len(came)

    def finish(self, state: Tensors, sums: list[Sums]) -> tuple[list[Estimate], Tensors]:
        return [self._estimate(each) for each in sums], state

    def _estimate(self, sums: Sums) -> Estimate:
        if not sums.rows:
            return Estimate(None, None)
        if sums.parts is not None:
            return _of_parts(sums, sums.make_up(), sums.parts, sums.parts.share)
        return Estimate(sums.make_up(), sums.buffers / sums.weight)


@dataclass(frozen=True)
class FedAvg(Unbiased):
    """FedAvg: the weighted mean of the updates (S0).

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
            return _of_parts(sums, sums.update, sums.parts, sums.parts.weight)
        return Estimate(sums.update / sums.weight, sums.buffers / sums.weight)


def _of_parts(sums: Sums, update: Tensor, parts: Parts, by: Tensor) -> Estimate:
    """Each scalar's sum divided by its own number; a scalar that no row held does not change."""
    owned, known = parts.weight > 0, parts.buffer_weight > 0
    update = torch.where(owned, update / by, torch.zeros_like(by))
    buffers = torch.where(known, sums.buffers / parts.buffer_weight, parts.buffers)
    return Estimate(update, buffers, owned)


def came_back(chunk: Chunk) -> Array:
    """The places in a chunk of the rows that succeeded."""
    return np.flatnonzero(chunk.ok)
