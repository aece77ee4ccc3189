"""SCAFFOLD (Karimireddy et al. 2020): control variates against the drift of local training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.engine.local import Correction
from rota.estimate import memory
from rota.estimate.average import Estimate, Sums, Unbiased, came_back
from rota.estimate.memory import Fresh, Place, Tensors
from rota.plan import Chunk, Plan
from rota.weights import Weights


@dataclass
class Round:
    """The state that a round began from, all models' sums, the drawn clients' new controls, and what they change the common ones by."""

    state: Tensors
    sums: list[Sums]
    fresh: Fresh
    change: list[Tensor]


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD: the clients' steps are corrected by control variates, against the drift of unequal clients (Karimireddy et al. 2020).

    Each local step adds c - c_i to the gradient, and then c_i <- c_i - c + (start - end) / (lr steps) (option II), c = sum of d_i c_i; all
    are 0 at first. The updates are summed with the plan's weights, as by `unbiased`. c goes down with the model, and what c_i changed by
    comes up with the update. `memory`, the c_i, is a vector the size of the model for every client: on the device, in main memory
    ("cpu"), or in a memory-mapped file in the temporary folder ("disk"). Made for plain SGD.
    """

    memory: Place = "device"

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    costs: ClassVar[str] = "a control a client on the server; twice the bytes"
    controls: ClassVar[int] = 1

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        return memory.init(models, shares, self.memory) | {
            f"common.{s}": torch.zeros_like(m.params) for s, m in enumerate(models)
        }

    def correction(self, state: Tensors, plan: Plan) -> Correction:
        """c - c_i of the plan's rows."""
        memory.settle(state)

        def shift(rows: Array) -> Tensor:
            of, clients = plan.model[rows], plan.client[rows]
            common = state[f"common.{of[0]}"]
            out = common.new_empty(len(rows), len(common))
            for s in np.unique(of).tolist():  # of one size: models that share a stack
                mine = np.flatnonzero(of == s)
                out[mine] = state[f"common.{s}"] - memory.read(state, s, clients[mine], common)
            return out

        return shift

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> Round:
        memory.settle(state)
        sums = Unbiased().begin({}, models, plan)
        return Round(
            state, sums, [[] for _ in models], [torch.zeros_like(m.params) for m in models]
        )

    def add(self, sums: Round, plan: Plan, chunk: Chunk) -> None:
        Unbiased().add(sums.sums, plan, chunk)
        came, s = came_back(chunk), chunk.model
        clients, update = plan.client[chunk.rows[came]], chunk.update[came]
        length = torch.as_tensor(
            chunk.lr * chunk.steps[came], dtype=update.dtype, device=update.device
        )
        change = update / length[:, None] - sums.state[f"common.{s}"]
        sums.change[s] += sums.state["share"][s, clients].to(update) @ change
        fresh = memory.read(sums.state, s, clients, update) + change
        sums.fresh[s].append((clients, fresh.to(sums.state[f"memory.{s}"].device)))

    def finish(self, state: Tensors, sums: Round) -> tuple[list[Estimate], Tensors]:
        common = {
            f"common.{s}": state[f"common.{s}"] + change for s, change in enumerate(sums.change)
        }
        return Unbiased().finish({}, sums.sums)[0], memory.remember(state, sums.fresh) | common
