"""What a round's line in rounds.jsonl says about parts of models."""

from __future__ import annotations

from typing import Any

import numpy as np

from rota.plan import Plan, Seen

NEIGHBOURS = 64
"""A record counts the units that parts leave out in at most this many groups per layer."""


def told(names: list[str], plan: Plan, seen: Seen) -> dict[str, Any]:
    """Who held only a part of a model, how long that took, and which units were left out.

    `slowest` is the client that the round waited for; it trains its models one after the other.
    """
    if plan.cut is None:
        return {}
    width = np.array([1.0, *(part.width for part in plan.cuts)])[plan.cut]
    rows = np.flatnonzero(width < 1)
    held = {}
    for s, name in enumerate(names):
        mine = rows[plan.model[rows] == s]
        held[name] = {
            "client": plan.client[mine].tolist(),
            "width": width[mine].tolist(),
            "seconds": seen.seconds[mine].tolist(),
        }
    slowest = None
    if np.isfinite(seen.seconds).any():
        by_client = np.bincount(plan.client, np.nan_to_num(seen.seconds))
        client = int(plan.client[by_client[plan.client].argmax()])  # all may have taken no time
        narrow = float(width[plan.client == client].min())
        slowest = {"client": client, "seconds": float(by_client[client]), "width": narrow}
    return {
        "parts": len(rows),
        "narrowest": float(width[rows].min(initial=1.0)),
        "slowest": slowest,
        "held": held,
        "dropped": _dropped(names, plan),
    }


def _dropped(names: list[str], plan: Plan) -> dict[str, Any]:
    """For each model and layer, how many rows left out each unit; means over neighbours."""
    out: dict[str, Any] = {}
    for k, part in enumerate(plan.cuts, start=1):
        rows, model = int(np.sum(plan.cut == k)), out.setdefault(names[part.model], {})
        for layer, kept in zip(part.cut.units.layers, part.cut.kept, strict=True):
            times = np.full(layer.size, rows)
            times[kept] = 0
            number = min(layer.size, NEIGHBOURS)
            starts = np.arange(number) * layer.size // number
            means = np.add.reduceat(times, starts) / np.diff(starts, append=layer.size)
            model[layer.name] = np.round(means + model.get(layer.name, 0.0), 3).tolist()
    return out
