"""What a run folder writes down about its data: who holds how much of what, and a digest."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from rota.data.federation import Federation
from rota.data.roster import Numbered, Roster

LISTED_CLIENTS = 2000
"""Up to this many clients are listed one by one; beyond it, an even selection of them by size."""

LABELLED = 50_000_000
"""Up to this many (client, class) pairs, labels are counted."""

DIGESTED = 2**26
"""The digest reads at most this many bytes of the inputs, and as many of the targets."""


def describe(data: Federation | Roster) -> dict[str, Any]:
    """One task's clients: their sizes, and their label counts where the targets are classes.

    Test examples and labels are left out where the examples are not at hand.
    """
    roster = data.roster if isinstance(data, Federation) else data
    shown = np.arange(roster.clients)
    if roster.clients > LISTED_CLIENTS:
        by_size = np.argsort(roster.sizes, kind="stable")
        even = np.linspace(0, roster.clients - 1, LISTED_CLIENTS).astype(int)
        shown = np.sort(by_size[even])
    out: dict[str, Any] = {
        "data": roster.name,
        "clients": roster.clients,
        "examples": int(roster.sizes.sum()),
    }
    if isinstance(data, Federation):
        out["test_examples"] = len(data.test.y)
        if data.validation is not None:
            out["validation_examples"] = len(data.validation)
    out |= {
        "digest": digest(data),
        "shown": shown.tolist(),
        "sizes": roster.sizes[shown].tolist(),
    }
    if isinstance(data, Federation) and 0 < data.clients * data.classes <= LABELLED:
        out["labels"] = data.train.label_counts(data.classes)[shown].tolist()
    return out


def digest(data: Federation | Roster) -> str:
    """A digest of who has which examples, of all targets, and of the inputs.

    Of many inputs, an even selection is read. Without examples, the roster itself is read.
    """
    out = hashlib.blake2b(digest_size=16)
    if isinstance(data, Roster):
        out.update(repr((data.name, data.shape, data.classes)).encode())
        out.update(data.sizes.tobytes())
        if not isinstance(data.ids, Numbered):
            out.update("\0".join(data.ids).encode())
        return out.hexdigest()
    for part in (data.train, data.test):
        out.update(part.offsets.tobytes())
        for values in (part.y, part.x):
            step = max(1, -(-values.nbytes // DIGESTED))
            rows = values[::step].contiguous().cpu()
            out.update(rows.view(torch.uint8).numpy().tobytes())
    if data.validation is not None:
        for values in (data.validation.y, data.validation.x):
            step = max(1, -(-values.nbytes // DIGESTED))
            out.update(values[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return out.hexdigest()
