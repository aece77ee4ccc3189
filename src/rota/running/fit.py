"""Whether a task's examples are sound and its model, loss and score take them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rota.data.federation import Federation, Part
from rota.errors import BadInput, first_line
from rota.plan import Task, cross_entropy, top1


def check_values(data: Federation) -> None:
    """No NaN or infinity; labels inside the classes."""
    for part, kind in ((data.train, "train"), (data.test, "test")):
        if not len(part.y):
            raise BadInput(f"data '{data.name}' has no {kind} examples")
        for values, what in ((part.x, "x"), (part.y, "y")):
            if values.is_floating_point():
                bad = (
                    ~torch.isfinite(values).flatten(1).all(dim=1)
                    if values.dim() > 1
                    else ~torch.isfinite(values)
                )
                _refuse(bad, data, part, f"{kind} {what} is NaN or infinite")
        if not part.y.is_floating_point():
            _refuse(
                (part.y < 0) | (part.y >= data.classes),
                data,
                part,
                f"{kind} label outside 0..{data.classes - 1}",
            )


def _refuse(bad: Tensor, data: Federation, part: Part, problem: str) -> None:
    """Name the first bad row and whose it is."""
    if not bool(bad.any()):
        return
    row = int(torch.nonzero(bad.flatten())[0])
    client = part.owner(row)
    where = (
        f"row {row}"
        if part.clients == 1
        else f"client {client}, row {row - int(part.offsets[client])}"
    )
    count = int(bad.sum())
    more = f" and in {count - 1} more rows" if count > 1 else ""
    raise BadInput(
        f"data '{data.name}': {problem} at {where}{more}: mend or remove {'them' if more else 'it'}"
    )


def check_fit(task: Task, name: str) -> None:
    """The model takes the data, and has an output for every class; loss and score take its outputs."""
    data = task.federation
    if task.score is top1 and data.train.y.is_floating_point():
        own = "a function that gives one number an example, such as lambda outputs, targets: -(outputs - targets) ** 2"
        why = "the targets are real numbers, of which accuracy says nothing"
        raise BadInput(
            f"task '{name}': {why}: give score {own}, or give class labels as whole numbers"
        )
    x, y = data.train.x[:2], data.train.y[:2]
    try:
        module = task.build()
        with torch.no_grad():
            outputs = module.eval()(x)
    except BadInput as mistake:
        raise BadInput(f"task '{name}': {mistake}") from mistake
    except Exception as error:  # a model of the user's own may raise anything
        raise BadInput(
            f"task '{name}': the model does not fit examples of shape {data.shape}: {first_line(error)}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise BadInput(
            f"task '{name}': the model gives a {type(outputs).__name__}: it must give one tensor"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise BadInput(f"task '{name}': the model has no parameters to train")
    if data.classes and outputs.shape[-1] < data.classes:
        raise BadInput(
            f"task '{name}': the model has {outputs.shape[-1]} outputs but the data have {data.classes} classes"
        )
    if (
        task.loss is cross_entropy
        and y.is_floating_point()
        and (y.shape != outputs.shape or outputs.shape[-1] == 1)
    ):
        own = "a function that gives one number an example, such as lambda outputs, targets: (outputs - targets) ** 2"
        raise BadInput(
            f"task '{name}': the targets are real numbers, and the default loss is for classes: give loss {own}"
        )
    _check_measure(f"task '{name}': the loss", task.loss, outputs, y)
    if task.score is not top1:
        _check_measure(f"task '{name}': the score", task.score, outputs, y)


def _check_measure(
    what: str, measure: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> None:
    """A loss or score of the user's own takes what it will be given, and gives one number an example."""
    try:
        values = measure(outputs, targets)
    except Exception as error:
        raise BadInput(f"{what} does not take the model's outputs: {first_line(error)}") from error
    gives = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
    if gives != (len(targets),):
        raise BadInput(
            f"{what} must give one number an example, shape ({len(targets)},), and gives {gives}"
        )
