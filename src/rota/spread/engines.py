"""The engines of a run of several processes: those of one, with the training dealt out.

Process 0 cuts a job into groups, as it would do alone. The rows of a group are dealt out, and their
results come back into the group's order. So everything after that, beginning with a chunk's sum,
happens in process 0 as in a run of one process, with the same bits. A group is all that a process
needs to train it: nobody else holds states or policies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.engine import parts
from rota.engine.backends import Library, Stacks
from rota.engine.batched import Batched, Family
from rota.engine.examples import Examples
from rota.engine.group import Group, Result
from rota.engine.schedule import examples_of
from rota.engine.sequential import Sequential
from rota.plan import Chunk, Job, Local, Model
from rota.spread.hands import Hands
from rota.submodel.cut import SubModel
from rota.weights import Weights

WINDOW = 256 << 20
"""Bytes of results of rows that are trained one by one, and wait for their turn."""


class Address(NamedTuple):
    """Which back end trains a group: that of a task's family, or of a part of its network."""

    task: int
    part: SubModel | None = None
    scaled: bool = False


class Training(NamedTuple):
    """A message: train a group."""

    at: Address
    group: Group
    alone: bool


class Rows(NamedTuple):
    """A message: train these rows one by one, with the vectors of each row's local work."""

    job: Job
    start: list[Weights] | None
    anchor: list[Tensor] | None
    shift: list[Tensor] | None


class Spread(Batched):
    """The batched engine with groups that are dealt out to all processes."""

    hands: Hands | None = None
    """The processes; None in those that train what they are sent."""
    ending: Callable[[], None] | None = None
    """What ends the other processes."""

    def __init__(self, threads: int, *given: Any) -> None:
        self.threads = threads
        super().__init__(*given)

    def _family(self, name: str, tasks: list[int], examples: Examples) -> Family:
        family = super()._family(name, tasks, examples)
        return replace(family, backend=Dealt(self, family, Address(tasks[0])))

    def _smaller(self, family: Family, part: SubModel, scaled: bool) -> Family:
        small = super()._smaller(family, part, scaled)
        at = Address(family.tasks[0], part, scaled)
        return replace(small, backend=Dealt(self, small, at))

    def _one_by_one(self, job: Job, rows: Array) -> Iterator[Chunk]:
        for chunk in one_by_one(self.hands, self.plain, job.of(rows)):
            yield replace(chunk, rows=rows[chunk.rows])

    def close(self) -> None:
        """End the other processes."""
        if self.ending:
            self.ending()

    def answer(self, asked: Training | Rows) -> list[Result] | list[Chunk]:
        """Train what another process asks for."""
        if isinstance(asked, Rows):
            return trained(self.plain, asked)
        (family,) = (each for each in self.families if each.tasks[0] == asked.at.task)
        part, scaled = asked.at.part, asked.at.scaled
        found: Family | None = family
        if part is not None:
            make = partial(self._smaller, family, part, scaled)
            found = parts.recent(family.smaller, (scaled, parts.shape(part)), make)
        assert found is not None
        assert isinstance(found.backend, Dealt)
        return found.backend.own.start(placed(asked.group, self.device), asked.alone)()


class Dealt:
    """A back end whose groups are dealt out.

    The C library's rows are independent of each other, so they are dealt out one by one. On a GPU
    each process trains its rows as a stack. Stacks on a CPU stay whole, because their rows' last
    bits depend on each other's number.
    """

    def __init__(self, engine: Spread, family: Family, at: Address) -> None:
        self.engine, self.at, self.flops, self.whole = engine, at, family.flops, family.backend
        self.checks = self.whole.checks
        self.own = self.whole
        """What trains here: on a CPU with this process's part of the cores."""
        if isinstance(self.whole, Library | Stacks):
            self.own = copy.copy(self.whole)
            self.own.workers = replace(self.whole.workers, number=engine.threads)

    def most(self, width: int) -> int:
        """The most rows that one group may have: as many as in one process."""
        return self.whole.most(width)

    def start(self, group: Group, alone: bool) -> Callable[[], list[Result]]:
        """Deal a group out; what is returned waits for the results."""
        hands = self.engine.hands
        assert hands is not None
        nbytes, flops = group.start.params[0].nbytes, self.flops * group.processed
        if isinstance(self.whole, Stacks):
            (owner,) = hands.owners(flops.sum(keepdims=True), nbytes * len(group))
            owners = np.full(len(group), owner)
        else:
            owners = hands.owners(flops, nbytes)
        asked = []
        for rank in np.unique(owners)[::-1].tolist():  # this process last: the others wait for less
            places = np.flatnonzero(owners == rank)
            some = group.of(places) if len(places) < len(group) else group
            work = Training(self.at, lean(some), alone) if rank else self.own.start(some, alone)
            cost = float(flops[places].sum()), nbytes * len(places)
            asked.append((rank, hands.ask(rank, work, *cost)))

        def results() -> list[Result]:
            found = [each for rank, work in asked for each in hands.wait(rank, work)]
            hands.look()
            return found if len(asked) == 1 else [self._together(group, found)]

        return results

    def _together(self, group: Group, found: list[Result]) -> Result:
        """Results in the order of the group."""
        came = np.concatenate([each.row for each in found])
        sorter = np.argsort(came)
        order = sorter[np.searchsorted(came, group.row, sorter=sorter)]
        place = np.argsort(order)  # of each row that came in the group
        shape = len(group), found[0].update.shape[1]
        if isinstance(self.whole, Library):
            update = self.whole.native.room(*shape)
        else:
            update = group.start.params.new_empty(shape)
        end = 0
        for each in found:
            start, end = end, end + len(each.row)
            update[torch.from_numpy(place[start:end])] = each.update.to(update.device)
        buffers = torch.cat([each.buffers.to(update.device) for each in found])
        norms = [each.norm for each in found if each.norm is not None]
        reasons = [reason for each in found for reason in each.reason]
        return Result(
            row=group.row,
            update=update,
            buffers=buffers[torch.from_numpy(order)],
            loss=np.concatenate([each.loss for each in found])[order],
            steps=np.concatenate([each.steps for each in found])[order],
            processed=np.concatenate([each.processed for each in found])[order],
            reason=[reasons[at] for at in order.tolist()],
            norm=np.concatenate(norms)[order] if len(norms) == len(found) else None,
        )


def lean(group: Group) -> Group:
    """A group with those starts alone that its rows begin at."""
    lines, line = np.unique(group.line, return_inverse=True)
    start = Weights(*(side[torch.from_numpy(lines)] for side in group.start))
    return replace(group, start=start, line=line)


def placed(group: Group, device: torch.device) -> Group:
    """A group that has arrived, on the device."""
    vectors = (moved(each, device) for each in (group.start, group.anchor, group.shift))
    return replace(group, **dict(zip(("start", "anchor", "shift"), vectors, strict=True)))


class SpreadSequential(Sequential):
    """The sequential engine with rows that are dealt out to all processes."""

    hands: Hands | None = None
    ending: Callable[[], None] | None = None

    def close(self) -> None:
        """End the other processes."""
        if self.ending:
            self.ending()

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a job."""
        return one_by_one(self.hands, self, job)

    def answer(self, asked: Rows) -> list[Chunk]:
        """Train what another process asks for."""
        return trained(self, asked)


def one_by_one(hands: Hands | None, engine: Sequential, job: Job) -> Iterator[Chunk]:
    """Train rows one by one, some in each process; they come in their order."""
    assert hands is not None
    if not len(job.plan):
        return
    nbytes = max(job.models[s].params.nbytes for s in np.unique(job.plan.model).tolist())
    size = max(4 * len(hands.hands), WINDOW // nbytes)
    flops = work(engine, job)
    for begin in range(0, len(job.plan), size):
        rows = np.arange(begin, min(begin + size, len(job.plan)))
        owners = hands.owners(flops[rows], nbytes)
        asked, mine = {}, {}
        for rank in np.unique(owners)[::-1].tolist():
            mine[rank] = rows[owners == rank]
            some = job.of(mine[rank])
            task = sent(some) if rank else lambda job=some: list(Sequential.train(engine, job))
            cost = float(flops[mine[rank]].sum()), nbytes * len(mine[rank])
            asked[rank] = hands.ask(rank, task, *cost)
        came = {}
        for rank, future in asked.items():
            for chunk in hands.wait(rank, future):
                (place,) = mine[rank][chunk.rows].tolist()
                came[place] = replace(chunk, rows=np.array([place]))
        hands.look()
        for row in rows.tolist():
            yield came.pop(row)


def work(engine: Sequential, job: Job) -> Array:
    """The FLOPs that rows take."""
    flops = np.zeros(len(job.plan))
    for t in np.unique(job.task).tolist():
        mine = np.flatnonzero(job.task == t)
        sizes = engine.tasks[t].roster.sizes[job.plan.client[mine]]
        flops[mine] = engine.flops[t] * examples_of(engine.tasks[t], sizes, engine.least[t])
    return flops


def sent(job: Job) -> Rows:
    """Some rows as a message: with the models that they train, and their vectors as tensors."""

    def each(vector: Callable[[Array], Any] | None) -> list[Any] | None:
        """A vector for every row, one after the other: they may differ in length."""
        rows = range(len(job.plan))
        return None if vector is None else [vector(np.array([row])) for row in rows]

    used, local = set(job.plan.model.tolist()), job.local
    nothing = Weights(torch.empty(0), torch.empty(0))
    models = [m if s in used else Model(m.task, nothing) for s, m in enumerate(job.models)]
    lean = replace(job, models=models, local=Local(), units=())
    return Rows(lean, each(local.start), each(local.anchor), each(local.shift))


def trained(engine: Sequential, asked: Rows) -> list[Chunk]:
    """The chunks of some rows that another process asks for."""
    job, device = asked.job, engine.device

    def vector(each: list[Any] | None) -> Callable[[Array], Any] | None:
        return None if each is None else lambda rows: moved(each[int(rows[0])], device)

    local = Local(vector(asked.start), vector(asked.anchor), vector(asked.shift))
    models = [Model(m.task, moved(m.weights, device)) for m in job.models]
    return list(Sequential.train(engine, replace(job, models=models, local=local)))


def moved(what: Any, device: torch.device) -> Any:
    """A tensor or weights on a device."""
    if isinstance(what, Weights):
        return Weights(*(side.to(device) for side in what))
    return what if what is None else what.to(device)
