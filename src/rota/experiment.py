"""What is run, and what a run remembers: Experiment and State."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rota import plan as nouns
from rota import submodel
from rota.arrays import Array
from rota.channel import Channel, Whole
from rota.metrics.own import Measure
from rota.plan import Model, Task
from rota.policies import KINDS
from rota.submodel.tasks import units_of_all
from rota.submodel.units import Units


def _held(kind: str) -> Any:
    return property(lambda experiment: experiment.policies[kind])


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
    metrics: Sequence[str | Measure] = ()
    """Measures of the sampler by name, and functions that measure the models (rota.metrics)."""

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
        metrics: Sequence[str | Measure] = (),
        policies: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        unknown = given.keys() - KINDS.keys()
        if unknown:
            raise TypeError(f"unknown argument '{unknown.pop()}': policies are {', '.join(KINDS)}")
        given |= {"sampler": sampler, "estimator": estimator}
        held = {**(policies or {}), **{k: p for k, p in given.items() if p is not None}}
        if any(isinstance(p, str | dict) for p in held.values()):
            from rota.recipe.named import policy  # which reads all that can be named

            held = {k: policy(k, p, tasks) for k, p in held.items()}
        held |= {k: kind.make() for k, kind in KINDS.items() if held.get(k) is None}
        values = (tasks, {k: held[k] for k in KINDS}, rounds, seed, evaluate, target, metrics)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    def using(self, **policies: Any) -> Experiment:
        """The same experiment with other policies, given by their kinds."""
        return replace(self, policies={**self.policies, **policies})

    sampler, estimator, server = (_held(kind) for kind in ("sampler", "estimator", "server"))
    devices, availability = _held("devices"), _held("availability")
    admission, capacity = _held("admission"), _held("capacity")

    @property
    def channel(self) -> Channel | None:
        """What updates go through on their way to the server; None: they travel as they are."""
        channel: Channel = self.policies["channel"]
        return None if type(channel) is Whole else channel

    @cached_property
    def shares(self) -> Array:
        """d[t, i]: client i's share of task t's data; a run begins with one model per task."""
        return nouns.shares(self.tasks)

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
