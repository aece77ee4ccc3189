"""How the cost of a round grows with the clients, the cohort and the models.

Above all, the cost of the server's part: deciding who trains what, and learning from the replies.
"""

from __future__ import annotations

import copy
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rota import data, loop, models
from rota.data.federation import Federation, Part
from rota.engine import make
from rota.estimate import FedAvg, StaleVre
from rota.experiment import Experiment
from rota.plan import Task
from rota.sampling import SAMPLERS, Sampler
from rota_lab.bench import processes
from rota_lab.bench.works import images

CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
COHORTS = (1, 10, 100, 1_000)
COHORT, AMONG = 10, 10_000
"""The cohort while the clients grow, and the clients while the cohort grows."""
LEARNS = "kvib"
"""A sampler that learns has the most to do."""
OTHERS = (
    "uniform",
    "proportional",
    "vrb",
    "mabs",
    "avare",
    "osmd",
    "osmd-adaptive",
    "clustered-size",
)
"""Unbiased samplers that ask no client before they draw: measured with the most clients and the
largest cohort."""
FLEET = (100_000, 1_000)
"""Clients and cohort of McMahan's CNN."""
TASKS, PEOPLE = 20, 10_000
"""Models at once, and their clients, with the largest cohort."""
ASSIGN = (
    "mmfl-random",
    "mmfl-gvr",
    "mmfl-lvr",
    "mmfl-vre",
    "mmfl-kvib",
    "round-robin",
    "round-robin-server",
    "fedfair",
)
"""Samplers that assign models to clients."""
MILLIONS = 10_000_000
LARGE = ("uniform", "kvib", "vrb")
"""Samplers with this many clients, each in a process of its own, which tells its memory."""
EXAMPLES = 5
"""The examples of each client."""


STEPS = ("ask", "hear", "draw", "watch", "see", "learn", "observe")
"""What a sampler does in a round."""


def timed(sampler: Sampler, seconds: list[float]) -> Sampler:
    """The same sampler, which notes how long each of its steps takes."""

    def clocked(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            with _clock(seconds):
                return step(*given)

        return run

    own = type(sampler)
    steps = {name: clocked(getattr(own, name)) for name in STEPS if hasattr(own, name)}
    twin = copy.copy(sampler)
    object.__setattr__(twin, "__class__", type(own.__name__, (own,), steps))
    return twin


@contextmanager
def _clock(seconds: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


def measure(device: str, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Logistic regression with more and more clients, cohorts and models; then a large CNN, ten
    million clients, and rounds in several processes."""
    rows = []
    settings = [(clients, COHORT, LEARNS) for clients in CLIENTS]
    settings += [(CLIENTS[-1], COHORTS[-1], sampler) for sampler in (LEARNS, *OTHERS)]
    settings += [(AMONG, cohort, LEARNS) for cohort in COHORTS]
    held: Federation | None = None
    for clients, cohort, sampler in settings:
        if held is None or held.clients != clients:
            say(f"growth: making {clients:,} clients")
            held = data.synthetic(clients=clients, examples=EXAMPLES)
        say(f"growth: {clients:,} clients, {cohort:,} per round, {sampler}")
        rows.append(_measure("logistic", held, cohort, sampler, device, rounds))
    held = data.synthetic(clients=PEOPLE, examples=EXAMPLES)
    for sampler in ASSIGN:
        say(f"growth: {PEOPLE:,} clients, {COHORTS[-1]:,} per round, {TASKS} models, {sampler}")
        rows.append(_measure("logistic", held, COHORTS[-1], sampler, device, rounds, TASKS))
    clients, cohort = FLEET
    say(f"growth: {clients:,} clients, {cohort:,} CNNs per round")
    rows.append(_measure("cnn", _digits(clients), cohort, LEARNS, device, rounds))
    for sampler in LARGE if device == "cpu" else ():  # the server's work is on a CPU anyway
        say(f"growth: {MILLIONS:,} clients, {COHORTS[-1]:,} per round, {sampler}")
        rows.append(_alone(sampler, rounds))
    return [*rows, *processes.measure(device, rounds, say)]


def _alone(sampler: str, rounds: int) -> dict[str, Any]:
    """A row for the most clients, measured in a process of its own, with its peak memory."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_large, args=(sampler, rounds, there))
    process.start()
    there.close()
    row: dict[str, Any] = here.recv()
    process.join()
    return row


def _large(sampler: str, rounds: int, answer: Any) -> None:
    """Measure rounds of clients with one small example each: the server has nearly all to do."""
    torch.set_num_threads(1)
    x = torch.ones(MILLIONS, 2)
    y = torch.arange(MILLIONS) % 2
    train = Part(x, y, np.arange(MILLIONS + 1))
    test = Part(x[:100], y[:100], np.array([0, 100]))
    data = Federation("two numbers", train, test, 2)
    row = _measure("logistic", data, COHORTS[-1], sampler, "cpu", rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answer.send({**row, "peak_bytes": peak})


def _digits(clients: int) -> Federation:
    """Made-up images for this many clients."""
    total, tests = clients * EXAMPLES, 1000
    made = images(total + tests, (1, 28, 28), strength=3.5)
    x, y = made.x, made.y
    train = Part(x[:total], y[:total], np.arange(clients + 1) * EXAMPLES)
    test = Part(x[total:], y[total:], np.array([0, tests]))
    return Federation("made-up mnist", train, test, 10)


def _measure(
    model: str,
    federation: Federation,
    cohort: int,
    sampler: str,
    device: str,
    rounds: int,
    number: int = 1,
) -> dict[str, Any]:
    task = Task(models.MODELS[model], federation, lr=0.05, batch=EXAMPLES)
    tasks = [replace(task, name=f"{model}-{s + 1}") for s in range(number)]
    options: dict[str, Any] = {"budget": cohort}
    spent: list[float] = []
    policy = timed(SAMPLERS[sampler](**options), spent)
    estimator = StaleVre() if sampler == "mmfl-vre" else FedAvg()
    experiment = Experiment(tasks, policy, estimator, rounds=rounds + 3, evaluate=rounds + 3)
    engine = make("batched", experiment, device)
    state = loop.begin(experiment, engine)
    whole, server = [], []
    for _ in range(rounds + 2):
        spent.clear()
        began = time.perf_counter()
        state, _ = loop.play(experiment, engine, state)
        whole.append(time.perf_counter() - began)
        server.append(sum(spent))
    scores = engine.evaluate(state.models)
    seconds, own = float(np.median(whole[2:])), float(np.median(server[2:]))
    return {
        "work": "growth",
        "system": "rota-batched",
        "device": device,
        "seconds_per_round": seconds,
        "accuracy": float(np.mean([score.accuracy for score in scores])),
        "loss": float(np.mean([score.loss for score in scores])),
        "model": model,
        "models": number,
        "clients": federation.clients,
        "cohort": cohort,
        "sampler": sampler,
        "server_seconds_per_round": own,
        "server_share": own / seconds,
    }
