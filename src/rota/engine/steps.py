"""One task's local step, traced once and then made for every size that comes up."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor, fx, nn

from rota import weights
from rota.arrays import Array
from rota.engine.group import Group
from rota.engine.optimisers import plain
from rota.engine.rules import Unbatchable
from rota.engine.trace import Layout, directly, fuse, resize, stack, trace
from rota.plan import Task

Step = Callable[..., None]
SAMPLE = 1 << 16
"""The most examples that steps are traced and tried on."""
FUSED = 1e-20, 1e20
"""Learning rates between which a loss that is multiplied by one neither vanishes nor overflows."""
TRACER = threading.Lock()
"""Groups train in threads, and torch's tracer takes one at a time."""


class Steps:
    """A task's step for every number of rows and every width of mini-batches."""

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
        self.plain = plain(task)
        self.places = torch.arange(min(len(x), SAMPLE), device=x.device)
        """The examples that steps are traced and tried on."""
        self.traced: dict[tuple[int, int], fx.GraphModule] = {}
        self.made: dict[tuple[int, int, bool], fx.GraphModule] = {}
        self.ends: list[int] = []
        """The first two widths. The steps for other widths are made from theirs."""

    def keep_to(self, places: Array) -> None:
        """Trace and try steps on these examples only."""
        if not len(places):
            raise Unbatchable("has tables that all clients' data leave")
        self.places = torch.from_numpy(places[:SAMPLE]).to(self.x.device)

    def some(self, width: int, after: int = 0) -> Tensor:
        """The places of `width` examples, from the sample's `after`-th on, round and round."""
        number = torch.arange(width, device=self.places.device) + after
        return self.places[number % len(self.places)]

    def fuses(self, group: Group) -> bool:
        """Whether a group's learning rates go into its losses, so that gradients are updates."""
        low, high = FUSED
        fine = (low < group.rate) & (group.rate < high)
        return self.plain and group.shift is None and bool(fine.all())

    def get(self, rows: int, width: int, fused: bool) -> Step:
        """The step that works in place (see `fuse`); a single row has no axis of rows."""
        with TRACER:
            step: Step = self._get(rows, width, fused).forward
            return step

    def single(self, width: int, fused: bool) -> fx.Graph:
        """The step of one row that works in place, in torch's basic operators."""
        with TRACER:
            params = self.params.views(torch.empty(self.params.numel, dtype=self.dtype))
            traced = copy.deepcopy(self._trace(1, width))
            return fuse(traced, params, len(self.buffers.names), fused).graph

    def of_one(self, width: int) -> fx.GraphModule:
        """The step of one client, as it was traced."""
        with TRACER:
            return self._trace(1, width)

    def _get(self, rows: int, width: int, fused: bool) -> fx.GraphModule:
        key = (rows, width, fused)
        if key not in self.made:
            self.made[key] = self._between(rows, width, fused) or self._make(rows, width, fused)
        return self.made[key]

    def _between(self, rows: int, width: int, fused: bool) -> fx.GraphModule | None:
        """The step made from those of two other sizes, if there are two and that is possible.

        These are two and three rows, and the first two widths.
        """
        if rows <= 3 and width not in self.ends and len(self.ends) < 2:
            self.ends.append(width)
        if rows <= 3 and width in self.ends:
            return None
        try:
            if rows > 3:
                few, more = (self._get(n, width, fused) for n in (2, 3))
                return resize(few, more, Fraction(rows - 2))
            low, high = self.ends
            narrow, wide = (self._get(rows, n, fused) for n in self.ends)
            return resize(narrow, wide, Fraction(width - low, high - low))
        except Unbatchable:  # this size is another computation
            return None

    def _make(self, rows: int, width: int, fused: bool) -> fx.GraphModule:
        """The step made from its trace."""
        flat = torch.empty(rows, self.params.numel, device=self.x.device, dtype=self.dtype)
        params = [p[0] if rows == 1 else p for p in self.params.views(flat)]
        traced = copy.deepcopy(self._trace(rows, width))
        return directly(fuse(traced, params, len(self.buffers.names), fused), self.x.is_cuda)

    def _trace(self, rows: int, width: int) -> fx.GraphModule:
        """The trace of a step: of the module for one row, and of that trace for more."""
        if (rows, width) not in self.traced:
            with torch.inference_mode(False):  # in it, torch before 2.13 traces gradients of zero
                self.traced[rows, width] = self._traced(rows, width)
        return self.traced[rows, width]

    def _traced(self, rows: int, width: int) -> fx.GraphModule:
        device, pick = self.x.device, self.some(width)
        if rows == 1:
            return trace(self.task, self.module, self.x[pick], self.y[pick], self.autocast)
        start = weights.read(self.module)  # real values, because operators may look at them
        params = self.params.views(start.params.repeat(rows, 1))
        buffers = self.buffers.views(start.buffers.repeat(rows, 1))
        weight = torch.ones(rows, width, device=device, dtype=self.dtype)
        key, number = torch.zeros(2, rows, dtype=torch.int64, device=device)
        x, y = self.x[pick.expand(rows, -1)], self.y[pick.expand(rows, -1)]
        return stack(self._trace(1, width), rows, [*params, *buffers, x, y, weight, key, number])
