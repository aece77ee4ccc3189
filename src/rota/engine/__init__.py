"""Engines execute plans and decide nothing. The same plan and seed give the same result on all."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rota.engine.batched import Batched
from rota.engine.machine import where
from rota.engine.score import Score
from rota.engine.sequential import Sequential
from rota.errors import BadInput, did_you_mean
from rota.plan import Chunk, Job, Model, Seen
from rota.running import choices
from rota.world.drift import Drifting

if TYPE_CHECKING:
    from rota.experiment import Experiment

__all__ = ["ENGINES", "Batched", "Engine", "Options", "Score", "Sequential", "make", "where"]


class Engine(Protocol):
    """Holds the tasks' networks, and reaches the clients' data."""

    def initial(self) -> list[Model]:
        """The models before the first round, one per task."""

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a job; a row's randomness is addressed by (seed, now, client, task)."""

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        """The test losses and scores of all models, or of those with the numbers `which`."""

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        """Each row's mean loss over its client's training examples, or over some at random."""


@dataclass(frozen=True)
class Options:
    """Where an engine computes, and with which precision; None is full precision."""

    device: torch.device
    autocast: torch.dtype | None = None


class Maker(Protocol):
    """What makes an engine; the classes in ENGINES are such."""

    def make(self, experiment: Experiment, options: Options) -> Engine:
        """The engine for an experiment."""


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


ENGINES: dict[str, Any] = {name: _load(place) for name, place in choices.ENGINES.items()}
"""Classes with `make(experiment, options)`, which returns an Engine."""


def make(
    name: str | Maker, experiment: Experiment, device: str = "auto", precision: str = "fp32"
) -> Engine:
    """Make an engine by its name ("auto": the fastest) on a device ("auto": a GPU if there is one).

    Instead of a name, anything with `make` will do, such as a fleet of clients that has met.
    `precision` "tf32" (on a GPU) and "bf16" make products and convolutions faster, and round more.
    """
    if name == "auto":
        name = "batched"  # it leaves to the sequential engine what it cannot stack
    known = name in ENGINES if isinstance(name, str) else hasattr(name, "make")
    if not known:
        raise BadInput(f"unknown engine '{name}': {did_you_mean(str(name), ['auto', *ENGINES])}")
    device = where(device)
    if precision not in choices.PRECISIONS:
        hint = did_you_mean(precision, choices.PRECISIONS)
        raise BadInput(f"unknown precision '{precision}': {hint}")
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)
        # by default torch takes tf32 for convolutions, but not for products
        tf32 = precision != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    autocast = torch.bfloat16 if precision == "bf16" else None
    from rota.personal.prepare import prepared  # which needs this module

    maker: Maker = ENGINES[name] if isinstance(name, str) else name
    options = Options(torch.device(device), autocast)
    if experiment.policies["drift"].every is None:
        return maker.make(prepared(experiment), options)
    return Drifting(lambda each: maker.make(prepared(each), options), experiment)
