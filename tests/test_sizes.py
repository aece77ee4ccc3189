"""Sizes beyond this machine's memory: one sentence and status 2, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation
from test_cli import call
from torch import nn

from rota.data import fit, memory
from rota.engine import Batched, make
from rota.errors import BadInput
from rota.estimate import ESTIMATORS
from rota.experiment import Experiment
from rota.plan import Plan, Task, whole
from rota.weights import Weights

TERA = 10**12


def wide(shape: tuple[int, ...], classes: int, width: int = TERA) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["task.model=test_sizes:wide"], "the model has 300,000.0 GB of weights"),
        (["task.steps=1000000000000"], "the list of a client's 1,000,000,000,000 mini-batches"),
        (["task.epochs=1000000000000"], "mini-batches would take"),
        (["task.steps=1000000000000", "task.batch=1000000000000"], "lower steps"),
        (["sampler.budget=1000000000000"], "there are 20: give a number from 1 to 20"),
        (["task.partition.clients=1000000000000"], "it needs 1000000000000 examples"),
        (
            ["task.partition=", "task.data=synthetic", "task.data.clients=1000000000000"],
            "GB of memory: lower clients",
        ),
        (
            ["sampler=mmfl-random", "sampler.processors=1000000000000", "estimator=unbiased"],
            "sampler.processors: 20,000,000,000,000 draws per round would take",
        ),
    ],
    ids=lambda value: value[0].partition("=")[0] if isinstance(value, list) else "",
)
def test_a_recipe_beyond_memory(
    settings: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    words = [word for setting in settings for word in ("--set", setting)]
    outcome = call("run", "fedavg-digits", "--allow", "test_sizes", *words, "--out", tmp_path / "a")
    assert (outcome.status, sentence in outcome.err) == (2, True), outcome.err
    assert outcome.err.splitlines()[-1].startswith("rota: ")


def test_a_model_is_measured_without_memory_for_it() -> None:
    """Also one that cannot be built without, or is a module; buffers count, lazy weights do not."""
    data = federation([5, 5])

    def awkward() -> nn.Module:
        module = nn.Linear(4, 3)
        if float(module.weight.sum()) > 1e9:  # there is no such number without memory
            return nn.Identity()
        return module

    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert fit._nbytes(Task(module, data)) == 4 * (12 + 3 + 3 + 3 + 3 + 3) + 8
    assert fit._nbytes(Task(nn.LazyLinear(3), data)) == 0
    assert fit._nbytes(Task(awkward, data)) == 0
    fit.check_sizes([Task(awkward, data), Task(module, data)], ["one", "two"])


def test_models_are_refused_by_what_training_them_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Task(nn.Linear(4, 10**6, device="meta"), federation([5, 5]))]
    for room, fine in ((200e6, True), (150e6, False)):
        monkeypatch.setattr(memory, "total", lambda room=room: room)
        if fine:
            fit.check_sizes(tasks, ["wide"])
            continue
        with pytest.raises(BadInput, match=r"task 'wide': the model has 0\.0 GB of weights"):
            fit.check_sizes(tasks, ["wide"])


@pytest.mark.parametrize("name", ["fedvarp", "scaffold"])
def test_an_estimators_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Weights(torch.zeros(1000), torch.zeros(0))]
    shares = np.full((1, 1000), 1e-3)
    monkeypatch.setattr(memory, "total", lambda: 3.9e6)
    estimator: Any = ESTIMATORS[name]
    with pytest.raises(BadInput, match=r"memory of 1,000 clients would .*set estimator.memory to"):
        estimator().init(models, shares)
    estimator("disk").init(models, shares)
    monkeypatch.setattr(memory, "total", lambda: 4.1e6)
    estimator().init(models, shares)


def test_few_rows_of_a_large_model_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of large models are small, and the updates are those of large groups."""
    task = Task(nn.Linear(4, 3), federation([5, 12, 7, 9, 8, 3]), batch=4)
    plan = Plan(np.arange(6), np.zeros(6, np.int64), np.ones(6), np.full(6, 1 / 6))
    found = []
    for room in (1e12, 16 * 60 * 2 + 1):
        monkeypatch.setattr(memory, "total", lambda room=room: room)
        engine = make("batched", Experiment([task]), "cpu")
        assert isinstance(engine, Batched)
        chunks = list(engine.train(whole(engine.initial(), plan, 1)))
        found.append((len(chunks), torch.cat([chunk.update for chunk in chunks])))
    assert found[1][0] > found[0][0]
    torch.testing.assert_close(
        found[0][1].sort(dim=0).values, found[1][1].sort(dim=0).values, rtol=0, atol=0
    )


def test_long_lists_of_mini_batches_are_made_one_client_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROTA_NATIVE", "0")
    task = Task(nn.Linear(4, 3), federation([5, 12, 7]), batch=4, steps=50)
    plan = Plan(np.arange(3), np.zeros(3, np.int64), np.ones(3), np.full(3, 1 / 3))
    found = []
    for room in (1e12, 1000.0):
        monkeypatch.setattr(memory, "total", lambda room=room: room)
        engine = make("batched", Experiment([task]), "cpu")
        chunks = list(engine.train(whole(engine.initial(), plan, 1)))
        assert not any(reason for chunk in chunks for reason in chunk.reason)
        order = np.argsort(np.concatenate([chunk.rows for chunk in chunks]))
        found.append(torch.cat([chunk.update for chunk in chunks])[order])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
