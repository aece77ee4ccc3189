"""How a round's cost grows with the number of clients and with the cohort; of the server's part, drawing and observing, above all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rota import data, loop, models
from rota.bench.works import images
from rota.data.federation import Array, Federation, Part
from rota.engine import make
from rota.estimate import FedAvg
from rota.loop import Experiment
from rota.plan import Plan, Seen, State, Task
from rota.sampling import SAMPLERS, Sampler

CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
COHORTS = (1, 10, 100, 1_000)
COHORT, AMONG = 10, 10_000  # the cohort while the clients grow, and the clients while the cohort grows
LEARNS = "kvib"  # a sampler that learns has the most to do
OTHERS = ("uniform", "proportional", "vrb", "mabs", "avare", "osmd", "osmd-adaptive", "osmd-independent", "clustered-size")
"""Unbiased ones that ask nobody before they draw: of the most clients, with the largest cohort."""
FLEET = (100_000, 1_000)  # clients and cohort of McMahan's CNN
EXAMPLES = 5  # of each client


@dataclass(frozen=True)
class Timed:
    """A sampler, and how long its draws and observations took in each round."""

    inner: Sampler
    seconds: list[float] = field(default_factory=list)

    def init(self, shares: Array, rounds: int) -> State:
        return self.inner.init(shares, rounds)

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        began = time.perf_counter()
        plan = self.inner.draw(state, shares, generator)
        self.seconds.append(time.perf_counter() - began)
        return plan

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        began = time.perf_counter()
        state = self.inner.observe(state, shares, plan, seen)
        self.seconds[-1] += time.perf_counter() - began
        return state


def measure(device: str, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Logistic regression: a row for every number of clients, sampler and cohort; and a large round of a large network."""
    rows = []
    settings = [(n, COHORT, LEARNS) for n in CLIENTS] + [(CLIENTS[-1], COHORTS[-1], sampler) for sampler in (LEARNS, *OTHERS)]
    settings += [(AMONG, cohort, LEARNS) for cohort in COHORTS]
    held: Federation | None = None
    for clients, cohort, sampler in settings:
        if held is None or held.clients != clients:
            say(f"growth: making {clients:,} clients")
            held = data.synthetic(clients=clients, examples=EXAMPLES)
        say(f"growth: {clients:,} clients, {cohort:,} a round, {sampler}")
        rows.append(_measure("logistic", held, cohort, sampler, device, rounds))
    clients, cohort = FLEET
    say(f"growth: {clients:,} clients, {cohort:,} CNNs a round")
    return [*rows, _measure("cnn", _digits(clients), cohort, LEARNS, device, rounds)]


def _digits(clients: int) -> Federation:
    """Made-up images for so many clients."""
    total, tests = clients * EXAMPLES, 1000
    made = images(total + tests, (1, 28, 28), strength=3.5)
    x, y = made.x, made.y
    parts = Part(x[:total], y[:total], np.arange(clients + 1) * EXAMPLES), Part(x[total:], y[total:], np.array([0, tests]))
    return Federation("made-up mnist", *parts, 10)


def _measure(model: str, federation: Federation, cohort: int, sampler: str, device: str, rounds: int) -> dict[str, Any]:
    task = Task(models.MODELS[model], federation, lr=0.05, batch=EXAMPLES)
    options: dict[str, Any] = {"budget": cohort}
    timed = Timed(SAMPLERS[sampler](**options))
    experiment = Experiment([task], timed, FedAvg(), rounds=rounds + 3, evaluate=rounds + 3)
    machine = make("batched", [task], experiment.devices, 0, device)
    state = loop.begin(experiment, machine)
    seconds = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        state, _ = loop.play(experiment, machine, state)
        seconds.append(time.perf_counter() - began)
    score = machine.evaluate(state.models)[0]
    whole, server = float(np.median(seconds[2:])), float(np.median(timed.seconds[2:]))
    return {
        "work": "growth",
        "system": "rota-batched",
        "device": device,
        "seconds_per_round": whole,
        "accuracy": score.accuracy,
        "loss": score.loss,
        "model": model,
        "clients": federation.clients,
        "cohort": cohort,
        "sampler": sampler,
        "server_seconds_per_round": server,
        "server_share": server / whole,
    }
