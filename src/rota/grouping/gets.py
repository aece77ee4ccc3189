"""What each client gets: the model of its group, on its own test set and on everybody's."""

from __future__ import annotations

from typing import Any

import numpy as np

from rota.arrays import Array
from rota.engine import Score

LISTED = 200
"""Up to this many clients are listed one by one."""


Entries = dict[str, Any]


def gets(names: list[str], shares: Array, scores: list[Score] | None, alike: str) -> Entries:
    """Entries of a round's record: over all clients, and of each model's clients.

    There are such entries if clients have test sets, or models have groups. A client that has
    several models counts once for each. There are no entries over all models if their scores are
    not `alike`, which says what is better.
    """
    apart = bool(((shares > 0).sum(axis=1) < shares.shape[1]).any())
    if not scores or not (apart or any(score.by_client is not None for score in scores)):
        return {}
    own, whole, found = [], [], dict[str, Entries]()
    for name, row, score in zip(names, shares, scores, strict=True):
        members = np.flatnonzero(row > 0)
        mine = np.full(len(members), np.nan)
        if score.by_client is not None:
            mine = score.by_client[members]
        found[name] = {"clients": len(members), **over(mine, score.better)}
        if len(members) <= LISTED and score.by_client is not None:
            found[name]["own"] = dict(zip(map(str, members.tolist()), mine.tolist(), strict=True))
        own.append(mine)
        whole.append(np.full(len(members), score.accuracy))
    out: dict[str, Any] = {"groups_of_clients": found}
    if alike:
        figures = over(np.concatenate(own), alike)
        out |= {f"own_{key}": value for key, value in figures.items()}
        out["shared_mean"] = _mean(np.concatenate(whole))
    return out


def over(values: Array, better: str = "higher") -> dict[str, float]:
    """Mean, worst, worst 10th percentile and standard deviation of clients' scores, where known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {}
    return {
        "mean": float(known.mean()),
        "worst": float(known.max() if better == "lower" else known.min()),
        "p10": float(np.quantile(known, 0.9 if better == "lower" else 0.1)),
        "spread": float(known.std()),
    }


def _mean(values: Array) -> float | None:
    return float(values.mean()) if len(values) else None
