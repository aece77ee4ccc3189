"""Synthetic(alpha, beta): classification tasks that differ between clients by a given amount.

Shamir et al. 2014, Li et al. 2020.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data.federation import Federation, Part
from rota.data.memory import check_room
from rota.errors import BadInput

BLOCK = 1024
"""The number of clients that are made at once.

This bounds the memory, and a client's data do not depend on the number of clients.
"""

LARGEST = 1e12
"""The largest deviation: x stays far inside float32."""


def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 100,
    dim: int = 60,
    classes: int = 10,
    iid: bool = False,
    examples: int | None = None,
    seed: int = 0,
) -> Federation:
    """Synthetic(alpha, beta): each client its own linear task and inputs; needs no files.

    Client i draws u ~ N(0, alpha), B ~ N(0, beta) (alpha and beta are deviations), v_j ~ N(B, 1)
    and W, b ~ N(u, 1); its examples are x ~ N(v, diag(j^-1.2)), j = 1..dim, and y = argmax(xW + b).
    So alpha says how much the clients' models differ, and beta their inputs. With `iid` all share
    one W, b ~ N(0, 1), and v_j = B.

    Clients hold int(lognormal(4, 2)) + 50 examples, or `examples` each; nine tenths are for
    training (at least one), the rest is the client's own test set. Client i's data do not depend on
    the number of clients.
    """
    _check(alpha=alpha, beta=beta, clients=clients, dim=dim, classes=classes, examples=examples)

    def stream(*purpose: int | str) -> np.random.Generator:
        return rng.generator(rng.key(seed, "synthetic", *purpose))

    def normal(purpose: str, block: int, *shape: int) -> Array:
        return stream(purpose, block).standard_normal(shape, np.float32)

    _check_room(clients, examples or 2, dim, classes)
    if examples:
        sizes = np.full(clients, examples)
    else:
        sizes = np.floor(stream("sizes").lognormal(4, 2, clients)).astype(np.int64) + 50
        _check_room(clients, sizes.mean(), dim, classes)
    u = stream("u").normal(0, alpha, clients).astype(np.float32)
    shift = stream("B").normal(0, beta, clients).astype(np.float32)
    train, test = _empty(sizes * 9 // 10, sizes, dim)
    kept = train.sizes
    for block, start in enumerate(range(0, clients, BLOCK)):
        here = slice(start, min(start + BLOCK, clients))
        size, count = sizes[here], len(sizes[here])
        own = np.zeros((1, dim), np.float32) if iid else normal("v", block, count, dim)
        mean = shift[here, None] + own
        deviation = _deviation(dim).astype(np.float32)
        x = normal("x", block, size.sum(), dim) * deviation + np.repeat(mean, size, axis=0)
        ends = np.cumsum(size)
        if iid:
            y = (x @ normal("W", 0, dim, classes) + normal("b", 0, classes)).argmax(1)
        else:
            weights = normal("W", block, count, dim, classes) + u[here, None, None]
            bias = normal("b", block, count, classes) + u[here, None]
            if examples:
                y = (x.reshape(count, examples, dim) @ weights + bias[:, None]).argmax(2).ravel()
            else:
                each = zip(np.split(x, ends[:-1]), weights, bias, strict=True)
                y = np.concatenate([(rows @ w + b).argmax(1) for rows, w, b in each])
        # A client's examples are independent draws, so the first nine tenths are as good as any.
        place = np.arange(len(x)) - np.repeat(ends - size, size)
        chosen = place < np.repeat(kept[here], size)
        for part, mask in ((train, chosen), (test, ~chosen)):
            span = slice(int(part.offsets[here.start]), int(part.offsets[here.stop]))
            part.x[span], part.y[span] = torch.from_numpy(x[mask]), torch.from_numpy(y[mask])
    return Federation("synthetic", train, test, classes)


def synthetic_kvib() -> Federation:
    """Synthetic(0, 0) of K-Vib's experiments: 100 clients, 36,068 examples; needs no files.

    These are the same numbers as the data published with K-Vib, to the bit: numpy's legacy
    generator and Python's own, both seeded with 4399, in the order in which that set was made.
    Sizes are 50 to 5,744, and a tenth of the clients hold 63.1 %.
    """
    legacy, shuffler = np.random.RandomState(4399), random.Random(4399)
    sizes = legacy.lognormal(4, 2, 100).astype(np.int64) + 50
    legacy.standard_normal(200)  # u and B, drawn with deviation 0
    mean = legacy.standard_normal((100, 60))
    train, test = _empty(sizes * 9 // 10, sizes, 60)
    for client, size in enumerate(sizes):
        weights, bias = legacy.standard_normal((60, 10)), legacy.standard_normal(10)
        x = mean[client] + legacy.standard_normal((size, 60)) * _deviation(60)
        y = (x @ weights + bias).argmax(1)
        order = list(range(size))
        shuffler.shuffle(order)
        cut = int(train.sizes[client])
        for part, rows in ((train, order[:cut]), (test, order[cut:])):
            own_x, own_y = part.of(client)
            own_x.copy_(torch.from_numpy(x[rows])), own_y.copy_(torch.from_numpy(y[rows]))
    return Federation("synthetic-kvib", train, test, 10)


def _deviation(dim: int) -> Array:
    """The inputs' standard deviations: sqrt(j^-1.2)."""
    deviation: Array = np.sqrt(np.arange(1, dim + 1) ** -1.2)
    return deviation


def _empty(train: Array, sizes: Array, dim: int) -> tuple[Part, Part]:
    """Allocate the two parts, to be filled in place: a million clients are too many to copy."""
    train = np.maximum(train, 1)
    parts = []
    for counts in (train, sizes - train):
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = int(offsets[-1])
        x, y = torch.empty(rows, dim), torch.empty(rows, dtype=torch.int64)
        parts.append(Part(x, y, offsets))
    return parts[0], parts[1]


def _check(
    *, alpha: float, beta: float, clients: int, dim: int, classes: int, examples: int | None
) -> None:
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 <= value <= LARGEST:
            raise BadInput(
                f"synthetic: {name} is {value}, but it is a standard deviation: give a number from "
                f"0 to {LARGEST:g}"
            )
    for name, count, least in (
        ("clients", clients, 1),
        ("dim", dim, 1),
        ("classes", classes, 2),
        ("examples", examples, 2),
    ):
        if count is not None and count < least:
            raise BadInput(f"synthetic: {name} is {count}, but it must be at least {least}")


def _check_room(clients: int, examples: float, dim: int, classes: int) -> None:
    """Refuse more data than fit into memory, before they are made."""
    held = float(clients) * (40 + examples * (4 * dim + 8))
    made = min(clients, BLOCK) * (float(dim) * classes * 4 + examples * dim * 8)
    what = f"synthetic: {clients:,} clients with {examples:,.0f} examples of {dim:,} numbers each"
    check_room(held + made, what, "lower clients, examples, dim or classes")
