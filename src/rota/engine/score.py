"""Evaluation: models' losses and scores on the shared test set, or on every client's own."""

from __future__ import annotations

import warnings
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
from rota.engine import local
from rota.engine.functional import Forward, takes_statistics
from rota.engine.local import cores
from rota.plan import Task
from rota.weights import Weights

BATCH, ON_CPU, WORK = 1000, 100, 3e8
"""The most examples that are tested at once on a GPU, and on a CPU, where their features should stay in its cache; there it may be more of
a small network, whose training on them takes so many FLOPs.
"""
STACK = 32
"""The most models in one stack."""
TOLERANCE = 1e-3
"""Between the losses of a stacked and of a plain pass, in parts of the loss."""

Measure = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Examples, their targets and `lengths` -> each one's loss and score, [models, examples] both."""
Kind = tuple[int, ...]
"""What models that can be tested together agree on."""


@dataclass(frozen=True)
class Score:
    """Means over the test examples; `by_client` is each client's own mean score where the clients have test sets (NaN: none)."""

    loss: float
    accuracy: float
    by_client: Array | None = None


class Scorer:
    """The tasks' test parts on one device: each is there once, however many models are tested on it."""

    def __init__(
        self, tasks: list[Task], modules: list[nn.Module], flops: list[float], device: torch.device
    ) -> None:
        self.tasks, self.modules, self.flops, self.device = tasks, modules, flops, device
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.stacks: dict[Kind, bool] = {}  # whether a kind of model can be stacked
        self.threads = (
            ThreadPoolExecutor(cores(), initializer=torch.set_num_threads, initargs=(1,))
            if device.type == "cpu"
            else None
        )

    def passes(self, s: int, sizes: Sequence[int] | Array) -> list[tuple[slice, Tensor | None]]:
        """Owners' examples, one after the other, in passes over model s; each with its `lengths` if results depend on who is beside whom.

        The number of examples in a pass does not depend on the device then.
        """
        if not takes_statistics(self.modules[s]):
            most = (
                int(np.clip(WORK / max(self.flops[s], 1.0), ON_CPU, BATCH))
                if self.threads
                else BATCH
            )
            total = int(np.sum(sizes))
            return [(slice(start, start + most), None) for start in range(0, total, most)]
        pieces = np.array(
            [
                len(piece)
                for n in sizes
                if n
                for piece in np.array_split(np.arange(n), -(-n // BATCH))
            ]
        )
        number = (np.cumsum(pieces) - pieces) // BATCH
        cuts = np.split(pieces, np.flatnonzero(np.diff(number)) + 1)
        starts = np.cumsum([0, *(cut.sum() for cut in cuts)]).tolist()
        lengths = [
            torch.from_numpy(cut).to(self.device) if len(cut) > 1 or cut[0] == 1 else None
            for cut in cuts
        ]
        return list(zip(map(slice, starts, starts[1:]), lengths, strict=False))

    def one_by_one(self, models: list[Weights], which: Sequence[int]) -> list[Score]:
        """The scores of the models with these numbers, one pass over the test part each."""
        return [self._score([s], self._plain(s, models[s]))[0] for s in which]

    def together(self, models: list[Weights], which: Sequence[int]) -> list[Score]:
        """The same, with models of one network on the same data in one pass."""
        kinds: dict[Kind, list[int]] = {}
        for s in which:
            task = self.tasks[s]
            kinds.setdefault(
                (id(task.model), id(task.data), id(task.loss), id(task.score)), []
            ).append(s)
        found: dict[int, Score] = {}
        for kind, mine in kinds.items():
            height = STACK if self._stackable(kind, models, mine) else 1
            for some in (mine[start : start + height] for start in range(0, len(mine), height)):
                measure = (
                    self._stacked(some, models)
                    if len(some) > 1
                    else self._plain(some[0], models[some[0]])
                )
                found |= zip(some, self._score(some, measure), strict=True)
        return [found[s] for s in which]

    def _score(self, which: list[int], measure: Measure) -> list[Score]:
        data = self.tasks[which[0]].federation
        x, y = self._test(data)
        parts = self.passes(which[0], [len(y)] if data.shared_test else data.test.sizes)
        pieces = self.spread(
            lambda part: measure(x[part[0]].to(self.device), y[part[0]].to(self.device), part[1]),
            parts,
        )
        loss, hits = (
            torch.cat(side, dim=1).double().cpu().numpy() for side in zip(*pieces, strict=True)
        )
        clients = [None if data.shared_test else _by_client(data, each) for each in hits]
        return [
            Score(float(a.mean()), float(b.mean()), own)
            for a, b, own in zip(loss, hits, clients, strict=True)
        ]

    def spread(self, function: Callable[[Any], Any], parts: Iterable[Any]) -> list[Any]:
        """A function of each of these parts, on all cores of a CPU."""

        def one(part: Any) -> Any:
            with torch.no_grad():  # which is each thread's own
                return function(part)

        return list((self.threads.map if self.threads else map)(one, parts))

    def _test(self, data: Federation) -> tuple[Tensor, Tensor]:
        if id(data) not in self.held:
            self.held[id(data)] = local.on_device(data.test, self.device)
        return self.held[id(data)]

    def _plain(self, s: int, model: Weights) -> Measure:
        task, module = self.tasks[s], self.modules[s].eval()
        weights.load(module, model)

        def measure(x: Tensor, y: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
            outputs = forward(module, x, lengths)
            return task.loss(outputs, y)[None], task.score(outputs, y)[None]

        return measure

    def _stacked(self, which: list[int], models: list[Weights]) -> Measure:
        task, module = self.tasks[which[0]], self.modules[which[0]].eval()

        def one(params: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            outputs = functional_call(module, weights.named(module, Weights(params, buffers)), (x,))
            return task.loss(outputs, y), task.score(outputs, y)

        params, buffers = (torch.stack([models[s][i] for s in which]) for i in range(2))
        many = torch.vmap(one, in_dims=(0, 0, None, None))
        return lambda x, y, _: many(params, buffers, x, y)

    def _stackable(self, kind: Kind, models: list[Weights], which: list[int]) -> bool:
        """Whether a stack pays and is right: tried once on a few examples, against a plain pass.

        Convolutions of many weights become grouped ones, which are slower than a model at a time: a test batch fills the device.
        """
        if len(which) == 1:
            return False
        if kind not in self.stacks:
            x, y = (
                part[:8].to(self.device) for part in self._test(self.tasks[which[0]].federation)
            )
            module = self.modules[which[0]]
            slow = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
            self.stacks[kind] = (
                not slow and not takes_statistics(module) and self._agree(which[:2], models, x, y)
            )
        return self.stacks[kind]

    @torch.no_grad()
    def _agree(self, pair: list[int], models: list[Weights], x: Tensor, y: Tensor) -> bool:
        plain = torch.cat([self._plain(s, models[s])(x, y, None)[0] for s in pair])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it only loops
                stacked, _ = self._stacked(pair, models)(x, y, None)
        except Exception:  # a user's module or loss may do anything, and one at a time it works
            return False
        return torch.allclose(stacked, plain, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def forward(module: nn.Module, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """A module's outputs; `lengths`: how many of the examples, one after the other, are each owner's, who knows no others."""
    if x.is_cuda and x.dim() == 4:
        x = x.contiguous(
            memory_format=torch.channels_last
        )  # convolutions would turn round all they see otherwise
    with (
        Forward(lengths) if x.is_cuda or lengths is not None else nullcontext()
    ):  # it costs a little on every call
        out: Tensor = module(x)
        return out


def _by_client(data: Federation, hits: Array) -> Array:
    owners = np.repeat(np.arange(data.test.clients), data.test.sizes)
    with np.errstate(invalid="ignore"):
        return np.asarray(
            np.bincount(owners, weights=hits, minlength=data.test.clients) / data.test.sizes
        )
