"""What an engine gets: a Job, with the Duty of each row and the vectors of its Local work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from rota.arrays import Array
from rota.plan.plan import Plan
from rota.plan.task import Model
from rota.weights import Weights

if TYPE_CHECKING:
    from rota.channel import Channel
    from rota.submodel.units import Units

NUMBER = 8
"""Bytes per single number in a reply: a norm or a loss."""


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
    how: Literal["plain", "nested", "distilled", "scaled"] = "plain"
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
