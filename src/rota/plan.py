"""The nouns: Task (what is learnt), Plan (who trains what this round), Question (what a sampler asks before it draws), Chunk (what came
back), Seen (what policies observe)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rota import rng
from rota.arrays import Array
from rota.data.federation import Federation
from rota.data.roster import Roster
from rota.errors import BadInput

State = dict[str, Any]
"""What a policy remembers between rounds: named arrays, and nothing else, so that a checkpoint holds all of it. Clients' updates
are tensors, on the device they came from; those of a checkpoint are arrays at first."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits, one number an example."""
    return F.cross_entropy(outputs, targets, reduction="none")


def top1(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's class, one number an example."""
    return (outputs.argmax(-1) == targets).float()


@dataclass(frozen=True)
class Task:
    """One model to learn: its network, its clients' data, and the work a client does on it in a round.

    `model` is a function that returns an nn.Module (where it has parameters named `shape` or `classes`, they are filled from
    the data), or a module, whose weights are then the starting point. A client runs `epochs` passes over its examples in
    mini-batches of `batch` (None: all of them, S0's B = infinity), or exactly `steps` mini-batches: steps=1 is one
    gradient of synchronous distributed SGD. The local optimiser starts afresh in every row: SGD with `momentum` (heavy ball,
    or `nesterov`), or Adam; its `lr` is multiplied by `lr_decay` after every round. `prox` is FedProx's mu, which adds
    mu/2 ||w - w_server||^2 to the local loss; `weight_decay` adds weight_decay * w to the gradient; `clip` bounds the
    gradient's norm before that. `loss` and `score` give one number an example.
    """

    model: Callable[..., nn.Module] | nn.Module
    data: Federation | Roster
    lr: float = 0.1
    batch: int | None = 10
    epochs: int = 1
    steps: int | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None
    lr_decay: float = 1.0
    prox: float = 0.0
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    score: Callable[[Tensor, Tensor], Tensor] = top1
    name: str = ""

    @property
    def roster(self) -> Roster:
        """What the server knows of the clients' data."""
        return self.data if isinstance(self.data, Roster) else self.data.roster

    @property
    def federation(self) -> Federation:
        """The examples, which engines need that train on this machine."""
        if isinstance(self.data, Roster):
            raise BadInput(
                f"task '{self.name or self.data.name}' has a roster in the place of data: "
                "give a Federation, or choose an engine that trains where the data are"
            )
        return self.data

    def build(self, seed: int = 0) -> nn.Module:
        """A fresh module; the same seed gives the same weights."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        wanted = inspect.signature(self.model).parameters
        known: dict[str, Any] = {"shape": self.roster.shape, "classes": self.roster.classes}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(seed, "init"))
            return self.model(**{name: value for name, value in known.items() if name in wanted})

    def lr_at(self, now: int) -> float:
        """The learning rate of round `now`, counted from 1."""
        return self.lr * self.lr_decay ** (now - 1)


def shares(tasks: list[Task]) -> Array:
    """d[s, i]: client i's share of model s's training examples; rows sum to 1, 0 means "no data for it"."""
    sizes: Array = np.stack([task.roster.sizes for task in tasks]).astype(np.float64)
    return np.asarray(sizes / sizes.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Plan:
    """One round's rota: row r says that client[r] trains model[r], drawn with probability[r], to count weight[r].

    `weight` is what makes the weighted sum of updates estimate full participation: share / probability, where the pair was
    drawn once. Rows are unique: a pair drawn twice is one row of twice the weight. A probability is NaN where it has no closed form.
    """

    client: Array
    model: Array
    probability: Array
    weight: Array

    def __len__(self) -> int:
        return len(self.client)

    def of(self, rows: Array) -> Plan:
        """Some of its rows, in that order."""
        return Plan(self.client[rows], self.model[rows], self.probability[rows], self.weight[rows])


def checked(plan: Plan, shares: Array) -> Plan:
    """The plan, if it is one: a sampler of the user's own may draw anything."""
    if not isinstance(plan, Plan):
        raise BadInput(
            f"the sampler draws a {type(plan).__name__}: its draw must return a rota.Plan"
        )
    for name, column in vars(plan).items():
        if (
            not isinstance(column, np.ndarray)
            or column.shape != np.shape(plan.client)
            or column.ndim != 1
        ):
            raise BadInput(
                f"the sampler's plan has no row of numbers for '{name}': give four arrays of one length"
            )
    for name, number in (("client", shares.shape[1]), ("model", shares.shape[0])):
        column = getattr(plan, name)
        if column.dtype.kind not in "iu" or ((column < 0) | (column >= number)).any():
            raise BadInput(
                f"the sampler's plan has a wrong '{name}': give whole numbers from 0 to {number - 1}"
            )
    if not (shares[plan.model, plan.client] > 0).all():
        row = int(np.argmin(shares[plan.model, plan.client] > 0))
        where = f"client {plan.client[row]} for model {plan.model[row]}"
        raise BadInput(
            f"the sampler draws {where}, of which it has no data or cannot be reached: draw where shares are above 0"
        )
    if (
        not np.isfinite(plan.weight).all()
        or (plan.probability <= 0).any()
        or (plan.probability > 1 + 1e-6).any()
    ):
        raise BadInput(
            "the sampler's plan has wrong numbers: weights are finite, probabilities above 0, up to 1 (NaN where not known)"
        )
    if len(np.unique(plan.model * shares.shape[1] + plan.client)) < len(plan):
        raise BadInput(
            "the sampler draws a client twice for one model: give it one row of twice the weight"
        )
    return plan


@dataclass(frozen=True)
class Question:
    """What a sampler asks of some pairs before it draws: to train, and say the update's norm or send it; or to say the model's loss.

    A loss is the mean over all the client's training examples, or over `examples` of them at random. "expected" asks no client but the
    estimator, for the norms that it expects from what it remembers.
    """

    rows: Plan
    what: Literal["norm", "update", "loss", "expected"]
    examples: int | None = None


@dataclass(frozen=True)
class Chunk:
    """What came back for some rows of the plan, all of one model, stacked.

    `update` [rows, params] is start - end of local training (it includes the learning rate); `buffers` [rows, buffers] are
    the new values. `loss` is the mean training loss over the local steps; `steps` counts those, `examples` the examples processed,
    and `lr` is the learning rate of them all. A row whose `reason` is not empty failed: its update and loss mean nothing.
    """

    rows: Array
    model: int
    lr: float
    update: Tensor
    buffers: Tensor
    loss: Array
    steps: Array
    examples: Array
    seconds: Array
    reason: list[str]
    measured: tuple[Tensor, Array] | None = None
    """The updates, and their norms where the engine knows them already."""

    @property
    def ok(self) -> Array:
        """Which rows came back."""
        return np.array([not reason for reason in self.reason], bool)

    @cached_property
    def norm(self) -> Array:
        """The updates' norms."""
        if self.measured is not None and self.measured[0] is self.update:
            return self.measured[1]
        return np.asarray(torch.linalg.vector_norm(self.update, dim=1).double().cpu().numpy())


NOT_FINITE = "the update is not finite"


def admit(chunk: Chunk) -> Chunk:
    """Turn rows that cannot be used into failed rows, with the reason."""
    finite = np.isfinite(
        chunk.norm
    )  # which may overflow where no entry does, so what it doubts is looked at
    if not finite.all():
        finite |= torch.isfinite(chunk.update).all(dim=1).cpu().numpy()
    if chunk.buffers.shape[1]:
        finite &= torch.isfinite(chunk.buffers).all(dim=1).cpu().numpy()
    if finite.all():
        return chunk
    reason = [
        old if fine or old else NOT_FINITE
        for old, fine in zip(chunk.reason, finite.tolist(), strict=True)
    ]
    return replace(chunk, reason=reason)


@dataclass
class Seen:
    """What the server saw of each plan row, as arrays over rows: all that policies learn from.

    `norm` and `loss` are NaN for rows that failed, `examples` and `seconds` for those that did not train: a failed row has its price.
    `norm` is the norm of what the estimator weighs: the update, or what it differs by from one that is remembered. `pace` is the row's
    learning rate in parts of the largest of all models'. The updates themselves are kept (row -> update, on their device) only for a
    sampler that needs them.
    """

    norm: Array
    loss: Array
    examples: Array
    seconds: Array
    reason: list[str]
    update: dict[int, Tensor] | None = None
    pace: Array | float = 1.0

    @classmethod
    def nothing(cls, rows: int, updates: bool = False, pace: Array | float = 1.0) -> Seen:
        norm, loss, examples, seconds = np.full((4, rows), np.nan)
        return cls(
            norm, loss, examples, seconds, ["no reply"] * rows, {} if updates else None, pace
        )

    @property
    def ok(self) -> Array:
        return np.array([not reason for reason in self.reason], bool)

    def add(self, chunk: Chunk, norm: Array | None = None) -> None:
        """Write one chunk's rows in, with these norms where they are not the updates' own."""
        ok, ran = chunk.ok, chunk.steps > 0
        rows = chunk.rows[ok]
        self.norm[rows] = (chunk.norm if norm is None else norm)[ok]
        self.loss[rows] = chunk.loss[ok]
        self.examples[chunk.rows[ran]] = chunk.examples[ran]
        self.seconds[chunk.rows[ran]] = chunk.seconds[ran]
        for row, reason in zip(chunk.rows, chunk.reason, strict=True):
            self.reason[row] = reason
        if self.update is not None:
            self.update |= dict(
                zip(
                    rows.tolist(),
                    chunk.update[torch.from_numpy(ok).to(chunk.update.device)],
                    strict=True,
                )
            )
