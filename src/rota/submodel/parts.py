"""From widths and choices to the parts of models that clients hold in a round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import Model, Plan, State
from rota.submodel.choice import NESTED, Wanted
from rota.submodel.cut import SubModel, keep
from rota.submodel.units import Units


@dataclass(frozen=True)
class Held:
    """Each client's width in a round, and the parts of models that clients of these widths hold."""

    widths: Array
    parts: tuple[SubModel, ...]
    units: tuple[Units, ...]
    left: Array | None = None
    """Each model's share of the data whose clients are not left out; None if nobody is."""
    how: Any = "plain"
    """How parts train (choice.Choice)."""

    def present(self, shares: Array) -> Array:
        """A round's shares without the clients of width 0; the others' shares grow in proportion.

        So the round estimates the average over the clients that are not left out.
        """
        if self.left is None:
            return shares
        some = np.where(self.widths > 0, shares, 0.0)
        return np.divide(some, self.left, out=np.zeros_like(some), where=self.left > 0)

    def divide(self, plan: Plan) -> Plan:
        """The plan in which each row holds its client's part of its model."""
        cut = np.zeros(len(plan), np.int64)
        for k, part in enumerate(self.parts, start=1):
            cut[(plan.model == part.model) & (self.widths[plan.client] == part.width)] = k
        return replace(plan, cut=cut, cuts=self.parts)


def hold(
    policies: dict[str, Any],
    units: tuple[Units, ...],
    models: list[Model],
    shares: Array,
    states: dict[str, State],
    seed: int,
    now: int,
) -> Held | None:
    """A round's parts: one per model and width below 1. None: everybody trains whole models."""
    widths = policies["capacity"].widths(states["capacity"])
    if widths is None:
        return None
    out = widths == 0
    left = shares[:, ~out].sum(axis=1, keepdims=True) if out.any() else None
    parts = []
    for s, model in enumerate(models):
        for width in np.unique(widths[shares[s] > 0]).tolist():
            if not 0 < width < 1:
                continue
            wanted = Wanted(s, model, units[model.task], width, now)
            generator = rng.generator(rng.key(seed, "submodel", now, s, round(1e6 * width)))
            cut = keep(
                wanted.units, policies["submodel"].keep(states["submodel"], wanted, generator)
            )
            share = float(shares[s, widths == width].sum())
            share = share if left is None else share / float(left[s, 0])
            parts.append(SubModel(s, width, share, cut))
    how = getattr(policies["submodel"], "trains", "plain")
    if how in NESTED:
        _check_nested(parts)
    return Held(widths, tuple(parts), units, left, how)


def _check_nested(parts: list[SubModel]) -> None:
    """Parts come by model, the narrowest first."""
    for narrow, wide in pairwise(parts):
        kept = zip(narrow.cut.kept, wide.cut.kept, strict=False)
        if narrow.model == wide.model and not all(np.isin(*each).all() for each in kept):
            raise BadInput(
                f"the part of width {narrow.width:g} is no part of that of width {wide.width:g}: "
                "a choice of units with nested parts must keep the same units first, as ordered "
                "does"
            )
