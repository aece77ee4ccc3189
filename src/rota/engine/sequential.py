"""The reference engine: one row after the other, any nn.Module, plain torch. The other engines must agree with it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from rota import rng, weights
from rota.engine import local
from rota.engine.clock import Devices, step_flops
from rota.engine.score import Score, score_parts
from rota.plan import Chunk, Plan, Task
from rota.weights import Weights


class Sequential:
    """Trains the rows of a plan one by one on one device."""

    def __init__(self, tasks: list[Task], devices: Devices, seed: int, device: torch.device) -> None:
        self.tasks = tasks
        self.device = device
        self.modules = [task.build(rng.key(seed, "model", s)).to(device) for s, task in enumerate(tasks)]
        self.data = [(task.data.train.x.to(device), task.data.train.y.to(device)) for task in tasks]
        self.dropout = [local.uses_dropout(m, x[:2]) for m, (x, _) in zip(self.modules, self.data, strict=True)]
        self.least = [local.smallest_batch(m, x) for m, (x, _) in zip(self.modules, self.data, strict=True)]
        self.flops = [step_flops(task) for task in tasks]
        self.speed, self.link = devices.profile(tasks[0].data.clients, seed)

    def initial(self) -> list[Weights]:
        """The models before the first round."""
        return [weights.read(module) for module in self.modules]

    def train(self, models: list[Weights], plan: Plan, stream: int) -> Iterator[Chunk]:
        """Run the plan's rows from these models; a row's randomness is addressed by (stream, client, model)."""
        for row, (client, model) in enumerate(zip(plan.client.tolist(), plan.model.tolist(), strict=True)):
            end, loss, examples, reason = self._train_row(models[model], client, model, local.row_key(stream, client, model))
            seconds = examples * self.flops[model] / self.speed[client] + 2 * models[model].nbytes / self.link[client]
            yield Chunk(
                rows=np.array([row]),
                model=model,
                update=(models[model].params - end.params)[None],
                buffers=end.buffers[None],
                loss=np.array([loss]),
                examples=np.array([examples]),
                seconds=np.array([seconds]),
                reason=[reason],
            )

    def _train_row(self, start: Weights, client: int, model: int, key: int) -> tuple[Weights, float, int, str]:
        """One client's local training: the model it ends with, its mean loss, the examples it processed, and why it failed if it did."""
        task, module = self.tasks[model], self.modules[model]
        rows = slice(*task.data.train.offsets[client : client + 2].tolist())
        x, y = self.data[model][0][rows], self.data[model][1][rows]
        weights.load(module, start)
        module.train()
        optimiser = torch.optim.SGD(module.parameters(), lr=task.lr)
        stream = rng.as_tensor([key], self.device)[0]
        dropout = local.Dropout(stream)
        steps = local.batches(task, len(y), stream, self.least[model])
        if not steps:
            return start, float("nan"), 0, local.TOO_FEW
        total = torch.zeros((), device=self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)  # for modules that draw from torch's own generator in other ways than dropout
            for step, batch in enumerate(steps):
                if self.dropout[model]:
                    dropout.start(step)
                    with dropout:
                        outputs = module(x[batch])
                else:
                    outputs = module(x[batch])
                loss = task.loss(outputs, y[batch]).mean()
                optimiser.zero_grad()
                loss.backward()
                if task.prox:
                    _pull(module, start.params, task.prox)
                optimiser.step()
                total += loss.detach()
        return weights.read(module), float(total) / len(steps), sum(len(batch) for batch in steps), ""

    def evaluate(self, models: list[Weights]) -> list[Score]:
        """Each model's loss and score on the test part."""
        out = []
        for task, module, model in zip(self.tasks, self.modules, models, strict=True):
            weights.load(module, model)
            out.append(score_parts(task, module, self.device))
        return out


def _pull(module: nn.Module, start: Tensor, strength: float) -> None:
    """FedProx: add the gradient of strength/2 * ||w - start||^2."""
    params = list(module.parameters())
    for p, origin in zip(params, start.split([p.numel() for p in params]), strict=True):
        if p.grad is not None:
            p.grad.add_(p.detach() - origin.view_as(p), alpha=strength)
