"""The fast engine: it groups the rows of a plan, and back ends train every group at once.

Tasks form families: those of a family have the same network and the same local work, except for
their learning rates. Rows of one family train in groups, ordered by their number of steps. The
engine decides who is in a group with whom; a back end trains it (backends/). Rows that no back end
can train go to the sequential engine.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.channel import carry
from rota.engine import backends
from rota.engine.backends import Backend
from rota.engine.bounds import strays
from rota.engine.examples import Examples, join, upload
from rota.engine.group import Group, Result, Workers
from rota.engine.rules import Unbatchable
from rota.engine.schedule import (
    batch_sizes,
    batches_per_epoch,
    examples_of,
    local_steps,
    widths,
)
from rota.engine.score import Score
from rota.engine.sequential import Sequential
from rota.engine.steps import Steps
from rota.engine.trace import UNKNOWN
from rota.engine.trials import ignores_padding, suits
from rota.errors import not_a_clients
from rota.plan import Chunk, Job, Model, Seen, Task
from rota.weights import Weights
from rota.world.devices import Profile

if TYPE_CHECKING:
    from rota.engine import Options
    from rota.experiment import Experiment

logger = logging.getLogger(__name__)

SAMPLE = 1024
"""Examples that a step is traced and tried on, where the data are not on the device."""


@dataclass(frozen=True)
class Family:
    """Tasks whose rows can train in one group, their examples, and what trains them."""

    tasks: list[int]
    steps: Steps
    examples: Examples
    backend: Backend
    least: int
    """The smallest mini-batch that the network trains on."""
    lone: Array
    """Owners whose rows must not be in a group: their data leave the model's tables (bounds.py)."""


def signature(task: Task, apart: bool) -> tuple[object, ...]:
    """What tasks of one family agree on; with `apart` that includes the data."""
    own = ("lr", "lr_decay", "lr_steps", "lr_warmup", "lr_cosine", "name", "data", "model")
    values = [getattr(task, each.name) for each in fields(Task) if each.name not in own]
    x, y = task.federation.train.x, task.federation.train.y
    shape = (x.shape[1:], x.dtype, y.shape[1:], y.dtype, task.data.classes)
    return (id(task.data) if apart else shape, id(task.model), *values)


class Batched:
    """Trains the rows of a plan in groups on one device."""

    def __init__(
        self,
        tasks: list[Task],
        profile: Profile,
        seed: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.tasks, self.seed, self.device, self.autocast = tasks, seed, device, autocast
        self.workers = Workers.on(device)
        pairs = upload(tasks, device)
        near = all(x.device.type == device.type for x, _ in pairs)
        alike: dict[tuple[object, ...], list[int]] = {}
        for t, task in enumerate(tasks):
            apart = not (near and backends.joins(device))
            alike.setdefault(signature(task, apart), []).append(t)
        joined = [(some, join(tasks, some, pairs)) for some in alike.values()]
        for some, examples in joined:  # views of one array, so that nothing lies there twice
            for t in some:
                pairs[t] = examples.of(t, tasks[t].roster.clients)
        self.plain = Sequential(tasks, profile, seed, device, autocast, pairs)
        self.families = self._families(joined)

    @classmethod
    def make(cls, experiment: Experiment, options: Options) -> Batched:
        """The engine for an experiment."""
        tasks, seed = experiment.tasks, experiment.seed
        profile = experiment.devices.profile(tasks[0].roster.clients, seed)
        return cls(tasks, profile, seed, options.device, options.autocast)

    def _families(self, joined: list[tuple[list[int], Examples]]) -> list[Family]:
        """The families whose steps a back end can train; the others are reported."""
        found = []
        for tasks, examples in joined:
            name = self.tasks[tasks[0]].name or self.tasks[tasks[0]].data.name
            try:
                with warnings.catch_warnings():  # torch's own warnings, about what is tried here
                    warnings.simplefilter("ignore")
                    found.append(self._family(name, tasks, examples))
            except Exception as error:  # a user's module may do anything; alone it trains
                known = isinstance(error, Unbatchable)
                if not known and not_a_clients(error):
                    raise
                logger.warning(
                    "task '%s' runs on the sequential engine, one client at a time: its model %s",
                    name,
                    error if known else UNKNOWN,
                )
                logger.debug("why it cannot be stacked:", exc_info=error)
        return found

    def _family(self, name: str, tasks: list[int], examples: Examples) -> Family:
        """Trace and try the step of some tasks; raises an exception if that fails."""
        task, module = self.tasks[tasks[0]], self.plain.modules[tasks[0]]
        x, y, sizes = examples.x, examples.y, np.diff(examples.offsets)
        if x.device.type != self.device.type:  # the data do not fit: a few will do to trace with
            x, y = x[:SAMPLE].to(self.device), y[:SAMPLE].to(self.device)
        steps = Steps(task, module, x, y, self.autocast)
        suits(steps)
        width = int(widths(task, sizes, *backends.widths(self.device)).max())
        lone = strays(steps.of_one(width), examples.x, examples.y, examples.offsets, width)
        if lone.any():
            sound = np.flatnonzero(np.repeat(~lone, sizes))
            steps.keep_to(sound[sound < len(x)])
        ignores_padding(steps, width)
        backend = backends.choose(steps, examples, width, self.workers)
        if backend.checks:
            lone[:] = False
        elif lone.any():
            logger.warning(
                "task '%s': %d of %d clients hold a token or a label outside of the model's "
                "tables; each of them trains by itself",
                name,
                lone.sum(),
                len(lone),
            )
        return Family(tasks, steps, examples, backend, self.plain.least[tasks[0]], lone)

    def initial(self) -> list[Model]:
        """The models before the first round, one per task."""
        return self.plain.initial()

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        """The test losses and scores of all models, or of those with the numbers `which`."""
        return self.plain.scorer.together(models, range(len(models)) if which is None else which)

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        """Each row's mean loss over its client's training examples, or over some at random."""
        return self.plain.losses(job, examples)

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a job. Results are taken in order, and only a few groups wait."""
        groups = [
            (family, rows, width)
            for family in self.families
            for rows, width in self._groups(family, job)
        ]
        if sum(len(rows) for _, rows, _ in groups) < len(job.plan):
            grouped = np.concatenate([np.empty(0, np.int64), *(rows for _, rows, _ in groups)])
            yield from self._one_by_one(job, np.setdiff1d(np.arange(len(job.plan)), grouped))
        waiting: deque[tuple[Array, Callable[[], list[Result]]]] = deque()
        failed: list[Array] = []

        def finished() -> Iterator[Chunk]:
            rows, results = waiting.popleft()
            try:
                found = results()
            except Exception as error:  # a user's module may raise anything over one client's data
                if not_a_clients(error):
                    raise
                logger.debug("a group failed:", exc_info=error)
                failed.append(rows)
                return
            for result in found:
                yield from self._chunks(job, result)

        for family, rows, width in groups:
            group = self._group(family, job, rows, width)
            waiting.append((rows, family.backend.start(group, alone=len(groups) == 1)))
            if len(waiting) > 2 * self.workers.number:
                yield from finished()
        while waiting:
            yield from finished()
        if failed:  # only now, because no other thread traces a module any more
            yield from self._one_by_one(job, np.concatenate(failed))

    def _one_by_one(self, job: Job, rows: Array) -> Iterator[Chunk]:
        """Train some rows on the sequential engine."""
        for chunk in self.plain.train(job.of(rows)):
            yield replace(chunk, rows=rows[chunk.rows])

    def _groups(self, family: Family, job: Job) -> Iterator[tuple[Array, int]]:
        """The rows of each group of a family, and the width of its mini-batches.

        Rows without any step are left out: the sequential engine says why they cannot train.
        """
        task, examples = self.tasks[family.tasks[0]], family.examples
        rows = np.flatnonzero(np.isin(job.task, family.tasks))
        owners = examples.owners(job.task[rows], job.plan.client[rows])
        sizes = examples.sizes(owners)
        steps = local_steps(task, sizes, family.least)
        able = (steps > 0) & ~family.lone[owners]
        if job.plan.cut is not None:  # the sequential engine trains parts of models
            able &= job.plan.cut[rows] == 0
        if job.how != "plain" and job.plan.cut is not None:  # what only the sequential engine does
            able &= (job.how == "scaled") & (job.plan.cut[rows] == 0)
        if self.plain.profile.memory is not None:  # the sequential engine says what does not fit
            batch = np.minimum(batch_sizes(task, sizes), sizes).tolist()
            each = zip(rows.tolist(), batch, strict=True)
            able &= np.array([not self.plain.lack(job, *row) for row in each], bool)
        wide = widths(task, sizes, *backends.widths(self.device))
        for width in sorted(set(wide[able].tolist()), reverse=True):
            mine = np.flatnonzero((wide == width) & able)
            mine = mine[np.argsort(-steps[mine], kind="stable")]
            most = family.backend.most(width)
            for start in range(0, len(mine), most):
                yield rows[mine[start : start + most]], width

    def _group(self, family: Family, job: Job, rows: Array, width: int) -> Group:
        """All that a back end needs to train some rows."""
        task, local, models = self.tasks[family.tasks[0]], job.local, job.plan.model[rows]
        owners = family.examples.owners(job.task[rows], job.plan.client[rows])
        sizes = family.examples.sizes(owners)
        if local.start is None:
            present, line = np.unique(models, return_inverse=True)
            starts = [job.models[m].weights for m in present.tolist()]
            start = Weights(*(torch.stack(side) for side in zip(*starts, strict=True)))
        else:
            start, line = local.start(rows), np.arange(len(rows))
        rates = np.array([each.lr_at(job.now) for each in self.tasks])
        return Group(
            width=width,
            key=rng.key(self.seed, "train", job.now),
            start=start,
            row=rows,
            client=job.plan.client[rows],
            task=job.task[rows],
            first=family.examples.offsets[owners],
            examples=sizes,
            batch=batch_sizes(task, sizes),
            per_epoch=batches_per_epoch(task, sizes, family.least),
            steps=local_steps(task, sizes, family.least),
            processed=examples_of(task, sizes, family.least),
            rate=rates[job.task[rows]],
            line=line,
            anchor=None if local.anchor is None else local.anchor(rows),
            shift=None if local.shift is None else local.shift(rows),
        )

    def _chunks(self, job: Job, result: Result) -> Iterator[Chunk]:
        """A result as chunks, one per model."""
        models = job.plan.model[result.row]
        for model in sorted(set(models.tolist())):
            task, update = job.models[model].task, result.update
            flops, processed = self.plain.flops[task], result.processed
            chunk = Chunk(
                rows=result.row,
                model=model,
                now=job.now,
                lr=self.tasks[task].lr_at(job.now),
                update=update,
                buffers=result.buffers,
                loss=result.loss,
                steps=result.steps,
                examples=processed,
                reason=result.reason,
                measured=None if result.norm is None else (update, result.norm),
                costs=self.plain.profile.costs(job, result.row, flops, processed),
            )
            yield carry(job, self.seed, chunk.of(np.flatnonzero(models == model)))
