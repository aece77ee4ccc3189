"""The clients' last updates, and all their inner products: for samplers that compare clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Plan, Seen, State

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


def remember(state: State, plan: Plan, seen: Seen) -> State:
    """The state in which the successful rows' updates replace their clients' older ones.

    What has not changed is not copied.
    """
    assert seen.update is not None, "the sampler must say `updates = True`"
    new = {**state, "known": state["known"].copy()}
    back = np.flatnonzero(seen.ok)
    for s in np.unique(plan.model[back]).tolist():
        rows = back[plan.model[back] == s]
        clients = plan.client[rows]
        fresh = torch.stack([seen.update[row] for row in rows.tolist()]).float()
        for client, update in zip(clients.tolist(), fresh, strict=True):
            new[f"update.{s}.{client}"] = update.clone()  # a view would keep all of them
        new["known"][s, clients] = True
        known = np.flatnonzero(new["known"][s])
        everybody = []
        for client in known.tolist():
            name = f"update.{s}.{client}"
            new[name] = torch.as_tensor(new[name], device=fresh.device)  # a checkpoint has arrays
            everybody.append(new[name])
        products = _products(fresh, everybody).cpu().numpy()
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
