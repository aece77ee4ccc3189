"""The droppable units of the tasks' networks."""

from __future__ import annotations

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
    """The droppable units of a task's network; where there is no data, found on zeros."""
    if isinstance(task.data, Roster):
        example = torch.zeros(2, *task.roster.shape)
    else:
        example = task.data.train.x[:2]
    return find_units(task.build(), example)


def begin_submodel(submodel: Any, at: Opening) -> State:
    """A choice of units before the first round; nothing if all clients train whole models."""
    units = at.experiment.units
    state: State = submodel.init([units[model.task] for model in at.models]) if units else {}
    return state
