"""Engines execute plans; they decide nothing. Same plan and seed, same result, on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from rota.arrays import Array
from rota.engine.batched import Batched
from rota.engine.local import Correction
from rota.engine.score import Score
from rota.engine.sequential import Sequential
from rota.errors import BadInput, did_you_mean
from rota.plan import Chunk, Plan, Task
from rota.weights import Weights
from rota.world.devices import Devices

__all__ = ["ENGINES", "Batched", "Devices", "Engine", "Score", "Sequential", "make", "where"]


class Engine(Protocol):
    """Holds the tasks' data and modules on a device."""

    def initial(self) -> list[Weights]:
        """The models before the first round."""

    def train(
        self, models: list[Weights], plan: Plan, now: int, correction: Correction | None = None
    ) -> Iterator[Chunk]:
        """Run the plan's rows from these models, as in round `now`; a row's randomness is addressed by (seed, now, client, model)."""

    def evaluate(self, models: list[Weights], which: Sequence[int] | None = None) -> list[Score]:
        """The models' losses and scores on the test part: of all, or of those with the numbers `which`."""

    def losses(
        self, models: list[Weights], plan: Plan, now: int, examples: int | None = None
    ) -> tuple[Array, Array]:
        """Each row's mean loss of its model on the client's training examples, or on some of them at random, and how many those were."""

    def seconds(self, model: int, clients: Array, examples: Array, nbytes: float) -> Array:
        """How long a model's rows take: training on so many examples, and so many bytes on the link."""


ENGINES: dict[str, Callable[..., Engine]] = {"sequential": Sequential, "batched": Batched}
PRECISIONS = ("fp32", "tf32", "bf16")


def where(device: str) -> str:
    """A device that is here, by name; "auto" is a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device is 'cuda', but torch sees no GPU here: use --device cpu")
    if device not in ("cpu", "cuda"):
        raise BadInput(f"unknown device '{device}': use cuda (a GPU), cpu, or auto")
    return device


def make(
    name: str,
    tasks: list[Task],
    devices: Devices,
    seed: int,
    device: str = "auto",
    precision: str = "fp32",
) -> Engine:
    """An engine by name ("auto": the fastest that fits) on a device ("auto": a GPU where there is one).

    `precision` is that of products and convolutions: "tf32" (on a GPU) and "bf16" are faster and round more.
    """
    if name == "auto":
        name = "batched"  # which leaves to the sequential engine what it cannot stack
    if name not in ENGINES:
        raise BadInput(f"unknown engine '{name}': {did_you_mean(name, ['auto', *ENGINES])}")
    device = where(device)
    if precision not in PRECISIONS:
        raise BadInput(f"unknown precision '{precision}': {did_you_mean(precision, PRECISIONS)}")
    if device == "cuda":  # by default torch takes tf32 for convolutions, and not for products
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
            precision != "fp32"
        )
    return ENGINES[name](
        tasks, devices, seed, torch.device(device), torch.bfloat16 if precision == "bf16" else None
    )
