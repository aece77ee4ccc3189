"""Drift: clients' data change during the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rota import rng
from rota.arrays import Array
from rota.data.federation import Federation, Part
from rota.errors import BadInput

if TYPE_CHECKING:
    from rota.engine import Engine, Score
    from rota.experiment import Experiment
    from rota.plan import Chunk, Job, Model, Seen


@dataclass(frozen=True)
class Drift:
    """Every `every` rounds a random `share` of the clients get data like another one's.

    A mover gets the examples of another mover: as many as it had, so that the shares stay as they
    are. They are repeated if the other one had fewer. Clients' own test sets move too. Without
    `every` nothing changes.
    """

    every: int | None = None
    share: float = 1.0

    def check(self) -> None:
        """Refuse options that make no sense."""
        if self.every is not None and self.every < 1:
            raise BadInput(f"drift.every is {self.every}: it must be at least 1")
        if not 0 < self.share <= 1:
            raise BadInput(f"drift.share is {self.share:g}: it must be above 0 and at most 1")

    def phase(self, now: int) -> int:
        """How often data have changed before round `now`."""
        return 0 if self.every is None else (now - 1) // self.every

    def sources(self, sizes: Array, seed: int, phase: int) -> Array:
        """Whose first data each client has after so many changes."""
        source = np.arange(len(sizes))
        for number in range(1, phase + 1):
            generator = rng.generator(rng.key(seed, "drift", number))
            some = generator.permutation(np.flatnonzero(sizes))
            movers = some[: max(2, round(self.share * len(some)))]
            source[movers] = source[np.roll(movers, 1)]
        return source

    def data(self, data: Federation, seed: int, phase: int) -> Federation:
        """The clients' data after so many changes."""
        sizes = data.train.sizes
        source = self.sources(sizes, seed, phase)
        train = _moved(data.train, source, sizes)
        test = data.test
        if not data.shared_test:
            test = _moved(test, source, test.sizes[source])
        return replace(data, train=train, test=test)


def _moved(part: Part, source: Array, sizes: Array) -> Part:
    """A part in which every client has so many of its source's examples."""
    first = [np.arange(*part.offsets[client : client + 2]) for client in source.tolist()]
    rows = [np.resize(some, size) for some, size in zip(first, sizes.tolist(), strict=True)]
    places = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    return Part(part.x[places], part.y[places], np.concatenate([[0], np.cumsum(sizes)]))


class Drifting:
    """An engine whose clients' data change: one engine for each stretch of rounds.

    Which data a job sees depends on its round alone, so a resumed run sees the same.
    """

    def __init__(self, make: Callable[[Experiment], Engine], experiment: Experiment) -> None:
        self.make, self.experiment, self.phase = make, experiment, 0
        self.engine = make(experiment)
        if hasattr(self.engine, "fleet") or not all(
            isinstance(task.data, Federation) for task in experiment.tasks
        ):
            if hasattr(self.engine, "close"):
                self.engine.close()
            raise BadInput("drift is for simulations: leave drift.every out")

    def _at(self, now: int) -> Engine:
        """The engine on the data of a round."""
        drift: Drift = self.experiment.policies["drift"]
        phase, seed = drift.phase(now), self.experiment.seed
        if phase != self.phase:
            tasks = [
                replace(task, data=drift.data(task.federation, seed, phase))
                for task in self.experiment.tasks
            ]
            self.engine, self.phase = self.make(replace(self.experiment, tasks=tasks)), phase
        return self.engine

    def initial(self) -> list[Model]:
        """The models before the first round."""
        return self.engine.initial()

    def train(self, job: Job) -> Iterator[Chunk]:
        """Train the rows of a job on the data of its round."""
        return self._at(job.now).train(job)

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        """Each row's mean loss on the data of its round."""
        return self._at(job.now).losses(job, examples)

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        """The scores on the test sets of the last job's round."""
        return self.engine.evaluate(models, which)
