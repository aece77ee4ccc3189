"""At home: what the drawn clients train and keep for themselves, around a round's training.

A simulation keeps for its clients what they would keep. It never enters an estimate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rota import weights
from rota.arrays import Array
from rota.engine import Engine, Score
from rota.estimate import Correcting, memory
from rota.estimate.memory import Fresh, Place
from rota.personal.nothing import Nothing
from rota.plan import Chunk, Costs, Duty, Job, Local, Model, Plan, State, Task, whole
from rota.scores import overall
from rota.weights import Weights

if TYPE_CHECKING:
    from rota.experiment import Experiment
    from rota.personal import Personal

BLOCK = 256
"""Clients whose models are tested at once: they are held together."""
WHOLE = 200
"""At most so many clients' models are tried on the whole test set."""


@dataclass
class Home:
    """A round's training, with what clients do for themselves."""

    experiment: Experiment
    engine: Engine
    state: State
    fresh: Fresh = field(init=False)
    spent: Costs = field(init=False)
    """The time that each row spent for itself."""

    def __post_init__(self) -> None:
        self.fresh = [[] for _ in self.experiment.tasks]
        if self.state:
            memory.settle(self.state)

    @property
    def personal(self) -> Personal:
        return self.experiment.policies["personal"]  # type: ignore[no-any-return]

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a round's job, and what their clients keep."""
        return self.personal.train(self, job)

    def kept(self) -> State:
        """The state after the round."""
        return memory.remember(self.state, self.fresh) if self.state else self.state

    def scores(self, models: list[Model], shares: Array, now: int) -> list[Score]:
        """The scores of all models; if there are personal models, then of those.

        The loss and accuracy of a model are then the means over its clients' models on the whole
        test set, or over 200 of them. `by_client` has each one's accuracy on its own test set.
        """
        if isinstance(self.personal, Nothing):
            return _of_groups(self.engine.evaluate(models), models, shares)
        found = []
        for s, model in enumerate(models):
            task = self.experiment.tasks[model.task]
            members = np.flatnonzero(shares[s] > 0)
            if not len(members):  # nobody uses it
                found += [replace(each, by_client=None) for each in self.engine.evaluate([model])]
                continue
            some = members[:: -(-len(members) // WHOLE) or 1]
            module = task.build().to(model.params.device).eval()
            own, shared = np.full(shares.shape[1], np.nan), list[Score]()
            for clients, theirs in self._used(models, s, members, now):
                each = [Weights(*pair) for pair in zip(*theirs, strict=True)]
                for client, mine in zip(clients.tolist(), each, strict=True):
                    own[client] = own_accuracy(task, module, mine, client)
                places = np.flatnonzero(np.isin(clients, some)).tolist()
                shared += self.engine.evaluate([Model(model.task, each[p]) for p in places])
            found.append(Score(*_means(shared), own, f"{task.better}"))
        return found

    def _used(
        self, models: list[Model], s: int, members: Array, now: int
    ) -> Iterator[tuple[Array, Weights]]:
        """The models that the clients of model s use, block by block."""
        for start in range(0, len(members), BLOCK):
            clients = members[start : start + BLOCK]
            plan = Plan(clients, np.full(len(clients), s), *np.ones((2, len(clients))))
            for rows, theirs in self.personal.own(self, whole(models, plan, now)):
                yield clients[rows], theirs

    # ---- what methods are made of

    def alone(self, job: Job, which: int, local: Local) -> Iterator[Chunk]:
        """Train the rows on their tasks' further work number `which`; nothing is sent."""
        rows = len(job.plan)
        nothing = np.zeros(rows, np.int64)
        self.spent = Costs(np.zeros(rows), np.zeros(rows), nothing, nothing)
        work = Duty(np.ones(rows), nothing, nothing, nothing)
        mine = replace(job, models=self.further(job, which), duty=work, local=local, channel=None)
        for chunk in self.engine.train(mine):
            ran = chunk.steps > 0
            self.spent.seconds[chunk.rows[ran]] = chunk.costs.seconds[ran]
            self.spent.computing[chunk.rows[ran]] = chunk.costs.computing[ran]
            yield chunk

    def further(self, job: Job, which: int) -> list[Model]:
        """The job's models, with their tasks' further work in place of the tasks."""
        tasks = len(self.experiment.tasks)
        return [replace(model, task=tasks * (1 + which) + model.task) for model in job.models]

    def paid(self, chunk: Chunk) -> Chunk:
        """A chunk of the round whose rows also report the time that they spent for themselves."""
        seconds = chunk.costs.seconds + self.spent.seconds[chunk.rows]
        computing = chunk.costs.computing + self.spent.computing[chunk.rows]
        return replace(chunk, costs=replace(chunk.costs, seconds=seconds, computing=computing))

    def fetched(self, job: Job, rows: Array) -> Weights:
        """The models that rows fetch, one line for each."""
        each = [job.models[s].weights for s in job.plan.model[rows].tolist()]
        return Weights(*(torch.stack(side) for side in zip(*each, strict=True)))

    def read(self, job: Job, rows: Array) -> Tensor:
        """What the rows' clients keep, one line for each; rows of one network."""
        task, clients = job.task[rows], job.plan.client[rows]
        like = job.models[0].params
        out = like.new_empty(len(rows), self.state[f"memory.{task[0]}"].shape[1])
        for t in np.unique(task).tolist():
            mine = np.flatnonzero(task == t)
            out[mine] = memory.read(self.state, t, clients[mine], like)
        return out

    def keep(self, job: Job, chunk: Chunk, vectors: Tensor) -> Array:
        """Write down what a chunk's clients keep from now on; returns where that is finite."""
        t, clients = int(job.task[chunk.rows[0]]), job.plan.client[chunk.rows]
        fine = torch.isfinite(vectors).all(dim=1).cpu().numpy() & chunk.ok
        for client in clients[~fine].tolist():
            logging.getLogger("rota").warning(
                "client %d: its personal training failed, so it keeps what it had", client
            )
        device = self.state[f"memory.{t}"].device
        self.fresh[t].append((clients[fine], vectors[np.flatnonzero(fine)].to(device, copy=True)))
        return np.flatnonzero(fine)

    def stays(self, job: Job, size: Array) -> Duty:
        """The job's duties without the `size` bytes of each row's model that stay at home."""
        estimator = self.experiment.estimator
        each = 1 + (estimator.controls if isinstance(estimator, Correcting) else 0)
        down = np.maximum(job.duty.down - each * size, 0)  # 0 if they have the model already
        return replace(job.duty, down=down, up=job.duty.up - each * size)


def _of_groups(scores: list[Score], models: list[Model], shares: Array) -> list[Score]:
    """Each model's accuracies for its own clients, where a task's clients are in groups."""
    tasks = np.array([model.task for model in models])
    out = []
    for s, score in enumerate(scores):
        others = (shares[tasks == tasks[s]] > 0).any(axis=0) & (shares[s] <= 0)
        if score.by_client is not None and (tasks == tasks[s]).sum() > 1:
            mine = np.where(others, np.nan, score.by_client)
            score = replace(score, by_client=mine if np.isfinite(mine).any() else None)
        out.append(score)
    return out


def filled(first: list[Tensor], shares: Array, place: Place) -> State:
    """A memory in which every client of task t keeps first[t]."""
    models = [Weights(vector, vector[:0]) for vector in first]
    state = memory.init(models, shares, place, "personal")
    for t, vector in enumerate(first):
        state[f"memory.{t}"].copy_(vector)
    return state


@torch.no_grad()
def own_accuracy(task: Task, module: nn.Module, model: Weights, client: int) -> float:
    """A model's mean score on a client's own test set; NaN if it has none."""
    x, y = task.federation.test.of(client)
    if not len(y):
        return float("nan")
    weights.load(module, model)
    scores = []
    for some, targets in zip(x.split(BLOCK), y.split(BLOCK), strict=True):
        outputs = module(some.to(model.params.device))
        scores.append(task.score(outputs, targets.to(model.params.device)))
    return overall(task.score, torch.cat(scores).double().cpu().numpy())


def _means(scores: Sequence[Score]) -> tuple[float, float]:
    if not scores:
        return float("nan"), float("nan")
    loss, accuracy = ([getattr(each, key) for each in scores] for key in ("loss", "accuracy"))
    return float(np.mean(loss)), float(np.mean(accuracy))
