"""What a grouping may look at and ask for before a round, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rota import rng
from rota.admission import admit
from rota.arrays import Array
from rota.engine import Engine
from rota.plan import Chunk, Costs, Job, Local, Model, Plan, Seen, Task, duty
from rota.weights import Weights
from rota.world.devices import Devices

BLOCK = 256
"""Clients that train alone for several rounds at once: their local models are held."""


@dataclass(frozen=True)
class Groups:
    """Who learns with whom.

    `of[t, i]` is the number of client i's group in task t, from 0 on. It is -1 where the client is
    in no group and cannot be drawn.

    A new model begins at the weighted mean of the models that its clients had. `weights` says
    otherwise: for each task, where each group's model begins. `similar` says how alike clients of
    a task are, as a matrix from 0 to 1, for records and reports.
    """

    of: Array
    weights: list[list[Weights]] | None = None
    similar: Callable[[int, Array], Array] | None = None


@dataclass(frozen=True)
class Occasion:
    """The moment before round `now`. The run pays for everything that is asked of clients.

    `of[t, i]` is the present group of client i in task t (-1: none), whose model is
    `models[row(t, group)]`. `shares` is d[t, i], whatever the groups are.
    """

    now: int
    seed: int
    tasks: list[Task]
    models: list[Model]
    of: Array
    shares: Array
    reachable: Array
    """[tasks, clients]: who has data and can be reached in this round."""
    engine: Engine
    devices: Devices
    asked: list[tuple[Plan, Seen]] = field(default_factory=list)
    fetched: list[tuple[Plan, list[Model]]] = field(default_factory=list)
    """The rows that fetched a model which they may still have when the round begins."""

    def row(self, task: int, group: int = 0) -> int:
        """The number of a group's model among the run's models."""
        return [s for s, model in enumerate(self.models) if model.task == task][group]

    def updates(self, task: int, clients: Array, local: int | None = None) -> Iterator[Chunk]:
        """Let clients train as in a round, and give their updates chunk by chunk.

        They begin at their groups' models. With `local`, they begin at the task's first model, and
        each trains alone for as long as in that many rounds before it sends its update. Rows that
        failed are left out. A chunk's `rows` are places in `clients`, and its memory must not be
        kept.
        """
        if local is None:
            rows = np.array([self.row(task, group) for group in self.of[task, clients].tolist()])
            yield from self._trained(self._job(self.models, clients, rows, (1, 1)))
            return
        models = self.engine.initial()
        row = np.array([[model.task for model in models].index(task)])
        first = models[int(row[0])].weights
        for start in range(0, len(clients), BLOCK):
            some = clients[start : start + BLOCK]
            places, begin = np.arange(len(some)), _copies(first, len(some))
            for k in range(local):
                way = int(k == 0), int(k == local - 1)
                job = self._job(models, some[places], row, way, begin, self.now + k)
                ends, came = [], []
                for chunk in self._trained(job):
                    params = begin.params[chunk.rows] - chunk.update
                    if way[1]:
                        yield replace(
                            chunk, rows=start + places[chunk.rows], update=first.params - params
                        )
                    ends.append(Weights(params, chunk.buffers.clone()))
                    came.append(chunk.rows)
                if not ends:
                    break
                order = np.argsort(np.concatenate(came))
                begin = Weights(*(torch.cat(side)[order] for side in zip(*ends, strict=True)))
                places = places[np.concatenate(came)[order]]

    def _job(
        self,
        models: list[Model],
        clients: Array,
        rows: Array,
        way: tuple[int, int],
        begin: Weights | None = None,
        now: int | None = None,
    ) -> Job:
        plan = _plan(clients, rows, np.ones(len(clients)))
        work = duty(models, plan, 1.0, (way[0], 0), (way[1], 0))
        local = Local()
        if begin is not None:
            local = Local(start=lambda few: Weights(begin.params[few], begin.buffers[few]))
        return Job(self.now if now is None else now, models, plan, work, local)

    def _trained(self, job: Job) -> Iterator[Chunk]:
        """The rows that succeeded; all that were asked are charged."""
        seen = Seen.nothing(len(job.plan))
        self.asked.append((job.plan, seen))
        for reply in self.engine.train(job):
            chunk = admit(reply, job, seen)
            if chunk is None:
                continue
            seen.add(chunk)
            came = np.flatnonzero(chunk.ok)
            if len(came):
                yield chunk.of(came)

    def losses(self, clients: Array, rows: Array, models: list[Model] | None = None) -> Array:
        """Each client's mean loss of the model with this row; NaN where that failed."""
        models = self.models if models is None else models
        plan = _plan(clients, rows, np.ones(len(clients)))
        job = Job(self.now, models, plan, duty(models, plan, 1 / 3, (1, 0), (0, 0), numbers=1))
        with rng.addressed(rng.key(self.seed, "grouping", self.now)):
            seen = self.engine.losses(job)
        self.asked.append((plan, seen))
        self.fetched.append((plan.of(np.flatnonzero(seen.ok)), models))
        return np.where(seen.ok, seen.loss, np.nan)

    def pay(self, task: int, clients: Array, flops: Array, up: Array) -> None:
        """Charge what clients compute and send in any other way."""
        profile = self.devices.profile(self.of.shape[1], self.seed)
        seconds, computing = profile.seconds(clients, flops, up, self.now)
        plan = _plan(clients, np.full(len(clients), self.row(task)), np.ones(len(clients)))
        seen = Seen.nothing(len(plan))
        down = np.zeros(len(plan), np.int64)
        seen.costs = Costs(seconds, computing, np.asarray(up, np.int64), down)
        seen.reason = [""] * len(plan)
        self.asked.append((plan, seen))


def _copies(weights: Weights, number: int) -> Weights:
    """The same weights once per row (views)."""
    return Weights(*(part.expand(number, -1) for part in weights))


def _plan(clients: Array, rows: Array, weight: Array) -> Plan:
    rows = np.broadcast_to(rows, clients.shape).astype(np.int64)
    return Plan(clients.astype(np.int64), rows, np.ones(len(clients)), weight.astype(np.float64))
