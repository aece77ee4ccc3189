"""What an attack found: long names, full disks, folders that vanish, numbers that overflow."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from conftest import federation, linear
from test_cli import SMALL, call
from torch import nn

import rota
from rota import loop
from rota.errors import BadInput
from rota.estimate import ESTIMATORS
from rota.experiment import Experiment
from rota.plan import Plan, Task
from rota.running.folder import Gone
from rota.running.run import execute
from rota.sampling import Full
from rota.world.devices import Devices

SIZES = [5, 12, 7, 9]


def make(**changes: Any) -> Experiment:
    tasks = [Task(linear, federation(SIZES), name="line")]
    given = {"tasks": tasks, "sampler": Full(), "rounds": 2, "seed": 3}
    return Experiment(**{**given, **changes})


@pytest.mark.parametrize("name", ["x" * 300, "ü" * 60, "/" * 90])
def test_a_name_too_long_for_a_file_is_refused_before_round_1(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="is too long for a file's name: give it a shorter name"):
        execute(make(tasks=[Task(linear, federation(SIZES), name=name)]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    name = name[: 200 // len(quote(name[0], safe=""))]
    longest = make(tasks=[Task(linear, federation(SIZES), name=name)], rounds=1)
    execute(longest, engine="sequential", out=tmp_path / "run")
    assert len(list((tmp_path / "run" / "models").iterdir())) == 1


class Noise(nn.Module):
    """A model that draws random numbers in evaluation, too."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x + torch.randn(x.shape))
        return out


def noise(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Noise(shape[0], classes)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("sampler", [Full(), rota.sampling.SAMPLERS["mmfl-lvr"](2)])
def test_a_model_that_is_random_in_evaluation_is_reproducible(
    tmp_path: Path, engine: str, sampler: Any
) -> None:
    """Whatever has been drawn before, in how many passes, and also after a resume."""
    data = federation(SIZES, own_test=False)
    many = rota.from_clients(
        [(data.train.x[rows], data.train.y[rows]) for rows in (slice(0, 15), slice(15, 33))],
        (data.test.x.repeat(100, 1), data.test.y.repeat(100)),
        classes=3,
    )

    def play(rounds: int, **more: Any) -> list[Any]:
        torch.rand(len(str(tmp_path)) + rounds)
        chosen = make(tasks=[Task(noise, many, name="line")], sampler=sampler, rounds=rounds)
        return execute(chosen, engine=engine, **more).records

    whole = play(4)
    assert play(4) == whole
    out = tmp_path / "run"
    assert play(2, out=out) == whole[:2]
    assert play(4, out=out, resume=True) == whole


@pytest.mark.parametrize("name", ["fedvarp", "scaffold"])
def test_a_memory_on_disk_has_its_room_before_round_1(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A mapped page that finds no room later would end the process with SIGBUS."""
    sizes, unlink = [], Path.unlink

    def measured(path: Path, *more: Any, **others: Any) -> None:
        if "rota-memory" in path.name:
            sizes.append((path.stat().st_blocks * 512, path.stat().st_size))
        unlink(path, *more, **others)

    monkeypatch.setattr(Path, "unlink", measured)
    execute(make(estimator=ESTIMATORS[name](memory="disk")), engine="sequential")
    assert sizes
    assert all(held >= size > 0 for held, size in sizes)


def test_a_memory_on_a_disk_that_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        BadInput, match=r"has no room for them \(No space left on device\): set TMP"
    ):
        execute(make(estimator=ESTIMATORS["fedvarp"](memory="disk")), engine="sequential")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spread": 1000.0}, "devices.spread is 1000.0: it must be at most 20"),
        ({"gflops": 1e-300}, "devices.gflops is 1e-300: it must be from 1e-12 to 1e\\+12"),
        ({"mbps": 1e300}, "devices.mbps is 1e\\+300: it must be from"),
    ],
)
def test_devices_that_no_clock_can_tell(options: dict[str, float], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        execute(make(devices=Devices(**options)))


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_folder_that_vanishes_during_a_run(tmp_path: Path, how: str) -> None:
    """One sentence, and nothing is written where the folder was."""
    out = tmp_path / "run"

    def vanish(record: Any) -> None:
        if record["round"] == 2:
            out.rename(tmp_path / "there") if how == "moved" else shutil.rmtree(out)

    with pytest.raises(Gone, match="is no longer there: it was moved or deleted during the run"):
        execute(make(rounds=4), engine="sequential", out=out, watch=vanish)
    assert not out.exists()
    if how == "moved":
        execute(make(rounds=4), engine="sequential", out=tmp_path / "there", resume=True)
        assert (tmp_path / "there" / "summary.json").exists()


def test_a_folder_that_vanishes_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, play = tmp_path / "run", loop.play

    def vanish(*given: Any) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        return play(*given)

    monkeypatch.setattr(loop, "play", vanish)
    outcome = call("run", *SMALL, "--out", out)
    assert outcome.status == 1
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"rota: the run failed: the folder {out} is no longer there")
    assert "Traceback" not in outcome.err


def test_a_comparison_killed_before_its_first_run_began(tmp_path: Path) -> None:
    """Between making a folder and writing config.toml; it is resumed as if nothing had been."""
    words = ("compare", *SMALL, "--vary", "sampler=full,uniform", "--out", tmp_path / "grid")
    (tmp_path / "grid" / "full-seed0").mkdir(parents=True)
    assert "choose another --out" in call(*words).err
    outcome = call(*words, "--resume")
    assert outcome.status == 0, outcome.err
    assert len(list((tmp_path / "grid").glob("*/summary.json"))) == 2


def test_a_run_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    outcome = call("run", *SMALL, "--out", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    assert call("doctor").status == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["availability.chance=1e-9"], "hardly any client can ever be reached"),
        (["server.lr=1e-300"], "server.lr is 1e-300: the models will not change"),
        (["task.lr=1e-30"], "task 'digits': lr is 1e-30: its model will not change"),
        (["task.steps=2", "task.epochs=3"], "steps (2) decides, and epochs (3) is not used"),
        ([], ""),
        (["task.steps=2", "availability.chance=0.01", "server.lr=1e-3", "rounds=20"], ""),
    ],
)
def test_what_is_hardly_ever_meant_is_said(tmp_path: Path, settings: list[str], words: str) -> None:
    given = [word for setting in settings for word in ("--set", setting)]
    outcome = call("run", *SMALL, *given, "--out", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    lines = [line for line in outcome.err.splitlines() if line.startswith("rota: ")]
    assert len(lines) == bool(words)
    assert words in "".join(lines)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "[" * 100_000, "{", "", "\xff"])
def test_a_checkpoint_whose_numbers_are_no_object_is_damaged(tmp_path: Path, text: str) -> None:
    execute(make(), engine="sequential", out=tmp_path / "whole")
    execute(make(rounds=1), engine="sequential", out=tmp_path / "run")
    (tmp_path / "run/checkpoint/00000001/state.json").write_bytes(text.encode("latin-1"))
    execute(make(), engine="sequential", out=tmp_path / "run", resume=True)
    for name in ("rounds.jsonl", "models/line.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_report_over_files_that_no_run_writes(tmp_path: Path) -> None:
    """One sentence that names the folder, also among others that are fine."""
    for name in ("good", "bad"):
        execute(make(), engine="sequential", out=tmp_path / name)
    good = {path: path.read_bytes() for path in (tmp_path / "bad").glob("*.json*")}
    for path in good:
        for text in (
            "[]",
            "3",
            '{"round": 1}',
            '{"line": []}',
            '{"line": {"clients": "x"}}',
            "[" * 9999,
        ):
            path.write_text(text + "\n")
            for folders in (["bad"], ["good", "bad"]):
                outcome = call("report", *(tmp_path / each for each in folders))
                if outcome.status:
                    assert outcome.status == 2, outcome.err
                    assert str(tmp_path / "bad") in outcome.err
                    assert outcome.err.count("\n") == 1
        path.write_bytes(good[path])
    assert call("report", tmp_path / "good", tmp_path / "bad").status == 0


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"round": 1}', '{"round": 2, "models": 3}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    execute(make(rounds=1), engine="sequential", out=tmp_path / "run")
    (tmp_path / "run/rounds.jsonl").write_text(line + "\n")
    with pytest.raises(
        BadInput, match=r"line 1 of .* is damaged \(it is not the record of round 1"
    ):
        execute(make(), engine="sequential", out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.float16, np.longdouble, object, complex])
@pytest.mark.parametrize("column", ["client", "model", "probability", "weight"])
@pytest.mark.parametrize("estimator", ["fedavg", "fedvarp"])
def test_own_samplers_of_odd_types(column: str, kind: type, estimator: str) -> None:
    """A plan of other numbers is the same plan, or refused in one sentence."""

    class Odd:
        def init(self, shares: Any, rounds: int) -> dict[str, Any]:
            return {}

        def draw(self, state: Any, shares: Any, generator: Any) -> Plan:
            n = shares.shape[1]
            plan = Plan(np.arange(n), np.zeros(n, int), np.ones(n), np.ones(n))
            if self.kind is None:
                return plan
            return replace(plan, **{column: getattr(plan, column).astype(self.kind)})

        def observe(self, state: Any, shares: Any, plan: Any, seen: Any) -> Any:
            return state

        kind: Any = None

    def play(given: Any) -> Any:
        sampler = Odd()
        sampler.kind = given
        tasks = [Task(linear, federation([2] * 140), name="line")]
        policies = {"sampler": sampler, "estimator": ESTIMATORS[estimator]()}
        done = execute(make(tasks=tasks, rounds=1, **policies), engine="sequential")
        return done.records, done.state.models[0].params.tolist()

    whole = column in ("client", "model")
    wrong = kind in (object, complex) or (whole and kind in (np.float16, np.longdouble))
    if kind is np.int8 and column == "client":
        kind = np.int16
    if wrong:
        with pytest.raises(BadInput, match=f"the sampler's plan has a wrong '{column}'"):
            play(kind)
    else:
        assert play(kind) == play(None)
