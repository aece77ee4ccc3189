"""Several runs of a comparison at once: `rota compare --jobs N`.

Each of N processes (worker.py) trains one run after the other, on its share of the cores and of the
GPUs. A process that dies is replaced, and its run goes on from its checkpoint, once.
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
from typing import IO, Any

from rota.cli.output import Stopped

Job = dict[str, Any]
"""What worker.py needs to know about a run."""
Words = Callable[[str, str], None]
TRIES = 2
"""A run whose process dies is tried this many times."""


@dataclass
class Worker:
    """A process that trains runs, and the run that it is at."""

    process: subprocess.Popen[str]
    place: int
    listening: list[threading.Thread] = field(default_factory=list)
    job: Job | None = None

    def give(self, job: Job) -> None:
        """Train this run next."""
        self.job = job
        assert self.process.stdin is not None
        with suppress(OSError):  # it has died, and will be heard of
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Let go of a process that has ended."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        for thread in self.listening:
            thread.join()


def play(
    jobs: Sequence[Job],
    number: int,
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
    heard: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
    number = min(number, len(jobs))
    workers = [_start(place, number, heard, say) for place in range(number)]

    def next_run(worker: Worker) -> None:
        worker.job = None
        if waiting:
            job = waiting.pop(0)
            tries[job["name"]] = tries.get(job["name"], 0) + 1
            worker.give(_placed(job, worker.place, number))

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
                how = _death(worker.process.wait())
                if tries[name] < TRIES:
                    say(name, f"rota: its process {how}: the run goes on in a new one")
                    begun = (Path(worker.job["out"]) / "config.toml").exists()
                    waiting.insert(0, {**worker.job, "resume": begun})
                else:
                    end(worker.job, f"its process {how}, {TRIES} times", True)
                worker.close()
                fresh = workers[worker.place] = _start(worker.place, number, heard, say)
                next_run(fresh)
    finally:
        _stop(workers)
    return {job["name"]: results[job["name"]] for job in jobs if job["name"] in results}


def _start(place: int, number: int, heard: Any, say: Words) -> Worker:
    """A new process, and two threads that listen to it."""
    share = _share(place, number)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    most = min(len(share), int(threads)) if threads.isdecimal() else len(share)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rota.cli.worker", ",".join(map(str, share))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": str(max(1, most))},
        start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others
    )
    worker = Worker(process, place)

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


def _death(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _stop(workers: Sequence[Worker]) -> None:
    """End all processes; runs that are going on write their checkpoints first."""
    for worker in workers:
        worker.process.terminate()
    try:
        for worker in workers:
            worker.process.wait()
            worker.close()
    except KeyboardInterrupt:  # who asks twice does not want to wait
        for worker in workers:
            worker.process.kill()
        raise Stopped(130, "interrupted", None) from None
