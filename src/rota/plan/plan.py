"""Who trains: a round's Plan, and the Question that a sampler asks before it draws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput

if TYPE_CHECKING:
    from rota.submodel.cut import SubModel


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
        if columns[name].dtype != np.float64:
            with np.errstate(over="ignore"):
                columns[name] = columns[name].astype(np.float64)
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
