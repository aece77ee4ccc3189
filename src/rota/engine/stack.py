"""A stack in training: its rows' parameters are one matrix, and one step moves all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.group import Group
from rota.engine.optimisers import descend, moments
from rota.engine.schedule import grid
from rota.engine.steps import Step, Steps


class Stack:
    """Up to `rows` rows of one task, most steps first. Row r has the parameters theta[r]."""

    def __init__(self, steps: Steps, rows: int, width: int, fused: bool) -> None:
        device, dtype = steps.x.device, steps.dtype
        self.steps, self.rows, self.width, self.fused = steps, rows, width, fused
        self.theta = aligned(rows, steps.params.numel, device, dtype)
        self.buffers = torch.zeros(rows, steps.buffers.numel, device=device, dtype=dtype)
        self.loss = torch.zeros(rows, device=device, dtype=dtype)
        self.number, self.key, self.last = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        """The number of the step (the same for all rows), the rows' keys, and their steps."""
        self.rate = torch.zeros(rows, device=device, dtype=dtype)
        self.prepared: dict[int, tuple[Step, list[Tensor], list[Tensor]]] = {}
        if not fused:
            self.anchor = torch.zeros_like(self.theta)
            self.gradient = aligned(rows, steps.params.numel, device, dtype)
            self.shift = torch.zeros_like(self.theta)
            self.memory = [torch.zeros_like(self.theta) for _ in range(moments(steps.task))]

    def load(self, group: Group, key: Tensor, theta: Tensor, buffers: Tensor, rate: Tensor) -> None:
        """Put a group's rows in place; if there are fewer than the stack holds, the rest idle."""
        self.last.zero_()
        self.loss.zero_()
        self.number.zero_()
        for mine, given in (
            (self.theta, theta),
            (self.buffers, buffers),
            (self.key, key),
            (self.rate, rate),
            (self.last, torch.as_tensor(group.steps, device=rate.device)),
        ):
            mine[: len(group)].copy_(given)
        self.begin(group)

    def begin(self, group: Group) -> None:
        """Set up the local optimisers of rows that are in place."""
        if self.fused:
            return
        n = len(group)
        self.anchor.copy_(self.theta)
        if group.anchor is not None:
            self.anchor[:n].copy_(group.anchor)
        self.shift.zero_()
        if group.shift is not None:
            self.shift[:n].copy_(group.shift)
        for moment in self.memory:
            moment.zero_()

    def advance(self, rows: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Take one local step with the first `rows` rows on mini-batches [rows, width, ...].

        `weight` [rows, width] is 0 for padding. For an example it is 1 / (examples in the
        mini-batch), times the learning rate if the stack is fused.
        """
        if rows not in self.prepared:
            self.prepared[rows] = self._prepare(rows)
        step, front, back = self.prepared[rows]
        if rows == 1:
            x, y, weight = x[0], y[0], weight[0]
        step(*front, x, y, weight, *back)
        if not self.fused:
            self._optimise(rows)
        self.number += 1

    def _prepare(self, rows: int) -> tuple[Step, list[Tensor], list[Tensor]]:
        """The step for this number of rows, and its arguments before and after the mini-batch.

        The arguments are views, which stay valid.
        """
        held = (self.theta, self.buffers, self.key, self.number, self.loss)
        theta, buffers, key, number, loss = (
            values[0] if rows == 1 else values[:rows] for values in held
        )
        front = [*self.steps.params.views(theta), *self.steps.buffers.views(buffers)]
        back = [key, number, loss]
        if not self.fused:
            back += self.steps.params.views(self.gradient[0] if rows == 1 else self.gradient[:rows])
        return self.steps.get(rows, self.width, self.fused), front, back

    def _optimise(self, rows: int) -> None:
        """Let the local optimisers take a step; rows that have finished stay as they are."""
        going = self.number[:rows] < self.last[:rows]
        descend(
            self.steps.task,
            self.theta[:rows],
            self.gradient[:rows],
            self.anchor[:rows],
            self.shift[:rows],
            [moment[:rows] for moment in self.memory],
            self.number[:rows],
            torch.where(going, self.rate[:rows], 0.0),
        )


def begin(group: Group, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows begin, as parameters and buffers, and their learning rates."""
    rate = torch.as_tensor(group.rate, device=device, dtype=dtype)
    if len(group.start.params) == 1:
        theta, buffers = (each.expand(len(group), -1) for each in group.start)
        return theta, buffers, rate
    line = torch.as_tensor(group.line, device=device)
    return group.start.params[line], group.start.buffers[line], rate


def aligned(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A matrix of zeros.

    On a GPU its rows begin at multiples of 256 bytes: otherwise no kernel loads 16 bytes at once.
    """
    room = -(-columns // 64) * 64 if device.type == "cuda" else columns
    return torch.zeros(rows, room, device=device, dtype=dtype)[:, :columns]


def active(steps: list[int], room: int) -> list[int]:
    """How many rows take part in each step; `steps` are the rows' own, most first.

    These are as many as must, rounded up to the grid where there is room.
    """
    if steps[0] == steps[-1]:
        return [min(grid(len(steps)), room)] * steps[0]
    out, rows = [], len(steps)
    for t in range(steps[0]):
        while steps[rows - 1] <= t:
            rows -= 1
        out.append(min(grid(rows), room))
    return out
