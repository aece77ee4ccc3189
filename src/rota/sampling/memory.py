"""The clients' last updates, and all their inner products: for samplers that compare clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Chunk, Plan, State

MOST = 5_000
BLOCK = 1 << 13
"""Columns that a CPU multiplies at once, so that they stay in its cache; a GPU takes eight times as
many."""


def begin(shares: Array) -> State:
    """The state in which no update is known.

    For model s it has update.s.i of client i [0] and gram.s [clients, clients]; `known` is
    [models, clients].
    """
    models, clients = shares.shape
    if clients > MOST:
        raise BadInput(
            f"this sampler compares every client with every other: {clients:,} clients are more "
            f"than the {MOST:,} it can take"
        )
    state: State = {"known": np.zeros(shares.shape, bool)}
    for s in range(models):
        state[f"gram.{s}"] = np.zeros((clients, clients))
    for s in range(models):
        for client in range(clients):
            state[f"update.{s}.{client}"] = torch.zeros(0)
    return state


Fresh = dict[int, tuple[int, int, Tensor]]
"""The updates of one round: plan row -> model, client, and update, on its device."""


def see(fresh: Fresh, plan: Plan, chunk: Chunk) -> None:
    """Keep copies of the updates that came back."""
    for place in np.flatnonzero(chunk.ok).tolist():
        row = int(chunk.rows[place])
        update = chunk.update[place].float().clone()  # a view would keep the whole chunk
        fresh[row] = chunk.model, int(plan.client[row]), update


def remember(state: State, fresh: Fresh) -> State:
    """Replace the clients' older updates with fresh ones. What has not changed is not copied."""
    new = {**state, "known": state["known"].copy()}
    for s in sorted({model for model, _, _ in fresh.values()}):
        mine = [fresh[row][1:] for row in sorted(fresh) if fresh[row][0] == s]
        clients = np.array([client for client, _ in mine])
        updates = torch.stack([update for _, update in mine])
        new |= {f"update.{s}.{client}": update for client, update in mine}
        new["known"][s, clients] = True
        known = np.flatnonzero(new["known"][s])
        names = [f"update.{s}.{client}" for client in known.tolist()]
        everybody = [torch.as_tensor(new[name], device=updates.device) for name in names]
        new |= zip(names, everybody, strict=True)
        products = _products(updates, everybody).cpu().numpy()
        gram = state[f"gram.{s}"].copy()
        gram[np.ix_(clients, known)] = products
        gram[np.ix_(known, clients)] = products.T
        new[f"gram.{s}"] = gram
    return new


def _products(some: Tensor, everybody: list[Tensor]) -> Tensor:
    """All inner products, in double precision.

    A CPU computes those of one block in single precision, which is twice as fast.
    """
    out = torch.zeros(len(some), len(everybody), dtype=torch.float64, device=some.device)
    width, kind = (8 * BLOCK, torch.float64) if some.is_cuda else (BLOCK, torch.float32)
    block = some.new_empty(len(everybody), width)
    for start in range(0, some.shape[1], width):
        mine = some[:, start : start + width]
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
