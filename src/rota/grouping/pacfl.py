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
    """PACFL: one clustering before training, by the subspaces that the clients' inputs span.

    Every client sends `vectors` singular vectors of its examples. The similarity of two clients is
    the mean squared cosine of the principal angles between their subspaces. Average linkage joins
    clients that are at least `threshold` alike. By default, the threshold is the similarity that
    the two halves of a client's own examples reach for nine clients in ten: clients that are as
    similar as that may have the same data.

    Clients that cannot be reached before the first round are asked later, and join the group that
    is most like them. The clients' data must be on this machine, and their inputs numbers.
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
        known, of = state["known"] | whom, at.of.copy()
        new = {**state, "known": known}
        for t in np.flatnonzero(whom.any(axis=1)).tolist():
            clients = np.flatnonzero(whom[t])
            bases, halves = self._ask(at, t, clients)
            kept = state.get(f"bases.{t}")
            new[f"bases.{t}"] = np.zeros((len(of[t]), *bases.shape[1:]), np.float32)
            if kept is None:
                of[t] = -1
                new[f"bases.{t}"][clients] = bases
                threshold = halves if self.threshold is None else self.threshold
                of[t, clients] = self._cluster(alike(bases, bases), threshold)
                continue
            new[f"bases.{t}"][:] = kept
            new[f"bases.{t}"][clients] = bases
            placed = np.flatnonzero(of[t] >= 0)
            near = alike(bases, kept[placed])
            names = np.unique(of[t, placed])
            means = np.stack([near[:, of[t, placed] == g].mean(axis=1) for g in names], axis=1)
            of[t, clients] = names[means.argmax(axis=1)]

        def similar(t: int, clients: Array) -> Array:
            return alike(new[f"bases.{t}"][clients], new[f"bases.{t}"][clients])

        return Groups(of, similar=similar), new

    def _ask(self, at: Occasion, t: int, clients: Array) -> tuple[Array, float]:
        """Each client's singular vectors [clients, vectors, numbers]; how alike halves are."""
        from scipy.linalg import eigh

        train = at.tasks[t].federation.train
        wide = train.x[0].numel()
        out = np.zeros((3, len(clients), self.vectors, wide), np.float32)
        for row, client in enumerate(clients.tolist()):
            x = train.of(client)[0].reshape(-1, wide).double()
            products = [(part.T @ part).numpy() for part in (x[::2], x[1::2])]
            for k, each in enumerate((sum(products), *products)):
                _, vectors = eigh(each, subset_by_index=(wide - self.vectors, wide - 1))
                out[k, row] = vectors.T[::-1]  # the largest first
        # products of all pairs of columns, or of rows if these are fewer, and their eigenvectors
        few, many = (f(train.sizes[clients], wide) for f in (np.minimum, np.maximum))
        flops = 4.0 * many * few**2 + 27.0 * few**3
        at.pay(t, clients, flops, np.full(len(clients), NUMBER * (self.vectors * wide + 1)))
        halves = ((out[1] @ out[2].swapaxes(1, 2)) ** 2).sum(axis=(1, 2)) / self.vectors
        return out[0], float(np.quantile(halves, 0.1))

    def _cluster(self, near: Array, threshold: float) -> Array:
        """Groups by average linkage."""
        distance = 1 - (near + near.T) / 2
        return clusters(distance, "average", most=1 - threshold)


def alike(a: Array, b: Array) -> Array:
    """The mean squared cosine of the principal angles between each pair of subspaces."""
    vectors = a.shape[1]
    products = a.reshape(len(a) * vectors, -1) @ b.reshape(len(b) * vectors, -1).T
    squares = products.reshape(len(a), vectors, len(b), vectors) ** 2
    return np.asarray(squares.sum(axis=(1, 3)) / vectors, np.float64).clip(0, 1)
