"""Losses and scores by name. Each is a function of a batch's outputs and targets.

A loss gives one number per example, and so does a score that is a mean over the test examples.
A score of the whole test set (R², AUC, F1) gives what it needs to know of each example, a line of
numbers, and `WHOLE` has the function that makes one score of all lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rota.arrays import Array

__all__ = ["LOSSES", "SCORES", "auc", "bce", "cross_entropy", "f1", "huber", "mae", "mse"]
__all__ += ["r2", "top1"]

Measure = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits, as a mean over an example's targets; classes are dimension 1."""
    return _each(F.cross_entropy(outputs, targets, reduction="none"))


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits, as a mean over an example's labels; these are 0 or 1."""
    logits, labels = _like(outputs, targets), targets * 1.0
    return _each(F.binary_cross_entropy_with_logits(logits, labels, reduction="none"))


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, as a mean over an example's targets."""
    return _each((_like(outputs, targets) - targets) ** 2)


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, as a mean over an example's targets."""
    return _each((_like(outputs, targets) - targets).abs())


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss, squared up to an error of 1, as a mean over an example's targets."""
    return _each(F.huber_loss(_like(outputs, targets), targets * 1.0, reduction="none"))


def top1(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of an example's targets whose class has the largest output; most have one."""
    return _each((outputs.argmax(1 if targets.dim() > 1 else -1) == targets).float())


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of the targets' variance that the outputs explain; 1 is perfect."""
    return _lines(_like(outputs, targets), targets)


def auc(outputs: Tensor, targets: Tensor) -> Tensor:
    """The area under the ROC curve; with several classes, the mean of each against the rest.

    Two classes may have one output, the logit of the second one, or two.
    """
    if outputs.dim() == 1 or outputs.shape[-1] == 1:
        return _lines(_like(outputs, targets), targets)
    return _lines(outputs.softmax(-1), targets)


def f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """F1 as the mean over the classes. Two classes may have one output, the second one's logit."""
    if outputs.dim() == 1 or outputs.shape[-1] == 1:
        return _lines((_like(outputs, targets) > 0).long(), targets)
    return _lines(outputs.argmax(-1), targets)


def _like(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the targets' shape: [n, 1] and [n] would become [n, n]."""
    return outputs.reshape(targets.shape)


def _each(values: Tensor) -> Tensor:
    """One number per example."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _lines(*values: Tensor) -> Tensor:
    """One line per example, with all these numbers of it."""
    return torch.cat([value.reshape(len(value), -1).double() for value in values], dim=1)


def _explained(lines: Array) -> float:
    guess, truth = np.split(lines, 2, axis=1)
    apart = ((truth - truth.mean(axis=0)) ** 2).sum()
    return float(1 - ((guess - truth) ** 2).sum() / apart) if apart else float("nan")


def _area(lines: Array) -> float:
    values, labels = lines[:, :-1], lines[:, -1]
    if values.shape[1] == 1:
        return _area_of(values[:, 0], labels == 1)
    if values.shape[1] == 2:
        return _area_of(values[:, 1], labels == 1)
    known = [_area_of(each, labels == c) for c, each in enumerate(values.T)]
    known = [each for each in known if not np.isnan(each)]
    return float(np.mean(known)) if known else float("nan")


def _area_of(values: Array, positive: Array) -> float:
    """The chance that a positive example has the larger value; equal ones count half."""
    number, others = int(positive.sum()), int((~positive).sum())
    if not number or not others or np.isnan(values).any():
        return float("nan")
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((rank[positive].sum() - number * (number + 1) / 2) / (number * others))


def _balance(lines: Array) -> float:
    guess, truth = lines.T
    found = []
    for c in np.unique(lines):
        both = 2 * ((guess == c) & (truth == c)).sum()
        found.append(both / ((guess == c).sum() + (truth == c).sum()))
    return float(np.mean(found))


LOSSES: dict[str, Measure] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": mse,
    "mae": mae,
    "huber": huber,
}
SCORES: dict[str, Measure] = {
    "accuracy": top1,
    "mse": mse,
    "mae": mae,
    "r2": r2,
    "auc": auc,
    "f1": f1,
}
MEASURES = {"loss": LOSSES, "score": SCORES}
"""The fields of a task that are functions of outputs and targets, with rota's own by name."""
WHOLE: dict[Measure, Callable[[Array], float]] = {r2: _explained, auc: _area, f1: _balance}
"""Scores that are no means over the examples."""
ERRORS: tuple[Measure, ...] = (mse, mae, huber, bce, cross_entropy)
"""Of these, lower is better."""
TITLES = {"mse": "mean squared error", "mae": "mean absolute error", "r2": "R²"}
TITLES |= {"auc": "AUC", "f1": "F1"}


def overall(measure: Measure, values: Array) -> float:
    """One score, from what `measure` gave for all examples; NaN without an example."""
    if not len(values):
        return float("nan")
    return WHOLE[measure](values) if measure in WHOLE else float(values.mean())


def by_owner(measure: Measure, values: Array, offsets: Array) -> Array:
    """The score of each owner's examples, which begin at these rows."""
    if measure not in WHOLE:
        sizes = np.diff(offsets)
        owner = np.repeat(np.arange(len(sizes)), sizes)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.bincount(owner, weights=values, minlength=len(sizes)) / sizes)
    pieces = np.split(values, offsets[1:-1])
    return np.array([overall(measure, piece) for piece in pieces])


def name(measure: Any, known: dict[str, Measure]) -> str:
    """A measure's name in a recipe, or of a function of one's own."""
    for word, each in known.items():
        if measure is each:
            return word
    return str(getattr(measure, "__qualname__", type(measure).__name__))


def of_all(words: Iterable[str]) -> str:
    """The name of the score that all models have; "score" if they have several."""
    found = set(words)
    return found.pop() if len(found) == 1 else "score"


def title(word: str) -> str:
    """A score in words: "mean squared error" for "mse", "distance" for "mine:distance"."""
    return TITLES.get(word, word.rpartition(":")[2].rpartition(".")[2] or "score")
