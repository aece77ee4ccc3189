"""The reference engine: one row after the other, any nn.Module, plain torch. The other engines must agree with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from rota import rng, weights
from rota.data.federation import Array
from rota.engine import local
from rota.engine.clock import Devices, step_flops
from rota.engine.local import Correction
from rota.engine.score import Score, score_parts
from rota.plan import Chunk, Plan, Task
from rota.weights import Weights


class Sequential:
    """Trains the rows of a plan one by one on one device."""

    def __init__(self, tasks: list[Task], devices: Devices, seed: int, device: torch.device, autocast: torch.dtype | None = None) -> None:
        self.autocast = autocast
        self.tasks = tasks
        self.seed = seed
        self.device = device
        self.modules = [task.build(rng.key(seed, "model", s)).to(device) for s, task in enumerate(tasks)]
        self.counters = [[(b, b.clone()) for b in module.buffers() if not b.is_floating_point()] for module in self.modules]
        self.start = [weights.read(module) for module in self.modules]  # the modules themselves are worked with
        self.data = [(task.data.train.x.to(device), task.data.train.y.to(device)) for task in tasks]
        self.dropout = [local.uses_dropout(m, x[:2]) for m, (x, _) in zip(self.modules, self.data, strict=True)]
        self.least = [local.smallest_batch(m, x) for m, (x, _) in zip(self.modules, self.data, strict=True)]
        self.flops = [step_flops(task) for task in tasks]
        self.speed, self.link = devices.profile(tasks[0].data.clients, seed)

    def initial(self) -> list[Weights]:
        """The models before the first round."""
        return self.start

    def train(self, models: list[Weights], plan: Plan, now: int, correction: Correction | None = None) -> Iterator[Chunk]:
        """Run the plan's rows from these models, as in round `now`."""
        for row, (client, model) in enumerate(zip(plan.client.tolist(), plan.model.tolist(), strict=True)):
            shift = None if correction is None else correction(np.array([row]))[0]
            end, loss, examples, reason = self._train_row(models[model], client, model, now, shift)
            yield Chunk(
                rows=np.array([row]),
                model=model,
                update=(models[model].params - end.params)[None],
                buffers=end.buffers[None],
                loss=np.array([loss]),
                examples=np.array([examples]),
                seconds=self.seconds(model, plan.client[[row]], np.array([examples]), models[model].nbytes),
                reason=[reason],
            )

    def seconds(self, model: int, clients: Array, examples: Array, nbytes: int) -> Array:
        """How long rows of a model take on their clients' devices: training, and the model's way down and up."""
        return np.asarray(examples * self.flops[model] / self.speed[clients] + 2 * nbytes / self.link[clients])

    def _train_row(self, start: Weights, client: int, model: int, now: int, shift: Tensor | None) -> tuple[Weights, float, int, str]:
        """One client's local training: the model it ends with, its mean loss, the examples it processed, and why it failed if it did."""
        task, module = self.tasks[model], self.modules[model]
        rows = slice(*task.data.train.offsets[client : client + 2].tolist())
        x, y = self.data[model][0][rows], self.data[model][1][rows]
        weights.load(module, start)
        for counter, beginning in self.counters[model]:  # BatchNorm counts its batches: each row anew
            counter.copy_(beginning)
        module.train()
        optimiser = local.optimiser(task, now, module.parameters())
        key = local.row_key(self.seed, now, client, model)
        stream = rng.as_tensor([key], self.device)[0]
        dropout = local.Dropout(stream)
        steps = local.batches(task, len(y), stream, self.least[model])
        if not steps:
            return start, float("nan"), 0, local.TOO_FEW
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)  # for modules that draw numbers in other ways than dropout
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
        return weights.read(module), float(total) / len(steps), sum(len(batch) for batch in steps), ""

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def evaluate(self, models: list[Weights]) -> list[Score]:
        """Each model's loss and score on the test part."""
        out = []
        for task, module, model in zip(self.tasks, self.modules, models, strict=True):
            weights.load(module, model)
            out.append(score_parts(task, module, self.device))
        return out


def _add(module: nn.Module, vector: Tensor, prox: float | None = None) -> None:
    """Add a flat vector to the gradient; with `prox`, FedProx's prox * (w - vector) instead."""
    params = list(module.parameters())
    for p, piece in zip(params, vector.split([p.numel() for p in params]), strict=True):
        if p.grad is not None:
            p.grad.add_(piece.view_as(p) if prox is None else prox * (p.detach() - piece.view_as(p)))
