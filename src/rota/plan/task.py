"""What is learned, and what a client does for it: Task and Model."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rota import rng
from rota.arrays import Array
from rota.data.federation import Federation
from rota.data.roster import Roster
from rota.errors import BadInput
from rota.scores import ERRORS, Measure, cross_entropy, top1
from rota.weights import Weights


@dataclass(frozen=True)
class Task:
    """What is learned: a network, the clients' data, and the local work of a client in a round.

    `model` is a function that returns an nn.Module, or a module whose weights are the starting
    point. Parameters of the function named `shape` or `classes` are filled from the data. A model
    and data may also be given by their names in recipes.

    A client makes `epochs` passes over its examples in mini-batches of `batch` (None: one batch of
    all examples, B = infinity), or takes exactly `steps` mini-batches; `steps=1` is one gradient of
    synchronous distributed SGD. Every row starts with a fresh local optimiser: SGD with `momentum`
    (heavy ball, or `nesterov`), Adam or AdamW, or any of torch.optim, given as a function of the
    parameters and the learning rate; the last are trained one client at a time.

    `lr` is multiplied by `lr_decay` after every round, or from each of the rounds `lr_steps` on. In
    the first `lr_warmup` rounds it rises linearly, and over `lr_cosine` rounds it falls along half
    a cosine to nearly 0. Within a row it is multiplied by `lr_local_decay` after every local step.

    `prox` is FedProx's mu: it adds mu/2 ||w - w_server||^2 to the local loss. `weight_decay` adds
    weight_decay * w to the gradient. `clip` bounds the gradient's norm before weight decay is
    added. `loss` and `score` are names of rota.scores, or functions that return one number per
    example; `better` says whether a "higher" or a "lower" score is better.
    """

    model: Callable[..., nn.Module] | nn.Module
    data: Federation | Roster
    lr: float = 0.1
    batch: int | None = 10
    epochs: int = 1
    steps: int | None = None
    optimizer: Literal["sgd", "adam", "adamw"] | Callable[..., torch.optim.Optimizer] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None
    lr_decay: float = 1.0
    lr_steps: tuple[int, ...] = ()
    lr_warmup: int = 0
    lr_cosine: int | None = None
    lr_local_decay: float = 1.0
    prox: float = 0.0
    loss: Measure = cross_entropy
    score: Measure = top1
    name: str = ""
    better: Literal["higher", "lower"] | None = None

    def __post_init__(self) -> None:
        for key in ("model", "data", "loss", "score"):
            if isinstance(given := getattr(self, key), str | dict):
                from rota.recipe.named import part  # which reads all that can be named

                object.__setattr__(self, key, part(key, given))
        if self.better is None:
            object.__setattr__(self, "better", "lower" if self.score in ERRORS else "higher")

    @property
    def roster(self) -> Roster:
        """What the server knows of the clients' data."""
        return self.data if isinstance(self.data, Roster) else self.data.roster

    @property
    def federation(self) -> Federation:
        """The examples, for engines that train on this machine."""
        if isinstance(self.data, Roster):
            raise BadInput(
                f"task '{self.name or self.data.name}' has a roster instead of data: give a "
                "Federation, or choose an engine that trains where the data are"
            )
        return self.data

    def build(self, seed: int = 0) -> nn.Module:
        """Make a fresh module; the same seed gives the same weights."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        wanted = inspect.signature(self.model).parameters
        known: dict[str, Any] = {"shape": self.roster.shape, "classes": self.roster.classes}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(seed, "init"))
            return self.model(**{name: value for name, value in known.items() if name in wanted})

    def lr_at(self, now: int) -> float:
        """The learning rate of round `now`; the first round is 1."""
        number = sum(now >= each for each in self.lr_steps) if self.lr_steps else now - 1
        rate = self.lr * self.lr_decay**number
        if self.lr_cosine:
            played = min(now, self.lr_cosine) - 1
            rate *= (1 + math.cos(math.pi * played / self.lr_cosine)) / 2
        if now <= self.lr_warmup:
            rate *= now / (self.lr_warmup + 1)
        return rate


def shares(tasks: list[Task]) -> Array:
    """d[t, i]: client i's share of task t's examples. Rows sum to 1, and 0 means no data."""
    sizes: Array = np.stack([task.roster.sizes for task in tasks]).astype(np.float64)
    return np.asarray(sizes / sizes.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Model:
    """One of a run's models: the number of its task, and its weights."""

    task: int
    weights: Weights

    @property
    def params(self) -> Tensor:
        return self.weights.params

    @property
    def buffers(self) -> Tensor:
        return self.weights.buffers

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes
