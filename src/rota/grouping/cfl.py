"""Clustered FL (Sattler et al. 2020): a group is split where its clients pull apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from rota.arrays import Array
from rota.errors import BadInput
from rota.estimate import memory
from rota.estimate.memory import Fresh
from rota.grouping.linkage import clusters
from rota.grouping.occasion import Groups, Occasion
from rota.grouping.similar import numbered
from rota.plan import Chunk, Job, State


@dataclass(frozen=True)
class Cfl:
    """Clustered FL: a group is split in two when its clients' updates cancel each other out.

    A group is split when the norm of its mean update is below `calm` times the largest norm of a
    client's update. It is split where the largest cosine similarity of two updates across the split
    is least (their Algorithm 1, which is single linkage), and this cosine may be `apart` at most.
    From round `warmup` on, a group may be split once all of its clients have trained since its last
    split. The server remembers one update per client, so this works with any sampler. The two
    thresholds are relative to the updates, unlike Sattler's, which must be set anew for each model.
    """

    calm: float = 0.3
    apart: float = 0.0
    warmup: int = 3

    sees: ClassVar[frozenset[str]] = frozenset({"update"})

    def check(self) -> None:
        """Refuse options that make no sense."""
        if not 0 <= self.calm <= 1:
            raise BadInput(f"grouping.calm is {self.calm:g}: it must be from 0 to 1")
        if not -1 <= self.apart <= 1:
            raise BadInput(f"grouping.apart is {self.apart:g}: it must be a cosine from -1 to 1")

    def init(self, shares: Array) -> State:
        """Since when each client is in its group, and the round of its remembered update."""
        return {"since": np.ones(shares.shape, np.int64), "when": np.zeros(shares.shape, np.int64)}

    def regroup(self, state: State, at: Occasion) -> tuple[Groups | None, State]:
        if "share" not in state:  # the sizes of the models are known only now
            first = [at.models[at.row(t)].weights for t in range(len(at.tasks))]
            state = {**state, **memory.init(first, at.shares, "device")}
        if at.now <= self.warmup:
            return None, state
        memory.settle(state)
        of, since = at.of.copy(), state["since"].copy()
        for t in range(len(at.tasks)):
            for g in range(int(at.of[t].max()) + 1):
                clients = np.flatnonzero(at.of[t] == g)
                if len(clients) < 2 or (state["when"][t, clients] < since[t, clients]).any():
                    continue
                away = self._split(state, at, t, clients)
                if away is not None:
                    of[t, clients[away]] = of[t].max() + 1
                    since[t, clients] = at.now
        if (of == at.of).all():
            return None, state
        for t in range(len(at.tasks)):
            of[t, of[t] >= 0] = numbered(of[t, of[t] >= 0])

        def similar(t: int, clients: Array) -> Array:
            return (cosines(self._updates(state, at, t, clients)) + 1) / 2

        return Groups(of, similar=similar), {**state, "since": since}

    def _updates(self, state: State, at: Occasion, t: int, clients: Array) -> torch.Tensor:
        return memory.read(state, t, clients, at.models[at.row(t)].params)

    def _split(self, state: State, at: Occasion, t: int, clients: Array) -> Array | None:
        """Which clients leave their group; None if it stays together."""
        updates = self._updates(state, at, t, clients)
        share = torch.as_tensor(at.shares[t, clients] / at.shares[t, clients].sum()).to(updates)
        mean, most = float((share @ updates).norm()), float(updates.norm(dim=1).max())
        if not mean < self.calm * most:
            return None
        alike = cosines(updates)
        away: Array = clusters(1 - alike, "single", number=2) == 1
        if alike[np.ix_(away, ~away)].max() > self.apart:
            return None
        return away

    def watch(self, state: State, job: Job) -> tuple[State, Job, Fresh]:
        memory.settle(state)
        tasks = len(state["when"])
        return {**state, "when": state["when"].copy()}, job, [[] for _ in range(tasks)]

    def see(self, watched: Any, job: Job, chunk: Chunk) -> None:
        """Remember whole updates; those of parts of a model cannot be compared."""
        state, _, fresh = watched
        came = np.flatnonzero(chunk.ok)
        if not len(came) or job.plan.held(int(chunk.rows[0])) is not None:
            return
        t, clients = job.models[chunk.model].task, job.plan.client[chunk.rows[came]]
        update = chunk.update[came].to(state[f"memory.{t}"].device, copy=True)
        fresh[t].append((clients, update))
        state["when"][t, clients] = job.now

    def learn(self, state: State, watched: Any) -> State:
        new, _, fresh = watched
        return memory.remember(new, fresh)


def cosines(rows: torch.Tensor) -> Array:
    """The cosine similarity of each pair of rows."""
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    return np.asarray((unit @ unit.T).clamp(-1, 1).cpu().numpy())
