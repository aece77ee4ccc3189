"""IFCA (Ghosh et al. 2020): several models, and each client learns the one that suits it best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rota import rng, weights
from rota.arrays import Array
from rota.errors import BadInput
from rota.grouping.occasion import Groups, Occasion
from rota.plan import Model, State
from rota.weights import Weights


@dataclass(frozen=True)
class Ifca:
    """IFCA: `groups` models per task; a client learns the one with the least loss on its data.

    The models begin with different random weights. Every `every` rounds, before the draw, a random
    `fraction` of the clients that can be reached fetch all models, and report each one's mean loss
    over their training examples. The others stay where they are.
    """

    groups: int = 3
    every: int = 1
    fraction: float = 1.0

    def check(self) -> None:
        """Refuse options that make no sense."""
        for key in ("groups", "every"):
            if getattr(self, key) < 1:
                raise BadInput(f"grouping.{key} is {getattr(self, key)}: it must be at least 1")
        if not 0 < self.fraction <= 1:
            raise BadInput(
                f"grouping.fraction is {self.fraction:g}: it must be above 0 and at most 1"
            )

    def init(self, shares: Array) -> State:
        return {}

    def regroup(self, state: State, at: Occasion) -> tuple[Groups | None, State]:
        if (at.now - 1) % self.every:
            return None, state
        of, models = at.of.copy(), self._models(at)
        for t in range(len(at.tasks)):
            clients = np.flatnonzero(at.reachable[t])
            if self.fraction < 1:
                chance = rng.generator(rng.key(at.seed, "ifca", at.now, t)).random(len(at.of[t]))
                clients = clients[chance[clients] < self.fraction]
            if not len(clients):
                continue
            rows = np.flatnonzero([model.task == t for model in models])
            who, row = np.repeat(clients, len(rows)), np.tile(rows, len(clients))
            loss = at.losses(who, row, models).reshape(len(clients), len(rows))
            told = np.isfinite(loss).any(axis=1)
            loss = np.where(np.isfinite(loss), loss, np.inf)
            of[t, clients[told]] = loss[told].argmin(axis=1)
        begin = [[m.weights for m in models if m.task == t] for t in range(len(at.tasks))]
        return Groups(of, begin), state

    def _models(self, at: Occasion) -> list[Model]:
        """The run's models; before the first round, models that begin differently."""
        if at.now > 1:
            return at.models
        models = []
        for model in at.models:
            task, first = at.tasks[model.task], model.weights
            models.append(model)
            for g in range(1, self.groups):
                other = weights.read(task.build(rng.key(at.seed, "ifca", model.task, g)))
                other = Weights(*(part.to(first.params.device) for part in other))
                if torch.equal(other.params, first.params):
                    raise BadInput(
                        "ifca needs models that begin differently, but the task's model has fixed "
                        "weights: give the task a function that makes the model"
                    )
                models.append(Model(model.task, other))
        return models
