"""SCAFFOLD (Karimireddy et al. 2020): control variates against the drift of local training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.estimate import memory
from rota.estimate.average import Estimate, Sums, Unbiased
from rota.estimate.memory import Fresh, Place, Tensors
from rota.plan import Chunk, Local, Plan
from rota.weights import Weights


@dataclass
class ControlledSums:
    """A round: its first state, its sums, the drawn clients' new controls, and the change of c."""

    state: Tensors
    sums: list[Sums]
    fresh: Fresh
    change: list[Tensor]


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD: control variates correct the drift of unequal clients (Karimireddy et al. 2020).

    Each local step adds c - c_i to the gradient. After it, c_i <- c_i - c + (start - end) / (lr
    steps) (option II), and c = sum of d_i c_i; all are 0 at first. The updates are summed as
    `unbiased` sums them. c is sent down with the model, and the change of c_i is sent
    up with the update. `memory` is where the c_i are kept, one vector the size of the model per
    client: on the device, in main memory ("cpu"), or in a memory-mapped file in the temporary
    folder ("disk"). SCAFFOLD is made for plain SGD.
    """

    memory: Place = "device"

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    costs: ClassVar[str] = "one control per client on the server; twice the bytes"
    controls: ClassVar[int] = 1
    plain_sgd: ClassVar[bool] = True

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        state = memory.init(models, shares, self.memory)
        for s, model in enumerate(models):
            state[f"common.{s}"] = torch.zeros_like(model.params)
        return state

    def local(self, state: Tensors, models: list[Weights], plan: Plan) -> Local:
        """Every local step adds c - c_i to the gradient."""
        memory.settle(state)

        def shift(rows: Array) -> Tensor:
            of, clients = plan.model[rows], plan.client[rows]
            common = state[f"common.{of[0]}"]
            out = common.new_empty(len(rows), len(common))
            for s in np.unique(of).tolist():  # models of one size may be trained together
                mine = np.flatnonzero(of == s)
                out[mine] = state[f"common.{s}"] - memory.read(state, s, clients[mine], common)
            return out

        return Local(shift=shift)

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> ControlledSums:
        memory.settle(state)
        sums = Unbiased().begin({}, models, plan)
        change = [torch.zeros_like(model.params) for model in models]
        return ControlledSums(state, sums, [[] for _ in models], change)

    def add(self, sums: ControlledSums, plan: Plan, chunk: Chunk) -> None:
        Unbiased().add(sums.sums, plan, chunk)
        came, s = np.flatnonzero(chunk.ok), chunk.model
        clients, update = plan.client[chunk.rows[came]], chunk.update[came]
        length = torch.as_tensor(chunk.lr * chunk.steps[came]).to(update)
        change = update / length[:, None] - sums.state[f"common.{s}"]
        sums.change[s] += sums.state["share"][s, clients].to(update) @ change
        fresh = memory.read(sums.state, s, clients, update) + change
        sums.fresh[s].append((clients, fresh.to(sums.state[f"memory.{s}"].device)))

    def finish(self, state: Tensors, sums: ControlledSums) -> tuple[list[Estimate], Tensors]:
        new = memory.remember(state, sums.fresh)
        for s, change in enumerate(sums.change):
            new[f"common.{s}"] = state[f"common.{s}"] + change
        return Unbiased().finish({}, sums.sums)[0], new
