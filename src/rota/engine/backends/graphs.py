"""Stacks on a GPU, where every local step is one CUDA graph.

So a step costs one launch, whatever the network's number of operators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota.engine.backends.schedule import Schedule, nearly, schedule
from rota.engine.examples import Examples
from rota.engine.group import Group, Result, Workers
from rota.engine.rules import on_gpu
from rota.engine.stack import Stack, active, begin
from rota.engine.steps import Steps

logger = logging.getLogger(__name__)


class Graphs:
    """Trains groups as stacks on a GPU."""

    checks = False

    def __init__(self, steps: Steps, examples: Examples, workers: Workers) -> None:
        self.steps, self.examples, self.workers = steps, examples, workers
        self.room: dict[int, int] = {}
        """Width -> the most rows in one stack."""
        self.stacks: dict[tuple[int, bool], GraphStack] = {}
        """(Width, fused) -> the stack that trains such groups."""

    def most(self, width: int) -> int:
        """As many rows as fit well into the free memory."""
        if width not in self.room:
            self.room[width] = rows_that_fit(self.steps, width)
        return self.room[width]

    def start(self, group: Group, alone: bool) -> Callable[[], list[Result]]:
        """Begin to train a group; what is returned waits for the results."""
        train = partial(in_parts, group, self._train, self._shrink)
        # a thread would only cost time, as there is nothing else to do meanwhile
        return train if alone else self.workers.threads.submit(train).result

    def _shrink(self, width: int, rows: int) -> None:
        """Train fewer rows together from now on."""
        self.room[width] = rows
        self.stacks = {key: held for key, held in self.stacks.items() if key[0] != width}

    def _train(self, group: Group) -> Result:
        rows, fused = len(group), self.steps.fuses(group)
        x, y, group = self._here(group)
        todo = schedule(group, x.device)
        theta, buffers, rate = begin(group, x.device, self.steps.dtype)
        sizes = active(group.steps.tolist(), nearly(rows))
        held = self._stack(group.width, fused, sizes[0], len(sizes), x, y)
        held.run(group, todo, sizes, x, y, theta, buffers, rate)
        stack, norm = held.stack, None
        after = stack.buffers[:rows].clone()
        if on_gpu(theta):
            from rota.engine import kernels

            update, numbers = kernels.results(theta, stack.theta, stack.loss)
            norm, total = numbers.cpu().numpy()  # what the round waits for
        else:
            update, total = theta - stack.theta[:rows], stack.loss[:rows].double().cpu().numpy()
        return Result(
            row=group.row,
            update=update,
            buffers=after,
            loss=total / group.steps / (group.rate if fused else 1.0),
            steps=group.steps,
            processed=group.processed,
            reason=[""] * rows,
            norm=norm,
        )

    def _here(self, group: Group) -> tuple[Tensor, Tensor, Group]:
        """The data on the device, and the group with its rows' places in them.

        These are all data; or, if they do not fit, those of the rows.
        """
        device, x, y = self.steps.x.device, self.examples.x, self.examples.y
        if x.device == device:
            return self.steps.x, self.steps.y, group
        first = np.cumsum(group.examples) - group.examples
        places = np.repeat(group.first - first, group.examples) + np.arange(group.examples.sum())
        return x[places].to(device), y[places].to(device), replace(group, first=first)

    def _stack(
        self, width: int, fused: bool, rows: int, steps: int, x: Tensor, y: Tensor
    ) -> GraphStack:
        """The stack that trains such a group, with room to spare: the next cohort may be larger."""
        held = self.stacks.get((width, fused))
        if (
            held is None
            or held.stack.rows < rows
            or len(held.index) < steps
            or len(held.x) < len(x)
        ):
            room = max(rows, min(self.most(width), rows + rows // 4))
            longest, pool = steps + steps // 4, self.workers.pool
            held = GraphStack(self.steps, room, width, fused, longest, x, y, pool)
            self.stacks[width, fused] = held
        return held


def in_parts(
    group: Group, train: Callable[[Group], Result], shrink: Callable[[int, int], None]
) -> list[Result]:
    """Train a group; or, where the device has no memory for it, its halves."""
    try:
        return [train(group)]
    except torch.OutOfMemoryError:
        if len(group) == 1:
            raise
    half = -(-len(group) // 2)
    shrink(group.width, half)
    logger.warning("no memory for %d rows together: continuing with %d at a time", len(group), half)
    torch.cuda.empty_cache()
    parts = np.split(np.arange(len(group)), [half])
    return [result for part in parts for result in in_parts(group.of(part), train, shrink)]


class GraphStack:
    """A stack, its mini-batches on the GPU, and a CUDA graph per number of rows that take part.

    A graph reads the step's number from the stack, so a replay needs nothing from the host. It
    holds the addresses of the stack and of the data: both stay in place while the object lives. The
    intermediate results of a step lie in `pool`, which all stacks share that never run at the same
    time, because none of them outlives a step.
    """

    def __init__(
        self,
        steps: Steps,
        rows: int,
        width: int,
        fused: bool,
        longest: int,
        x: Tensor,
        y: Tensor,
        pool: Any,
    ) -> None:
        self.stack = Stack(steps, rows, width, fused)
        self.x, self.y, self.pool = x, y, pool
        self.index = torch.zeros(longest, rows, width, dtype=torch.int64, device=x.device)
        if x is steps.x:  # captures and idle rows need examples whose tokens are inside the tables
            self.index += steps.places[0]
        self.weight = torch.zeros(longest, rows, width, dtype=steps.dtype, device=x.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(
        self,
        group: Group,
        todo: Schedule,
        sizes: list[int],
        x: Tensor,
        y: Tensor,
        theta: Tensor,
        buffers: Tensor,
        rate: Tensor,
    ) -> None:
        """Train a group from `theta` on, sizes[t] rows in step t; the results are in `stack`.

        There may be fewer rows and steps than there is room for. The rows beyond the group train on
        what earlier ones left there, and nobody reads their results.
        """
        if x is not self.x:  # data that do not fit on the GPU: replace those of the last group
            self.x[: len(x)].copy_(x)
            self.y[: len(y)].copy_(y)
        for size in set(sizes) - self.graphs.keys():
            self._capture(size)
        number, rows = todo.index.shape[:2]
        if on_gpu(self.weight) and todo.last is not None:
            self._load(group, todo, todo.last, theta, buffers, rate)
        else:
            scale = rate[:, None] if self.stack.fused else 1.0
            self.index[:number, :rows].copy_(todo.index)
            self.weight.zero_()
            self.weight[:number, :rows].copy_(todo.weight * scale)
            self.stack.load(group, todo.key, theta, buffers, rate)
        for size in sizes:
            self.graphs[size].replay()

    def _load(
        self,
        group: Group,
        todo: Schedule,
        last: Tensor,
        theta: Tensor,
        buffers: Tensor,
        rate: Tensor,
    ) -> None:
        """Put rows and their mini-batches in place, in few launches."""
        from rota.engine import kernels

        stack = self.stack
        tables = (self.index, self.weight)
        state = (stack.key, stack.last, stack.rate, stack.loss, stack.number)
        kernels.load(todo.index, todo.weight, todo.key, last, rate, tables, state, stack.fused)
        kernels.spread(theta, stack.theta)
        if buffers.shape[1]:
            stack.buffers[: len(theta)].copy_(buffers)
        stack.begin(group)

    def _capture(self, rows: int) -> None:
        """Make the graph of a step with this number of rows."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):  # libraries set themselves up in first calls, outside of graphs
                self.stack.number.zero_()
                self._step(rows)
        torch.cuda.current_stream().wait_stream(beside)
        self.stack.number.zero_()
        graph = self.graphs[rows] = torch.cuda.CUDAGraph()
        # "thread_local", because other threads use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self._step(rows)

    def _step(self, rows: int) -> None:
        """One local step of the first rows."""
        stack = self.stack
        if on_gpu(self.weight):
            from rota.engine import kernels

            batch = kernels.take(self.x, self.y, self.index, self.weight, stack.number, rows)
            stack.advance(rows, *batch)
            return
        now = stack.number[:1]
        index = self.index.index_select(0, now)[0, :rows]
        weight = self.weight.index_select(0, now)[0, :rows]
        stack.advance(rows, self.x[index], self.y[index], weight)


def rows_that_fit(steps: Steps, width: int) -> int:
    """The power of two of rows that fits the free memory well, judged by a step of two rows."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stack = Stack(steps, 2, width, steps.plain)
    index = steps.some(width).expand(2, -1)
    weight = torch.zeros(2, width, dtype=steps.dtype, device=steps.x.device)
    stack.advance(2, steps.x[index], steps.y[index], weight)
    torch.cuda.synchronize()
    each = max(1, (torch.cuda.max_memory_allocated() - before) // 2)
    free, _ = torch.cuda.mem_get_info()
    return 1 << max(0, int(0.6 * free / each).bit_length() - 1)
