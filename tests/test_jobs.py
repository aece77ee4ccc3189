"""Comparisons in several processes: the same results, deaths, interruptions, and their places."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_cli import call, lines

import rota
from rota.cli import jobs
from rota.engine import where
from rota.engine.machine import cores
from rota.errors import BadInput

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rota.__file__).parents[1])}
SMALL = ("compare", "fedavg-digits", "--set", "task.steps=1", "--set", "task.epochs=")
DEADLY = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from rota.sampling import Uniform

@dataclass(frozen=True)
class Deadly(Uniform):
    times: int = 0

    def observe(self, state, shares, plan, seen):
        died = Path(__file__).parent / f"died{self.times}"
        number = len(died.read_text()) if died.exists() else 0
        if number < self.times:
            died.write_text("x" * (number + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return state
"""


def same(one: Path, other: Path) -> bool:
    """Whether two comparisons have the same runs, to the byte."""
    for folder in one.iterdir():
        if not folder.is_dir():
            continue
        for name in ("config.toml", "rounds.jsonl", "data.json", "models/digits.safetensors"):
            if (folder / name).read_bytes() != (other / folder.name / name).read_bytes():
                return False
    return sum(each.is_dir() for each in one.iterdir()) == sum(e.is_dir() for e in other.iterdir())


def test_the_same_bytes_in_one_process_and_in_several(tmp_path: Path) -> None:
    words = [*SMALL, "--set", "rounds=3", "--vary", "estimator=fedavg,unbiased", "--seeds", 3]
    alone = call(*words, "--out", tmp_path / "a", "--json")
    both = call(*words, "--out", tmp_path / "b", "--json", "--jobs", 2)
    assert (alone.status, both.status) == (0, 0), both.err
    assert same(tmp_path / "a", tmp_path / "b")
    first, second = json.loads(alone.out), json.loads(both.out)
    assert [run["run"] for run in first] == [run["run"] for run in second]
    run = second[4]
    assert (run["setting"], run["seed"]) == ({"estimator": "unbiased"}, 1)
    assert run["folder"] == str(tmp_path / "b" / "unbiased-seed1")
    assert run["accuracy"] == lines(Path(run["folder"]))[-1]["accuracy"]
    accuracy = run["over_seeds"]["accuracy"]
    assert accuracy["values"] == [each["accuracy"] for each in second[3:]]
    assert accuracy["mean"] == pytest.approx(sum(accuracy["values"]) / 3)
    assert accuracy["low"] < accuracy["mean"] < accuracy["high"]
    assert accuracy == first[3]["over_seeds"]["accuracy"]
    assert "unbiased-seed2: round 3/3" in both.err


def deadly(folder: Path, module: str = "deadly") -> Path:
    """A recipe whose process dies `sampler.times` times; each module needs a name of its own."""
    (folder / f"{module}.py").write_text(DEADLY)
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'rounds = 3\n[sampler]\nname = "{module}:Deadly"\nbudget = 2\n'
        '[[task]]\ndata = "digits"\npartition = { name = "iid", clients = 5 }\nmodel = "logistic"\n'
    )
    return recipe


def test_a_run_whose_process_dies_goes_on_once(tmp_path: Path) -> None:
    """The others are not affected; a run whose process dies again is left out."""
    recipe = deadly(tmp_path)
    words = ["compare", recipe, "--vary", "sampler.times=0,1,9", "--out", tmp_path / "a"]
    told = call(*words, "--jobs", 2, "--json")
    assert told.status == 1
    assert [run["run"] for run in json.loads(told.out)] == ["0-seed0", "1-seed0"]
    died = "its process was killed by signal 9"
    assert f"1-seed0: rota: {died}: the run goes on in a new one" in told.err
    assert f"rota: 9-seed0: {died}, 2 times" in told.err
    assert "rota: 1 of 3 runs failed and are left out: 9-seed0" in told.err
    assert "rota: to resume: rota compare" in told.err
    assert (tmp_path / "died9").read_text() == "xx"
    rounds = [
        (tmp_path / "a" / name / "rounds.jsonl").read_bytes() for name in ("0-seed0", "1-seed0")
    ]
    assert rounds[0] == rounds[1]


def test_the_same_runs_on_a_cluster_and_one_that_dies_goes_on(tmp_path: Path) -> None:
    """In a process of its own, which starts a cluster of Ray's with real actors."""
    words = ["compare", deadly(tmp_path, "far"), "--vary", "sampler.times=0,1"]
    out = [*words, "--out", tmp_path / "a", "--launcher", "ray", "--jobs", 2, "--json"]
    program = [sys.executable, "-m", "rota", *map(str, out)]
    told = subprocess.run(program, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert told.returncode == 0, told.stderr
    assert [run["run"] for run in json.loads(told.stdout)] == ["0-seed0", "1-seed0"]
    assert "1-seed0: rota: its process was killed by signal 9: the run goes on" in told.stderr
    assert (tmp_path / "died1").read_text() == "x"
    assert call(*words, "--out", tmp_path / "b").status == 0  # it has died often enough by now
    assert same(tmp_path / "a", tmp_path / "b")


def test_a_launcher_that_is_not_there(tmp_path: Path) -> None:
    words = (*SMALL, "--vary", "seed=0", "--out", tmp_path / "a", "--launcher")
    with mock.patch.dict(sys.modules, {"ray": None}):
        told = call(*words, "ray")
    assert (told.status, told.err.count("\n")) == (2, 1)
    assert "pip install 'rota[ray]'" in told.err
    assert call(*words, "slurm").status == 2


def test_a_process_takes_no_more_cores_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_CORES", "1")
    assert cores() == 1
    for anything in ("1000000", "", "x"):
        monkeypatch.setenv("ROTA_CORES", anything)
        assert cores() == len(os.sched_getaffinity(0))


def locked(folder: Path) -> bool:
    """Whether a process is running in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def wait(true: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.faults)]
)
def test_an_interrupted_comparison_stops_all_and_goes_on(tmp_path: Path, how: int) -> None:
    """By Ctrl-C, or when the process that gives the runs away is killed."""
    out, names = tmp_path / "a", ("fedavg-seed0", "unbiased-seed0")
    words = [*SMALL, "--vary", "estimator=fedavg,unbiased", "--jobs", "2"]
    endless = [sys.executable, "-m", "rota", *words, "--set", "rounds=1000000", "--out", str(out)]
    with subprocess.Popen(endless, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        wait(lambda: all(len(lines(out / name)) > 3 for name in names))
        process.send_signal(how)
        assert process.stderr is not None
        said = process.stderr.read()
    wait(lambda: not any(locked(out / name) for name in names))
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert ("rota: to resume: rota compare" in said) == (how == signal.SIGINT)
    assert all(list((out / name / "checkpoint").iterdir()) for name in names)
    if how == signal.SIGINT:
        assert "interrupted; the checkpoint is written" in said
        return
    rounds = 5 + max(len(lines(out / name)) for name in names)
    whole = ["--set", f"rounds={rounds}"]
    assert call(*words, *whole, "--out", out, "--resume").status == 0
    assert call(*words, *whole, "--out", tmp_path / "b").status == 0
    assert same(out, tmp_path / "b")


def test_each_process_has_its_share() -> None:
    with mock.patch.object(os, "sched_getaffinity", return_value={0, 2, 4, 6, 7}, create=True):
        shares = [jobs._share(place, 2) for place in range(2)]
        assert shares == [[0, 4, 7], [2, 6]]
        assert [jobs._share(place, 7) for place in (4, 5, 6)] == [[7], [0], [2]]
    job = {"how": {"device": "auto"}}
    with mock.patch.object(torch.cuda, "device_count", return_value=2):
        devices = [jobs._placed(job, place, 3)["how"]["device"] for place in range(3)]
        assert devices == ["cuda:0", "cuda:1", "cuda:0"]
        assert jobs._placed({"how": {"device": "cpu"}}, 1, 3)["how"]["device"] == "cpu"
        assert jobs._placed({"how": {"device": "cuda:1"}}, 0, 3)["how"]["device"] == "cuda:1"


def test_a_gpu_by_its_number() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
    ):
        assert [where(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == [
            "cuda",
            "cuda",
            "cuda:1",
            "cpu",
        ]
        with pytest.raises(BadInput, match=r"'cuda:2', but the last GPU here is cuda:1"):
            where("cuda:2")
        for wrong in ("cuda:", "cuda:x", "cpu:0", "gpu"):
            with pytest.raises(BadInput, match="unknown device"):
                where(wrong)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(BadInput, match="torch sees no GPU here"),
    ):
        where("cuda:1")


def test_a_mistake_in_a_device_or_a_number_of_jobs(tmp_path: Path) -> None:
    words = [*SMALL, "--vary", "seed=1,2", "--out", tmp_path / "a"]
    assert "'cuda:x' is not one of" in call(*words, "--device", "cuda:x").err
    assert call(*words, "--jobs", 0).status == 2
    assert not (tmp_path / "a").exists()
