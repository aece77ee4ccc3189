"""The fast engine: rows of the plan are stacked and trained at once, as one computation, on a CPU or a GPU.

A stack is some rows of one network: their parameters are the rows of one matrix, their mini-batches one tensor, and a local step of all
of them is one traced list of operators (trace.py). Rows are ordered by their number of steps, and retire from the end of the
stack as they finish. On a GPU a step is one CUDA graph; on a CPU several stacks run side by side, a thread each.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rota.data.federation import Array
from rota.engine.clock import Devices
from rota.engine.local import TOO_FEW, Correction
from rota.engine.schedule import local_steps, schedule, widths
from rota.engine.score import Score
from rota.engine.sequential import Sequential
from rota.engine.stack import Stack, Steps, active
from rota.engine.trace import Unbatchable
from rota.plan import Chunk, Plan, Task
from rota.weights import Weights


class Batched:
    """Trains the rows of a plan in stacks on one device. What cannot be stacked goes to the sequential engine, and says so."""

    def __init__(self, tasks: list[Task], devices: Devices, seed: int, device: torch.device) -> None:
        self.plain = Sequential(tasks, devices, seed, device)
        self.tasks, self.seed, self.device = tasks, seed, device
        self.steps: list[Steps | None] = [self._steps(model) for model in range(len(tasks))]
        self.stack_rows = 1
        self.threads = ThreadPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,))
        self.slots = self.padding = 0
        """Examples' places in mini-batches so far, and how many of them held no example."""

    def _steps(self, model: int) -> Steps | None:
        task = self.tasks[model]
        steps = Steps(task, self.plain.modules[model], *self.plain.data[model])
        try:
            steps.get(2, 2, steps.plain)
        except Unbatchable as error:
            name = task.name or task.data.name
            print(f"rota: task '{name}' runs on the sequential engine, because its model cannot be stacked: {error}", file=sys.stderr)
            return None
        return steps

    def initial(self) -> list[Weights]:
        """The models before the first round."""
        return self.plain.initial()

    def evaluate(self, models: list[Weights]) -> list[Score]:
        """Each model's loss and score on the test part."""
        return self.plain.evaluate(models)

    def train(self, models: list[Weights], plan: Plan, now: int, correction: Correction | None = None) -> Iterator[Chunk]:
        """Run the plan's rows from these models, as in round `now`."""
        waiting: deque[Future[Chunk]] = deque()
        for model in range(len(self.tasks)):
            rows = np.flatnonzero(plan.model == model)
            if not len(rows):
                continue
            groups = [*self._groups(model, plan, rows)]
            rest = np.setdiff1d(rows, np.concatenate([group for group, _ in groups])) if groups else rows
            yield from self._one_by_one(models, plan, rest, now, correction)
            for group, width in groups:
                waiting.append(self.threads.submit(self._train, models[model], plan, group, width, model, now, correction))
                if len(waiting) > 2 * (os.cpu_count() or 1):  # results are taken in order, and only a few wait
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _one_by_one(self, models: list[Weights], plan: Plan, rows: Array, now: int, correction: Correction | None) -> Iterator[Chunk]:
        """The sequential engine on some rows."""
        some = Plan(plan.client[rows], plan.model[rows], plan.probability[rows], plan.weight[rows])
        shift = None if correction is None else lambda few: correction(rows[few])
        for chunk in self.plain.train(models, some, now, shift):
            yield replace(chunk, rows=rows[chunk.rows])

    def _groups(self, model: int, plan: Plan, rows: Array) -> Iterator[tuple[Array, int]]:
        """Rows that are stacked together, most steps first, and the width of their mini-batches; not those without any step."""
        if self.steps[model] is None:
            return
        sizes = self.tasks[model].data.train.sizes[plan.client[rows]]
        steps, wide = local_steps(self.tasks[model], sizes, self.plain.least[model]), widths(self.tasks[model], sizes)
        for width in np.unique(wide)[::-1].tolist():
            mine = np.flatnonzero((wide == width) & (steps > 0))
            mine = mine[np.argsort(-steps[mine], kind="stable")]
            for first in range(0, len(mine), self.stack_rows):
                yield rows[mine[first : first + self.stack_rows]], width

    def _train(self, start: Weights, plan: Plan, rows: Array, width: int, model: int, now: int, correction: Correction | None) -> Chunk:
        """Train one stack."""
        task, steps = self.tasks[model], self.steps[model]
        assert steps is not None
        fused = steps.plain and correction is None
        todo = schedule(task, rows, plan, now, self.seed, self.plain.least[model], width, self.device)
        stack = Stack(steps, len(rows), width, fused)
        rate = torch.full((len(rows),), task.lr_at(now), device=self.device, dtype=steps.dtype)
        shift = None if correction is None else correction(rows)
        n = len(rows)
        stack.load(start.params.expand(n, -1), start.buffers.expand(n, -1), todo.key, torch.as_tensor(todo.steps), rate, shift)
        weight = todo.weight * rate[:, None] if fused else todo.weight
        x, y = self.plain.data[model]
        for t, at in enumerate(active(todo.steps.tolist())):
            batch = todo.index[t, :at]
            stack.advance(at, x[batch], y[batch], weight[t, :at])
        loss = stack.loss.double().cpu().numpy() / todo.steps / (task.lr_at(now) if fused else 1.0)
        return self._chunk(plan, rows, model, start, stack, loss, todo.examples)

    def _chunk(self, plan: Plan, rows: Array, model: int, start: Weights, stack: Stack, loss: Array, examples: Array) -> Chunk:
        return Chunk(
            rows=rows,
            model=model,
            update=start.params - stack.theta,
            buffers=stack.buffers,
            loss=loss,
            examples=examples,
            seconds=self.plain.seconds(model, plan.client[rows], examples, start.nbytes),
            reason=[""] * len(rows),
        )
