"""Several runs of a comparison at once: `rota compare --jobs N`.

Each of N processes (worker.py) trains one run after the other, on its share of the cores and of the
GPUs. A process that dies is replaced, and its run goes on from its checkpoint, once. A launcher
starts the processes: here they are this machine's, and those of `cluster.py` are a Ray cluster's.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from rota.cli.output import Stopped

Job = dict[str, Any]
"""What worker.py needs to know about a run."""
Words = Callable[[str, str], None]
COMMAND = [sys.executable, "-P", "-m", "rota.cli.worker"]
TRIES = 2
"""A run whose process dies is tried this many times."""


class Worker(Protocol):
    """A process that trains runs, and the run that it is at."""

    place: int
    job: Job | None

    def give(self, job: Job) -> None:
        """Train this run next."""

    def death(self) -> str:
        """How the process ended, in words that follow "its process"."""

    def close(self) -> None:
        """Let go of a process that has ended."""

    def stop(self) -> None:
        """Ask the process to end; it writes its run's checkpoint first."""

    def wait(self) -> None:
        """Wait for its end."""

    def kill(self) -> None:
        """End it at once."""


Heard = queue.SimpleQueue[tuple[Worker, dict[str, Any]]]
"""What workers say: lines of worker.py, or nothing at their end."""
Launcher = Callable[[int, int, Heard, Words], Worker]
"""Starts the process at one of several places."""


def play(
    jobs: Sequence[Job],
    number: int,
    launch: Launcher,
    show: Callable[[str, int, Any], None],
    failed: Callable[[str, str, bool], None],
    say: Words,
) -> dict[str, dict[str, Any]]:
    """The summaries of the runs that ended, by name.

    `show` is called with a run's name, its number of rounds, and each record; None is its end.
    `failed` is called with a run's name, why it failed, and whether it can be resumed. `say` is
    called with a run's name and a line that its process wrote.
    """
    waiting, tries, results = list(jobs), dict[str, int](), dict[str, dict[str, Any]]()
    heard: Heard = queue.SimpleQueue()
    number = min(number, len(jobs))
    workers = [launch(place, number, heard, say) for place in range(number)]

    def next_run(worker: Worker) -> None:
        worker.job = None
        if waiting:
            job = waiting.pop(0)
            tries[job["name"]] = tries.get(job["name"], 0) + 1
            worker.give(job)

    def end(job: Job, why: str, again: bool) -> None:
        failed(job["name"], why, again)
        show(job["name"], 0, None)

    try:
        for worker in workers:
            next_run(worker)
        while any(worker.job for worker in workers):
            worker, news = heard.get()
            if worker.job is None:
                continue
            name = worker.job["name"]
            if "record" in news:
                show(name, news["total"], news["record"])
            elif "summary" in news:
                results[name] = news["summary"]
                show(name, 0, None)
                next_run(worker)
            elif "failed" in news:
                end(worker.job, news["failed"], news["again"])
                next_run(worker)
            else:  # the process has died
                how = worker.death()
                if tries[name] < TRIES:
                    say(name, f"rota: its process {how}: the run goes on in a new one")
                    begun = (Path(worker.job["out"]) / "config.toml").exists()
                    waiting.insert(0, {**worker.job, "resume": begun})
                else:
                    end(worker.job, f"its process {how}, {TRIES} times", True)
                worker.close()
                fresh = workers[worker.place] = launch(worker.place, number, heard, say)
                next_run(fresh)
    finally:
        _stop(workers)
    return {job["name"]: results[job["name"]] for job in jobs if job["name"] in results}


@dataclass
class Process:
    """A process of this machine, on its share of the cores."""

    process: subprocess.Popen[str]
    place: int
    number: int
    listening: list[threading.Thread] = field(default_factory=list)
    job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        assert self.process.stdin is not None
        with suppress(OSError):  # it has died, and will be heard of
            line = json.dumps(_placed(job, self.place, self.number))
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def death(self) -> str:
        return death(self.process.wait())

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        for thread in self.listening:
            thread.join()

    def stop(self) -> None:
        self.process.terminate()

    def wait(self) -> None:
        self.process.wait()
        self.close()

    def kill(self) -> None:
        self.process.kill()


def start(place: int, number: int, heard: Heard, say: Words) -> Process:
    """A new process, and two threads that listen to it."""
    share = _share(place, number)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    most = min(len(share), int(threads)) if threads.isdecimal() else len(share)
    process = subprocess.Popen(
        [*COMMAND, ",".join(map(str, share))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": str(max(1, most))},
        start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others
    )
    worker = Process(process, place, number)

    def listen(lines: IO[str]) -> None:
        with lines:
            for line in lines:
                heard.put((worker, json.loads(line)))
        heard.put((worker, {}))

    def repeat(lines: IO[str]) -> None:
        with lines:
            for line in lines:
                say(worker.job["name"] if worker.job else "", line.rstrip("\n"))

    for listener, stream in ((listen, process.stdout), (repeat, process.stderr)):
        worker.listening.append(threading.Thread(target=listener, args=(stream,), daemon=True))
        worker.listening[-1].start()
    return worker


def _share(place: int, number: int) -> list[int]:
    """The cores of one of several processes; with more processes than cores they share them."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    return cores[place::number] or [cores[place % len(cores)]]


def _placed(job: Job, place: int, number: int) -> Job:
    """The job on the GPU of this process, if there are several and none is named."""
    import torch

    how, gpus = job["how"], torch.cuda.device_count()
    if number > 1 and gpus > 1 and how["device"] in ("auto", "cuda"):
        return {**job, "how": {**how, "device": f"cuda:{place % gpus}"}}
    return job


def death(status: int) -> str:
    """How a process ended, by its exit status."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _stop(workers: Sequence[Worker]) -> None:
    """End all processes; runs that are going on write their checkpoints first."""
    for worker in workers:
        worker.stop()
    try:
        for worker in workers:
            worker.wait()
    except KeyboardInterrupt:  # who asks twice does not want to wait
        for worker in workers:
            worker.kill()
        raise Stopped(130, "interrupted", None) from None
