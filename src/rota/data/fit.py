"""Check that a task's examples are sound, and that its model, loss and score take all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rota.data import lookups
from rota.data.federation import Federation, Part
from rota.data.lookups import Lookup
from rota.data.memory import check_room
from rota.errors import BadInput, at, first_line
from rota.plan import Task
from rota.scores import WHOLE, cross_entropy, top1

TRIED = 256
"""A model with unknown lookups is tried on at most this many examples with extreme numbers."""

CHECKED = 2**26
"""Bytes of examples that are checked at once: all of them may be more than the memory holds."""

BLOCK = 64
"""This many examples are tried at once."""


def check(task: Task, name: str, place: str = "") -> None:
    """Check one task's examples; `place` goes before sentences that name the data alone."""
    with at(place):
        check_values(task.federation)
    check_fit(task, name, place)


def check_sizes(tasks: list[Task], names: list[str]) -> None:
    """Refuse models, or lists of mini-batches, that are larger than this machine's memory.

    Nothing is allocated to find out.
    """
    models = [_nbytes(task) for task in tasks]
    largest = names[int(np.argmax(models))]
    # a model, its module, its gradient, its update, the estimate, and copies to write to disk
    what = f"task '{largest}': the model has {max(models) / 1e9:,.1f} GB of weights, and training"
    check_room(2 * sum(models) + 6 * max(models), what, "choose a smaller model")
    for task, name in zip(tasks, names, strict=True):
        most = int(task.roster.sizes.max(initial=1))
        each = most if task.batch is None else min(task.batch, most)
        steps = task.epochs * -(-most // each) if task.steps is None else task.steps
        check_room(
            steps * (8.0 * each + 200),
            f"task '{name}': the list of a client's {steps:,} mini-batches",
            "lower epochs" if task.steps is None else "lower steps",
        )


def _nbytes(task: Task) -> int:
    """The bytes of a model's weights; 0 if it cannot be built without memory for them."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about weights that are loaded into nothing
            module = task.model if isinstance(task.model, nn.Module) else task.build()
        tensors = [*module.parameters(), *module.buffers()]
        return sum(each.nbytes for each in tensors if not is_lazy(each))
    except Exception:  # a model of the user's own may raise anything
        return 0


def check_values(data: Federation) -> None:
    """Check that both parts are alike, without NaN or infinity, and that labels are classes."""
    for part, kind in _parts(data):
        _check_form(data, part, kind)
    for what in ("x", "y"):
        mine, theirs = getattr(data.test, what), getattr(data.train, what)
        if (mine.dtype, mine.shape[1:]) != (theirs.dtype, theirs.shape[1:]):
            raise BadInput(
                f"data '{data.name}': test {what} is {_form(mine)}, but train {what} is "
                f"{_form(theirs)}: give both parts the same type and shape"
            )
    for part, kind in _parts(data):
        for values, what in ((part.x, "x"), (part.y, "y")):
            if values.is_floating_point():
                each = max(1, CHECKED // max(1, values[:1].nbytes))  # of data that may be mapped
                fine = [_rows(torch.isfinite(some)).all(dim=1) for some in values.split(each)]
                bad = ~torch.cat(fine)
                _refuse(bad, data, part, f"{kind} {what} is NaN or infinite")
        if not part.y.is_floating_point():
            bad = _rows((part.y < 0) | (part.y >= data.classes)).any(dim=1)
            _refuse(bad, data, part, f"{kind} label outside 0..{data.classes - 1}")


def _parts(data: Federation) -> Iterator[tuple[Part, str]]:
    yield data.train, "train"
    yield data.test, "test"


def _check_form(data: Federation, part: Part, kind: str) -> None:
    """Check that there are as many inputs as targets, and that offsets cut them up."""
    if len(part.x) != len(part.y):
        raise BadInput(
            f"data '{data.name}' has {len(part.x)} {kind} inputs and {len(part.y)} targets: "
            "give one target per input"
        )
    offsets = np.asarray(part.offsets)
    if (
        offsets.ndim != 1
        or len(offsets) < 2
        or offsets.dtype.kind not in "iu"
        or (offsets[0], offsets[-1]) != (0, len(part.y))
        or (np.diff(offsets.astype(np.int64)) < 0).any()
    ):
        raise BadInput(
            f"data '{data.name}': the {kind} offsets must be whole numbers that rise from 0 to "
            f"the {len(part.y)} examples, one more than there are clients"
        )
    if not len(part.y):
        raise BadInput(f"data '{data.name}' has no {kind} examples")


def _form(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape[1:])}"


def _rows(values: Tensor) -> Tensor:
    """One flat row per example."""
    return values.reshape(len(values), -1)


def _where(data: Federation, part: Part, row: int) -> str:
    """Whose row it is: "client 3, row 12"."""
    if part.clients == 1:
        return f"row {row}"
    client = part.owner(row)
    name = data.roster.ids[client]
    known = "" if name == str(client) else f" ({name})"
    return f"client {client}{known}, row {row - int(part.offsets[client])}"


def _refuse(bad: Tensor, data: Federation, part: Part, problem: str) -> None:
    """Refuse data with bad rows; the sentence names the first one."""
    count = int(bad.sum())
    if count:
        where = _where(data, part, int(bad.int().argmax()))
        more = f" and in {count - 1} more rows" if count > 1 else ""
        raise BadInput(
            f"data '{data.name}': {problem} at {where}{more}: "
            f"fix or remove {'them' if more else 'it'}"
        )


def check_fit(task: Task, name: str, place: str = "") -> None:
    """Check that the model takes the data and has an output per class, and the loss its outputs."""
    data = task.federation
    if task.score is top1 and data.train.y.is_floating_point():
        raise BadInput(
            f"task '{name}': the targets are real numbers, and accuracy is for classes: set score "
            "to 'mse', 'mae' or 'r2', or give class labels as whole numbers"
        )
    x, y = data.train.x[:2].clone(), data.train.y[:2].clone()
    misfit = f"task '{name}': the model does not fit examples of shape {data.shape}"
    try:
        _refuse_lazy(task.model)  # which cannot always be copied
        module = task.build().eval()
        _refuse_lazy(module)
    except BadInput as mistake:
        raise BadInput(f"task '{name}': {mistake}") from mistake
    except Exception as error:  # a model of the user's own may raise anything
        raise BadInput(f"{misfit}: {first_line(error)}") from error
    found = lookups.find(module, x)
    with at(place):
        _check_lookups(data, "x", found.lookups, "model")
    try:
        with torch.no_grad():
            outputs = module(x)
    except Exception as error:
        raise BadInput(f"{misfit}: {first_line(error)}") from error
    _refuse_changed(x, f"task '{name}': the model changes its inputs")
    if not isinstance(outputs, Tensor):
        raise BadInput(
            f"task '{name}': the model gives a {type(outputs).__name__}: it must give one tensor, "
            "so wrap it in a module whose forward returns that one"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise BadInput(f"task '{name}': the model has no parameters to train")
    wide = max(outputs.shape[1:], default=1)
    if data.classes and wide < data.classes and task.loss is cross_entropy:
        raise BadInput(
            f"task '{name}': the model has {wide} outputs but the data have {data.classes} classes"
        )
    if not found.traced or (not x.is_floating_point() and not found.lookups):
        with at(place):
            _try_extremes(data, module)
    _check_measures(task, name, place, outputs, y)


def _check_measures(task: Task, name: str, place: str, outputs: Tensor, y: Tensor) -> None:
    """Check that the loss and the score take these outputs and targets, and fit all labels."""
    apart = y.shape != outputs.shape or outputs.shape[-1] == 1
    if task.loss is cross_entropy and y.is_floating_point() and apart:
        raise BadInput(
            f"task '{name}': the targets are real numbers, and the default loss is for classes: "
            "set loss to 'mse', 'mae' or 'huber'"
        )
    for what, measure in (("loss", task.loss), ("score", task.score)):
        if measure is top1:
            continue
        used = lookups.find(partial(measure, outputs), y)
        with at(place):
            _check_lookups(task.federation, "y", used.lookups, what)
        targets = y.clone()
        _check_measure(f"task '{name}': the {what}", measure, outputs, targets)
        _refuse_changed(targets, f"task '{name}': the {what} changes its targets")


def _refuse_changed(values: Tensor, who: str) -> None:
    """Refuse what would change the data: every test would be on other examples."""
    if values._version:
        raise BadInput(f"{who} in place: let it make new tensors, such as x = x * 2 for x *= 2")


def _refuse_lazy(module: object) -> None:
    """Refuse layers without sizes: all copies of a model must have the same weights."""
    if not isinstance(module, nn.Module):
        return
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise BadInput(
            "the model has lazy layers, whose sizes come with the first batch: give it layers with "
            "sizes, such as nn.Linear for nn.LazyLinear"
        )


def _check_lookups(data: Federation, what: str, found: list[Lookup], whose: str) -> None:
    """Check that every number that indexes a table is inside it, over all examples."""
    if not found:
        return
    for part, kind in _parts(data):
        values = _rows(_comparable(getattr(part, what)))
        if not values.numel():
            continue
        least, most = values.aminmax()
        for each in found:
            if least >= each.low and most < each.size:
                continue
            used = values[:, each.places]
            outside = (used < each.low) | (used >= each.size)
            bad = outside.any(dim=1)
            if not bad.any():  # the numbers in other places are larger
                continue
            row = int(bad.int().argmax())
            number = int(used[row, outside[row]][0])
            word = {"x": "token", "y": "label"}[what]
            count = int(bad.sum()) - 1
            more = f", as are {count} more rows" if count else ""
            raise BadInput(
                f"data '{data.name}': {kind} {word} {number} at {_where(data, part, row)} is "
                f"outside the {whose}'s {each.table}{more}: give numbers from {each.low} to "
                f"{each.size - 1}, or change the {whose}"
            )


def _comparable(values: Tensor) -> Tensor:
    """Values that aminmax takes, as `.long()` would make them."""
    if values.is_floating_point():
        return values.trunc()
    plain = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return values if values.dtype in plain else values.long()


def _try_extremes(data: Federation, module: nn.Module) -> None:
    """Run the model on the examples that hold the smallest and the largest numbers.

    This is for a model that computes indices from its input, or looks them up out of sight.
    """
    for part, kind in _parts(data):
        if not part.x.numel():
            continue
        rows = _extremes(_rows(_comparable(part.x)))
        for block in rows.split(BLOCK):
            if _error(module, part.x[block]) is None:
                continue
            for row in block.tolist():
                error = _error(module, part.x[[row]])
                if error:
                    raise BadInput(
                        f"data '{data.name}': the model cannot take the {kind} example at "
                        f"{_where(data, part, row)}: {first_line(error)}"
                    ) from error


def _extremes(values: Tensor) -> Tensor:
    """The rows that hold the smallest or largest number of a column, up to about TRIED rows."""
    step = max(1, -(-values.shape[1] // (TRIED // 2)))
    columns = values[:, ::step]
    flat = torch.stack([values.argmin(), values.argmax()]) // values.shape[1]
    rows: Tensor = torch.cat([flat, columns.argmin(dim=0), columns.argmax(dim=0)]).unique()
    return rows


def _error(module: nn.Module, x: Tensor) -> Exception | None:
    """What the model raises."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            module(x)
    except Exception as error:
        return error
    return None


def _check_measure(
    what: str, measure: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> None:
    """Check that a loss or score takes what it will be given, and gives one number per example."""
    try:
        values = measure(outputs, targets)
    except Exception as error:
        raise BadInput(f"{what} does not take the model's outputs: {first_line(error)}") from error
    gives = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
    if gives != (len(targets),) and measure not in WHOLE:
        raise BadInput(
            f"{what} must give one number per example, shape ({len(targets)},), and gives {gives}"
        )
