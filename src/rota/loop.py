"""The round. Read this first.

    plan    = who trains what                        sampler.draw
    chunks  = what came back, as it comes            engine.train
    models  = models - estimate of the full update   estimator, server
    state   = what the next round decides from       sampler.observe

Everything that a run remembers is in `State`, so a checkpoint is a State and resuming is `play` from it. Every random number is
addressed by (seed, purpose, round, client, model), so nothing depends on how far a generator has been used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from rota import plan as nouns
from rota import rng
from rota.data.federation import Array
from rota.engine import Devices, Engine
from rota.estimate import Estimate, Estimator, Server, Sgd, Tensors, Unbiased
from rota.plan import Chunk, Seen, Task
from rota.record import Record, record
from rota.sampling import Sampler
from rota.weights import Weights


@dataclass(frozen=True)
class Experiment:
    """What is run: tasks that share their clients, and the policies that decide over them."""

    tasks: list[Task]
    sampler: Sampler
    estimator: Estimator = field(default_factory=Unbiased)
    server: Server = field(default_factory=Sgd)
    devices: Devices = field(default_factory=Devices)
    rounds: int = 100
    seed: int = 0
    evaluate: int = 1
    """Every how many rounds the models are tested (the last round always is)."""
    target: float | None = None
    """Stop once every model's accuracy is at least this."""

    @cached_property
    def shares(self) -> Array:
        """d[s, i]: client i's share of model s's data."""
        return nouns.shares(self.tasks)

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
    """The virtual clock: synchronous rounds, each as long as its slowest row."""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def nbytes(self) -> int:
        """What the server holds between rounds."""
        tensors = [*self.estimator.values(), *(t for moments in self.server for t in moments.values())]
        return sum(m.nbytes for m in self.models) + sum(a.nbytes for a in self.sampler.values()) + sum(t.nbytes for t in tensors)


def begin(experiment: Experiment, engine: Engine) -> State:
    """The state before the first round."""
    models = engine.initial()
    return State(
        round=0,
        models=models,
        sampler=experiment.sampler.init(experiment.shares),
        estimator=experiment.estimator.init(models, experiment.tasks[0].data.clients),
        server=[{} for _ in models],
    )


def play(experiment: Experiment, engine: Engine, state: State) -> tuple[State, Record]:
    """One round: the new state, and what is written of it."""
    now = state.round + 1
    plan = experiment.sampler.draw(state.sampler, experiment.shares, rng.generator(rng.key(experiment.seed, "draw", now)))

    seen = Seen.nothing(len(plan))
    sums = experiment.estimator.begin(state.estimator, state.models, plan)
    for chunk in engine.train(state.models, plan, now):
        chunk = admit(chunk)
        experiment.estimator.add(sums, plan, chunk)
        seen.add(chunk)
    if len(plan) and not seen.ok.any():
        raise FloatingPointError(f"round {now}: no client's update could be used ({seen.reason[0]}); a lower lr may help")

    estimates, estimator = experiment.estimator.finish(state.estimator, sums)
    models, server = apply(experiment.server, state.models, estimates, state.server)
    row_bytes = np.array([model.nbytes for model in state.models], np.int64)[plan.model]
    new = State(
        round=now,
        models=models,
        sampler=experiment.sampler.observe(state.sampler, plan, seen),
        estimator=estimator,
        server=server,
        seconds=state.seconds + float(np.nanmax(seen.seconds, initial=0.0)),
        bytes_up=state.bytes_up + int(row_bytes[seen.ok].sum()),
        bytes_down=state.bytes_down + int(row_bytes.sum()),
    )
    test = now % experiment.evaluate == 0 or now == experiment.rounds
    totals = {"seconds": new.seconds, "bytes_up": new.bytes_up, "bytes_down": new.bytes_down, "server_bytes": new.nbytes}
    return new, record(now, experiment.names, plan, seen, engine.evaluate(models) if test else None, totals)


def admit(chunk: Chunk) -> Chunk:
    """Turn rows that cannot be used into failed rows, with the reason."""
    finite = torch.isfinite(chunk.update).all(dim=1) & torch.isfinite(chunk.buffers).all(dim=1)
    if bool(finite.all()):
        return chunk
    reason = [old if fine or old else "the update is not finite" for old, fine in zip(chunk.reason, finite.tolist(), strict=True)]
    return replace(chunk, reason=reason)


def apply(server: Server, models: list[Weights], estimates: list[Estimate], states: list[Tensors]) -> tuple[list[Weights], list[Tensors]]:
    """Every model one server step further; a model that nobody trained stays as it is."""
    new_models, new_states = [], []
    for model, (update, buffers), state in zip(models, estimates, states, strict=True):
        if update is not None and buffers is not None:
            params, state = server.step(model.params, update, state)
            model = Weights(params, buffers)
        new_models.append(model)
        new_states.append(state)
    return new_models, new_states
