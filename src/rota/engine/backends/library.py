"""The C library on a CPU: every core trains one row after the other, without stacks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rota.data import memory
from rota.engine.backends.schedule import row_keys
from rota.engine.group import Group, Result, Workers
from rota.engine.native import ROW, Native

RESULTS = 256 << 20
"""Bytes of results that a group may have, or more if that keeps all cores busy ..."""
PART = 1 / 16
"""... but no more than this part of the memory: a few groups wait at the same time."""


class Library:
    """Trains groups with the C library."""

    checks = True

    def __init__(self, native: Native, workers: Workers) -> None:
        self.native, self.workers = native, workers
        each = max(1, native.steps.params.numel * native.steps.dtype.itemsize)
        room = max(1, int(PART * min(memory.total(), 2.0**60)) // each)
        self.rows = min(room, max(8 * workers.number, RESULTS // each))

    def most(self, width: int) -> int:
        """As many rows as have about 256 MB of results, and enough to keep all cores busy."""
        return self.rows

    def start(self, group: Group, alone: bool) -> Callable[[], list[Result]]:
        """Begin to train a group on all idle cores; what is returned waits for the results."""
        rows = np.zeros(len(group), ROW)
        keys = row_keys(group.key, group.client, group.task, torch.device("cpu"))
        rows["key"] = keys.numpy().view(np.uint64)
        rows["first"], rows["examples"], rows["batch"] = group.first, group.examples, group.batch
        rows["per_epoch"], rows["steps"] = group.per_epoch, group.steps
        rows["rate"], rows["start"] = group.rate, group.line
        params, buffers = (each.contiguous() for each in group.start)
        plain = self.native.steps.fuses(group)
        shift, anchor = (
            None if each is None else each.contiguous() for each in (group.shift, group.anchor)
        )
        given = rows, params, buffers, shift, anchor
        workers = self.workers
        finish = self.native.start(workers.threads, workers.number, group.width, plain, *given)

        def results() -> list[Result]:
            found = finish()
            ok = np.array([not reason for reason in found.reason])
            return [
                Result(
                    row=group.row,
                    update=found.update,
                    buffers=found.buffers,
                    loss=found.loss,
                    steps=np.where(ok, group.steps, 0),
                    processed=np.where(ok, group.processed, 0),
                    reason=found.reason,
                )
            ]

        return results
