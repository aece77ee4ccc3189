"""How the processes of a run begin and end: copies of this one, or processes of torchrun."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from rota import recipe as recipes
from rota.data.describe import digest
from rota.engine import Maker, Options, make
from rota.engine.machine import cores
from rota.errors import BadInput, did_you_mean, not_a_clients, what_and_where
from rota.experiment import Experiment
from rota.recipe.describe import describe
from rota.spread.engines import Spread, SpreadSequential
from rota.spread.hands import Answer, Hands, Hello, Lost, timed
from rota.spread.wire import Wire

HERE = "127.0.0.1"
ENGINES = {"auto": Spread, "batched": Spread, "sequential": SpreadSequential}
SECONDS = 10.0
"""How long the end of a process without work may take."""


@dataclass(frozen=True)
class Processes:
    """The engine of a run in `number` processes, on the CPU of this machine.

    `rota.run(tasks, engine=rota.spread.Processes(4))` gives the same models, bit for bit, as
    `engine` does in one process. The other processes are copies of this one, and share its data.
    """

    number: int
    engine: str = "auto"

    def make(self, experiment: Experiment, options: Options) -> Spread | SpreadSequential:
        """The engine for an experiment; its `close` ends the other processes."""
        if not 1 <= self.number <= 256:
            raise BadInput(f"processes is {self.number}: give a number from 1 to 256")
        known(self.engine)
        if options.device.type != "cpu" or torch.cuda.device_count():
            raise BadInput(
                "copies of a process cannot use its GPUs: hide them (CUDA_VISIBLE_DEVICES=), or "
                "start one process per GPU with torchrun"
            )
        threads = max(1, cores() // self.number)
        engine = _build(self.engine, threads, experiment, options)
        store = TCPStore(HERE, 0, None, True, wait_for_workers=False)
        copies = []
        for rank in range(1, self.number):
            given = store.port, rank, self.number, engine, threads
            copies.append(multiprocessing.get_context("fork").Process(target=_copy, args=given))
            copies[-1].daemon = True
        try:
            with warnings.catch_warnings():  # newer Pythons warn of threads, which no copy needs
                warnings.simplefilter("ignore", DeprecationWarning)
                for each in copies:
                    each.start()
            return _lead(Wire(store, 0, self.number, HERE), engine, threads, "", copies)
        except BaseException:
            _end(copies, 0.0)
            raise


@dataclass(frozen=True)
class Torchrun:
    """The engine of a run in the processes that torchrun has started; process 0 is the run's."""

    engine: str = "auto"

    def make(self, experiment: Experiment, options: Options) -> Spread | SpreadSequential:
        """The engine for an experiment. In all processes but 0 this returns when the run ends."""
        known(self.engine)
        store, rank, size = next(rendezvous("env://"))
        threads = max(1, cores() // int(os.environ["LOCAL_WORLD_SIZE"]))
        wire = Wire(store, rank, size)
        try:
            engine = _build(self.engine, threads, experiment, options)
        except Exception as error:
            if rank:
                wire.send(0, Answer(None, 0.0, what_and_where(error), True))
            raise
        if rank == 0:
            return _lead(wire, engine, threads, _digest(experiment), [])
        _serve(wire, engine, threads, _digest(experiment))
        return engine


def launched() -> bool:
    """Whether torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def rank() -> int:
    """The number of this process, of those that torchrun has started."""
    return int(os.environ["RANK"])


def restarted() -> bool:
    """Whether torchrun has started the processes again after one of them had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def over(engine: str, processes: int | None) -> str | Maker:
    """What makes the engine: over torchrun's processes, over copies of this one, or as it is."""
    if launched():
        if processes is not None:
            raise BadInput(
                "--processes starts copies of a process, and torchrun has started several "
                "already: leave --processes out"
            )
        _choose_gpu()
        return Torchrun(engine)
    return engine if processes is None else Processes(processes, engine)


def serve(config: dict[str, Any], engine: str, device: str, precision: str) -> None:
    """Train what process 0 of torchrun asks for, with a recipe's data, until the run ends."""
    _choose_gpu()
    experiment = recipes.build(recipes.resolve(config))
    try:
        make(Torchrun(engine), experiment, device, precision)
    except RuntimeError as error:  # process 0 says what has ended the run
        raise SystemExit(1) from error


def _choose_gpu() -> None:
    """Let a process of torchrun see one GPU of its machine alone. None may have been used yet."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen else [str(each) for each in range(torch.cuda.device_count())]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["LOCAL_RANK"]) % len(gpus)]


def known(engine: str) -> None:
    """Refuse an engine that does not train in this process."""
    if engine not in ENGINES:
        raise BadInput(
            f"the engine '{engine}' does not run in several processes: "
            f"{did_you_mean(engine, ENGINES)}"
        )


def _build(
    name: str, threads: int, experiment: Experiment, options: Options
) -> Spread | SpreadSequential:
    profile = experiment.devices.profile(experiment.tasks[0].roster.clients, experiment.seed)
    given = experiment.tasks, profile, experiment.seed, options.device, options.autocast
    if ENGINES[name] is SpreadSequential:
        return SpreadSequential(*given)
    return Spread(threads, *given)


def _digest(experiment: Experiment) -> str:
    """What tells two experiments apart, and their data."""
    told = json.dumps(describe(experiment), default=str)
    data = [digest(task.data) for task in experiment.tasks]
    return hashlib.sha256(repr((told, data)).encode()).hexdigest()


def _lead(
    wire: Wire,
    engine: Spread | SpreadSequential,
    threads: int,
    digest: str,
    copies: Sequence[BaseProcess],
) -> Spread | SpreadSequential:
    """The engine of process 0, once all others are ready."""
    hellos = [Hello(threads, _place(), digest)]
    for other in range(1, wire.size):
        try:
            hello = wire.receive(other)
        except RuntimeError as error:
            raise Lost(f"process {other} of {wire.size} has ended before it could begin") from error
        if isinstance(hello, Answer):
            raise Lost(f"process {other} of {wire.size} failed: {hello.failed}")
        if hello.digest != digest:
            raise BadInput(
                f"process {other} of {wire.size} ({hello.place}) has another recipe or other data "
                "than process 0: start all of them with the same"
            )
        hellos.append(hello)

    def ended(rank: int) -> bool:
        return rank > 0 and len(copies) > 0 and copies[rank - 1].exitcode is not None

    hands = engine.hands = Hands(wire, hellos, ended)

    def close() -> None:
        idle = hands.close(SECONDS)
        _end(copies, SECONDS if idle else 0.0)

    engine.ending = close
    return engine


def _copy(port: int, rank: int, size: int, engine: Spread | SpreadSequential, threads: int) -> None:
    """What a copy of process 0 does. Ctrl-C reaches it too, but process 0 decides on the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the threads of torch do not live in a copy
    gc.freeze()  # nor do others, whose owners must not look for them at their end
    try:
        wire = Wire(TCPStore(HERE, port, None, False), rank, size, HERE)
        _serve(wire, engine, threads, "")
    except RuntimeError:
        logging.getLogger(__name__).debug("process 0 is gone:", exc_info=True)
        raise SystemExit(1) from None


def _serve(wire: Wire, engine: Spread | SpreadSequential, threads: int, digest: str) -> None:
    """Train what process 0 asks for, until it says that this is all; RuntimeError if it is gone."""
    logging.getLogger("rota").setLevel(logging.CRITICAL)  # process 0 says the same
    wire.send(0, Hello(threads, _place(), digest))
    while (asked := wire.receive(0)) is not None:
        try:
            answer = timed(partial(engine.answer, asked))
        except Exception as error:  # a user's module may raise anything over one client's data
            answer = Answer(None, 0.0, what_and_where(error), not_a_clients(error))
        wire.send(0, answer)


def _place() -> str:
    return f"process id {os.getpid()} on {socket.gethostname()}"


def _end(copies: Sequence[BaseProcess], seconds: float) -> None:
    """End copies of this process, those that do not end by themselves too."""
    for each in copies:
        if each.pid is not None:
            each.join(seconds)
            if each.exitcode is None:
                each.terminate()
            each.join()
