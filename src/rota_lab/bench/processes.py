"""How a round's time falls with the processes that train it, and what 8 GPUs would give.

The prediction for n processes is a sum of four times, each of which is measured on this machine:

    a round with 1/n of the cohort, on 1/n of the cores (on a GPU: on the whole GPU)
    + n - 1 models that are sent + the updates of the others' rows that come back
    + one message there and back

So it assumes that nothing overlaps, that all that is sent shares one connection of the measured
rate, and that every process has the same device and equally much to do. Where processes have GPUs,
it leaves out the copies between a GPU and its main memory.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import TCPStore

from rota import loop
from rota.engine import Maker, make
from rota.engine.machine import cores
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.sampling import Uniform
from rota.spread import Processes
from rota.spread.start import HERE
from rota.spread.wire import Wire
from rota_lab.bench.works import WARMUP, WORKS, Work

NAMES = ("cnn", "lstm")
COUNTS = (1, 2, 4)
PREDICTED = (2, 4, 8)
MESSAGES = 20


class Connection(NamedTuple):
    """Seconds of a message there and back, and bytes per second."""

    latency: float
    rate: float


def measure(device: str, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rounds in 1, 2, 4 processes of this machine's CPU, or on its GPU; and what is predicted."""
    rows = []
    for name in NAMES:
        work = WORKS[name]
        task = work.task(work.data(work))
        one, nbytes, first = _rounds(work, task, "auto", device, rounds, say, "one process")
        rows.append(_row(work, device, 1, one, one, None, True))
        connection = measure_connection(nbytes)
        for number in PREDICTED:
            part = replace(work, cohort=-(-work.cohort // number))
            with _some_cores(max(1, cores() // number) if device == "cpu" else cores()):
                each, _, _ = _rounds(part, task, "auto", device, rounds, say, f"1/{number}")
            guess = predict(each, work.cohort, number, nbytes, connection)
            seconds, same = None, None
            if device == "cpu" and number in COUNTS:
                how = f"{number} processes"
                found = _rounds(work, task, Processes(number), device, rounds, say, how)
                seconds, same = found[0], found[2] == first
            rows.append(_row(work, device, number, seconds, one, guess, same))
    return rows


def predict(part: float, cohort: int, number: int, nbytes: int, connection: Connection) -> float:
    """The seconds of a round in `number` processes, of which each trains a `part` of it."""
    theirs = cohort - -(-cohort // number)
    sent = (number - 1 + theirs) * nbytes
    return part + sent / connection.rate + connection.latency


def measure_connection(nbytes: int) -> Connection:
    """Between two processes of this machine, for messages of so many bytes."""
    store = TCPStore(HERE, 0, None, True, wait_for_workers=False)
    other = multiprocessing.get_context("fork").Process(target=_echo, args=(store.port,))
    other.start()
    wire, model = Wire(store, 0, 2, HERE), torch.zeros(nbytes, dtype=torch.uint8)
    empty: list[float] = []
    full: list[float] = []
    for message, times in ((None, empty), (model, full)):
        for _ in range(MESSAGES):
            began = time.perf_counter()
            wire.send(1, (message,))
            wire.receive(1)
            times.append(time.perf_counter() - began)
    wire.send(1, None)
    other.join()
    return Connection(statistics.median(empty), 2 * nbytes / statistics.median(full))


def _echo(port: int) -> None:
    """Send back what comes."""
    wire = Wire(TCPStore(HERE, port, None, False), 1, 2, HERE)
    while (message := wire.receive(0)) is not None:
        wire.send(0, message)


@contextmanager
def _some_cores(number: int) -> Iterator[None]:
    """Use so many cores of this process's alone."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(mine)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def _rounds(
    work: Work,
    task: Any,
    how: str | Maker,
    device: str,
    rounds: int,
    say: Callable[[str], None],
    what: str,
) -> tuple[float, int, str]:
    """The median seconds of a round without tests, a model's bytes, and the models' digest."""
    say(f"growth: {work.name}, {work.cohort} per round, {what}")
    total = WARMUP + rounds
    sampler = Uniform(budget=work.cohort)
    experiment = Experiment([task], sampler, FedAvg(), rounds=total + 1, evaluate=total + 1)
    engine, seconds = make(how, experiment, device), []
    try:
        state = loop.begin(experiment, engine)
        for _ in range(total):
            began = time.perf_counter()
            state, _ = loop.play(experiment, engine, state)
            seconds.append(time.perf_counter() - began)
    finally:
        if hasattr(engine, "close"):
            engine.close()
    (model,) = state.models
    digest = hashlib.sha256(model.params.cpu().numpy().tobytes()).hexdigest()
    return statistics.median(seconds[WARMUP:]), model.params.nbytes, digest


def _row(
    work: Work,
    device: str,
    number: int,
    seconds: float | None,
    one: float,
    guess: float | None,
    same: bool | None,
) -> dict[str, Any]:
    return {
        "work": "growth",
        "system": "rota-batched",
        "device": device,
        "model": work.name,
        "cohort": work.cohort,
        "processes": number,
        "cores": cores(),
        "seconds_per_round": seconds,
        "accuracy": None,
        "speedup": one / seconds if seconds else None,
        "predicted_seconds": guess,
        "predicted_speedup": one / guess if guess else None,
        "same_bytes": same,
    }
