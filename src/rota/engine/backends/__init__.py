"""What trains a group of rows at once: rows in, results out.

library   the C library: a core trains one row after the other (CPU)
stacks    rows as one computation of torch operators (CPU)
graphs    such stacks with every local step as one CUDA graph (GPU)

A back end belongs to one family of tasks, whose rows differ in their data, their start and their
learning rate, but not in their computation. It decides nothing about who trains with whom.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from rota.engine import native
from rota.engine.backends.graphs import Graphs
from rota.engine.backends.library import Library
from rota.engine.backends.stacks import Stacks
from rota.engine.examples import Examples
from rota.engine.group import Group, Result, Workers
from rota.engine.rules import Unbatchable
from rota.engine.steps import Steps
from rota.engine.trials import verify
from rota.errors import not_a_clients

__all__ = ["Backend", "Graphs", "Group", "Library", "Result", "Stacks", "Workers", "choose"]

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Trains the rows of one family."""

    checks: bool
    """Whether the back end itself fails rows whose data leave the model's tables."""

    def most(self, width: int) -> int:
        """The most rows that one group may have, with mini-batches of this width."""

    def start(self, group: Group, alone: bool) -> Callable[[], list[Result]]:
        """Begin to train a group; what is returned waits for the results.

        `alone` says that no other group is to train meanwhile.
        """


def joins(device: torch.device) -> bool:
    """Whether tasks with different data may share groups; on a CPU that would gain nothing."""
    return device.type == "cuda"


def widths(device: torch.device) -> tuple[int, int]:
    """How fine the grid of mini-batch widths is, and the least width: a GPU prefers few groups."""
    return (8, 16) if device.type == "cuda" else (16, 1)


def choose(steps: Steps, examples: Examples, width: int, workers: Workers) -> Backend:
    """The fastest back end that trains a step; raises Unbatchable if there is none.

    The step is tried on mini-batches of `width`.
    """
    if steps.x.device.type == "cuda":
        verify(steps, width)
        return Graphs(steps, examples, workers)
    if steps.autocast is None:
        try:
            made = native.Native(steps, workers.spare)
            native.verify(made, width)
            return Library(made, workers)
        except Unbatchable:
            raise
        except Exception as error:  # whatever keeps the C library from it
            known = isinstance(error, native.Unsupported | native.Unavailable)
            if not known and not_a_clients(error):
                raise
            logger.debug("why the C library does not train it:", exc_info=error)
    verify(steps, width)
    return Stacks(steps, workers)
