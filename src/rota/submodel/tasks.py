"""The droppable units of the tasks' networks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from rota.data.roster import Roster
from rota.errors import BadInput
from rota.plan import State, Task
from rota.scores import cross_entropy
from rota.submodel.choice import Choice
from rota.submodel.units import Units, find_units

if TYPE_CHECKING:
    from rota.policies import Opening

logger = logging.getLogger(__name__)


def units_of_all(tasks: list[Task], choice: Choice) -> tuple[Units, ...]:
    """The units of all tasks, whose losses must suit the choice of units."""
    distilled = getattr(choice, "trains", "plain") == "distilled"
    for task in tasks:
        if distilled and task.loss is not cross_entropy:
            raise BadInput(
                f"submodel.distil needs cross-entropy as the loss, and task '{task.name}' has "
                "another one: set distil to false, or leave out the task's loss"
            )
    return tuple(map(units_of, tasks))


def units_of(task: Task) -> Units:
    """The droppable units of a task's network; where there is no data, found on zeros.

    The network's attribute `whole` may name modules that are left as they are.
    """
    if isinstance(task.data, Roster):
        example = torch.zeros(2, *task.roster.shape)
    else:
        example = task.data.train.x[:2]
    module = task.build()
    units = find_units(module, example, getattr(module, "whole", ()))
    if not units.layers:
        name = task.name or task.data.name
        logger.warning("task '%s': its network has no unit to drop: parts are whole models", name)
    return units


def begin_submodel(submodel: Any, at: Opening) -> State:
    """A choice of units before the first round; nothing if all clients train whole models."""
    units = at.experiment.units
    state: State = submodel.init([units[model.task] for model in at.models]) if units else {}
    return state
