"""Evaluation: models' losses and scores on the shared test set, or on every client's own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from rota import weights
from rota.arrays import Array
from rota.data.federation import Federation
from rota.engine.examples import on_device
from rota.engine.functional import Forward, takes_statistics
from rota.engine.local import draws
from rota.engine.machine import cores
from rota.engine.rules import without_loops
from rota.plan import Model, Task
from rota.scores import by_owner, overall
from rota.weights import Weights

BATCH = 1000
"""The most examples in one pass."""
ON_CPU = 100
"""The most examples in one pass on a CPU, so that their features stay in its cache."""
WORK = 3e8
"""On a CPU, a pass of a small network may have as many examples as take these FLOPs in training."""
STACK = 32
"""The most models in one stack."""
TOLERANCE = 1e-3
"""The relative difference that the losses of a stacked and a plain pass may have."""

Measure = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Examples, their targets and `lengths` -> the loss and score of each, both [models, examples]."""
Kind = tuple[int, ...]
"""What models that can be tested together agree on."""


@dataclass(frozen=True)
class Score:
    """Over the test examples; `by_client` has the scores on clients' own test sets, or NaN."""

    loss: float
    accuracy: float
    by_client: Array | None = None
    better: str = "higher"


class Scorer:
    """The tasks' test parts on one device, each of them once."""

    def __init__(
        self, tasks: list[Task], modules: list[nn.Module], flops: list[float], device: torch.device
    ) -> None:
        self.tasks, self.modules, self.flops, self.device = tasks, modules, flops, device
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.draws: dict[int, bool] = {}  # whether a task's network is random in evaluation
        self.stacks: dict[Kind, bool] = {}  # whether a kind of model can be stacked
        self.threads = None
        if device.type == "cpu":
            self.threads = ThreadPoolExecutor(cores(), "score", torch.set_num_threads, (1,))

    def passes(
        self, s: int, sizes: Sequence[int] | Array, together: bool = True
    ) -> list[tuple[slice, Tensor | None]]:
        """Passes of task s's network over owners' examples, which lie one owner after the other.

        Owners may share a pass if they are `together`. Where an example's results depend on the
        others in its pass, a pass has `lengths` (see `forward`), and its size does not depend on
        the device.
        """
        if not takes_statistics(self.modules[s]):
            small = int(np.clip(WORK / max(self.flops[s], 1.0), ON_CPU, BATCH))
            most, ends = small if self.threads else BATCH, np.cumsum(sizes)
            runs = [(0, ends[-1])] if together else zip(ends - sizes, ends, strict=True)
            starts = ((start, end) for begin, end in runs for start in range(begin, end, most))
            return [(slice(start, min(start + most, end)), None) for start, end in starts]
        # an owner with many examples has several, nearly equal pieces
        split = (np.array_split(np.arange(n), -(-n // BATCH)) for n in sizes if n)
        pieces = np.array([len(piece) for each in split for piece in each])
        number = (np.cumsum(pieces) - pieces) // (BATCH if together else 1)  # of a piece's pass
        cuts = np.split(pieces, np.flatnonzero(np.diff(number)) + 1)
        passes: list[tuple[slice, Tensor | None]] = []
        end = 0
        for cut in cuts:
            start, end = end, end + int(cut.sum())
            alone = len(cut) == 1 and cut[0] > 1
            known = None if alone else torch.from_numpy(cut).to(self.device)
            passes.append((slice(start, end), known))
        return passes

    def one_by_one(self, models: list[Model], which: Sequence[int]) -> list[Score]:
        """The scores of the models with these numbers, one model after the other."""
        return [self._score(models[s].task, 1, self._plain(models[s]))[0] for s in which]

    def together(self, models: list[Model], which: Sequence[int]) -> list[Score]:
        """The same scores, with models of one network on the same data tested together."""
        kinds: dict[Kind, list[int]] = {}
        for s in which:
            task = self.tasks[models[s].task]
            kind: Kind = (id(task.model), id(task.data), id(task.loss), id(task.score))
            kinds.setdefault(kind, []).append(s)
        found: dict[int, Score] = {}
        for kind, numbers in kinds.items():
            mine = [models[s] for s in numbers]
            height = STACK if self._stackable(kind, mine) else 1
            for start in range(0, len(mine), height):
                some = mine[start : start + height]
                measure = self._stacked(some) if len(some) > 1 else self._plain(some[0])
                scores = self._score(some[0].task, len(some), measure)
                found |= zip(numbers[start : start + height], scores, strict=True)
        return [found[s] for s in which]

    def _score(self, task: int, number: int, measure: Measure) -> list[Score]:
        """The scores of a number of models of one network."""
        mine = self.tasks[task]
        data = self.tasks[task].federation
        x, y = self._test(data)
        parts = self.passes(task, [len(y)] if data.shared_test else data.test.sizes)

        def part(piece: tuple[slice, Tensor | None]) -> tuple[Tensor, Tensor]:
            return measure(x[piece[0]].to(self.device), y[piece[0]].to(self.device), piece[1])

        pieces = self.spread(task, part, parts)
        sides = [torch.cat(side, dim=1) for side in zip(*pieces, strict=True)]
        loss, hits = (side.double().cpu().numpy() for side in sides)
        out = []
        for a, b in zip(loss, hits, strict=True):
            each = None if data.shared_test else by_owner(mine.score, b, data.test.offsets)
            out.append(Score(float(a.mean()), overall(mine.score, b), each, f"{mine.better}"))
        return out

    def spread(self, s: int, function: Callable[[Any], Any], parts: Iterable[Any]) -> list[Any]:
        """Map a function over these parts, on all cores of a CPU.

        Networks that draw random numbers stay on one core: all threads draw from one generator.
        """

        def one(part: Any) -> Any:
            with torch.no_grad():  # every thread has its own setting
                return function(part)

        if s not in self.draws:
            self.draws[s] = draws(self.modules[s], self.tasks[s].federation.train.x[:1])
        threads = None if self.draws[s] else self.threads
        return list((threads.map if threads else map)(one, parts))

    def _test(self, data: Federation) -> tuple[Tensor, Tensor]:
        if id(data) not in self.held:
            self.held[id(data)] = on_device(data.test, self.device)
        return self.held[id(data)]

    def _plain(self, model: Model) -> Measure:
        task, module = self.tasks[model.task], self.modules[model.task].eval()
        weights.load(module, model.weights)

        def measure(x: Tensor, y: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
            outputs = forward(module, x, lengths)
            return task.loss(outputs, y)[None], task.score(outputs, y)[None]

        return measure

    def _stacked(self, models: list[Model]) -> Measure:
        task, module = self.tasks[models[0].task], self.modules[models[0].task].eval()

        own = threading.local()  # functional_call changes the module, so threads must not share it

        def one(params: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            if not hasattr(own, "module"):
                own.module = copy.deepcopy(module)
            named = weights.named(own.module, Weights(params, buffers))
            outputs = functional_call(own.module, named, (x,))
            return task.loss(outputs, y), task.score(outputs, y)

        params = torch.stack([model.params for model in models])
        buffers = torch.stack([model.buffers for model in models])
        many = torch.vmap(one, in_dims=(0, 0, None, None))
        return lambda x, y, _: many(params, buffers, x, y)

    def _stackable(self, kind: Kind, models: list[Model]) -> bool:
        """Whether a stack is faster and correct; it is compared once with plain passes on a few
        examples.

        Networks with convolutions are tested one by one: one network's batch fills the device, and
        a stack would turn its convolutions into slower, grouped ones.
        """
        if len(models) == 1:
            return False
        if kind not in self.stacks:
            task = models[0].task
            x, y = (part[:8].to(self.device) for part in self._test(self.tasks[task].federation))
            module = self.modules[task]
            slow = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
            able = not slow and not takes_statistics(module)
            self.stacks[kind] = able and self._agree(models[:2], x, y)
        return self.stacks[kind]

    @torch.no_grad()
    def _agree(self, pair: list[Model], x: Tensor, y: Tensor) -> bool:
        plain = torch.cat([self._plain(model)(x, y, None)[0] for model in pair])
        try:
            with without_loops():
                stacked, _ = self._stacked(pair)(x, y, None)
        except Exception:  # a user's module or loss may do anything; one at a time it works
            return False
        return torch.allclose(stacked, plain, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def forward(module: nn.Module, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """A module's outputs, as if each owner's examples were alone; they have these `lengths`."""
    if x.is_cuda and x.dim() == 4:  # otherwise convolutions would transpose all they get
        x = x.contiguous(memory_format=torch.channels_last)
    needed = x.is_cuda or lengths is not None  # the context costs a little on every call
    with Forward(lengths) if needed else nullcontext():
        out: Tensor = module(x)
        return out
