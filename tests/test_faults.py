"""Real processes are killed at random moments, many times over one run.

What they leave is what an unbroken run leaves.
"""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_store import Toy, contents, die_at, make, resume_or_start, tidy

from rota.engine import ENGINES
from rota.estimate import Yogi
from rota.experiment import Experiment
from rota.running import run as running
from rota.running.run import execute

pytestmark = pytest.mark.faults

# the command line with a checkpoint after every round, so that kills find it writing
ROTA = """
import rota.cli
import rota.running.run as run
run.CHECKPOINT_SECONDS = run.CHECKPOINT_COSTS = -1
rota.cli.main()
"""
SETTINGS = [
    "--set",
    "rounds=80",
    "--set",
    "server=yogi",
    "--set",
    "server.lr=0.05",
    "--set",
    "evaluate=3",
]


def rota(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ROTA, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


def begin(folder: Path, **more: Any) -> subprocess.Popen[str]:
    """Start the run or resume it, as its user would."""
    if (folder / "config.toml").exists():
        return rota("run", str(folder / "config.toml"), "--out", str(folder), "--resume", **more)
    return rota("run", "fedavg-digits", *SETTINGS, "--out", str(folder), **more)


def lines(folder: Path) -> int:
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rounds(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until the process has played a round, or has ended."""
    before = lines(folder)
    while process.poll() is None and lines(folder) == before:
        time.sleep(0.01)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for the end: what the process said."""
    out, said = process.communicate(timeout=300)
    assert process.returncode == status, out + said
    return said


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    finish(begin(folder))
    return contents(folder)


def test_rota_run_killed_again_and_again(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """Killed while it starts, plays, saves, or writes its models or its report.

    Now and then it is stopped by Ctrl-C, or as a cluster stops a job.
    """
    seed = random.randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)
    folder = tmp_path / "run"
    for kill in range(9):
        process = begin(folder)
        if kill % 4:  # else at any time, the first seconds included
            wait_for_rounds(process, folder)
        time.sleep(chance.uniform(0, 0.7 if kill % 4 else 6))
        process.send_signal(chance.choice([signal.SIGKILL] * 4 + [signal.SIGINT, signal.SIGTERM]))
        process.communicate(timeout=300)
        print(f"kill {kill}: status {process.returncode}, {lines(folder)} rounds written")
    for _ in range(2):  # to its end, and once more with nothing left to do
        finish(begin(folder))
        assert contents(folder) == unbroken
        assert tidy(folder)
        assert (folder / "report.html").stat().st_size > 10_000


def test_two_at_once(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """The second process is refused, and does the first no harm."""
    folder = tmp_path / "run"
    first = begin(folder)
    wait_for_rounds(first, folder)
    first.send_signal(signal.SIGSTOP)
    try:
        assert f"another process is running in {folder}" in finish(begin(folder), status=2)
    finally:
        first.send_signal(signal.SIGCONT)
    finish(first)
    assert contents(folder) == unbroken


def test_disk_full(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """No file may grow past a size: the run fails and says how to resume, and with room it does."""
    folder = tmp_path / "run"
    process = begin(folder)
    while process.poll() is None and lines(folder) < 5:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    # too little for the tensors; too little for the lines
    for limit in (100_000, lines(folder) * 300):
        newest = max(folder.glob("checkpoint/0*"))
        small = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        said = finish(begin(folder, preexec_fn=small), status=1)
        assert "File too large" in said
        assert f"{folder}/config.toml --out {folder} --resume" in said
        assert newest.exists()
    finish(begin(folder))
    assert contents(folder) == unbroken
    assert tidy(folder)


def kill_one(experiment: Experiment, folder: Path, engine: str, wait: bool, delay: float) -> int:
    """Fork a child that runs or resumes, and kill it: its status.

    It is killed some time after it began or, with `wait`, after its first round.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking while there are threads
        child = os.fork()
    if not child:
        try:
            resume_or_start(experiment, folder, engine)
            os._exit(0)
        finally:
            os._exit(1)
    before = lines(folder)
    ended, status = os.waitpid(child, os.WNOHANG)
    while wait and not ended and lines(folder) == before:
        time.sleep(0.005)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name in ("sequential", "batched")])
def test_killed_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Without the seconds that starting takes, for a few rounds each."""
    monkeypatch.setattr(running, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(running, "CHECKPOINT_COSTS", -1.0)
    rounds, least = (
        (40, 30) if engine == "sequential" else (10, 3)
    )  # the batched one takes seconds to start
    experiment = make(rounds=rounds, server=Yogi(), evaluate=2)
    execute(experiment, engine=engine, out=tmp_path / "unbroken")
    seed = random.randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)
    kills = run = 0
    while kills < least:
        run += 1
        folder = tmp_path / str(run)
        while status := kill_one(
            experiment, folder, engine, chance.random() < 0.8, chance.uniform(0, 0.2)
        ):
            assert status == -signal.SIGKILL
            kills += 1
        assert contents(folder) == contents(tmp_path / "unbroken")
        assert tidy(folder)


@pytest.mark.parametrize("torn", [False, True], ids=["between writes", "inside a write"])
def test_killed_at_every_file_operation_thrice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    """For every k: die before operation k of three processes in a row, then finish."""
    monkeypatch.setitem(ENGINES, "toy", Toy)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(running, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(running, "CHECKPOINT_COSTS", -1.0)
    experiment = make()
    execute(experiment, engine="toy", out=tmp_path / "unbroken")
    operation, statuses = 0, {137}
    while 137 in statuses:
        operation += 1
        folder = tmp_path / str(operation)
        statuses = {die_at(operation, torn, experiment, folder) for _ in range(3)}
        assert statuses <= {0, 137}
        resume_or_start(experiment, folder)
        assert contents(folder) == contents(tmp_path / "unbroken"), f"operation {operation}"
        assert tidy(folder)
    assert operation > 60
