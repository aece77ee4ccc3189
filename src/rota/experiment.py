"""What is run, and what a run remembers: Experiment and State."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rota import plan as nouns
from rota import submodel
from rota.admission import Admission
from rota.arrays import Array
from rota.channel import Channel, Whole
from rota.estimate import Estimator, Server
from rota.plan import Model, Task
from rota.policies import KINDS
from rota.sampling import Sampler
from rota.submodel import Capacity
from rota.submodel.tasks import units_of_all
from rota.submodel.units import Units
from rota.world.availability import Availability
from rota.world.devices import Devices


@dataclass(frozen=True, init=False)
class Experiment:
    """What is run: tasks that share their clients, and one policy of each kind that decides.

    Policies are given by the names of their kinds: Experiment(tasks, sampler=KVib(10)).
    """

    tasks: list[Task]
    policies: dict[str, Any]
    rounds: int = 100
    seed: int = 0
    evaluate: int = 1
    """The models are tested after every so many rounds, and after the last one."""
    target: float | None = None
    """Stop once every model's accuracy is at least this."""
    metrics: Sequence[str] = ()
    """Measures of the sampler in every round, at no cost to the run (rota.metrics)."""

    def __init__(
        self,
        tasks: list[Task],
        sampler: Any = None,
        estimator: Any = None,
        *,
        rounds: int = 100,
        seed: int = 0,
        evaluate: int = 1,
        target: float | None = None,
        metrics: Sequence[str] = (),
        policies: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        unknown = given.keys() - KINDS.keys()
        if unknown:
            raise TypeError(f"unknown argument '{unknown.pop()}': policies are {', '.join(KINDS)}")
        given |= {"sampler": sampler, "estimator": estimator}
        held = {**(policies or {}), **{k: p for k, p in given.items() if p is not None}}
        held |= {k: kind.make() for k, kind in KINDS.items() if held.get(k) is None}
        values = (tasks, {k: held[k] for k in KINDS}, rounds, seed, evaluate, target, metrics)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    def using(self, **policies: Any) -> Experiment:
        """The same experiment with other policies, given by their kinds."""
        return replace(self, policies={**self.policies, **policies})

    @property
    def sampler(self) -> Sampler:
        return self.policies["sampler"]  # type: ignore[no-any-return]

    @property
    def estimator(self) -> Estimator:
        return self.policies["estimator"]  # type: ignore[no-any-return]

    @property
    def server(self) -> Server:
        return self.policies["server"]  # type: ignore[no-any-return]

    @property
    def devices(self) -> Devices:
        return self.policies["devices"]  # type: ignore[no-any-return]

    @property
    def availability(self) -> Availability:
        return self.policies["availability"]  # type: ignore[no-any-return]

    @property
    def admission(self) -> Admission:
        return self.policies["admission"]  # type: ignore[no-any-return]

    @property
    def channel(self) -> Channel | None:
        """What updates go through on their way to the server; None: they travel as they are."""
        channel: Channel = self.policies["channel"]
        return None if type(channel) is Whole else channel

    @cached_property
    def shares(self) -> Array:
        """d[t, i]: client i's share of task t's data; a run begins with one model per task."""
        return nouns.shares(self.tasks)

    @property
    def capacity(self) -> Capacity:
        return self.policies["capacity"]  # type: ignore[no-any-return]

    @cached_property
    def units(self) -> tuple[Units, ...]:
        """Each task's droppable units; empty if no client ever trains a part of a model."""
        if type(self.capacity) in (submodel.Whole, submodel.Exclude):
            return ()
        return units_of_all(self.tasks, self.policies["submodel"])

    @property
    def names(self) -> list[str]:
        """The tasks' names, or their data's names, numbered where they are not unique."""
        plain = [task.name or task.data.name for task in self.tasks]
        return [n if plain.count(n) == 1 else f"{n}-{t}" for t, n in enumerate(plain)]

    def models(self, models: list[Model]) -> list[str]:
        """The names of a run's models: their tasks', numbered where a task has several."""
        of = [model.task for model in models]
        known = [(self.names[t], of[:s].count(t)) for s, t in enumerate(of)]
        return [f"{n}.{k}" if of.count(t) > 1 else n for (n, k), t in zip(known, of, strict=True)]


@dataclass(frozen=True)
class State:
    """Everything that a run remembers after `round` rounds."""

    round: int
    models: list[Model]
    shares: Array
    """d[s, i]: client i's share of model s's data."""
    policies: dict[str, nouns.State]
    """What each policy remembers, by kind."""
    seconds: float = 0.0
    """The virtual clock: rounds are synchronous, each as long as its slowest client."""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def nbytes(self) -> int:
        """What the server holds between rounds, apart from the shares."""
        remembered = [value for state in self.policies.values() for value in state.values()]
        return sum(int(each.nbytes) for each in [*self.models, *remembered])
