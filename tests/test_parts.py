"""Parts of models in whole rounds: unbiased estimates, buffers, several models and widths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation
from torch import nn

import rota
from rota import loop
from rota.engine import Engine, make
from rota.estimate import ESTIMATORS, SERVERS
from rota.experiment import Experiment
from rota.plan import Chunk, Costs, Job, Task
from rota.recipe import registry
from rota.sampling import SAMPLERS
from rota.submodel import Cut, Fixed, Invariant, Ordered, Random, keep

SIZES = [9, 12, 20, 31, 8, 17]
WIDTHS = (1.0, 0.5, 0.75, 0.5, 1.0, 0.5)
ROUNDS = 500


def small(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 4), nn.ReLU(), nn.Linear(4, classes))


def ordered(experiment: Experiment, s: int, width: float) -> Cut:
    """The first units of every layer of model s."""
    units = experiment.units[s]
    return keep(units, [np.arange(count) for count in units.counts(width)])


class Canned:
    """An engine whose clients always send the same numbers, whatever the model is."""

    def __init__(self, sent: torch.Tensor, real: Engine) -> None:
        self.sent, self.initial = sent, real.initial

    def train(self, job: Job) -> Iterator[Chunk]:
        one = np.ones(1)
        for row, client in enumerate(job.plan.client.tolist()):
            part = job.plan.held(row)
            update = self.sent[client] if part is None else self.sent[client][part.places]
            yield Chunk(
                rows=np.array([row]),
                model=int(job.plan.model[row]),
                now=job.now,
                lr=0.1,
                update=update[None].clone(),
                buffers=torch.zeros(1, 0),
                loss=one,
                steps=np.ones(1, np.int64),
                examples=one,
                costs=Costs(one, one, np.ones(1, np.int64), np.ones(1, np.int64)),
                reason=[""],
            )


class Noting:
    """An engine that notes its jobs and chunks."""

    def __init__(self, real: Engine) -> None:
        self.real, self.initial, self.evaluate = real, real.initial, real.evaluate
        self.jobs: list[Job] = []
        self.chunks: list[Chunk] = []

    def train(self, job: Job) -> Iterator[Chunk]:
        self.jobs.append(job)
        for chunk in self.real.train(job):
            self.chunks.append(chunk)
            yield chunk


@pytest.mark.parametrize(
    ("name", "reached", "left_out"),
    [
        ("uniform", 1.0, False),
        ("uniform", 0.7, True),
        ("kvib", 0.7, False),
        ("mmfl-gvr", 0.7, True),
    ],
)
def test_every_scalar_is_unbiased(name: str, reached: float, left_out: bool) -> None:
    """For the average over the clients that could hold it, weighted by their data: Monte Carlo."""
    widths = np.array([*WIDTHS[:-1], 0.0 if left_out else WIDTHS[-1]])
    experiment = Experiment(
        [Task(small, federation(SIZES))],
        rota.sampling.SAMPLERS[name](budget=3),
        rota.estimate.Unbiased(),
        availability=rota.Availability(chance=reached) if reached < 1 else rota.Availability(),
        capacity=Fixed(each=tuple(widths)),
        submodel=Ordered(),
        rounds=10**9,
        evaluate=10**9,
    )
    real = make("sequential", experiment, "cpu")
    (model,) = real.initial()
    number = len(model.params)
    sent = torch.randn(6, number, generator=torch.Generator().manual_seed(1))
    engine: Any = Canned(sent, real)
    state = loop.begin(experiment, engine)
    start, steps = state.models, []
    for _ in range(ROUNDS):
        after, _ = loop.play(experiment, engine, replace(state, models=start))
        steps.append((start[0].params - after.models[0].params).double().numpy())
        state = after
    owns = np.zeros((6, number), bool)
    for i in np.flatnonzero(widths).tolist():
        owns[i, ordered(experiment, 0, widths[i]).places.numpy()] = True
    mass = owns * experiment.shares[0][:, None]
    target = (mass * sent.double().numpy()).sum(axis=0) / mass.sum(axis=0)
    error = np.std(steps, axis=0) / np.sqrt(ROUNDS)
    assert (error > 0).all()
    assert np.abs((np.mean(steps, axis=0) - target) / error).max() < 4.5


class Normed(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(
            nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, classes)
        )


@pytest.mark.parametrize("estimator", [rota.estimate.FedAvg(), rota.estimate.Unbiased()])
def test_running_statistics_are_averaged_over_the_rows_that_hold_them(estimator: Any) -> None:
    widths = (1.0, 0.5, 0.5, 1.0, 0.5, 0.5)
    task = Task(Normed, federation(SIZES), batch=4)
    common: dict[str, Any] = {"submodel": Ordered(), "capacity": Fixed(each=widths)}
    experiment = Experiment([task], rota.sampling.Full(), estimator, **common)
    engine: Any = Noting(make("sequential", experiment, "cpu"))
    state = loop.begin(experiment, engine)

    after, _ = loop.play(experiment, engine, state)
    places = ordered(experiment, 0, 0.5).buffer_places
    half = np.isin(np.arange(8), places.numpy())
    assert half.sum() == 4  # two of four means, and two of four variances
    total, weight = torch.zeros(8), torch.zeros(8)
    for chunk in engine.chunks:
        (client,) = chunk.rows.tolist()
        held = slice(None) if widths[client] == 1 else places
        total[held] += float(experiment.shares[0, client]) * chunk.buffers[0]
        weight[held] += float(experiment.shares[0, client])
    torch.testing.assert_close(after.models[0].buffers, total / weight)


def wide(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 10), nn.ReLU(), nn.Linear(10, classes))


def test_each_model_has_its_own_parts() -> None:
    """Two networks of which clients hold parts of the same widths."""
    data = federation(SIZES)
    tasks = [Task(small, data, name="small"), Task(wide, data, name="wide")]
    experiment = Experiment(
        tasks, rota.sampling.Full(), capacity=Fixed(sizes=(0.5, 0.25)), submodel=Random()
    )
    engine: Any = Noting(make("sequential", experiment, "cpu"))
    _, record = loop.play(experiment, engine, loop.begin(experiment, engine))
    assert not record["failures"]
    (job,) = engine.jobs
    found = {(int(s), job.plan.held(row).model) for row, s in enumerate(job.plan.model)}
    assert found == {(0, 0), (1, 1)}
    assert len(job.plan.cuts) == 4


def test_of_several_widths_the_narrowest_part_says_what_was_dropped() -> None:
    experiment = Experiment(
        [Task(wide, federation(SIZES))],
        rota.sampling.Full(),
        capacity=Fixed(each=(1.0, 0.8, 0.4, 0.6, 1.0, 0.8)),
        submodel=Invariant(),
    )
    engine = make("sequential", experiment, "cpu")
    state, record = loop.play(experiment, engine, loop.begin(experiment, engine))
    assert record["narrowest"] == 0.4
    assert state.policies["submodel"]["dropped.0.0"].sum() == 6


def test_random_parts_are_drawn_anew_in_every_round() -> None:
    """Federated dropout: each width, each model and each round has its own units."""
    tasks = [Task(wide, federation(SIZES), name=name) for name in ("one", "other")]
    experiment = Experiment(
        tasks, rota.sampling.Full(), capacity=Fixed(sizes=(0.5, 0.4)), submodel=Random()
    )
    engine: Any = Noting(make("sequential", experiment, "cpu"))
    state = loop.begin(experiment, engine)
    for _ in range(3):
        state, _ = loop.play(experiment, engine, state)
    kept = [tuple(part.cut.kept[0]) for job in engine.jobs for part in job.plan.cuts]
    assert len(kept) == 12
    assert len(set(kept)) > 10  # of 252 and 210 subsets


def test_torch_has_one_thread_while_cores_train_clients() -> None:
    """Its other threads would wait for the cores; the last group's chunks come when these rest."""
    task = Task(small, federation(SIZES))
    experiment = Experiment(
        [task], rota.sampling.Full(), capacity=Fixed(each=WIDTHS), submodel=Ordered()
    )
    engine = make("batched", experiment, "cpu")
    noting: Any = Noting(engine)
    loop.play(experiment, noting, loop.begin(experiment, noting))
    (job,), before = noting.jobs, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert [torch.get_num_threads() for _ in engine.train(job)] == [1, 1, 2]  # three widths
        some = engine.train(job)
        next(some)
        some.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def company() -> dict[str, dict[str, Any]]:
    """Every sampler, estimator and server once."""
    out: dict[str, dict[str, Any]] = {}
    for name, kind in SAMPLERS.items():
        size = {"budget": 3} if "budget" in registry.options("samplers", kind) else {}
        out[f"sampler {name}"] = {"sampler": kind(**size)}
    for name, kind in ESTIMATORS.items():
        asks = SAMPLERS["mmfl-gvr"](budget=3)
        out[f"estimator {name}"] = {"sampler": asks, "estimator": kind()}
    for name, kind in SERVERS.items():
        out[f"server {name}"] = {"sampler": SAMPLERS["uniform"](budget=3), "server": kind()}
    return out


COMPANY = company()
REFUSED = {
    "sampler divfl": "compares whole updates",
    "sampler clustered-similarity": "compares whole updates",
    "sampler mmfl-vre": "use stale-vre",  # which works on whole models only
    **{
        f"estimator {name}": "works on whole models only"
        for name in ("fedvarp", "fedstale", "stale-vr", "stale-vre", "mifa", "scaffold")
    },
}


@pytest.mark.parametrize("name", COMPANY)
def test_all_others_work_with_parts_or_refuse_them_in_a_sentence(name: str) -> None:
    given = dict(COMPANY[name])
    experiment: dict[str, Any] = {"capacity": Fixed(sizes=(1.0, 0.5)), "rounds": 2, **given}
    task = Task(small, federation(SIZES), batch=5)
    if name in REFUSED:
        with pytest.raises(rota.BadInput, match=REFUSED[name]):
            rota.run([task], **experiment)
        return
    run = rota.run([task], **experiment)
    assert run.summary["failures"] == 0
    assert torch.isfinite(run.state.models[0].params).all()
