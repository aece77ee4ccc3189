"""The reference engine: one row after the other, any nn.Module, plain torch.

The other engines must agree with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rota import rng, weights
from rota.arrays import Array
from rota.channel import carry
from rota.engine import local, parts
from rota.engine.bounds import guarded
from rota.engine.examples import Pair, upload
from rota.engine.flops import module_flops, tasks_flops
from rota.engine.footprint import Footprint, footprint
from rota.engine.nested import NESTED, draw, inside, loss_of, scale
from rota.engine.optimisers import fresh
from rota.engine.schedule import batches
from rota.engine.score import Score, Scorer, forward
from rota.errors import not_a_clients, what_and_where
from rota.plan import Chunk, Job, Model, Seen, Task
from rota.submodel.cut import SubModel
from rota.weights import Weights
from rota.world.devices import Profile

if TYPE_CHECKING:
    from rota.engine import Options
    from rota.experiment import Experiment


Forward = tuple[Callable[[Tensor], Tensor], float]
"""A forward pass, and its FLOPs per example."""


class Net:
    """A task's network, or a smaller one of the same task, and what training it costs."""

    def __init__(
        self, task: int, module: nn.Module, flops: float, x: Tensor, counting: bool = True
    ) -> None:
        self.task, self.module, self.flops, self.x = task, module, flops, x
        self.counting = counting
        """Whether the FLOPs of smaller networks are counted."""
        self.footprint: Footprint | None = None
        integers = [buffer for buffer in module.buffers() if not buffer.is_floating_point()]
        self.counters = [(each, each.clone()) for each in integers]
        self.smaller: dict[tuple[bool, parts.Shape], Net] = {}
        """The networks of parts that rows have held lately."""

    def of(self, part: SubModel | None, scaled: bool = False) -> Net:
        """The network itself, or that of a part; parts of one shape share it."""
        if part is None:
            return self
        key = scaled, parts.shape(part)
        return parts.recent(self.smaller, key, lambda: self._smaller(part, scaled))

    def _smaller(self, part: SubModel, scaled: bool) -> Net:
        from rota.submodel.cut import build

        small, flops = build(self.module, part.cut), float("nan")
        if self.counting:
            flops = module_flops(lambda: build(self.module, part.cut).cpu(), self.x[:1].cpu())
        module = scale(small, self.module) if scaled else small
        return Net(self.task, module, flops, self.x, self.counting)


class Sequential:
    """Trains the rows of a plan one by one on one device.

    A caller that knows the tasks' `flops` per example, and has no use for costs, may give them:
    counting them takes a second.
    """

    def __init__(
        self,
        tasks: list[Task],
        profile: Profile,
        seed: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
        data: list[Pair] | None = None,
        flops: list[float] | None = None,
    ) -> None:
        self.tasks, self.profile, self.seed = tasks, profile, seed
        self.device, self.autocast = device, autocast
        self.modules = [
            task.build(rng.key(seed, "model", t)).to(device) for t, task in enumerate(tasks)
        ]
        # copies, because the modules are worked with
        self.start = [Model(t, weights.read(module)) for t, module in enumerate(self.modules)]
        self.data = data or upload(tasks, device)
        self.sound = [np.zeros(task.roster.clients, bool) for task in tasks]
        """Whose data are known to stay inside the model's tables; only used on a GPU."""
        self.dropout, self.least = [], []
        with guarded(device):
            for module, (x, _) in zip(self.modules, self.data, strict=True):
                self.dropout.append(local.uses_dropout(module, x[:2].clone().to(device)))
                self.least.append(local.smallest_batch(module, x[:1].clone().to(device)))
        self.flops = tasks_flops(tasks) if flops is None else flops
        given = zip(self.modules, self.flops, self.data, strict=True)
        self.nets = [
            Net(t, module, cost, x, flops is None) for t, (module, cost, (x, _)) in enumerate(given)
        ]
        self.scorer = Scorer(tasks, self.modules, self.flops, device)

    @classmethod
    def make(cls, experiment: Experiment, options: Options) -> Sequential:
        """The engine for an experiment."""
        tasks, seed = experiment.tasks, experiment.seed
        profile = experiment.devices.profile(tasks[0].roster.clients, seed)
        return cls(tasks, profile, seed, options.device, options.autocast)

    def initial(self) -> list[Model]:
        """The models before the first round, one per task."""
        return self.start

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a job."""
        for row in range(len(job.plan)):
            model = int(job.plan.model[row])
            begin, place = self._start(job, row), np.array([row])
            task, net = job.models[model].task, self._net(job, row)
            flops = net.flops
            try:
                end, loss, steps, examples, flops, reason = self._train_row(job, row, net, begin)
            except Exception as error:  # a user's own model or loss may raise anything
                if not_a_clients(error):
                    raise
                end, loss, steps, examples = begin, float("nan"), 0, 0
                reason = what_and_where(error)
            chunk = Chunk(
                rows=place,
                model=model,
                now=job.now,
                lr=self.tasks[task].lr_at(job.now),
                update=(begin.params - end.params)[None],
                buffers=end.buffers[None],
                loss=np.array([loss]),
                steps=np.array([steps]),
                examples=np.array([examples]),
                reason=[reason],
                costs=self.profile.costs(job, place, flops, np.array([examples])),
            )
            yield carry(job, self.seed, chunk)

    def _net(self, job: Job, row: int) -> Net:
        """The network that a row trains."""
        net = self.nets[int(job.task[row])]
        return net.of(job.plan.held(row), job.how == "scaled")

    def lack(self, job: Job, row: int, batch: int) -> str:
        """Why a row's training does not fit into its device's memory; empty if it does."""
        if self.profile.memory is None:
            return ""
        net = self._net(job, row)
        if net.footprint is None:
            x = self.data[net.task][0][:1].cpu()
            module, task = net.module, self.tasks[net.task]
            net.footprint = footprint(task, lambda: copy.deepcopy(module).cpu(), x)
        (room,) = self.profile.room(job.plan.client[[row]], job.now)
        need = net.footprint.of(batch)
        if need <= room:
            return ""
        return f"training needs {need / 1e6:.3g} MB, and the device has {room / 1e6:.3g} MB"

    def _forwards(self, job: Job, row: int, net: Net, key: int, steps: int) -> list[Forward]:
        """Each mini-batch's forward pass, and its FLOPs per example."""
        found: list[Forward] = [(net.module, net.flops)]
        if job.how not in NESTED:
            return found * steps
        own, model = job.plan.held(row), int(job.plan.model[row])
        mine = None if own is None else own.cut
        for part in job.plan.cuts:
            if part.model == model and (own is None or part.width < own.width):
                small = self.nets[net.task].of(part)
                found.append(inside(job.how, small, part.cut, net, mine))
        return [found[place] for place in draw(key, len(found), steps)]

    def _start(self, job: Job, row: int) -> Weights:
        """Where a row begins."""
        if job.local.start is None:
            return parts.fetched(job, row)
        params, buffers = parts.started(job, np.array([row]), job.local.start)
        return Weights(params[0], buffers[0])

    def _train_row(
        self, job: Job, row: int, net: Net, start: Weights
    ) -> tuple[Weights, float, int, int, float, str]:
        """Train one client.

        Returns the end, the mean loss, the steps, the examples, the FLOPs per example, and why the
        training failed.
        """
        model, module, client = net.task, net.module, int(job.plan.client[row])
        task = self.tasks[model]
        place = np.array([row])
        anchor: Tensor = start.params
        shift: Tensor | None = None
        if job.local.anchor:
            (anchor,) = parts.taken(job.plan, place, job.local.anchor(place))
        if job.local.shift:
            (shift,) = parts.taken(job.plan, place, job.local.shift(place))
        rows = slice(*task.federation.train.offsets[client : client + 2].tolist())
        x, y = (part[rows].to(self.device) for part in self.data[model])
        weights.load(module, start)
        for counter, beginning in net.counters:  # BatchNorm counts its batches anew in each row
            counter.copy_(beginning)
        module.train()
        optimiser = fresh(task, job.now, module.parameters())
        key = local.row_key(self.seed, job.now, client, model)
        stream = rng.as_tensor([key], self.device)[0]
        dropout = local.Dropout(stream)
        steps = batches(task, len(y), stream, self.least[model])
        if steps and (lack := self.lack(job, row, max(map(len, steps)))):
            return start, float("nan"), 0, 0, net.flops, lack
        if not steps:
            return start, float("nan"), 0, 0, net.flops, local.TOO_FEW
        forwards = self._forwards(job, row, net, key, len(steps))
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        whole = task.steps is None and self.least[model] == 1
        with torch.random.fork_rng(devices=[]), self._guarded(model, client, whole):
            # for modules that draw random numbers in other ways than dropout
            torch.default_generator.manual_seed(key)
            for step, batch in enumerate(steps):
                dropout.start(step)
                with dropout if self.dropout[model] else nullcontext(), self._precision():
                    outputs = forwards[step][0](x[batch])
                loss = loss_of(forwards[step][0], outputs, y[batch], task)
                optimiser.zero_grad()
                loss.backward()
                if task.prox:
                    _add(module, anchor, task.prox)
                if task.clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), task.clip)
                if shift is not None:
                    _add(module, shift)
                optimiser.step()
                for group in optimiser.param_groups:
                    group["lr"] *= task.lr_local_decay
                total += loss.detach()
        sizes = [len(batch) for batch in steps]
        flops = net.flops
        if job.how in NESTED:
            flops = float(np.average([each for _, each in forwards], weights=sizes))
        return weights.read(module), float(total) / len(steps), len(steps), sum(sizes), flops, ""

    @contextmanager
    def _guarded(self, model: int, clients: int | Array, whole: bool) -> Iterator[None]:
        """On a GPU, raise an error for an index outside of a table: the device would stop for good.

        The checks are slow. They end for a client once a pass over its whole data went well.
        """
        if self.device.type != "cuda" or self.sound[model][clients].all():
            yield
            return
        with guarded(self.device):
            yield
        if whole:
            self.sound[model][clients] = True

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        """The test losses and scores of all models, or of those with the numbers `which`."""
        return self.scorer.one_by_one(models, range(len(models)) if which is None else which)

    def losses(self, job: Job, examples: int | None = None, together: bool = False) -> Seen:
        """Each row's mean loss over its client's training examples, or over a random part.

        Clients that share passes are faster `together`, but their losses are rounded otherwise.
        """
        plan, seen = job.plan, Seen.nothing(len(job.plan))
        seen.examples[:] = 0
        for s in np.unique(plan.model).tolist():
            rows, task = np.flatnonzero(plan.model == s), job.models[s].task
            weights.load(self.modules[task].eval(), job.models[s].weights)
            places, sizes = self._examples(task, plan.client[rows], job.now, examples)
            try:
                with self._guarded(task, plan.client[rows], examples is None):
                    loss = self._means(task, places, sizes, together)
            except Exception as error:  # as in `train`; one by one, we see which client fails
                if not_a_clients(error):
                    raise
                pieces = zip(plan.client[rows], places.split(sizes.tolist()), strict=True)
                loss = np.array([self._mean(task, client, piece) for client, piece in pieces])
            seen.loss[rows], seen.examples[rows] = loss, sizes
            costs = self.profile.costs(job, rows, self.flops[task], sizes)
            seen.costs.seconds[rows], seen.costs.computing[rows] = costs.seconds, costs.computing
            seen.costs.up[rows], seen.costs.down[rows] = costs.up, costs.down
        known = np.isfinite(seen.loss)
        seen.reason = ["" if fine else "the loss is not finite" for fine in known.tolist()]
        seen.loss[~known] = np.nan
        return seen

    def _means(self, s: int, places: Tensor, sizes: Array, together: bool = False) -> Array:
        """The mean losses of clients; client i has the next sizes[i] places."""
        task, module, (x, y) = self.tasks[s], self.modules[s], self.data[s]
        places = places.to(x.device)  # which need not be the engine's

        def measure(part: tuple[slice, Tensor | None]) -> Tensor:
            here = places[part[0]]
            return task.loss(
                forward(module, x[here].to(self.device), part[1]), y[here].to(self.device)
            )

        passes = self.scorer.passes(s, sizes, together)
        each = torch.cat(self.scorer.spread(s, measure, passes)).double().cpu().numpy()
        return np.asarray(np.bincount(np.repeat(np.arange(len(sizes)), sizes), each) / sizes)

    def _mean(self, s: int, client: int, places: Tensor) -> float:
        """One client's mean loss; NaN where computing it raises an error."""
        try:
            with self._guarded(s, client, False):
                return float(self._means(s, places, np.array([len(places)]))[0])
        except Exception as error:
            if not_a_clients(error):
                raise
            return float("nan")

    def _examples(
        self, model: int, clients: Array, now: int, most: int | None
    ) -> tuple[Tensor, Array]:
        """The places of clients' training examples, one client after the other; and their numbers.

        With `most`, a client with more examples gives that many at random.
        """
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
