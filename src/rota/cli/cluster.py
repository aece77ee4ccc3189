"""Several runs of a comparison at once on a Ray cluster: `rota compare --launcher ray`.

Each of N actors, anywhere in the cluster, starts the process that a comparison on one machine
starts (worker.py), and passes its lines on. All machines must have rota and the same packages, and
must see the comparison's folder under the same path.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rota.cli.jobs import COMMAND, Heard, Job, Launcher, Words, death
from rota.errors import BadInput

PATIENCE = 15.0
"""Seconds that a stopped run gets to write its checkpoint."""


def launcher() -> Launcher:
    """Connect to the cluster that RAY_ADDRESS names, or to this machine's; else start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that is started here
    try:
        import ray
    except ModuleNotFoundError:
        raise BadInput("--launcher ray needs Ray: pip install 'rota[ray]'") from None
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise BadInput(f"--launcher ray found no cluster: {error}") from error
    return partial(_start, ray)


class Host:
    """An actor: it holds a process on its machine."""

    def __init__(self, cores: int, folder: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder if os.path.isdir(folder) else None,
            env={**os.environ, "ROTA_CORES": str(cores), "OMP_NUM_THREADS": str(cores)},
        )

    def give(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def lines(self, of: str) -> Any:
        """Pass on what the process writes, as it comes."""
        stream = getattr(self.process, of)
        while line := stream.readline():  # not `yield from`: Ray sends into it, as into a generator
            yield line

    def status(self) -> int:
        return self.process.wait()

    def stop(self) -> None:
        self.process.terminate()


@dataclass
class Remote:
    """A process somewhere in the cluster."""

    ray: Any
    actor: Any
    place: int
    listening: list[threading.Thread] = field(default_factory=list)
    job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        self.actor.give.remote(json.dumps(job) + "\n")

    def death(self) -> str:
        try:
            return death(self.ray.get(self.actor.status.remote()))
        except self.ray.exceptions.RayActorError:
            return "was lost with its machine"

    def close(self) -> None:
        for thread in self.listening:
            thread.join(PATIENCE)
        self.kill()

    def stop(self) -> None:
        self.actor.stop.remote()

    def wait(self) -> None:
        lost = self.ray.exceptions
        with suppress(lost.RayActorError, lost.GetTimeoutError):
            self.ray.get(self.actor.status.remote(), timeout=PATIENCE)
        self.close()

    def kill(self) -> None:
        self.ray.kill(self.actor)


def _start(ray: Any, place: int, number: int, heard: Heard, say: Words) -> Remote:
    """A new actor with its share of the cluster, and two threads that listen to its process."""
    there = ray.cluster_resources()
    cores = max(1, int(there.get("CPU", 1) / number))
    share = {"num_cpus": cores, "num_gpus": min(1.0, there.get("GPU", 0) / number)}
    host = ray.remote(Host).options(**share, max_concurrency=8)
    worker = Remote(ray, host.remote(cores, os.getcwd()), place)

    def listen() -> None:
        with suppress(ray.exceptions.RayActorError):
            for line in worker.actor.lines.options(num_returns="streaming").remote("stdout"):
                heard.put((worker, json.loads(ray.get(line))))
        heard.put((worker, {}))

    def repeat() -> None:
        with suppress(ray.exceptions.RayActorError):
            for line in worker.actor.lines.options(num_returns="streaming").remote("stderr"):
                say(worker.job["name"] if worker.job else "", ray.get(line).rstrip("\n"))

    for listener in (listen, repeat):
        worker.listening.append(threading.Thread(target=listener, daemon=True))
        worker.listening[-1].start()
    return worker
