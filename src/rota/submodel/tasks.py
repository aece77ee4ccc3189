"""The droppable units of a task's network."""

from __future__ import annotations

import torch

from rota.data.roster import Roster
from rota.plan import Task
from rota.submodel.units import Units, find_units


def units_of(task: Task) -> Units:
    """The droppable units of a task's network; where there is no data, found on zeros."""
    if isinstance(task.data, Roster):
        example = torch.zeros(2, *task.roster.shape)
    else:
        example = task.data.train.x[:2]
    return find_units(task.build(), example)
