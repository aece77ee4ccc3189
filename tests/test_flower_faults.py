"""Faults of real processes: the run goes on or resumes, and no row counts twice."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import federation, linear
from fleets import HASTY, PATIENT, Nodes, bench, dealt, until

from rota.experiment import Experiment
from rota.flower.superlink import Kept, free_port
from rota.plan import Task

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # flwr's own
    pytest.mark.skipif(
        importlib.util.find_spec("flwr") is None,
        reason="Flower is not installed: pip install 'rota[flower]'",
    ),
]


def test_workers_nodes_and_rounds(tmp_path: Path) -> None:
    """Nodes {0: clients 0 and 3, 1: 1 and 4, 2: 2 and 5} that die, hang, leave and come back."""
    with bench(tmp_path) as one:
        # a worker killed between two rounds, as by a full memory: the next request starts another
        os.kill(one.worker(1), signal.SIGKILL)
        one.play(set())
        # a worker killed at work
        pid = one.worker(1)
        os.kill(pid, signal.SIGSTOP)
        killer = subprocess.Popen(["sh", "-c", f"sleep 2; kill -9 {pid}"])
        reasons = one.play({1, 4})
        killer.wait()
        assert all("the client's worker died" in reason for reason in reasons.values())
        one.play(set())
        # a hung worker: its transport ends it at the deadline
        os.kill(one.worker(2), signal.SIGSTOP)
        one.fleet.rules = HASTY
        one.play({2, 5})
        one.fleet.rules = PATIENT
        one.play(set())
        # a node that is stopped for longer than a round, and replies too late
        process = one.nodes.running[0].pid
        os.kill(process, signal.SIGSTOP)
        one.fleet.rules = HASTY
        one.play({0, 3})
        os.kill(process, signal.SIGCONT)
        one.fleet.rules = PATIENT
        one.play()
        one.play(set())
        # a node that leaves in good order, and comes back
        one.nodes.end(2, signal.SIGTERM)
        assert set(one.play().values()) <= {"its node went offline", "its node is offline"}
        one.nodes.start(2)
        until(lambda: not (one.fleet.look() or one.fleet.offline))
        one.play(set())
        # a disk that takes nothing: what is pending cannot be written
        pending = one.nodes.folders[1] / ".rota" / "pending"
        pending.unlink(missing_ok=True)
        pending.mkdir()
        one.play(set())


@pytest.mark.parametrize("where", ["memory", "database"])
def test_the_superlink_is_killed(where: str, tmp_path: Path) -> None:
    kept: list[Kept] = []
    database = tmp_path / "link.db" if where == "database" else None
    with bench(tmp_path / "data", kept, database) as one:
        for delay in (0.0, 0.3):
            wait = f"sleep {delay}; kill -9 {kept[-1].process.pid}"
            killer = subprocess.Popen(["sh", "-c", wait])
            if not delay:
                killer.wait()
            one.play(set())
            killer.wait()
            until(lambda: kept[-1].process.poll() is None)
        one.play(set())
        assert len(kept) >= 3


def served(root: Path, out: str, port: int, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "rota", "serve", str(root / "recipe.toml"), "--ordered"]
    words += ["--listen", f"127.0.0.1:{port}", "--out", str(root / out), *more]
    with (root / f"{out}.log").open("ab") as log:
        return subprocess.Popen(words, cwd=root, stdout=log, stderr=log)


def test_ctrl_c_while_the_superlink_hangs(tmp_path: Path) -> None:
    """Nobody waits for it, and the command that is shown resumes the run."""
    data, port = federation([9, 12]), free_port()
    folders = dealt(Experiment([Task(linear, data, name="a")]), tmp_path / "nodes", 1)
    (tmp_path / "test").mkdir()
    np.savez(tmp_path / "test" / "test.npz", x=data.test.x.numpy(), y=data.test.y.numpy())
    (tmp_path / "recipe.toml").write_text(
        "rounds = 9\nsampler = 'full'\n[[task]]\ndata = { name = 'folder', path = 'test' }\n"
        "model = 'logistic'\n"
    )
    nodes = Nodes(f"127.0.0.1:{port}", folders)
    more = ["--clients", "2", "--set", "rounds=5000"]
    server = served(tmp_path, "run", port, *more)
    try:
        lines = tmp_path / "run" / "rounds.jsonl"
        until(lambda: lines.exists() and lines.read_bytes().count(b"\n") > 2, 200)
        (link,) = (pid for pid in descendants(server.pid) if called(pid, "rota.flower.superlink"))
        os.kill(link, signal.SIGSTOP)
        nodes.running[0].send_signal(signal.SIGINT)
        assert nodes.running[0].wait(25) == 130
        server.send_signal(signal.SIGINT)
        assert server.wait(50) == 130
        (hint,) = (
            line.partition("to resume: ")[2]
            for line in lines_of(tmp_path / "run.log")
            if "to resume: " in line
        )
        for words in ("--ordered", f"--listen 127.0.0.1:{port}", "--set rounds=5000"):
            assert words in hint
        nodes.start(0)
        before = len(lines_of(lines))
        words = [sys.executable, "-m", *shlex.split(hint)]
        with (tmp_path / "again.log").open("wb") as log:
            server = subprocess.Popen(words, cwd=tmp_path, stderr=log)
        until(lambda: len(lines_of(lines)) > before + 2, 200)
    finally:
        server.terminate()
        server.wait()
        nodes.close()


def called(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/cmdline").read_text()


def test_the_server_is_killed_and_resumed(tmp_path: Path) -> None:
    """With the models of a run that nobody has killed."""
    data, port = federation([9, 12, 20, 31, 8, 17]), free_port()
    experiment = Experiment([Task(linear, data, name="a")])
    folders = dealt(experiment, tmp_path / "nodes", 3)
    (tmp_path / "test").mkdir()
    np.savez(tmp_path / "test" / "test.npz", x=data.test.x.numpy(), y=data.test.y.numpy())
    (tmp_path / "recipe.toml").write_text(
        "rounds = 60\nsampler = { name = 'uniform', budget = 4 }\n[[task]]\n"
        "data = { name = 'folder', path = 'test' }\nmodel = 'logistic'\nlr = 0.1\n"
    )
    nodes, six = Nodes(f"127.0.0.1:{port}", folders), ("--clients", "6")
    try:
        whole = served(tmp_path, "whole", port, *six)
        assert whole.wait(200) == 0, (tmp_path / "whole.log").read_text()
        broken = served(tmp_path, "broken", port, *six)
        lines = tmp_path / "broken" / "rounds.jsonl"
        until(lambda: lines.exists() and lines.read_bytes().count(b"\n") > 8, 120)
        broken.kill()
        broken.wait()
        until(lambda: not listening(port), 30)
        resumed = served(tmp_path, "broken", port, *six, "--resume")
        assert resumed.wait(200) == 0, (tmp_path / "broken.log").read_text()
    finally:
        nodes.close()
    one, two = (tmp_path / name / "models" for name in ("whole", "broken"))
    assert [file.read_bytes() for file in one.iterdir()] == [
        file.read_bytes() for file in two.iterdir()
    ]
    cohorts = [
        [json.loads(line)["cohort"] for line in lines_of(tmp_path / name / "rounds.jsonl")]
        for name in ("whole", "broken")
    ]
    assert cohorts[0] == cohorts[1]
    assert len(cohorts[0]) == 60


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines()


def listening(port: int) -> bool:
    from rota.flower.superlink import answers

    return answers("127.0.0.1", port)


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """`rota demo flower` ends with all that it has started."""
    words = [sys.executable, "-m", "rota", "demo", "flower", "--rounds", "5", "--nodes", "3"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    shown = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    assert shown.stderr is not None
    assert "starting a SuperLink" in shown.stderr.readline()
    assert "all nodes are there" in shown.stderr.readline()
    started = descendants(shown.pid)
    assert len(started) >= 4
    shown.send_signal(signal.SIGINT)
    assert shown.wait(60) == 130
    shown.stderr.close()
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in started), 20)
    assert not list(tmp_path.iterdir())


def test_the_demonstration_ends_by_itself(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rota", "demo", "flower", "--rounds", "4", "--nodes", "3"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    shown = subprocess.Popen(
        [*words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert shown.stderr is not None
    shown.stderr.readline()
    until(lambda: len(descendants(shown.pid)) >= 4, 240)
    started = descendants(shown.pid)
    out, said = shown.communicate(timeout=500)
    assert shown.returncode == 0, said
    assert said.count("round ") >= 4
    found = json.loads(out)
    assert found["accuracy"]["with FLuID"] > 0.5
    assert found["accuracy"]["without"] > 0.5
    assert 0 < found["width"] <= 1
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in started), 20)
    assert not list(tmp_path.iterdir())


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]
