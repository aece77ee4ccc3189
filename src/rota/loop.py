"""The round. Read this first.

    shares  = who has what, and can be reached       availability.step
    plan    = who trains what                        sampler.ask, sampler.draw
    chunks  = what came back, as it comes            engine.train
    models  = models - estimate of the full update   estimator, server
    state   = what the next round decides from       sampler.observe

Everything that a run remembers is in `State`, so a checkpoint is a State and resuming is `play` from it. Every random number is
addressed by (seed, purpose, round, client, model), so nothing depends on how far a generator has been used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rota import plan as nouns
from rota import rng
from rota.arrays import Array
from rota.engine import Devices, Engine
from rota.estimate import Correcting, Estimate, Estimator, Server, Sgd, Tensors, Unbiased
from rota.plan import Seen, Task, admit, checked
from rota.probe import Setting, price, probe
from rota.running.record import Record, record, same_score
from rota.sampling import Sampler
from rota.sampling.metrics import Meter
from rota.weights import Weights
from rota.world.availability import Availability


@dataclass(frozen=True)
class Experiment:
    """What is run: tasks that share their clients, and the policies that decide over them."""

    tasks: list[Task]
    sampler: Sampler
    estimator: Estimator = field(default_factory=Unbiased)
    server: Server = field(default_factory=Sgd)
    devices: Devices = field(default_factory=Devices)
    availability: Availability = field(default_factory=Availability)
    rounds: int = 100
    seed: int = 0
    evaluate: int = 1
    """Every how many rounds the models are tested (the last round always is)."""
    target: float | None = None
    """Stop once every model's accuracy is at least this."""
    metrics: Sequence[str] = ()
    """What is also measured of the sampler in every round (rota.sampling.metrics), at no cost to the run."""

    @cached_property
    def shares(self) -> Array:
        """d[s, i]: client i's share of model s's data."""
        return nouns.shares(self.tasks)

    def pace(self, now: int) -> Array:
        """Each model's learning rate in round `now`, in parts of the largest."""
        rates = np.array([task.lr_at(now) for task in self.tasks])
        return np.asarray(rates / rates.max())

    @property
    def names(self) -> list[str]:
        """The models' names: their tasks', or their data's, numbered where that is not unique."""
        plain = [task.name or task.data.name for task in self.tasks]
        return [name if plain.count(name) == 1 else f"{name}-{s}" for s, name in enumerate(plain)]


@dataclass(frozen=True)
class State:
    """Everything a run remembers after `round` rounds."""

    round: int
    models: list[Weights]
    sampler: nouns.State
    estimator: Tensors
    server: list[Tensors]
    seconds: float = 0.0
    """The virtual clock: synchronous rounds, each as long as its slowest client."""
    bytes_up: int = 0
    bytes_down: int = 0
    availability: nouns.State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What the server holds between rounds."""
        tensors = [
            *self.estimator.values(),
            *(t for moments in self.server for t in moments.values()),
        ]
        arrays = [*self.sampler.values(), *self.availability.values()]
        return sum(int(each.nbytes) for each in [*self.models, *arrays, *tensors])


def begin(experiment: Experiment, engine: Engine) -> State:
    """The state before the first round."""
    models, clients = engine.initial(), experiment.tasks[0].roster.clients
    return State(
        round=0,
        models=models,
        sampler=experiment.sampler.init(experiment.shares, experiment.rounds),
        estimator=experiment.estimator.init(models, experiment.shares),
        server=[{} for _ in models],
        availability=experiment.availability.init(clients),
    )


def play(
    experiment: Experiment, engine: Engine, state: State, meter: Meter | None = None
) -> tuple[State, Record]:
    """One round: the new state, and what is written of it, with what `meter` says."""
    now, sampler, estimator = state.round + 1, experiment.sampler, experiment.estimator
    shares, availability = experiment.availability.step(
        state.availability, experiment.shares, experiment.seed, now
    )
    pace = experiment.pace(now)
    setting = Setting(engine, estimator, state.models, now, experiment.seed, pace)
    memory, recalled, asked = probe(setting, sampler, state.sampler, shares, state.estimator)
    plan = checked(
        sampler.draw(memory, shares, rng.generator(rng.key(experiment.seed, "draw", now))), shares
    )

    seen = Seen.nothing(
        len(plan), updates=getattr(sampler, "updates", False), pace=pace[plan.model]
    )
    correction = estimator.correction(recalled, plan) if isinstance(estimator, Correcting) else None
    sums = estimator.begin(recalled, state.models, plan)
    for chunk in engine.train(state.models, plan, now, correction):
        chunk = admit(chunk)
        seen.add(chunk, estimator.add(sums, plan, chunk))

    estimates, remembered = estimator.finish(recalled, sums)
    models, server = apply(experiment.server, state.models, estimates, state.server)
    cost = price(setting, plan, seen, asked)
    new = State(
        round=now,
        models=models,
        sampler=sampler.observe(memory, shares, plan, seen),
        estimator=remembered,
        server=server,
        availability=availability,
        seconds=state.seconds + cost.seconds,
        bytes_up=state.bytes_up + cost.bytes_up,
        bytes_down=state.bytes_down + cost.bytes_down,
    )
    test = now % experiment.evaluate == 0 or now == experiment.rounds
    totals: Record = {
        "seconds": new.seconds,
        "client_seconds": cost.client_seconds,
        "bytes_up": new.bytes_up,
        "bytes_down": new.bytes_down,
    }
    totals |= {
        "server_bytes": new.nbytes,
        **(meter(memory, shares, state.models, now) if meter else {}),
    }
    scores = engine.evaluate(models) if test else None
    return new, record(
        now, experiment.names, plan, seen, scores, totals, asked, same_score(experiment.tasks)
    )


def apply(
    server: Server, models: list[Weights], estimates: list[Estimate], states: list[Tensors]
) -> tuple[list[Weights], list[Tensors]]:
    """Every model one server step further; a model of which nothing is known stays as it is."""
    new_models, new_states = [], []
    for model, (update, buffers), state in zip(models, estimates, states, strict=True):
        if update is not None:
            params, state = server.step(model.params, update, state)
            model = Weights(params, model.buffers if buffers is None else buffers)
        new_models.append(model)
        new_states.append(state)
    return new_models, new_states
