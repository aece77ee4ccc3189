"""PACFL (Vahidian et al. 2023): clients whose data span similar subspaces learn together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota.arrays import Array
from rota.data.federation import Federation
from rota.errors import BadInput
from rota.grouping.linkage import clusters
from rota.grouping.occasion import Groups, Occasion
from rota.plan import State, Task

NUMBER = 4
"""Bytes per number that clients send."""


@dataclass(frozen=True)
class Pacfl:
    """PACFL: clusters of clients by the subspaces that their inputs span.

    Every client sends `vectors` singular vectors of its examples. The similarity of two clients is
    the mean squared cosine of the principal angles between their subspaces. Average linkage joins
    clients that are at least `threshold` alike. By default, the threshold is the similarity that
    the two halves of a client's own examples reach for nine clients in ten: clients that are as
    similar as that may have the same data.

    All are asked before the first round. Clients that cannot be reached then are asked later, and
    all known clients are clustered anew. The clients' data must be on this machine, and their
    inputs numbers.
    """

    vectors: int = 3
    threshold: float | None = None

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.vectors < 1:
            raise BadInput(f"grouping.vectors is {self.vectors}: it must be at least 1")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise BadInput(
                f"grouping.threshold is {self.threshold:g}: it must be a similarity from 0 to 1"
            )

    def check_task(self, task: Task, name: str) -> None:
        """The inputs must be here, and span a space."""
        data = task.data
        if not isinstance(data, Federation) or not data.train.x.is_floating_point():
            raise BadInput(
                f"task '{name}': pacfl compares the clients' inputs, which must be numbers on this "
                "machine: use another grouping"
            )
        if self.vectors > data.train.x[0].numel():
            raise BadInput(
                f"grouping.vectors is {self.vectors}, but inputs of task '{name}' have only "
                f"{data.train.x[0].numel()} numbers"
            )

    def init(self, shares: Array) -> State:
        return {"known": np.zeros(shares.shape, bool)}

    def regroup(self, state: State, at: Occasion) -> tuple[Groups | None, State]:
        whom = at.reachable & ~state["known"]
        if not whom.any():
            return None, state
        new, of = {**state, "known": state["known"] | whom}, at.of.copy()
        for t in np.flatnonzero(whom.any(axis=1)).tolist():
            self._ask(new, at, t, np.flatnonzero(whom[t]))
            known = np.flatnonzero(new["known"][t])
            of[t] = -1
            of[t, known] = self._cluster(new[f"bases.{t}"][known], new[f"halves.{t}"][known])

        def similar(t: int, clients: Array) -> Array:
            return alike(new[f"bases.{t}"][clients], new[f"bases.{t}"][clients])

        return Groups(of, similar=similar), new

    def _ask(self, state: State, at: Occasion, t: int, clients: Array) -> None:
        """Write down singular vectors, the largest first, and how alike a client's halves are."""
        from scipy.linalg import eigh

        train = at.tasks[t].federation.train
        wide = train.x[0].numel()
        out = np.zeros((3, len(clients), self.vectors, wide), np.float32)
        for row, client in enumerate(clients.tolist()):
            x = train.of(client)[0].reshape(-1, wide).double()
            products = [(part.T @ part).numpy() for part in (x[::2], x[1::2])]
            for k, each in enumerate((sum(products), *products)):
                _, vectors = eigh(each, subset_by_index=(wide - self.vectors, wide - 1))
                out[k, row] = vectors.T[::-1]
        # products of all pairs of columns, or of rows if these are fewer, and their eigenvectors
        few, many = (f(train.sizes[clients], wide) for f in (np.minimum, np.maximum))
        flops = 4.0 * many * few**2 + 27.0 * few**3
        at.pay(t, clients, flops, np.full(len(clients), NUMBER * (self.vectors * wide + 1)))
        halves = ((out[1] @ out[2].swapaxes(1, 2)) ** 2).sum(axis=(1, 2)) / self.vectors
        everybody = at.of.shape[1]
        for name, told in ((f"bases.{t}", out[0]), (f"halves.{t}", halves)):
            kept = state.get(name, np.zeros((everybody, *told.shape[1:]), np.float32))
            state[name] = kept.copy()
            state[name][clients] = told

    def _cluster(self, bases: Array, halves: Array) -> Array:
        """Groups by average linkage."""
        threshold = self.threshold
        if threshold is None:
            threshold = float(np.quantile(halves, 0.1))
        near = alike(bases, bases)
        return clusters(1 - (near + near.T) / 2, "average", most=1 - threshold)


def alike(a: Array, b: Array) -> Array:
    """The mean squared cosine of the principal angles between each pair of subspaces."""
    vectors = a.shape[1]
    products = a.reshape(len(a) * vectors, -1) @ b.reshape(len(b) * vectors, -1).T
    squares = products.reshape(len(a), vectors, len(b), vectors) ** 2
    return np.asarray(squares.sum(axis=(1, 3)) / vectors, np.float64).clip(0, 1)
