"""New groups before a round, and which state of the run survives them.

Groups are rows of the shares matrix, so that whatever works with several models works inside of
groups. When the rows change, policies whose state is about the old rows begin again:

- What is about models begins again when models come, go or are mixed: a server optimiser's moments,
  invariant units and the norms that admission expects belong to weights that do not exist any
  more, and a capacity's times are one per model and client.
- What is about shares begins again when any client changes its group: samplers and estimators
  remember norms and updates of pairs (model, client).
- What is about clients goes on: their availability, and what a grouping knows of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from rota.arrays import Array
from rota.engine import Engine
from rota.errors import BadInput
from rota.experiment import Experiment, State
from rota.grouping.occasion import Groups, Occasion
from rota.grouping.simple import One
from rota.plan import Job, Model, duty
from rota.policies import KINDS, Opening
from rota.probe import Cost, cost
from rota.weights import Weights

SHOWN = 60
"""The most clients whose similarity is written down."""


@dataclass(frozen=True)
class Toll:
    """What a new grouping costs, and what is told of it in the round's record."""

    cost: Cost = field(default_factory=lambda: Cost(0.0, 0.0, 0, 0))
    told: dict[str, Any] = field(default_factory=dict)
    held: Array | None = None
    """[models, clients]: who fetched which of the round's models when it was asked."""

    def rest(self, job: Job, asked: Any) -> Job:
        """The round's job, in which nobody fetches a model twice.

        If the sampler asked too, its question counts as the first time, and the job knows of it.
        """
        if self.held is None or asked is not None:
            return job
        model = duty(job.models, job.plan).down * self.held[job.plan.model, job.plan.client]
        return replace(job, duty=replace(job.duty, down=job.duty.down - model))


def groups_of(models: list[Model], shares: Array, tasks: int) -> Array:
    """The number of each client's group in each task; -1 where it has none."""
    of = np.full((tasks, shares.shape[1]), -1, np.int64)
    for t in range(tasks):
        rows = [s for s, model in enumerate(models) if model.task == t]
        for number, s in enumerate(rows):
            of[t, shares[s] > 0] = number
    return of


def regroup(experiment: Experiment, engine: Engine, state: State) -> tuple[State, Toll]:
    """The state with new groups, if the grouping wants some before this round."""
    grouping, now = experiment.policies["grouping"], state.round + 1
    if isinstance(grouping, One):
        return state, Toll()
    base = experiment.shares
    reach, _ = experiment.availability.step(
        state.policies["availability"], base, experiment.seed, now
    )
    before = groups_of(state.models, state.shares, len(experiment.tasks))
    at = Occasion(
        now,
        experiment.seed,
        experiment.tasks,
        state.models,
        before,
        base,
        reach > 0,
        engine,
        experiment.devices,
    )
    groups, memory = grouping.regroup(state.policies["grouping"], at)
    state = replace(state, policies={**state.policies, "grouping": memory})
    toll = _toll(at)
    state = replace(
        state,
        seconds=state.seconds + toll.cost.seconds,
        bytes_up=state.bytes_up + toll.cost.bytes_up,
        bytes_down=state.bytes_down + toll.cost.bytes_down,
    )
    if groups is None:
        return state, replace(toll, held=_held(at, state.models))
    of = _checked(groups.of, base)
    models = _models(at, groups, of)
    shares = _shares(models, of, base)
    told = {**toll.told, "groups": _told(experiment, at, of, groups)}
    kept = len(models) == len(state.models) and all(
        new.weights is old.weights for new, old in zip(models, state.models, strict=True)
    )
    if not (kept and np.array_equal(shares, state.shares)):
        state = _begun(experiment, state, models, shares, kept)
    return state, replace(toll, told=told, held=_held(at, state.models))


def _held(at: Occasion, models: list[Model]) -> Array | None:
    """Who fetched which of the models when it was asked; None: nobody was."""
    if not at.fetched:
        return None
    held = np.zeros((len(models), at.of.shape[1]), bool)
    for plan, theirs in at.fetched:
        for s, model in enumerate(models):
            same = [r for r, each in enumerate(theirs) if each.weights is model.weights]
            held[s, plan.client[np.isin(plan.model, same)]] = True
    return held


def _toll(at: Occasion) -> Toll:
    """What was asked of clients: one question after the other."""
    if not at.asked:
        return Toll()
    each = [cost(plan, seen) for plan, seen in at.asked]
    failed = {
        int(plan.client[row]): seen.reason[row]
        for plan, seen in at.asked
        for row in np.flatnonzero(~seen.ok).tolist()
    }
    told: dict[str, Any] = {"asked_for_groups": sum(len(plan) for plan, _ in at.asked)}
    if failed:
        told["failed_for_groups"] = [{"client": c, "reason": why} for c, why in failed.items()]
    return Toll(Cost(*(sum(side) for side in zip(*each, strict=True))), told)


def _checked(of: Any, base: Array) -> Array:
    """The groups, if they are valid; a user's own grouping may return anything."""
    of = np.asarray(of)
    if of.shape != base.shape or of.dtype.kind not in "iu" or (of < -1).any():
        raise BadInput(
            f"the grouping's groups have shape {of.shape} and type {of.dtype}: give a whole number "
            f"from 0 on, or -1, for each of {base.shape[0]} tasks and {base.shape[1]} clients"
        )
    return np.where(base > 0, of, -1).astype(np.int64)


def _models(at: Occasion, groups: Groups, of: Array) -> list[Model]:
    """Each group's model. Tasks in order, each with its groups in order."""
    models = []
    for t in range(len(at.tasks)):
        number = int(of[t].max()) + 1
        if groups.weights is not None:
            number = max(number, len(groups.weights[t]))
        for g in range(max(number, 1)):
            if groups.weights is not None:
                models.append(Model(t, groups.weights[t][g]))
                continue
            clients = np.flatnonzero(of[t] == g)
            models.append(Model(t, _mixed(at, t, clients)))
    return models


def _mixed(at: Occasion, t: int, clients: Array) -> Weights:
    """The mean of the models that clients had, by their shares; newcomers had none.

    If there are only newcomers, they begin where the run began.
    """
    had = at.of[t, clients]
    sums = np.bincount(np.maximum(had, 0), at.shares[t, clients] * (had >= 0))
    parents = np.flatnonzero(sums)
    if len(clients) and not len(parents):
        return next(model for model in at.engine.initial() if model.task == t).weights
    if len(parents) < 2:
        return at.models[at.row(t, int(parents[0]) if len(parents) else 0)].weights
    parts = [at.models[at.row(t, g)].weights for g in parents.tolist()]
    factors = (sums[parents] / sums[parents].sum()).tolist()

    def mean(vectors: Iterator[Tensor]) -> Tensor:
        out: Any = sum(factor * each for factor, each in zip(factors, vectors, strict=True))
        return out  # type: ignore[no-any-return]

    return Weights(mean(part.params for part in parts), mean(part.buffers for part in parts))


def _shares(models: list[Model], of: Array, base: Array) -> Array:
    """d[s, i] in which every row is one group's, and sums to 1; or to 0 if nobody is in it."""
    task = [model.task for model in models]
    shares = np.zeros((len(models), base.shape[1]))
    for s, t in enumerate(task):
        row = np.where(of[t] == task[:s].count(t), base[t], 0.0)
        shares[s] = row / row.sum() if 0 < row.sum() < base[t].sum() else row
    return shares


def _begun(
    experiment: Experiment, state: State, models: list[Model], shares: Array, kept: bool
) -> State:
    """The state with other models or shares; policies that remember the old ones begin again.

    They begin as if clients that wait for a group were in their task's first one, because these are
    only away: a sampler would find too few clients for its budget.
    """
    left, task, all_of = experiment.rounds - state.round, [m.task for m in models], shares.copy()
    for t, base in enumerate(experiment.shares):
        mine = [s for s, of in enumerate(task) if of == t]
        waits = (base > 0) & ~(shares[mine] > 0).any(axis=0)
        all_of[mine[0], waits] = base[waits]
    opening = Opening(experiment, models, all_of, left)
    states = {
        k: kind.begin(experiment.policies[k], opening)
        if kind.about == "shares" or (kind.about == "models" and not kept)
        else state.policies[k]
        for k, kind in KINDS.items()
    }
    return replace(state, models=models, shares=shares, policies=states)


def _told(experiment: Experiment, at: Occasion, of: Array, groups: Groups) -> dict[str, Any]:
    """Who is in which group, and how alike they are, for the record."""
    told = {}
    for t, name in enumerate(experiment.names):
        mine: dict[str, Any] = {
            "members": [np.flatnonzero(of[t] == g).tolist() for g in range(int(of[t].max()) + 1)]
        }
        if groups.similar is not None:
            placed = np.flatnonzero(of[t] >= 0)
            order = placed[np.argsort(of[t, placed], kind="stable")]
            some = order[:: -(-len(order) // SHOWN)] if len(order) else order
            mine["clients"] = some.tolist()
            mine["similarity"] = np.round(groups.similar(t, some), 3).tolist()
        told[name] = mine
    return told
