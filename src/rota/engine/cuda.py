"""Stacks on a GPU: every local step is one CUDA graph, so that a step costs one launch whatever the network's number of operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rota.engine.rules import on_gpu
from rota.engine.schedule import Schedule
from rota.engine.stack import Stack, Steps


class GraphStack:
    """A stack with its mini-batch indices on the GPU, and a CUDA graph for each number of rows that takes part in a step.

    The graphs read the step's number from the stack itself, so a replay needs nothing from the host. They hold the addresses of
    the stack and of the data: both stay where they are as long as the object lives. What a step needs on the way lies in `pool`, which
    stacks that never run at the same time can share: nothing in it outlives a step.
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
        self.x, self.y = x, y
        self.index = torch.zeros(longest, rows, width, dtype=torch.int64, device=x.device)
        if x is steps.x:  # what is captured, and idle rows, must train on examples without errors
            self.index += steps.places[0]
        self.weight = torch.zeros(longest, rows, width, dtype=steps.dtype, device=x.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = pool

    def _step(self, rows: int) -> None:
        if on_gpu(self.weight):
            from rota.engine import kernels

            self.stack.advance(
                rows,
                *kernels.take(self.x, self.y, self.index, self.weight, self.stack.number, rows),
            )
            return
        now = self.stack.number[:1]
        index, weight = (
            table.index_select(0, now)[0, :rows] for table in (self.index, self.weight)
        )
        self.stack.advance(rows, self.x[index], self.y[index], weight)

    def _capture(self, rows: int) -> None:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            beside
        ):  # libraries set themselves up in the first calls, which cannot be captured
            for _ in range(2):
                self.stack.number.zero_()
                self._step(rows)
        torch.cuda.current_stream().wait_stream(beside)
        self.stack.number.zero_()
        self.graphs[rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self.graphs[rows], pool=self.pool, capture_error_mode="thread_local"
        ):  # other threads use the GPU meanwhile
            self._step(rows)

    def _load(
        self,
        todo: Schedule,
        last: Tensor,
        theta: Tensor,
        buffers: Tensor,
        rate: Tensor,
        shift: Tensor | None,
        anchor: Tensor | None,
    ) -> None:
        """Put rows and their mini-batches in place, in few launches."""
        from rota.engine import kernels

        stack = self.stack
        state = (stack.key, stack.last, stack.rate, stack.loss, stack.number)
        kernels.load(
            todo.index,
            todo.weight,
            todo.key,
            last,
            rate,
            (self.index, self.weight),
            state,
            stack.fused,
        )
        kernels.spread(theta, stack.theta)
        if buffers.shape[1]:
            stack.buffers[: len(theta)].copy_(buffers)
        stack.begin(len(theta), shift, anchor)

    def run(
        self,
        todo: Schedule,
        sizes: list[int],
        x: Tensor,
        y: Tensor,
        theta: Tensor,
        buffers: Tensor,
        rate: Tensor,
        shift: Tensor | None,
        anchor: Tensor | None,
    ) -> None:
        """Train rows from `theta` on, sizes[t] of them in step t; the results are in `stack`.

        There may be fewer rows and steps than there is room for. Rows beyond the last one train on what earlier ones left there, and
        nobody looks at them.
        """
        number, rows = todo.index.shape[:2]
        if (
            x is not self.x
        ):  # data that do not fit the GPU: those of these rows, in the place of the last ones
            self.x[: len(x)].copy_(x)
            self.y[: len(y)].copy_(y)
        for size in set(sizes) - self.graphs.keys():
            self._capture(size)
        if on_gpu(self.weight) and todo.last is not None:
            self._load(todo, todo.last, theta, buffers, rate, shift, anchor)
        else:
            self.index[:number, :rows].copy_(todo.index)
            self.weight.zero_()
            self.weight[:number, :rows].copy_(
                todo.weight * rate[:, None] if self.stack.fused else todo.weight
            )
            self.stack.load(
                theta,
                buffers,
                todo.key,
                torch.as_tensor(todo.steps, device=rate.device),
                rate,
                shift,
                anchor,
            )
        for size in sizes:
            self.graphs[size].replay()
