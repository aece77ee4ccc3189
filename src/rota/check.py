"""Everything that can be wrong with an experiment before its first round, each as one sentence that names what to change."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rota.data.federation import Federation, Part
from rota.errors import BadInput
from rota.loop import Experiment
from rota.plan import Task


def check(experiment: Experiment) -> None:
    """Raise BadInput for the first mistake found."""
    if not experiment.tasks:
        raise BadInput("there is no task: give at least one")
    for name, value in (("rounds", experiment.rounds), ("evaluate", experiment.evaluate)):
        if value < 1:
            raise BadInput(f"{name} is {value}: it must be at least 1")
    if len(set(experiment.names)) < len(experiment.names):
        raise BadInput(f"two tasks share the name '{max(experiment.names, key=experiment.names.count)}': give each task its own name")
    for task, name in zip(experiment.tasks, experiment.names, strict=True):
        check_work(task, name)
        check_values(task.data)
        check_fit(task, name)
    check_clients(experiment.tasks)


def check_work(task: Task, name: str) -> None:
    """The numbers of local training."""
    at_least_one = {"batch": task.batch, "epochs": task.epochs, "steps": task.steps}
    for key, value in at_least_one.items():
        if value is not None and value < 1:
            raise BadInput(f"task '{name}': {key} is {value}: it must be at least 1")
    if not task.lr > 0:
        raise BadInput(f"task '{name}': lr is {task.lr}: it must be above 0")
    if not task.prox >= 0:
        raise BadInput(f"task '{name}': prox is {task.prox}: it must be at least 0")


def check_clients(tasks: list[Task]) -> None:
    """All tasks have the same clients, and each client has data for one of them."""
    counts = [task.data.clients for task in tasks]
    if len(set(counts)) > 1:
        raise BadInput(f"the tasks have {', '.join(map(str, counts))} clients: all tasks of a run must have the same clients")
    held = np.sum([task.data.train.sizes for task in tasks], axis=0)
    if not held.all():
        empty = np.flatnonzero(held == 0)
        raise BadInput(
            f"client {empty[0]} has no training examples ({len(empty)} of {len(held)} clients have none): leave such clients out"
        )


def check_values(data: Federation) -> None:
    """No NaN or infinity; labels inside the classes."""
    for part, kind in ((data.train, "train"), (data.test, "test")):
        if not len(part.y):
            raise BadInput(f"data '{data.name}' has no {kind} examples")
        for values, what in ((part.x, "x"), (part.y, "y")):
            if values.is_floating_point():
                bad = ~torch.isfinite(values).flatten(1).all(dim=1) if values.dim() > 1 else ~torch.isfinite(values)
                _refuse(bad, data, part, f"{kind} {what} is NaN or infinite")
        if not part.y.is_floating_point():
            _refuse((part.y < 0) | (part.y >= data.classes), data, part, f"{kind} label outside 0..{data.classes - 1}")


def _refuse(bad: Tensor, data: Federation, part: Part, problem: str) -> None:
    """Name the first bad row and whose it is."""
    if not bool(bad.any()):
        return
    row = int(torch.nonzero(bad.flatten())[0])
    client = part.owner(row)
    where = f"row {row}" if part.clients == 1 else f"client {client}, row {row - int(part.offsets[client])}"
    raise BadInput(f"data '{data.name}': {problem} at {where} ({int(bad.sum())} rows in all): mend or remove them")


def check_fit(task: Task, name: str) -> None:
    """The model takes the data, and has an output for every class."""
    x, y = task.data.train.x[:2], task.data.train.y[:2]
    module = task.build()
    try:
        with torch.no_grad():
            outputs = module.eval()(x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"task '{name}': the model does not fit examples of shape {task.data.shape}: {reason}") from error
    if task.data.classes and outputs.shape[-1] < task.data.classes:
        raise BadInput(f"task '{name}': the model has {outputs.shape[-1]} outputs but the data have {task.data.classes} classes")
    try:
        losses = task.loss(outputs, y)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise BadInput(f"task '{name}': the loss does not take the model's outputs: {str(error).splitlines()[0]}") from error
    if losses.shape != (len(y),):
        raise BadInput(f"task '{name}': the loss must give one number an example, shape ({len(y)},), and gives {tuple(losses.shape)}")
