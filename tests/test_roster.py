"""The roster: what the server knows of the clients, and that it reads nothing else."""

from __future__ import annotations

import ast
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, network

import rota
from rota.data.describe import describe
from rota.data.roster import Roster
from rota.errors import BadInput
from rota.experiment import Experiment
from rota.plan import Task, shares
from rota.running import run as running
from rota.running.check import check
from rota.sampling import Uniform

SOURCE = Path(rota.__file__).parent
SHARED = ["admission", "experiment", "loop", "policies", "probe", "weights"]
SERVER = [
    *(SOURCE / f"{name}.py" for name in SHARED),
    *(
        path
        for room in ("plan", "sampling", "estimate", "running", "world")
        for path in sorted((SOURCE / room).glob("*.py"))
        # the checks of the examples themselves, and the world that changes clients' examples
        if path.name not in ("fit.py", "drift.py")
    ),
]


def test_a_federation_has_a_roster() -> None:
    data = federation([5, 0, 7])
    roster = data.roster
    assert roster is data.roster
    assert (roster.name, roster.shape, roster.classes) == ("blobs", (4,), 3)
    assert roster.sizes.tolist() == [5, 0, 7]
    assert roster.sizes.dtype == np.int64
    assert roster.clients == 3
    assert list(roster.ids) == ["0", "1", "2"]
    assert replace(data, ids=("north", "south", "west")).roster.ids[1] == "south"
    task = Task(network, data)
    assert task.roster is roster
    assert Task(network, roster).roster is roster
    assert task.federation is data


def test_ten_million_names_cost_nothing() -> None:
    start = time.perf_counter()
    roster = Roster("many", np.full(10_000_000, 3), (4,), 3)
    assert roster.ids[9_999_999] == "9999999"
    assert roster.ids[-2:] == ["9999998", "9999999"]
    assert len(roster.ids) == 10_000_000 == roster.clients
    assert len(repr(roster)) < 100
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"sizes": np.array([1.5, 2])}, "sizes must be one whole number from 0 on per client"),
        ({"sizes": np.array([3, -1])}, "sizes must be one whole number from 0 on per client"),
        ({"sizes": np.array([], int)}, "sizes must be one whole number from 0 on per client"),
        ({"ids": ["a"]}, "has 1 ids and 2 sizes: give one of each"),
        ({"ids": ["a", "a"]}, "two clients share an id"),
        ({"ids": [1, 2]}, r"roster\.ids is \[1, 2\], but it takes a list"),
        ({"classes": "ten"}, r"roster\.classes is 'ten', but it takes a whole number"),
    ],
    ids=str,
)
def test_a_roster_names_the_mistake(wrong: dict[str, Any], sentence: str) -> None:
    right: dict[str, Any] = {"sizes": np.array([3, 4]), "shape": (4,), "classes": 3}
    with pytest.raises(BadInput, match=sentence):
        Roster("own", **(right | wrong))


def test_the_server_plays_on_rosters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the examples, the server has rosters: the same run as with federations."""
    held = [Task(network, federation([5, 12, 20, 31], seed=seed)) for seed in (0, 1)]
    known = [replace(task, data=task.roster) for task in held]
    settings: dict[str, Any] = {"rounds": 3, "engine": "sequential", "device": "cpu", "seed": 5}
    whole = rota.run(held, sampler=Uniform(2), out=tmp_path / "whole", **settings)
    make = running.make
    there = Experiment(held, Uniform(2), rounds=3, seed=5)
    monkeypatch.setattr(running, "make", lambda name, _, *rest: make(name, there, *rest))
    apart = rota.run(known, sampler=Uniform(2), out=tmp_path / "apart", **settings)
    for mine, theirs in zip(whole.state.models, apart.state.models, strict=True):
        assert torch.equal(mine.params, theirs.params)
    rounds = [tmp_path / name / "rounds.jsonl" for name in ("whole", "apart")]
    assert rounds[0].read_bytes() == rounds[1].read_bytes()
    one, other = (
        json.loads((tmp_path / name / "data.json").read_text()) for name in ("whole", "apart")
    )
    for name, entry in other.items():
        assert entry["sizes"] == one[name]["sizes"]
        assert "labels" not in entry
    again = [replace(task, data=replace(task.roster, ids=["a", "b", "c", "d"])) for task in held]
    with pytest.raises(BadInput, match="the data of 'blobs-0' are not the data that the run"):
        rota.run(again, sampler=Uniform(2), out=tmp_path / "apart", resume=True, **settings)


def test_an_engine_here_needs_the_examples() -> None:
    task = Task(network, federation([5, 12]).roster)
    check(Experiment([task], Uniform(1)))
    with pytest.raises(BadInput, match="task 'blobs' has a roster instead of data: give a Fed"):
        rota.run([task], sampler=Uniform(1), rounds=1)
    empty = Roster("own", np.array([0, 0]), (4,), 3)
    with pytest.raises(BadInput, match="task 'own': no client has training examples"):
        check(Experiment([Task(network, empty)], Uniform(1)))


def test_shares_come_from_rosters() -> None:
    tasks = [Task(network, Roster("own", np.array([1, 3]), (4,), 3))]
    assert shares(tasks).tolist() == [[0.25, 0.75]]


def test_many_clients_are_described_by_a_selection() -> None:
    roster = Roster("many", np.arange(1, 5001), (4,), 3)
    entry = describe(roster)
    assert len(entry["shown"]) == len(entry["sizes"]) == 2000
    assert entry["clients"] == 5000
    assert entry["examples"] == 5000 * 5001 // 2


@pytest.mark.parametrize("path", SERVER, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_server_reads_no_examples(path: Path) -> None:
    """Server-side code reads rosters; only engines, sources and checks of the data see examples."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("train", "test", "federation"):
            # engine.train(...) and module.train() are calls
            assert id(node) in calls, f"{path.name}, line {node.lineno}: .{node.attr}"
