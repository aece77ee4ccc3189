"""The nouns of a round.

Task      what is learned: a network, its data, and a client's local work
Model     a task and weights; a run may have several models of one task
Plan      who trains which model in this round
Question  what a sampler asks clients before it draws
Job       what an engine gets: models, a plan, and the work that each row has to do
Chunk     what an engine gives back for some rows
Seen      what the server learns about each row
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rota import rng
from rota.arrays import Array
from rota.data.federation import Federation
from rota.data.roster import Roster
from rota.errors import BadInput
from rota.weights import Weights

if TYPE_CHECKING:
    from rota.channel import Channel
    from rota.submodel.cut import Cut
    from rota.submodel.units import Units

__all__ = [
    "Chunk",
    "Costs",
    "Duty",
    "Job",
    "Local",
    "Model",
    "Plan",
    "Question",
    "Seen",
    "State",
    "SubModel",
    "Task",
    "cross_entropy",
    "top1",
]

State = dict[str, Any]
"""What a policy remembers: named arrays and tensors and nothing else, so checkpoints hold it."""

NUMBER = 8
"""Bytes per single number in a reply: a norm or a loss."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits, one number per example."""
    return F.cross_entropy(outputs, targets, reduction="none")


def top1(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's class, one number per example."""
    return (outputs.argmax(-1) == targets).float()


@dataclass(frozen=True)
class Task:
    """What is learned: a network, the clients' data, and the local work of a client in a round.

    `model` is a function that returns an nn.Module, or a module whose weights are the starting
    point. Parameters of the function named `shape` or `classes` are filled from the data.

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
    added. `loss` and `score` return one number per example.
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
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    score: Callable[[Tensor, Tensor], Tensor] = top1
    name: str = ""

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


@dataclass(frozen=True, eq=False)
class SubModel:
    """A part of a model that some clients hold in a round.

    `cut` has the units that it keeps. `share` is the share of the model's data whose clients hold
    this part in this round, drawn or not; clients of width 0 do not count.
    """

    model: int
    width: float
    share: float
    cut: Cut

    @property
    def places(self) -> Tensor:
        """Where its parameters lie in the model's flat vector."""
        return self.cut.places

    @property
    def buffer_places(self) -> Tensor:
        """Where its buffers lie in the model's flat vector."""
        return self.cut.buffer_places

    def of(self, weights: Weights) -> Weights:
        """The part of a model's weights, or of rows of weights."""
        params, buffers = weights
        return Weights(params[..., self.places], buffers[..., self.buffer_places])


@dataclass(frozen=True)
class Plan:
    """One round's rota: row r says that client[r] trains model[r].

    `probability` is the chance that the row was drawn, or NaN where it has no closed form.
    `weight` makes the weighted sum of updates an estimate of full participation: share /
    probability for a pair that was drawn once. Rows are unique: a pair that was drawn twice is one
    row with twice the weight.
    """

    client: Array
    model: Array
    probability: Array
    weight: Array
    cut: Array | None = None
    """What part of its model each row holds: 0 is the whole, k is cuts[k - 1]."""
    cuts: tuple[SubModel, ...] = ()

    def __len__(self) -> int:
        return len(self.client)

    def of(self, rows: Array) -> Plan:
        """Some of the rows, in the given order."""
        return Plan(
            self.client[rows],
            self.model[rows],
            self.probability[rows],
            self.weight[rows],
            None if self.cut is None else self.cut[rows],
            self.cuts,
        )

    def held(self, row: int) -> SubModel | None:
        """The part of its model that a row holds; None is the whole."""
        if self.cut is None or not self.cut[row]:
            return None
        return self.cuts[int(self.cut[row]) - 1]


def checked(plan: Plan, shares: Array) -> Plan:
    """Return the plan if it is valid; a user's own sampler may draw anything."""
    if not isinstance(plan, Plan):
        raise BadInput(f"the sampler's draw returned a {type(plan).__name__}: return a rota.Plan")
    columns = {}
    for name in ("client", "model", "probability", "weight"):
        column = columns[name] = getattr(plan, name)
        known = isinstance(column, np.ndarray) and column.ndim == 1
        if not known or column.shape != np.shape(plan.client):
            raise BadInput(
                f"the sampler's plan has no one-dimensional array '{name}' of the same length as "
                "'client': give four arrays of one length"
            )
    # everything else computes with numbers of 64 bits
    for name, number in (("client", shares.shape[1]), ("model", shares.shape[0])):
        column = columns[name]
        if column.dtype.kind not in "iu" or ((column < 0) | (column >= number)).any():
            raise BadInput(
                f"the sampler's plan has a wrong '{name}': give whole numbers from 0 to "
                f"{number - 1}"
            )
        columns[name] = column.astype(np.int64, copy=False)
    for name in ("probability", "weight"):
        if columns[name].dtype.kind not in "iuf":
            raise BadInput(f"the sampler's plan has a wrong '{name}': give an array of floats")
        with np.errstate(over="ignore"):
            columns[name] = columns[name].astype(np.float64, copy=False)
    plan = replace(plan, **columns)
    owns = shares[plan.model, plan.client] > 0
    if not owns.all():
        row = int(np.argmin(owns))
        raise BadInput(
            f"the sampler drew client {plan.client[row]} for model {plan.model[row]}, but this "
            "client has no data for it or cannot be reached: draw only pairs whose share is above 0"
        )
    chances = plan.probability
    if not np.isfinite(plan.weight).all() or (chances <= 0).any() or (chances > 1 + 1e-6).any():
        raise BadInput(
            "the sampler's plan has wrong numbers: weights must be finite, and probabilities "
            "above 0 and at most 1 (NaN where unknown)"
        )
    if len(np.unique(plan.model * shares.shape[1] + plan.client)) < len(plan):
        raise BadInput(
            "the sampler drew a client twice for one model: give one row with twice the weight"
        )
    return plan


@dataclass(frozen=True)
class Question:
    """What a sampler asks about some pairs before it draws.

    - "norm": the client trains and reports the norm of its update
    - "update": the client trains and sends its update
    - "loss": the client reports the model's mean loss over its training examples, or over
      `examples` of them chosen at random
    - "expected": no client is asked; the estimator reports the norms that it expects
    """

    rows: Plan
    what: Literal["norm", "update", "loss", "expected"]
    examples: int | None = None


@dataclass(frozen=True)
class Duty:
    """What each row of a plan has to do, as arrays over rows.

    `training` is the share of the local training that the row still has to compute: 1, or 0 for a
    client that trained when it was probed, or 1/3 to evaluate a loss. `down` and `up` are the bytes
    of models and controls that the row fetches and sends. `numbers` is how many single numbers
    the reply carries besides; simulators count their bytes, but give them no time on the link.
    """

    training: Array
    down: Array
    up: Array
    numbers: Array

    def of(self, rows: Array) -> Duty:
        """The duties of some rows, in the given order."""
        return Duty(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True)
class Local:
    """The three vectors of local work, each a function of plan rows; None is the usual one.

    - `start`: where rows begin, as weights with a leading axis of rows (usually: at their model)
    - `anchor`: what the proximal term pulls to, [rows, params] (usually: to the start, as in
      FedProx; Ditto pulls personal models to the global one)
    - `shift`: what is added to the gradient of every local step, [rows, params] (usually: nothing;
      SCAFFOLD adds c - c_i)

    They are as long as the whole model. For a row that holds a part, an engine takes its numbers.
    """

    start: Callable[[Array], Weights] | None = None
    anchor: Callable[[Array], Tensor] | None = None
    shift: Callable[[Array], Tensor] | None = None

    def of(self, rows: Array) -> Local:
        """The same vectors for a plan that consists of these rows."""

        def cut(function: Callable[[Array], Any] | None) -> Callable[[Array], Any] | None:
            return None if function is None else lambda few: function(rows[few])

        return Local(cut(self.start), cut(self.anchor), cut(self.shift))


@dataclass(frozen=True)
class Job:
    """All that an engine needs to train the rows of a plan in round `now`."""

    now: int
    models: list[Model]
    plan: Plan
    duty: Duty
    local: Local = field(default_factory=Local)
    units: tuple[Units, ...] = ()
    """Each task's droppable units, if rows may hold parts of models."""
    how: Literal["plain", "nested", "scaled"] = "plain"
    """How parts of models train (submodel.choice.Choice)."""
    channel: Channel | None = None
    """What updates go through on their way back; None: they travel as they are."""

    @cached_property
    def task(self) -> Array:
        """The task of each row."""
        return np.array([model.task for model in self.models], np.int64)[self.plan.model]

    def of(self, rows: Array) -> Job:
        """The job of some rows, in the given order."""
        return replace(
            self, plan=self.plan.of(rows), duty=self.duty.of(rows), local=self.local.of(rows)
        )


def duty(
    models: list[Model],
    plan: Plan,
    training: float = 1.0,
    down: tuple[int, int] = (1, 0),
    up: tuple[int, int] = (1, 0),
    numbers: int = 0,
    channel: Channel | None = None,
) -> Duty:
    """The same duty for all rows. `down` and `up` count models and controls, without buffers.

    A channel changes the bytes of the updates, but not of buffers and controls.
    """
    model = np.array([each.nbytes for each in models], np.int64)[plan.model]
    control = np.array([each.params.nbytes for each in models], np.int64)[plan.model]
    for k, part in enumerate(plan.cuts, start=1):
        params, buffers = models[part.model].weights
        wide = len(part.places) * params.itemsize
        control[plan.cut == k] = wide
        model[plan.cut == k] = wide + len(part.buffer_places) * buffers.itemsize
    saved = np.zeros(len(plan), np.int64)
    if channel is not None:
        itemsize = np.array([each.params.itemsize for each in models], np.int64)[plan.model]
        for wide, size in {*zip(control.tolist(), itemsize.tolist(), strict=True)}:
            alike = (control == wide) & (itemsize == size)
            saved[alike] = wide - channel.nbytes(wide // size, size)
    return Duty(
        training=np.full(len(plan), training),
        down=down[0] * model + down[1] * control,
        up=up[0] * (model - saved) + up[1] * control,
        numbers=np.full(len(plan), numbers),
    )


def whole(models: list[Model], plan: Plan, now: int, local: Local | None = None) -> Job:
    """A job in which every row fetches its model, trains it and sends its update."""
    return Job(now, models, plan, duty(models, plan), local or Local())


@dataclass(frozen=True)
class Costs:
    """What each row costs, as arrays over rows: measured by real devices, computed by simulators.

    `seconds` is the time for computing and transfer together, `computing` for computing alone; both
    are NaN where the row did not train. `up` and `down` are bytes.
    """

    seconds: Array
    computing: Array
    up: Array
    down: Array

    @classmethod
    def nothing(cls, rows: int) -> Costs:
        """Rows that have cost nothing yet."""
        seconds, computing = np.full((2, rows), np.nan)
        up, down = np.zeros((2, rows), np.int64)
        return cls(seconds, computing, up, down)

    def of(self, places: Array) -> Costs:
        """The costs of some rows, in the given order."""
        return Costs(*(getattr(self, each.name)[places] for each in fields(self)))


@dataclass(frozen=True)
class Chunk:
    """What came back for some rows of a plan, all of one model, stacked.

    `now` is the round that the rows were trained in. `update` [rows, params] is start - end of
    local training, so it includes the learning rate; `buffers` [rows, buffers] are the new values.
    `loss` is the mean training loss over the local steps, `steps` counts them, `examples` counts
    the examples that were processed, and `lr` is the learning rate of all steps.

    A row with a `reason` failed: its update and its loss mean nothing, but its costs count.
    """

    rows: Array
    model: int
    now: int
    lr: float
    update: Tensor
    buffers: Tensor
    loss: Array
    steps: Array
    examples: Array
    costs: Costs
    reason: list[str]
    measured: tuple[Tensor, Array] | None = None
    """The updates, and their norms where the engine knows them already."""

    @property
    def ok(self) -> Array:
        """Which rows succeeded."""
        return np.array([not reason for reason in self.reason], bool)

    @cached_property
    def norm(self) -> Array:
        """The norms of the updates."""
        if self.measured is not None and self.measured[0] is self.update:
            return self.measured[1]
        return np.asarray(torch.linalg.vector_norm(self.update, dim=1).double().cpu().numpy())

    def of(self, places: Array) -> Chunk:
        """Some of the rows: `places` are positions in this chunk, not rows of the plan."""
        if len(places) == len(self.rows) and (places == np.arange(len(places))).all():
            return self
        known = self.measured is not None and self.measured[0] is self.update
        update = self.update[places]
        return replace(
            self,
            rows=self.rows[places],
            update=update,
            buffers=self.buffers[places],
            loss=self.loss[places],
            steps=self.steps[places],
            examples=self.examples[places],
            costs=self.costs.of(places),
            reason=[self.reason[place] for place in places.tolist()],
            measured=(update, self.norm[places]) if known else None,
        )


NO_REPLY = "no reply"
COLUMNS = {"norm", "loss", "examples", "seconds"}
"""Columns of Seen that a policy may declare in `sees`; "update" means that it watches chunks."""


@dataclass
class Seen:
    """What the server learned about each plan row, as arrays over rows.

    `norm` and `loss` are NaN for rows that failed, `examples` for rows that did not train. A row
    that trained and failed still has its costs. `norm` is the norm of what the estimator weighs:
    the update, or its difference from a remembered one. `pace` is the row's learning rate relative
    to the largest one of all models.
    """

    norm: Array
    loss: Array
    examples: Array
    costs: Costs
    reason: list[str]
    pace: Array | float = 1.0

    @classmethod
    def nothing(cls, rows: int, pace: Array | float = 1.0) -> Seen:
        """Nobody has replied yet."""
        norm, loss, examples = np.full((3, rows), np.nan)
        return cls(norm, loss, examples, Costs.nothing(rows), [NO_REPLY] * rows, pace)

    @property
    def seconds(self) -> Array:
        """Each row's time, computing and transfer; NaN where it did not train."""
        return self.costs.seconds

    @property
    def ok(self) -> Array:
        """Which rows succeeded."""
        return np.array([not reason for reason in self.reason], bool)

    def waits(self, rows: Array) -> Array:
        """Which of these rows have not replied."""
        return np.array([self.reason[row] == NO_REPLY for row in rows.tolist()], bool)

    def add(self, chunk: Chunk, norm: Array | None = None) -> None:
        """Write a chunk's rows, with `norm` in place of the norms of their updates."""
        ok, ran = chunk.ok, chunk.steps > 0
        rows = chunk.rows[ok]
        self.norm[rows] = (chunk.norm if norm is None else norm)[ok]
        self.loss[rows] = chunk.loss[ok]
        self.examples[chunk.rows[ran]] = chunk.examples[ran]
        self.costs.seconds[chunk.rows[ran]] = chunk.costs.seconds[ran]
        self.costs.computing[chunk.rows[ran]] = chunk.costs.computing[ran]
        self.costs.up[chunk.rows], self.costs.down[chunk.rows] = chunk.costs.up, chunk.costs.down
        for row, reason in zip(chunk.rows.tolist(), chunk.reason, strict=True):
            self.reason[row] = reason

    def only(self, sees: Collection[str]) -> Seen:
        """The columns that a policy declares in `sees`; the others are NaN."""
        rows = len(self.reason)
        unknown = np.full(rows, np.nan)
        return Seen(
            norm=self.norm if "norm" in sees else unknown,
            loss=self.loss if "loss" in sees else unknown,
            examples=self.examples if "examples" in sees else unknown,
            costs=self.costs if "seconds" in sees else Costs.nothing(rows),
            reason=self.reason,
            pace=self.pace,
        )
