"""The fast engine: rows of the plan are stacked and trained at once, as one computation, on a CPU or a GPU.

A stack is some rows of one network: their parameters are the rows of one matrix, their mini-batches one tensor, and a local step of all
of them is one traced list of operators (trace.py). Rows are ordered by their number of steps, and retire from the end of the
stack as they finish. On a GPU a step is one CUDA graph. On a CPU a step's list of operators goes to a C library (native/), which trains
a row on every core; what it does not have runs in stacks of torch operators, a thread each. Models that differ only in their learning
rate (a sweep) share their stacks.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.engine import native
from rota.engine.bounds import strays
from rota.engine.cuda import GraphStack
from rota.engine.fit import rows_for_a_core, rows_of_results, rows_that_fit
from rota.engine.local import cores
from rota.engine.rules import Unbatchable, on_gpu
from rota.engine.schedule import (
    Schedule,
    batches_per_epoch,
    examples_of,
    local_steps,
    nearly,
    row_keys,
    schedule,
    widths,
)
from rota.engine.score import Score
from rota.engine.sequential import Sequential
from rota.engine.stack import Stack, Steps, active, ignores_padding, suits, verify
from rota.engine.trace import UNKNOWN
from rota.errors import not_a_clients
from rota.plan import Chunk, Job, Model, Seen, Task
from rota.world.devices import Profile

if TYPE_CHECKING:
    from rota.engine import Options
    from rota.experiment import Experiment

logger = logging.getLogger(__name__)
SAMPLE = 1024  # examples that a step is traced and tried on, where the data are not on the device


@dataclass(frozen=True)
class Family:
    """Models whose rows can share a stack: the same network with the same local work, but for the learning rate.

    Their data are one array, in which examples offsets[i]:offsets[i+1] are owner i's; a client of model m is owner first[m] + client.
    """

    tasks: list[int]
    steps: Steps
    native: native.Native | None
    offsets: Array
    first: Array
    apart: Array
    """Owners whose data leave the model's tables (bounds.py): the plain engine trains them."""

    def owners(self, job: Job, rows: Array) -> Array:
        return np.asarray(self.first[job.task[rows]] + job.plan.client[rows])

    def sizes(self, job: Job, rows: Array) -> Array:
        """How many examples each row's client has."""
        owners = self.owners(job, rows)
        return np.asarray(self.offsets[owners + 1] - self.offsets[owners])


def signature(task: Task, apart: bool) -> tuple[object, ...]:
    """What tasks must agree on to share stacks; `apart`: the data, too."""
    values = [
        getattr(task, f.name)
        for f in fields(Task)
        if f.name not in ("lr", "lr_decay", "name", "data", "model")
    ]
    x, y = task.federation.train.x, task.federation.train.y
    data = (
        id(task.data) if apart else (x.shape[1:], x.dtype, y.shape[1:], y.dtype, task.data.classes)
    )
    return (data, id(task.model), *values)


def joins(device: torch.device) -> bool:
    """Whether the data of several models are put into one array, so that their rows share stacks. On a CPU rows gain nothing by it."""
    return device.type == "cuda"


class Batched:
    """Trains the rows of a plan in stacks on one device. What cannot be stacked goes to the sequential engine, and says so."""

    def __init__(
        self,
        tasks: list[Task],
        profile: Profile,
        seed: int,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.plain = Sequential(tasks, profile, seed, device, autocast)
        self.autocast = autocast
        self.tasks, self.seed, self.device = tasks, seed, device
        self.widths = (
            (8, 16) if device.type == "cuda" else (16, 1)
        )  # which there are: a GPU does better with few stacks
        self.families = self._families()
        self.most: dict[tuple[int, int], int] = {}  # (family, width) -> the most rows in one stack
        self.graphs: dict[tuple[int, int, bool], GraphStack] = {}
        self.pool = (
            torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        )  # of all graphs: they run one after the other
        self.workers = cores() if device.type == "cpu" else 1
        self.threads = ThreadPoolExecutor(
            self.workers, initializer=torch.set_num_threads, initargs=(1,)
        )

    def _families(self) -> list[Family]:
        together: dict[tuple[object, ...], list[int]] = {}
        apart = not joins(self.device) or any(
            x.device.type != self.device.type for x, _ in self.plain.data
        )
        for model, task in enumerate(self.tasks):
            together.setdefault(signature(task, apart), []).append(model)
        out = []
        for models in together.values():
            try:
                with warnings.catch_warnings():  # torch's own, about what is tried here
                    warnings.simplefilter("ignore")
                    out.append(self._family(models))
            except Exception as error:  # a user's module may do anything, and one by one it works
                known = isinstance(error, Unbatchable)
                if not known and not_a_clients(error):
                    raise
                why = error if known else UNKNOWN
                logger.warning(
                    "task '%s' runs on the sequential engine, one client at a time: its model %s",
                    self._name(models[0]),
                    why,
                )
                logger.debug("why it cannot be stacked:", exc_info=error)
        return out

    def _family(self, models: list[int]) -> Family:
        """Trace and try the step of some models; raises where that fails."""
        task = self.tasks[models[0]]
        x, y, offsets, first = self._join(models)
        near = x.device.type == self.device.type
        some = slice(None) if near else slice(SAMPLE)  # what does not fit: a few to trace with
        steps = Steps(
            task,
            self.plain.modules[models[0]],
            x[some].to(self.device),
            y[some].to(self.device),
            self.autocast,
        )
        suits(steps)
        width = int(widths(task, np.diff(offsets), *self.widths).max())
        apart = strays(steps.of_one(width), x, y, offsets, width)
        if apart.any():
            sound = np.flatnonzero(np.repeat(~apart, np.diff(offsets)))
            steps.keep_to(sound[sound < len(steps.x)])
            logger.warning(
                "task '%s': %d of %d clients hold a token or a label outside of the model's tables; "
                "each of them trains by itself",
                self._name(models[0]),
                apart.sum(),
                len(apart),
            )
        ignores_padding(steps, width)
        library = self._library(steps, width)
        if library is None:
            verify(steps, width)
        return Family(models, steps, library, offsets, first, apart)

    def _name(self, model: int) -> str:
        return self.tasks[model].name or self.tasks[model].data.name

    def _join(self, models: list[int]) -> tuple[Tensor, Tensor, Array, Array]:
        """The data of some models as one array, with Family's `offsets` and `first`. What each model had becomes a part of it."""
        leaders = {id(self.tasks[m].data): m for m in reversed(models)}
        places = {data: place for place, data in enumerate(leaders)}
        parts = [self.tasks[m].federation.train for m in leaders.values()]
        first = np.array([places.get(id(task.data), 0) * parts[0].clients for task in self.tasks])
        if len(parts) == 1:
            return *self.plain.data[models[0]], parts[0].offsets, first
        x, y = (torch.cat([self.plain.data[m][i] for m in leaders.values()]) for i in range(2))
        begin = np.cumsum([0, *(part.offsets[-1] for part in parts)])
        for m in models:
            mine = slice(*begin[places[id(self.tasks[m].data)] :][:2].tolist())
            self.plain.data[m] = x[mine], y[mine]
        return (
            x,
            y,
            np.concatenate(
                [
                    [0],
                    *(part.offsets[1:] + start for part, start in zip(parts, begin, strict=False)),
                ]
            ),
            first,
        )

    def _library(self, steps: Steps, width: int) -> native.Native | None:
        """The task's step for the C library, on a CPU and where it has all of its operators."""
        if self.device.type != "cpu" or self.autocast is not None:
            return None
        try:
            made = native.Native(steps)
            native.verify(made, width)
        except Unbatchable:
            raise
        except Exception as error:  # whatever keeps the C library from it
            known = isinstance(error, native.Unsupported | native.Unavailable)
            if not known and not_a_clients(error):
                raise
            logger.debug("why the C library does not train it:", exc_info=error)
            return None
        return made

    @classmethod
    def make(cls, experiment: Experiment, options: Options) -> Batched:
        """The engine for an experiment."""
        tasks, seed = experiment.tasks, experiment.seed
        profile = experiment.devices.profile(tasks[0].roster.clients, seed)
        return cls(tasks, profile, seed, options.device, options.autocast)

    def initial(self) -> list[Model]:
        """The models before the first round, one per task."""
        return self.plain.initial()

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        """The test losses and scores of all models, or of those with the numbers `which`."""
        return self.plain.scorer.together(models, range(len(models)) if which is None else which)

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        """Each row's mean loss over its client's training examples, or over some of them at random."""
        return self.plain.losses(job, examples)

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a job."""
        groups = [
            (f, rows, width)
            for f, family in enumerate(self.families)
            for rows, width in self._groups(f, family, job)
        ]
        if sum(len(rows) for _, rows, _ in groups) < len(job.plan):
            stacked = np.concatenate([np.empty(0, np.int64), *(rows for _, rows, _ in groups)])
            yield from self._one_by_one(job, np.setdiff1d(np.arange(len(job.plan)), stacked))
        waiting: deque[tuple[Array, Callable[[], list[Chunk]]]] = deque()
        failed: list[Array] = []

        def done() -> list[Chunk]:
            rows, finish = waiting.popleft()
            try:
                return finish()
            except Exception as error:  # a user's module may raise anything, for one client's data
                if not_a_clients(error):
                    raise
                logger.debug("a stack failed:", exc_info=error)
                failed.append(rows)
                return []

        finish: Callable[[], list[Chunk]]
        for f, rows, width in groups:  # results are taken in order, and only a few wait
            if self.device.type == "cuda" and len(groups) == 1:
                # nothing else runs meanwhile, and handing over to a thread takes time
                finish = partial(self._train, job, f, rows, width)
            elif self.families[f].native is None:
                finish = self.threads.submit(self._train, job, f, rows, width).result
            else:
                finish = self._start_native(job, f, rows, width)
            waiting.append((rows, finish))
            if len(waiting) > 2 * self.workers:
                yield from done()
        while waiting:
            yield from done()
        if failed:  # now that no other thread traces
            yield from self._one_by_one(job, np.concatenate(failed))

    def _one_by_one(self, job: Job, rows: Array) -> Iterator[Chunk]:
        """The sequential engine on some rows."""
        for chunk in self.plain.train(job.of(rows)):
            yield replace(chunk, rows=rows[chunk.rows])

    def _groups(self, f: int, family: Family, job: Job) -> Iterator[tuple[Array, int]]:
        """The rows of each stack, most steps first, and the width of its mini-batches.

        Rows without any step are left out.
        """
        task, first = family.steps.task, family.tasks[0]
        rows = np.flatnonzero(np.isin(job.task, family.tasks))
        rows = rows[~family.apart[family.owners(job, rows)]]
        if job.plan.cut is not None:  # parts of models are trained by the sequential engine
            rows = rows[job.plan.cut[rows] == 0]
        sizes = family.sizes(job, rows)
        steps = local_steps(task, sizes, self.plain.least[first])
        wide = widths(task, sizes, *self.widths)
        for width in np.unique(wide)[::-1].tolist():
            mine = np.flatnonzero((wide == width) & (steps > 0))
            mine = mine[np.argsort(-steps[mine], kind="stable")]
            if len(mine):
                most = self._most(f, family, width)
                for start in range(0, len(mine), most):
                    yield rows[mine[start : start + most]], width

    def _most(self, f: int, family: Family, width: int) -> int:
        if family.native is not None:
            return rows_of_results(family.steps, self.workers)
        if (f, width) not in self.most:
            on_gpu = self.device.type == "cuda"
            fit = rows_that_fit(family.steps, width) if on_gpu else rows_for_a_core(family.steps)
            self.most[f, width] = fit
        return self.most[f, width]

    def _train(self, job: Job, f: int, rows: Array, width: int) -> list[Chunk]:
        """Train one stack; or, where the device has no memory for it, its halves."""
        try:
            return self._train_stack(job, f, rows, width)
        except torch.cuda.OutOfMemoryError:
            if len(rows) == 1:
                raise
            self.graphs = {key: held for key, held in self.graphs.items() if key[:2] != (f, width)}
            self.most[f, width] = -(-len(rows) // 2)
            logger.warning(
                "no memory for a stack of %d rows: going on with %d at a time",
                len(rows),
                self.most[f, width],
            )
        torch.cuda.empty_cache()
        halves = np.split(rows, [self.most[f, width]])
        return [chunk for half in halves for chunk in self._train(job, f, half, width)]

    def _examples(self, family: Family, job: Job, rows: Array) -> tuple[Tensor, Tensor, Array]:
        """The data on the device, and where in them each row's client begins.

        Those are all data, or the data of the rows' clients.
        """
        first = family.offsets[family.owners(job, rows)]
        if self.plain.data[family.tasks[0]][0].device.type == self.device.type:
            return family.steps.x, family.steps.y, first
        x, y = self.plain.data[family.tasks[0]]
        sizes = family.sizes(job, rows)
        pieces = [np.arange(a, a + size) for a, size in zip(first, sizes, strict=True)]
        places = np.concatenate(pieces)
        begin = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return x[places].to(self.device), y[places].to(self.device), begin

    def _starts(self, job: Job, rows: Array) -> tuple[Array, Array, Tensor, Tensor]:
        """Where rows begin: the models among them, which of the starts is each row's, and these."""
        present, of = np.unique(job.plan.model[rows], return_inverse=True)
        if job.local.start is not None:
            params, buffers = job.local.start(rows)
            return present, np.arange(len(rows)), params.contiguous(), buffers.contiguous()
        params, buffers = (
            torch.stack([job.models[m].weights[i] for m in present.tolist()]) for i in range(2)
        )
        return present, of, params, buffers

    def _rates(self, job: Job, rows: Array) -> Array:
        """Each row's learning rate."""
        lr = np.array([task.lr_at(job.now) for task in self.tasks])
        return np.asarray(lr[job.task[rows]])

    def _train_stack(self, job: Job, f: int, rows: Array, width: int) -> list[Chunk]:
        family = self.families[f]
        task, least = family.steps.task, self.plain.least[family.tasks[0]]
        x, y, first = self._examples(family, job, rows)
        sizes = family.sizes(job, rows)
        clients, tasks = job.plan.client[rows], job.task[rows]
        todo = schedule(
            task, sizes, first, clients, tasks, job.now, self.seed, least, width, self.device
        )
        present, of, params, start_buffers = self._starts(job, rows)
        if len(params) == 1:
            theta, buffers = params.expand(len(rows), -1), start_buffers.expand(len(rows), -1)
        else:
            member = torch.as_tensor(of, device=self.device)
            theta, buffers = params[member], start_buffers[member]
        rates = self._rates(job, rows)
        rate = torch.as_tensor(rates, device=self.device, dtype=family.steps.dtype)
        shift = None if job.local.shift is None else job.local.shift(rows)
        anchor = None if job.local.anchor is None else job.local.anchor(rows)
        room = nearly(len(rows)) if self.device.type == "cuda" else len(rows)
        moving = active(todo.steps.tolist(), room)
        stack = self._run(f, width, todo, moving, x, y, theta, buffers, rate, shift, anchor)
        norm: Array | None = None
        if on_gpu(theta):
            from rota.engine import kernels

            update, numbers = kernels.results(theta, stack.theta, stack.loss)
            buffers = stack.buffers[: len(rows)].clone()
            norm, total = numbers.cpu().numpy()  # what the round waits for
        else:
            update = theta - stack.theta[: len(rows)]
            buffers = stack.buffers[: len(rows)].clone()
            total = stack.loss[: len(rows)].double().cpu().numpy()
        loss = total / todo.steps / (rates if stack.fused else 1.0)
        results = (update, buffers, loss, todo.steps, todo.examples, norm)
        return [self._chunk(job, rows, model, *results) for model in present.tolist()]

    def _start_native(self, job: Job, f: int, rows: Array, width: int) -> Callable[[], list[Chunk]]:
        """Begin to train rows with the C library, on all idle cores; what is returned waits for them."""
        family = self.families[f]
        library = family.native
        assert library is not None
        task, least = family.steps.task, self.plain.least[family.tasks[0]]
        clients, sizes, tasks = job.plan.client[rows], family.sizes(job, rows), job.task[rows]
        present, of, start, buffers = self._starts(job, rows)
        todo = np.zeros(len(rows), native.ROW)
        keys = row_keys(self.seed, job.now, clients, tasks, self.device)
        todo["key"] = keys.numpy().view(np.uint64)
        todo["first"], todo["examples"] = family.offsets[family.owners(job, rows)], sizes
        todo["batch"] = sizes if task.batch is None else task.batch
        todo["per_epoch"] = batches_per_epoch(task, sizes, least)
        todo["steps"] = local_steps(task, sizes, least)
        todo["rate"], todo["start"] = self._rates(job, rows), of
        shift = None if job.local.shift is None else job.local.shift(rows).contiguous()
        anchor = None if job.local.anchor is None else job.local.anchor(rows).contiguous()
        plain = family.steps.plain and shift is None
        given = todo, start, buffers, shift, anchor
        finish = library.start(self.threads, self.workers, width, plain, *given)
        examples = examples_of(task, sizes, least)

        def chunks() -> list[Chunk]:
            result = finish()
            ok = np.array([not reason for reason in result.reason])
            steps, seen = np.where(ok, todo["steps"], 0), np.where(ok, examples, 0)
            results = (result.update, result.buffers, result.loss, steps, seen, None)
            return [
                self._chunk(job, rows, model, *results, result.reason) for model in present.tolist()
            ]

        return chunks

    def _run(
        self,
        f: int,
        width: int,
        todo: Schedule,
        sizes: list[int],
        x: Tensor,
        y: Tensor,
        theta: Tensor,
        buffers: Tensor,
        rate: Tensor,
        shift: Tensor | None,
        anchor: Tensor | None,
    ) -> Stack:
        """All steps of one stack, sizes[t] rows in step t."""
        steps = self.families[f].steps
        fused = steps.plain and shift is None
        number, rows = todo.index.shape[:2]
        if self.device.type == "cuda":
            held = self.graphs.get((f, width, fused))
            if (
                held is None
                or held.stack.rows < sizes[0]
                or len(held.index) < number
                or len(held.x) < len(x)
            ):
                # with room to spare, because the next cohort may be larger
                most = min(self._most(f, self.families[f], width), sizes[0] + sizes[0] // 4)
                room, longest = max(sizes[0], most), number + number // 4
                held = GraphStack(steps, room, width, fused, longest, x, y, self.pool)
                self.graphs[f, width, fused] = held
            held.run(todo, sizes, x, y, theta, buffers, rate, shift, anchor)
            return held.stack
        stack = Stack(steps, rows, width, fused)
        stack.load(theta, buffers, todo.key, torch.as_tensor(todo.steps), rate, shift, anchor)
        weight = (todo.weight * rate[:, None] if fused else todo.weight).to(steps.dtype)
        with torch.inference_mode():
            for t, size in enumerate(sizes):
                batch = todo.index[t, :size]
                stack.advance(size, x[batch], y[batch], weight[t, :size])
        return stack

    def _chunk(
        self,
        job: Job,
        rows: Array,
        model: int,
        update: Tensor,
        buffers: Tensor,
        loss: Array,
        steps: Array,
        examples: Array,
        norm: Array | None = None,
        reason: list[str] | None = None,
    ) -> Chunk:
        """The rows of one model in a stack's results."""
        task = job.models[model].task
        chunk = Chunk(
            rows=rows,
            model=model,
            now=job.now,
            lr=self.tasks[task].lr_at(job.now),
            update=update,
            buffers=buffers,
            loss=loss,
            steps=steps,
            examples=examples,
            reason=reason or [""] * len(rows),
            measured=None if norm is None else (update, norm),
            costs=self.plain.profile.costs(job, rows, self.plain.flops[task], examples),
        )
        return chunk.of(np.flatnonzero(job.plan.model[rows] == model))
