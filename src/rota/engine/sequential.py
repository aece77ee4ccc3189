"""The reference engine: one row after the other, any nn.Module, plain torch. The other engines must agree with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from rota import rng, weights
from rota.arrays import Array
from rota.engine import local
from rota.engine.local import Correction
from rota.engine.score import Score, Scorer, forward
from rota.errors import not_a_clients, what_and_where
from rota.plan import Chunk, Plan, Task
from rota.weights import Weights
from rota.world.devices import Devices, step_flops


class Sequential:
    """Trains the rows of a plan one by one on one device."""

    def __init__(
        self,
        tasks: list[Task],
        devices: Devices,
        seed: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.autocast = autocast
        self.tasks = tasks
        self.seed = seed
        self.device = device
        self.modules = [
            task.build(rng.key(seed, "model", s)).to(device) for s, task in enumerate(tasks)
        ]
        self.counters = [
            [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
            for module in self.modules
        ]
        self.start = [
            weights.read(module) for module in self.modules
        ]  # the modules themselves are worked with
        held = {id(task.data): local.on_device(task.federation.train, device) for task in tasks}
        self.data = [held[id(task.data)] for task in tasks]
        self.dropout = [
            local.uses_dropout(m, x[:2].to(device))
            for m, (x, _) in zip(self.modules, self.data, strict=True)
        ]
        self.least = [
            local.smallest_batch(m, x[:1].to(device))
            for m, (x, _) in zip(self.modules, self.data, strict=True)
        ]
        kinds = {(id(task.model), id(task.data)): task for task in tasks}
        flops = {kind: step_flops(task, task.federation.train.x) for kind, task in kinds.items()}
        self.flops = [flops[id(task.model), id(task.data)] for task in tasks]
        self.scorer = Scorer(tasks, self.modules, self.flops, device)
        self.speed, self.link = devices.profile(tasks[0].roster.clients, seed)

    def initial(self) -> list[Weights]:
        """The models before the first round."""
        return self.start

    def train(
        self, models: list[Weights], plan: Plan, now: int, correction: Correction | None = None
    ) -> Iterator[Chunk]:
        """Run the plan's rows from these models, as in round `now`."""
        for row, (client, model) in enumerate(
            zip(plan.client.tolist(), plan.model.tolist(), strict=True)
        ):
            shift = None if correction is None else correction(np.array([row]))[0]
            try:
                end, loss, steps, examples, reason = self._train_row(
                    models[model], client, model, now, shift
                )
            except Exception as error:  # a model or a loss of the user's own may raise anything
                if not_a_clients(error):
                    raise
                end, loss, steps, examples, reason = (
                    models[model],
                    float("nan"),
                    0,
                    0,
                    what_and_where(error),
                )
            yield Chunk(
                rows=np.array([row]),
                model=model,
                lr=self.tasks[model].lr_at(now),
                update=(models[model].params - end.params)[None],
                buffers=end.buffers[None],
                loss=np.array([loss]),
                steps=np.array([steps]),
                examples=np.array([examples]),
                seconds=self.seconds(
                    model, plan.client[[row]], np.array([examples]), 2 * models[model].nbytes
                ),
                reason=[reason],
            )

    def seconds(self, model: int, clients: Array, examples: Array, nbytes: float) -> Array:
        """How long rows of a model take on their clients' devices: training on so many examples, and so many bytes on the link."""
        return np.asarray(
            examples * self.flops[model] / self.speed[clients] + nbytes / self.link[clients]
        )

    def _train_row(
        self, start: Weights, client: int, model: int, now: int, shift: Tensor | None
    ) -> tuple[Weights, float, int, int, str]:
        """One client's local training: the model it ends with, its mean loss, its steps and examples, and why it failed if it did."""
        task, module = self.tasks[model], self.modules[model]
        rows = slice(*task.federation.train.offsets[client : client + 2].tolist())
        x, y = (part[rows].to(self.device) for part in self.data[model])
        weights.load(module, start)
        for counter, beginning in self.counters[
            model
        ]:  # BatchNorm counts its batches: each row anew
            counter.copy_(beginning)
        module.train()
        optimiser = local.optimiser(task, now, module.parameters())
        key = local.row_key(self.seed, now, client, model)
        stream = rng.as_tensor([key], self.device)[0]
        dropout = local.Dropout(stream)
        steps = local.batches(task, len(y), stream, self.least[model])
        if not steps:
            return start, float("nan"), 0, 0, local.TOO_FEW
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                key
            )  # for modules that draw numbers in other ways than dropout
            for step, batch in enumerate(steps):
                dropout.start(step)
                with dropout if self.dropout[model] else nullcontext(), self._precision():
                    outputs = module(x[batch])
                loss = task.loss(outputs.float() if self.autocast else outputs, y[batch]).mean()
                optimiser.zero_grad()
                loss.backward()
                if task.prox:
                    _add(module, start.params, task.prox)
                if task.clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), task.clip)
                if shift is not None:
                    _add(module, shift)
                optimiser.step()
                total += loss.detach()
        return (
            weights.read(module),
            float(total) / len(steps),
            len(steps),
            sum(len(batch) for batch in steps),
            "",
        )

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def evaluate(self, models: list[Weights], which: Sequence[int] | None = None) -> list[Score]:
        """The models' losses and scores on the test part: of all, or of those with the numbers `which`."""
        return self.scorer.one_by_one(models, range(len(models)) if which is None else which)

    def losses(
        self, models: list[Weights], plan: Plan, now: int, examples: int | None = None
    ) -> tuple[Array, Array]:
        """Each row's mean loss of its model on the client's training examples, or on some of them at random, and how many those were."""
        loss, count = np.empty(len(plan)), np.empty(len(plan))
        for s in np.unique(plan.model).tolist():
            rows = np.flatnonzero(plan.model == s)
            weights.load(self.modules[s].eval(), models[s])
            places, sizes = self._examples(s, plan.client[rows], now, examples)
            count[rows] = sizes
            try:
                loss[rows] = self._means(s, places, sizes)
            except Exception as error:  # as in `train`: whose fault it is shows one by one
                if not_a_clients(error):
                    raise
                loss[rows] = [self._mean(s, part) for part in places.split(sizes.tolist())]
        return loss, count

    def _means(self, s: int, places: Tensor, sizes: Array) -> Array:
        """The mean losses of clients, of which the i-th has the next sizes[i] of the places."""
        each = self._losses(s, places, sizes).double().cpu().numpy()
        return np.asarray(np.bincount(np.repeat(np.arange(len(sizes)), sizes), each) / sizes)

    def _mean(self, s: int, places: Tensor) -> float:
        """One client's mean loss; NaN where that raises."""
        try:
            return float(self._means(s, places, np.array([len(places)]))[0])
        except Exception as error:
            if not_a_clients(error):
                raise
            return float("nan")

    def _losses(self, s: int, places: Tensor, sizes: Array) -> Tensor:
        """The losses of examples, one by one, of which sizes[i] are the i-th client's."""
        task, module, (x, y) = self.tasks[s], self.modules[s], self.data[s]
        places = places.to(x.device)  # which need not be the engine's

        def measure(part: tuple[slice, Tensor | None]) -> Tensor:
            here = places[part[0]]
            return task.loss(
                forward(module, x[here].to(self.device), part[1]), y[here].to(self.device)
            )

        return torch.cat(self.scorer.spread(measure, self.scorer.passes(s, sizes)))

    def _examples(
        self, model: int, clients: Array, now: int, most: int | None
    ) -> tuple[Tensor, Array]:
        """Where clients' training examples are, one client after the other: all, or `most` of each at random; and how many of each."""
        offsets = self.tasks[model].federation.train.offsets
        sizes = offsets[clients + 1] - offsets[clients]
        if most is None or (sizes <= most).all():
            before = np.cumsum(sizes) - sizes
            return torch.from_numpy(
                np.repeat(offsets[clients] - before, sizes) + np.arange(sizes.sum())
            ), sizes
        keys = rng.as_tensor(
            [rng.key(self.seed, "loss", now, client, model) for client in clients.tolist()],
            self.device,
        )
        each = zip(keys, sizes.tolist(), offsets[clients].tolist(), strict=True)
        return torch.cat(
            [rng.permutation(key, n)[:most].add(first) for key, n, first in each]
        ), np.minimum(sizes, most)


def _add(module: nn.Module, vector: Tensor, prox: float | None = None) -> None:
    """Add a flat vector to the gradient; with `prox`, FedProx's prox * (w - vector) instead."""
    params = list(module.parameters())
    for p, piece in zip(params, vector.split([p.numel() for p in params]), strict=True):
        if p.grad is not None:
            p.grad.add_(
                piece.view_as(p) if prox is None else prox * (p.detach() - piece.view_as(p))
            )
