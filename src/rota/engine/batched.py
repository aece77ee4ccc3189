"""The fast engine: it groups the rows of a plan, and back ends train every group at once.

Tasks form families: those of a family have the same network and the same local work, except for
their learning rates. Rows of one family train in groups, ordered by their number of steps. Rows
that hold parts of models form groups of their own, one width at a time: their smaller network is a
family too, made when a round first needs it (parts.py). The engine decides who is in a group with
whom; a back end trains it (backends/). Rows that no back end can train go to the sequential engine.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rota import rng
from rota.arrays import Array
from rota.channel import carry
from rota.engine import backends, nested, parts
from rota.engine.backends import Backend
from rota.engine.bounds import strays
from rota.engine.examples import Examples, join, upload
from rota.engine.group import Group, Result, Workers, one_thread
from rota.engine.rules import Unbatchable
from rota.engine.schedule import batch_sizes, batches_per_epoch, examples_of, local_steps, widths
from rota.engine.score import Score
from rota.engine.sequential import Sequential
from rota.engine.steps import Steps
from rota.engine.trace import UNKNOWN
from rota.engine.trials import ignores_padding, suits
from rota.errors import not_a_clients
from rota.plan import Chunk, Job, Model, Seen, Task
from rota.submodel.cut import SubModel
from rota.weights import Weights, load
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

    name: str
    tasks: list[int]
    steps: Steps
    examples: Examples
    backend: Backend
    width: int
    """The width of the widest mini-batches, on which the step was tried."""
    least: int
    """The smallest mini-batch that the network trains on."""
    flops: float
    """The FLOPs of a step, per example."""
    strays: Array
    """Owners whose data leave the model's tables (bounds.py)."""
    smaller: dict[tuple[bool, parts.Shape], Family | None] = field(default_factory=dict)
    """The families of smaller networks, by shape; None where no back end can train it."""

    @cached_property
    def lone(self) -> Array:
        """Owners whose rows must not be in a group."""
        return np.zeros_like(self.strays) if self.backend.checks else self.strays


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
        self.family_of = np.full(len(tasks), -1)
        """Each task's place in `families`; -1 where no back end can train it."""
        for place, family in enumerate(self.families):
            self.family_of[family.tasks] = place

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
            family = self._tried(f"task '{name}'", partial(self._family, name, tasks, examples))
            found += [family] if family else []
        return found

    def _tried(self, name: str, make: Callable[[], Family]) -> Family | None:
        """A family, or None where no back end can train it; then a line says why."""
        try:
            with warnings.catch_warnings():  # torch's own warnings, about what is tried here
                warnings.simplefilter("ignore")
                return make()
        except Exception as error:  # a user's module may do anything; alone it trains
            known = isinstance(error, Unbatchable)
            if not known and not_a_clients(error):
                raise
            logger.warning(
                "%s runs on the sequential engine, one client at a time: its model %s",
                name,
                error if known else UNKNOWN,
            )
            logger.debug("why it cannot be stacked:", exc_info=error)
            return None

    def _family(self, name: str, tasks: list[int], examples: Examples) -> Family:
        """Trace and try the step of some tasks; raises an exception if that fails."""
        task, net = self.tasks[tasks[0]], self.plain.nets[tasks[0]]
        x, y, sizes = examples.x, examples.y, np.diff(examples.offsets)
        if x.device.type != self.device.type:  # the data do not fit: a few will do to trace with
            x, y = x[:SAMPLE].to(self.device), y[:SAMPLE].to(self.device)
        steps = Steps(task, net.module, x, y, self.autocast)
        suits(steps)
        width = int(widths(task, sizes, *backends.widths(self.device)).max())
        wrong = strays(steps.of_one(width), examples.x, examples.y, examples.offsets, width)
        if wrong.any():
            sound = np.flatnonzero(np.repeat(~wrong, sizes))
            steps.keep_to(sound[sound < len(x)])
        ignores_padding(steps, width)
        backend = backends.choose(steps, examples, width, self.workers)
        least = self.plain.least[tasks[0]]
        family = Family(name, tasks, steps, examples, backend, width, least, net.flops, wrong)
        if family.lone.any():
            logger.warning(
                "task '%s': %d of %d clients hold a token or a label outside of the model's "
                "tables; each of them trains by itself",
                name,
                wrong.sum(),
                len(wrong),
            )
        return family

    def _smaller(self, family: Family, part: SubModel, scaled: bool) -> Family:
        """The family of a part's network: the same tasks and examples, and a step of its own."""
        t, whole = family.tasks[0], family.steps
        net = self.plain.nets[t].of(part, scaled)
        load(net.module, part.of(self.plain.start[t].weights))  # a diverged model fails the trial
        steps = Steps(whole.task, net.module, whole.x, whole.y, self.autocast)
        steps.places = whole.places
        backend = backends.choose(steps, family.examples, family.width, self.workers)
        return replace(family, steps=steps, backend=backend, flops=net.flops, smaller={})

    def initial(self) -> list[Model]:
        """The models before the first round, one per task."""
        return self.plain.initial()

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        """The test losses and scores of all models, or of those with the numbers `which`."""
        return self.plain.scorer.together(models, range(len(models)) if which is None else which)

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        """Each row's mean loss over its client's training examples, or over some at random."""
        return self.plain.losses(job, examples, together=True)

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a job. Results are taken in order, and only a few groups wait."""
        groups = [
            (family, some, width)
            for family, rows in self._sharing(job)
            for some, width in self._groups(family, job, rows)
        ]
        if sum(len(rows) for _, rows, _ in groups) < len(job.plan):
            grouped = np.concatenate([np.empty(0, np.int64), *(rows for _, rows, _ in groups)])
            yield from self._one_by_one(job, np.setdiff1d(np.arange(len(job.plan)), grouped))
        waiting: deque[tuple[Family, Array, Callable[[], list[Result]]]] = deque()
        failed: list[Array] = []

        def finished() -> Iterator[Chunk]:
            family, rows, results = waiting.popleft()
            try:
                found = results()
            except Exception as error:  # a user's module may raise anything over one client's data
                if not_a_clients(error):
                    raise
                logger.debug("a group failed:", exc_info=error)
                failed.append(rows)
                return
            with one_thread(bool(waiting) and self.device.type == "cpu"):
                for result in found:
                    yield from self._chunks(family, job, result)

        for family, rows, width in groups:
            group = self._group(family, job, rows, width)
            waiting.append((family, rows, family.backend.start(group, alone=len(groups) == 1)))
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

    def _sharing(self, job: Job) -> Iterator[tuple[Family, Array]]:
        """The rows of a job that share a network, and its family."""
        if job.how in nested.NESTED and job.plan.cut is not None:
            return  # every mini-batch has a width of its own: the sequential engine does that
        scaled = job.how == "scaled"
        of = self.family_of[job.task]
        for place, family in enumerate(self.families):
            mine = np.flatnonzero(of == place)
            whole, smaller = parts.by_shape(job.plan, mine)
            yield family, whole
            for part, rows in smaller[: parts.SHAPES]:
                name = f"task '{family.name}', width {part.width:.3g},"
                make = partial(self._tried, name, partial(self._smaller, family, part, scaled))
                found = parts.recent(family.smaller, (scaled, parts.shape(part)), make)
                if found:
                    yield found, rows

    def _groups(self, family: Family, job: Job, rows: Array) -> Iterator[tuple[Array, int]]:
        """Rows of a family in groups, and the width of each group's mini-batches.

        Rows without any step are left out: the sequential engine says why they cannot train.
        """
        task, examples = self.tasks[family.tasks[0]], family.examples
        owners = examples.owners(job.task[rows], job.plan.client[rows])
        sizes = examples.sizes(owners)
        steps = local_steps(task, sizes, family.least)
        able = (steps > 0) & ~family.lone[owners]
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
        task, local = self.tasks[family.tasks[0]], job.local
        owners = family.examples.owners(job.task[rows], job.plan.client[rows])
        sizes = family.examples.sizes(owners)
        if local.start is None:
            _, first, line = np.unique(
                parts.held(job.plan, rows), return_index=True, return_inverse=True
            )
            starts = [parts.fetched(job, row) for row in rows[first].tolist()]
            start = Weights(*(torch.stack(side) for side in zip(*starts, strict=True)))
        else:
            start, line = parts.started(job, rows, local.start), np.arange(len(rows))
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
            anchor=self._vector(job, rows, local.anchor),
            shift=self._vector(job, rows, local.shift),
        )

    def _vector(
        self, job: Job, rows: Array, vector: Callable[[Array], Tensor] | None
    ) -> Tensor | None:
        """A vector of the rows' local work, as long as what they hold."""
        return None if vector is None else parts.taken(job.plan, rows, vector(rows))

    def _chunks(self, family: Family, job: Job, result: Result) -> Iterator[Chunk]:
        """A result as chunks, whose rows hold the same model, or the same part of it."""
        held = parts.held(job.plan, result.row)
        for one in sorted(set(held.tolist())):
            mine = np.flatnonzero(held == one)
            model = int(job.plan.model[result.row[mine[0]]])
            chunk = Chunk(
                rows=result.row,
                model=model,
                now=job.now,
                lr=self.tasks[job.models[model].task].lr_at(job.now),
                update=result.update,
                buffers=result.buffers,
                loss=result.loss,
                steps=result.steps,
                examples=result.processed,
                reason=result.reason,
                measured=None if result.norm is None else (result.update, result.norm),
                costs=self.plain.profile.costs(job, result.row, family.flops, result.processed),
            )
            yield carry(job, self.seed, chunk.of(mine))
