"""The local optimisers.

`fresh` makes the one of a single client, from torch.optim: it is the definition. `descend` does the
same for all rows of a stack at once. For the C library, optimise() in native/rota.c makes one pass
over the parameters instead of one per operation; for McMahan's 2NN with momentum that takes a third
of the time. tests/test_local_work.py compares them all, so a new optimiser is one edit here, one in
rota.c and a line in that test.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rota.plan import Task


def plain(task: Task) -> bool:
    """Whether a step of the task subtracts learning rate * gradient and does nothing else."""
    more = task.momentum or task.weight_decay or task.prox or task.clip is not None
    return task.optimizer == "sgd" and not more and task.lr_local_decay == 1


def fresh(task: Task, now: int, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimiser of one row in round `now`."""
    rate = task.lr_at(now)
    if callable(task.optimizer):
        return task.optimizer(params, lr=rate)
    if task.optimizer == "adam":
        return torch.optim.Adam(params, lr=rate, weight_decay=task.weight_decay)
    if task.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=rate, weight_decay=task.weight_decay)
    return torch.optim.SGD(
        params,
        lr=rate,
        momentum=task.momentum,
        nesterov=task.nesterov,
        weight_decay=task.weight_decay,
    )


def moments(task: Task) -> int:
    """How many numbers per parameter the optimiser remembers."""
    return 2 if task.optimizer in ("adam", "adamw") else int(task.momentum > 0)


def descend(
    task: Task,
    theta: Tensor,
    gradient: Tensor,
    anchor: Tensor,
    shift: Tensor,
    memory: list[Tensor],
    number: Tensor,
    rate: Tensor,
) -> None:
    """Take step `number` of every row, in place; all matrices are [rows, params].

    A row with a `rate` of 0 stays where it is. `memory` are the moments, which are 0 at first.
    """
    g = gradient
    if task.prox:
        g = g + task.prox * (theta - anchor)
    if task.clip is not None:
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        g = g * (task.clip / (norm + 1e-6)).clamp(max=1.0)
    g = g + shift
    if task.lr_local_decay != 1:
        rate = rate * torch.pow(task.lr_local_decay, number.to(rate.dtype))
    if task.weight_decay and task.optimizer == "adamw":
        theta.mul_(1 - rate[:, None] * task.weight_decay)
    elif task.weight_decay:
        g = g + task.weight_decay * theta
    if task.optimizer in ("adam", "adamw"):
        first, second = memory
        first.lerp_(g, 0.1)
        second.mul_(0.999).addcmul_(g, g, value=0.001)
        t = (number[:, None] + 1).to(g.dtype)
        g = (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    elif task.momentum:
        (velocity,) = memory
        velocity.mul_(task.momentum).add_(g)
        g = g + task.momentum * velocity if task.nesterov else velocity
    theta.sub_(rate[:, None] * g)
