"""Stacks of torch operators on a CPU: one thread trains one stack."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rota.data import memory
from rota.engine.backends.schedule import schedule
from rota.engine.group import Group, Result, Workers
from rota.engine.stack import Stack, active, begin
from rota.engine.steps import Steps

PARAMETERS = 1 << 20
ENTRY = 32
"""Bytes that an example in a list of mini-batches takes; one client's list is shorter."""


class Stacks:
    """Trains groups as stacks on a CPU."""

    checks = False

    def __init__(self, steps: Steps, workers: Workers) -> None:
        self.steps, self.workers = steps, workers

    def most(self, width: int) -> int:
        """As many rows as hold about a million parameters together.

        Small networks are bound by the calls of operators, which the rows of a stack share. Large
        ones are bound by the cache, which a stack overflows. The number depends on the network
        alone and not on a timing: rows in stacks of another height round differently in their last
        bits, and a resumed run must repeat them.
        """
        return max(1, min(256, PARAMETERS // max(1, self.steps.params.numel)))

    def start(self, group: Group, alone: bool) -> Callable[[], list[Result]]:
        """Begin to train a group; what is returned waits for the results."""
        return self.workers.threads.submit(self._train, group).result

    def _train(self, group: Group) -> list[Result]:
        steps, rows = self.steps, len(group)
        listed = float(group.steps.max()) * rows * group.width
        if 2 * self.workers.number * ENTRY * listed > memory.total():
            raise RuntimeError("the list of the mini-batches would not fit into memory")
        x, y, fused = steps.x, steps.y, steps.fuses(group)
        todo = schedule(group, x.device)
        theta, buffers, rate = begin(group, x.device, steps.dtype)
        stack = Stack(steps, rows, group.width, fused)
        stack.load(group, todo.key, theta, buffers, rate)
        weight = (todo.weight * rate[:, None] if fused else todo.weight).to(steps.dtype)
        with torch.inference_mode():
            for t, size in enumerate(active(group.steps.tolist(), rows)):
                batch = todo.index[t, :size]
                stack.advance(size, x[batch], y[batch], weight[t, :size])
        total = stack.loss[:rows].double().numpy()
        return [
            Result(
                row=group.row,
                update=theta - stack.theta[:rows],
                buffers=stack.buffers[:rows].clone(),
                loss=total / group.steps / (group.rate if fused else 1.0),
                steps=group.steps,
                processed=group.processed,
                reason=[""] * rows,
            )
        ]
