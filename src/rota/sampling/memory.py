"""What samplers that compare clients remember: last updates, and all their inner products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Chunk, Job, State
from rota.sampling.cohort import Cohort

MOST = 5_000
BLOCK = 1 << 13
"""Columns that a CPU multiplies at once, which stay in its cache; a GPU takes 8 times as many."""
Fresh = dict[tuple[int, int], Tensor]
"""The updates of one round by (model, client), in the order of their arrival."""


@dataclass(frozen=True)
class Comparing(Cohort):
    """A sampler that watches the updates as they pass, and remembers each client's last one.

    For model s its state has update.s.i of client i and gram.s [clients, clients]; `known` is
    [models, clients].
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})

    def init(self, shares: Array, rounds: int) -> State:
        models, clients = shares.shape
        super().init(shares, rounds)
        if clients > MOST:
            raise BadInput(
                f"this sampler compares every client with every other: {clients:,} clients are "
                f"more than the {MOST:,} it can take"
            )
        state: State = {"known": np.zeros(shares.shape, bool)}
        for s in range(models):
            state[f"gram.{s}"] = np.zeros((clients, clients))
        for s in range(models):
            for client in range(clients):
                state[f"update.{s}.{client}"] = torch.zeros(0)
        return state

    def watch(self, state: State, job: Job) -> Fresh:
        return {}

    def see(self, watched: Fresh, job: Job, chunk: Chunk) -> None:
        for place in np.flatnonzero(chunk.ok).tolist():
            pair = chunk.model, int(job.plan.client[chunk.rows[place]])
            watched[pair] = chunk.update[place].to(torch.float32, copy=True)

    def learn(self, state: State, watched: Fresh) -> State:
        return remember(state, watched)


def remember(state: State, fresh: Fresh) -> State:
    """Replace the clients' older updates with fresh ones. What has not changed is not copied."""
    new = {**state, "known": state["known"].copy()}
    for s in sorted({model for model, _ in fresh}):
        clients = sorted(client for model, client in fresh if model == s)
        mine = [fresh[s, client] for client in clients]
        new |= {f"update.{s}.{client}": fresh[s, client] for client in clients}
        new["known"][s, clients] = True
        known = np.flatnonzero(new["known"][s])
        everybody = []
        for client in known.tolist():
            name = f"update.{s}.{client}"
            new[name] = torch.as_tensor(new[name], device=mine[0].device)  # a checkpoint has arrays
            everybody.append(new[name])
        products = _products(mine, everybody).cpu().numpy()
        gram, rows = state[f"gram.{s}"].copy(), np.array(clients)
        gram[np.ix_(rows, known)] = products
        gram[np.ix_(known, rows)] = products.T
        new[f"gram.{s}"] = gram
    return new


def _products(some: list[Tensor], everybody: list[Tensor]) -> Tensor:
    """All inner products in double precision; a CPU computes blocks in single, twice as fast."""
    on_gpu, device = some[0].is_cuda, some[0].device
    out = torch.zeros(len(some), len(everybody), dtype=torch.float64, device=device)
    width, kind = (8 * BLOCK, torch.float64) if on_gpu else (BLOCK, torch.float32)
    block = some[0].new_empty(len(everybody), width)
    for start in range(0, len(some[0]), width):
        mine = torch.stack([update[start : start + width] for update in some])
        pieces = [update[start : start + width] for update in everybody]
        theirs = torch.stack(pieces, out=block[:, : mine.shape[1]])
        out += mine.to(kind) @ theirs.to(kind).T
    return out


def distances(gram: Array) -> Array:
    """|u_i - u_j| for all pairs."""
    squares = np.diag(gram)
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares - 2 * gram, 0.0)))


def angles(gram: Array) -> Array:
    """arccos of the cosine of u_i and u_j for all pairs; 0 where an update is 0 or not known."""
    norms = np.sqrt(np.diag(gram))
    lengths = norms[:, None] * norms
    cosine = np.divide(gram, lengths, out=np.ones_like(gram), where=lengths > 0)
    out = np.arccos(np.clip(cosine, -1.0, 1.0))
    np.fill_diagonal(out, 0.0)
    return np.asarray(out)
