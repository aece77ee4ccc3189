"""A node's worker: it may hang, and it never outlives its transport. No Flower is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import federation
from fleets import posted, until

from rota.experiment import Experiment
from rota.flower.letter import VERSION, Letter, Refused
from rota.flower.node import Settings, Worker
from rota.models import MODELS
from rota.plan import Task, whole
from rota.sampling import Full
from rota.sampling.draw import everybody

QUERY = Letter("query", {"version": VERSION, "tasks": ["a"]})
SLOW = """
import sys, time
from pathlib import Path
from rota.flower.letter import Letter
from rota.flower.node import Settings, Worker
folder = Path(sys.argv[1])
worker = Worker(Settings("", folder, folder, slow=1000))
worker.ask(Letter("query", {"version": 1, "tasks": []}), 240)
print(worker.process.pid, flush=True)
time.sleep(240)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    np.savez(tmp_path / "me.npz", x=np.ones((3, 4), np.float32), y=np.zeros(3, int))
    worker = Worker(Settings("", tmp_path, tmp_path, threads=1))
    yield worker
    worker.stop()


def test_a_worker_that_hangs_is_ended_also_if_it_reads_nothing(worker: Worker) -> None:
    """A large letter does not fit into the pipe of a worker that does not read."""
    assert worker.ask(QUERY, 240).head["clients"] == {"me": [3]}
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(Refused, match="no result after 1 seconds"):
        worker.ask(Letter("train", {"version": VERSION}, {"own": bytes(4 << 20)}), 1.0)
    assert worker.ask(QUERY, 240).head["clients"] == {"me": [3]}  # by another one


def state(pid: int) -> str:
    """How a process is; empty if it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


TRAINED = """
import json, sys
from pathlib import Path
from rota.flower.letter import Letter, read_head
from rota.flower.worker import Work
folder = Path(sys.argv[1])
parts = {"model.0.0": (folder / "model").read_bytes()}
reply = Work(folder / "0").answer(Letter("train", read_head(sys.argv[2]), parts))
assert [row["reason"] for row in reply.head["rows"]] == [""], reply.head
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_client_does_not_load_the_compiler(optimizer: str, tmp_path: Path) -> None:
    """In a fleet of Flower's own each message starts a process, and that would take a second."""
    data = federation([4])
    task = Task(MODELS["logistic"], data, batch=2, optimizer=optimizer, name="a")
    experiment = Experiment([task], sampler=Full())
    remote = posted(experiment, tmp_path, 1)
    job = whole(remote.initial(), everybody(experiment.shares), 1)
    ((ask,), _) = remote._asks(job, "train", {})
    letter = ask.make(ask.node)
    (tmp_path / "model").write_bytes(letter.parts["model.0.0"])
    words = [sys.executable, "-c", TRAINED, str(tmp_path), letter.text]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a stopped process")
def test_a_worker_that_is_held_back_ends_with_its_transport(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SLOW, str(tmp_path)]
    transport = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert transport.stdout is not None
        pid = int(transport.stdout.readline())
        until(lambda: state(pid) == "T")
        time.sleep(0.1)
    finally:
        transport.kill()
        transport.communicate()
    until(lambda: state(pid) in ("", "Z"), 20)
