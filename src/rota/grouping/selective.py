"""Selective FedAvg: clients whose local models get the same examples right learn together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from rota import scores, weights
from rota.arrays import Array
from rota.data.federation import Examples
from rota.errors import BadInput
from rota.grouping.occasion import Groups, Occasion
from rota.grouping.similar import Measure, find_threshold, place, similarity
from rota.plan import State, Task
from rota.scores import auc, f1, r2
from rota.weights import Weights

SAMPLE = 1000
"""The threshold is found on this many clients at most."""
BATCH = 1000
"""Validation examples that are tried at once."""


@dataclass(frozen=True)
class Selective:
    """Selective FedAvg: groups of clients whose local models are right on the same examples.

    Before the first round every client trains alone, from the initial model, for as long as in
    `alone` rounds, and sends its local model. The server tries the local models on its validation
    set (`validation` of the data). A client's vector says which of the examples its model gets
    right. A client joins the first group (`fit`; or the best one) all of whose members are at least
    `threshold` like it. If there is none, it begins a group.

    The even examples form the groups. Without a `threshold`, it is the one whose groups are told
    apart best on the odd examples, or one group if none is. A client that comes later is placed by
    its own vector. If it fits no group, or if all clients are in one so far, a threshold is found
    and all are grouped anew. With `every`, the vectors are taken anew every so many rounds, and all
    are grouped anew. `compared` is how many clients of a group a newcomer is compared with. The
    paper asks for all of them; this is the default up to 5,000 clients, and 16 beyond.
    """

    alone: int = 10
    similarity: Measure = "overlap"
    threshold: float | None = None
    fit: Literal["first", "best"] = "first"
    every: int | None = None
    compared: int | None = None

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise BadInput(
                f"grouping.threshold is {self.threshold:g}: it must be a similarity from 0 to 1"
            )
        for key in ("alone", "every", "compared"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise BadInput(f"grouping.{key} is {value}: it must be at least 1")

    def check_task(self, task: Task, name: str) -> None:
        """The server needs examples of its own, which a model gets right or wrong."""
        if task.better == "lower" or task.score is r2:
            raise BadInput(
                f"task '{name}': selective grouping asks which examples a local model gets right, "
                f"and the score '{scores.name(task.score, scores.SCORES)}' does not say that: use "
                "grouping ifca, cfl or pacfl, or a score such as accuracy"
            )
        if getattr(task.data, "validation", None) is None:
            raise BadInput(
                f"task '{name}': selective grouping tries local models on the server's own "
                "examples, and the data have none: set data.validation to their number, or give "
                "validation to from_clients"
            )

    def init(self, shares: Array) -> State:
        return {
            "known": np.zeros(shares.shape, bool),
            "threshold": np.full(len(shares), np.nan),
        }

    def regroup(self, state: State, at: Occasion) -> tuple[Groups | None, State]:
        again = self.every is not None and at.now > 1 and (at.now - 1) % self.every == 0
        whom = at.reachable if again else at.reachable & ~state["known"]
        if not whom.any():
            return None, state
        state = {**state, "known": state["known"].copy(), "threshold": state["threshold"].copy()}
        of = at.of.copy()
        for t in np.flatnonzero(whom.any(axis=1)).tolist():
            first = not state["known"][t].any()
            self._ask(state, at, t, np.flatnonzero(whom[t]))
            of[t] = self.groups(state, t, np.full_like(of[t], -1) if first or again else of[t])

        def similar(t: int, clients: Array) -> Array:
            vectors = self._vectors(state, t, clients)
            return similarity(vectors, vectors, self.similarity)

        return Groups(of, similar=similar), state

    def _ask(self, state: State, at: Occasion, t: int, clients: Array) -> None:
        """Let clients train alone, and write down their vectors, eight examples in a byte."""
        task = at.tasks[t]
        held = task.federation.validation
        assert held is not None, "check_task saw it"
        start = next(model for model in at.engine.initial() if model.task == t).weights
        module = task.build().to(start.params.device).eval()
        name = f"right.{t}"
        packed = state.get(name, np.zeros((at.of.shape[1], -(-len(held) // 8)), np.uint8)).copy()
        for chunk in at.updates(t, clients, local=self.alone):
            for place_, row in enumerate(chunk.rows.tolist()):
                local = Weights(start.params - chunk.update[place_], chunk.buffers[place_])
                packed[clients[row]] = np.packbits(correct(task, module, local, held))
                state["known"][t, clients[row]] = True
        state[name], state[f"examples.{t}"] = packed, np.array(len(held))

    def groups(self, state: State, t: int, of: Array) -> Array:
        """The groups of all clients of task t with a vector; -1 are to be placed."""
        known = np.flatnonzero(state["known"][t])
        most = self.compared or (None if len(of) <= 5000 else 16)

        def similar(a: Array, b: Array) -> Array:
            ours, theirs = (self._vectors(state, t, known[each]) for each in (a, b))
            return similarity(ours, theirs, self.similarity)

        def placed(of: Array) -> Array:
            threshold = float(state["threshold"][t])
            return place(similar, of, threshold, self.fit == "best", most)

        new, before = np.full_like(of, -1), of[known]
        after = placed(before) if (before >= 0).any() else before
        free = self.threshold is None and (before.max() == 0 or after.max() > before.max())
        if (before < 0).all() or free:
            state["threshold"][t] = self._threshold(state, t, known)
            after = placed(np.full_like(before, -1))
        new[known] = after
        return new

    def _threshold(self, state: State, t: int, known: Array) -> float:
        if self.threshold is not None:
            return self.threshold
        few = known[:: -(-len(known) // SAMPLE)]
        even, odd = (self._vectors(state, t, few, half) for half in (0, 1))
        return find_threshold(even, odd, self.similarity, self.fit == "best")

    def _vectors(self, state: State, t: int, clients: Array, half: int = 0) -> Array:
        """Clients' vectors on the even examples of the validation set, or on the odd ones."""
        number = int(state[f"examples.{t}"])
        return np.unpackbits(state[f"right.{t}"][clients], axis=1, count=number)[:, half::2]


@torch.no_grad()
def correct(task: Task, module: nn.Module, model: Weights, examples: Examples) -> Array:
    """Which of the examples a model gets right: those with a score above one half.

    AUC and F1 are no scores of single examples. There it is whether the class is the right one.
    """
    weights.load(module, model)
    right = []
    for x, y in zip(examples.x.split(BATCH), examples.y.split(BATCH), strict=True):
        outputs, targets = module(x.to(model.params.device)), y.to(model.params.device)
        if task.score in (auc, f1):
            guess, truth = f1(outputs, targets).T
            right.append(guess == truth)
        else:
            right.append(task.score(outputs, targets) > 0.5)
    return np.asarray(torch.cat(right).cpu().numpy())
