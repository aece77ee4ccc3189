"""A stack of rows in training: their parameters as one matrix, and the steps that move all of them at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor, fx, nn

from rota import weights
from rota.arrays import Array
from rota.engine import local
from rota.engine.group import Group
from rota.engine.optimisers import descend, moments, plain
from rota.engine.rules import Unbatchable
from rota.engine.schedule import grid
from rota.engine.trace import Layout, directly, fuse, resize, stack, trace
from rota.plan import Task

Step = Callable[..., None]
TOLERANCE = (
    0.02  # between a stacked and a plain gradient: far above rounding, far below a wrong formula
)
ROUGH = 0.2  # the same where both are rounded to bfloat16
PADDING = 1e-4  # what other padding may change of a gradient, in parts of it: rounding alone
SAMPLE = 1 << 16
TRIALS = 3
TRACER = threading.Lock()
"""Stacks run in threads, and torch's tracer takes one at a time."""


class Steps:
    """One task's local step, traced, for every (rows, width) that comes up. Shared by all stacks of the task."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        x: Tensor,
        y: Tensor,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.task, self.module, self.x, self.y, self.autocast = task, module, x, y, autocast
        self.params, self.buffers = Layout.params(module), Layout.buffers(module)
        self.dtype = next(module.parameters()).dtype
        self.places = torch.arange(min(len(x), SAMPLE), device=x.device)
        """Examples that steps are traced and tried on."""
        self.plain = plain(task)
        self.traced: dict[tuple[int, int], fx.GraphModule] = {}
        self.made: dict[tuple[int, int, bool], fx.GraphModule] = {}
        self.ends: list[int] = []  # the first two widths, from which others are made

    def get(self, rows: int, width: int, fused: bool) -> Step:
        """The in-place step for that many rows (see `fuse`); a single row has no row axis."""
        with TRACER:
            step: Step = self._get(rows, width, fused).forward
            return step

    def _get(self, rows: int, width: int, fused: bool) -> fx.GraphModule:
        key = (rows, width, fused)
        if key not in self.made:
            self.made[key] = self._between(rows, width, fused) or self._make(rows, width, fused)
        return self.made[key]

    def _between(self, rows: int, width: int, fused: bool) -> fx.GraphModule | None:
        """The step from those of two and three rows, or from those of the first two widths, if there are any."""
        if rows > 3:
            try:
                return resize(
                    self._get(2, width, fused), self._get(3, width, fused), Fraction(rows - 2)
                )
            except Unbatchable:  # another number of rows is another computation
                return None
        if width not in self.ends and len(self.ends) < 2:
            self.ends.append(width)
        if width in self.ends:
            return None
        low, high = self.ends
        try:
            return resize(
                self._get(rows, low, fused),
                self._get(rows, high, fused),
                Fraction(width - low, high - low),
            )
        except Unbatchable:  # another width is another computation
            return None

    def _make(self, rows: int, width: int, fused: bool) -> fx.GraphModule:
        params = self.params.views(
            torch.empty(rows, self.params.numel, device=self.x.device, dtype=self.dtype)
        )
        params = [p[0] for p in params] if rows == 1 else params
        return directly(
            fuse(copy.deepcopy(self._trace(rows, width)), params, len(self.buffers.names), fused),
            self.x.is_cuda,
        )

    def single(self, width: int, fused: bool) -> fx.Graph:
        """The in-place step of one row, in torch's basic operators."""
        with TRACER:
            params = self.params.views(torch.empty(self.params.numel, dtype=self.dtype))
            return fuse(
                copy.deepcopy(self._trace(1, width)), params, len(self.buffers.names), fused
            ).graph

    def _trace(self, rows: int, width: int) -> fx.GraphModule:
        """The step as it was traced: for one row from the module, for two or three from that."""
        if (rows, width) not in self.traced:
            with torch.inference_mode(False):  # in it, torch before 2.13 traces gradients of zero
                self.traced[rows, width] = self._traced(rows, width)
        return self.traced[rows, width]

    def some(self, width: int, after: int = 0) -> Tensor:
        """The places of `width` examples, from the sample's `after`-th on, round and round."""
        number = torch.arange(width, device=self.places.device) + after
        return self.places[number % len(self.places)]

    def keep_to(self, places: Array) -> None:
        """Trace and try steps on these examples only."""
        if not len(places):
            raise Unbatchable("has tables that no client's data stay inside of")
        self.places = torch.from_numpy(places[:SAMPLE]).to(self.x.device)

    def of_one(self, width: int) -> fx.GraphModule:
        """One client's step, as it was traced."""
        with TRACER:
            return self._trace(1, width)

    def _traced(self, rows: int, width: int) -> fx.GraphModule:
        device = self.x.device
        pick = self.some(width)
        if rows == 1:
            return trace(self.task, self.module, self.x[pick], self.y[pick], self.autocast)
        start = weights.read(
            self.module
        )  # operators may look at the values that they are traced with
        params = self.params.views(start.params.repeat(rows, 1))
        buffers = self.buffers.views(start.buffers.repeat(rows, 1))
        weight = torch.ones(rows, width, device=device, dtype=self.dtype)
        key, number = torch.zeros(2, rows, dtype=torch.int64, device=device)
        x, y = self.x[pick.expand(rows, -1)], self.y[pick.expand(rows, -1)]
        return stack(self._trace(1, width), rows, [*params, *buffers, x, y, weight, key, number])


class Stack:
    """Up to `rows` rows of one task, in training. Row r's parameters are theta[r]; rows with more steps come first."""

    def __init__(self, steps: Steps, rows: int, width: int, fused: bool) -> None:
        device, dtype = steps.x.device, steps.dtype
        self.steps, self.rows, self.width, self.fused = steps, rows, width, fused
        self.theta = aligned(rows, steps.params.numel, device, dtype)
        self.buffers = torch.zeros(rows, steps.buffers.numel, device=device, dtype=dtype)
        self.loss = torch.zeros(rows, device=device, dtype=dtype)
        self.number = torch.zeros(
            rows, dtype=torch.int64, device=device
        )  # of the step, for each row alike
        self.key = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rate = torch.zeros(rows, device=device, dtype=dtype)
        self.last = torch.zeros(
            rows, dtype=torch.int64, device=device
        )  # how many steps each row has
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
        """One local step of the first `rows` rows on mini-batches [rows, width, ...].

        `weight` [rows, width] is 0 for padding, and for an example 1 / (examples in the batch), times the learning rate if fused.
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
        """The step for so many rows, and its arguments before and after the mini-batch: views that stay valid."""
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
    """A matrix of zeros; on a GPU its rows begin at multiples of 256 bytes, without which kernels cannot load 16 bytes at once."""
    room = -(-columns // 64) * 64 if device.type == "cuda" else columns
    return torch.zeros(rows, room, device=device, dtype=dtype)[:, :columns]


def active(steps: list[int], room: int) -> list[int]:
    """For each step, how many rows take part: as many as must, on the grid, if there is room. `steps` are the rows' own, most first."""
    if steps[0] == steps[-1]:
        return [min(grid(len(steps)), room)] * steps[0]
    out, rows = [], len(steps)
    for t in range(steps[0]):
        while steps[rows - 1] <= t:
            rows -= 1
        out.append(min(grid(rows), room))
    return out


def suits(steps: Steps) -> None:
    """Raise Unbatchable where a module cannot be trained in stacks, for a reason that shows without a step."""
    tensors = [*steps.module.parameters(), *steps.module.buffers()]
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(kinds) > 1:
        raise Unbatchable("has parameters and buffers of several number types")
    if steps.dtype not in (torch.float32, torch.float64):
        raise Unbatchable(f"has {str(steps.dtype).removeprefix('torch.')} parameters")
    if not all(parameter.requires_grad for parameter in steps.module.parameters()):
        raise Unbatchable("has frozen parameters")


def ignores_padding(steps: Steps, width: int) -> None:
    """Raise Unbatchable if the examples that fill up a mini-batch change what the others' gradient is."""
    real = max(1, width // 2)
    if real == width:
        return
    start = weights.read(steps.module)
    inputs = [*steps.params.views(start.params), *steps.buffers.views(start.buffers)]
    inside = torch.arange(width, device=steps.x.device) < real
    key, number = torch.zeros(2, dtype=torch.int64, device=steps.x.device)
    found = []
    for after in (width, 2 * width):
        pick = torch.where(inside, steps.some(width), steps.some(width, after))
        batch = (steps.x[pick], steps.y[pick], inside.to(steps.dtype) / real)
        with torch.inference_mode():
            results = steps.of_one(width)(*inputs, *batch, key, number)
        found.append(torch.cat([each.flatten().double() for each in results]))
    one, other = found
    if not torch.allclose(one, other, rtol=0, atol=PADDING * float(one.norm()), equal_nan=True):
        raise Unbatchable("mixes the examples of a mini-batch")


def verify(steps: Steps, width: int) -> None:
    """Compare a stacked step, half of it padding, with plain autograd on real examples; raises Unbatchable where they differ."""
    real = half(width)
    weight = (torch.arange(width, device=steps.x.device) < real).to(steps.dtype).expand(
        2, -1
    ) / real
    stack = Stack(steps, 2, width, fused=False)

    def trial(number: int) -> None:
        pick = steps.some(width, width + number * real)  # not those that it was traced on
        both = pick.expand(2, -1)
        stack.number.zero_()
        stack.theta.copy_(weights.read(steps.module).params)
        stack.buffers.copy_(weights.read(steps.module).buffers)
        with whole_precision(steps.x.is_cuda):
            stack.advance(2, steps.x[both], steps.y[both], weight)
            same_gradient(steps, stack.gradient, pick[:real], stack.key[0])

    repeated(trial)


def repeated(trial: Callable[[int], None]) -> None:
    """Up to three trials, each on other examples: rounding that turns a ReLU, as in a ResNet it may, spoils one, a wrong formula all."""
    for number in range(TRIALS):
        try:
            return trial(number)
        except Unbatchable:
            if number == TRIALS - 1:
                raise


@contextmanager
def whole_precision(cuda: bool) -> Iterator[None]:
    """Without TF32, whose rounding can choose another pixel in a max-pool, and is then no small difference."""
    if not cuda:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def half(width: int) -> int:
    """How many examples a trial has, that there may be padding too."""
    return min(width, max(2, width // 2))


def same_gradient(steps: Steps, found: Tensor, pick: Tensor, key: Tensor) -> None:
    """Compare gradients [rows, params] with plain autograd's on the examples `pick` in a first step with this key."""
    module = copy.deepcopy(steps.module).train()
    try:
        with (
            local.Dropout(key),
            torch.autocast(steps.x.device.type, steps.autocast, enabled=steps.autocast is not None),
        ):
            outputs = module(steps.x[pick])
    except ValueError as error:
        raise Unbatchable("normalises over mini-batches of a single example") from error
    loss = steps.task.loss(outputs.float() if steps.autocast else outputs, steps.y[pick]).mean()
    gradient = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    if any(g is None for g in gradient):
        raise Unbatchable("has unused parameters")  # which an optimiser does not even decay
    plain = torch.cat([g.flatten() for g in gradient])
    apart = float((found - plain).norm() / (plain.norm() * len(found) ** 0.5).clamp(min=1e-12))
    if not apart < (ROUGH if steps.autocast else TOLERANCE):
        raise Unbatchable(f"has another gradient when clients are stacked ({apart:.1%} off)")
