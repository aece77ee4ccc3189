"""A policy of an unknown kind remembers, observes and watches, and is written down."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from test_loop import fragile, sick
from test_store import contents, same, stop_after

import rota
from rota import loop
from rota.arrays import Array
from rota.engine import Sequential, make
from rota.errors import BadInput
from rota.estimate import FedVarp
from rota.experiment import Experiment, State
from rota.plan import Chunk, Job, Plan, Seen, Task
from rota.policies import EVERYTHING, KINDS, Kind, Opening
from rota.recipe.describe import describe
from rota.running.run import Interrupted
from rota.sampling import Full, Gvr, Uniform

SIZES = [5, 9, 7, 6, 8, 5]


@dataclass(frozen=True)
class Ledger:
    """Adds up each client's losses and seconds, and each model's updates, and counts the calls."""

    step: float = 1.0

    sees: ClassVar[frozenset[str]] = frozenset({"loss", "seconds", "update"})

    def init(self, opening: Opening) -> dict[str, Any]:
        models, clients = opening.shares.shape
        state: dict[str, Any] = {
            "loss": np.zeros((models, clients)),
            "seconds": np.zeros(clients),
            "calls": np.zeros(3, np.int64),
        }
        sums = {f"sum.{s}": torch.zeros_like(m.params) for s, m in enumerate(opening.models)}
        return state | sums

    def watch(self, state: dict[str, Any], job: Job) -> dict[str, Any]:
        return {
            "calls": 0,
            **{f"sum.{s}": state[f"sum.{s}"].clone() for s in range(len(job.models))},
        }

    def see(self, watched: dict[str, Any], job: Job, chunk: Chunk) -> None:
        ok = torch.from_numpy(chunk.ok)
        watched["calls"] += int(chunk.ok.sum())
        watched[f"sum.{chunk.model}"] += self.step * chunk.update[ok].sum(dim=0)

    def learn(self, state: dict[str, Any], watched: dict[str, Any]) -> dict[str, Any]:
        sums = {name: value for name, value in watched.items() if name != "calls"}
        return {**state, **sums, "calls": state["calls"] + [1, watched["calls"], 0]}

    def observe(
        self, state: dict[str, Any], shares: Array, plan: Plan, seen: Seen
    ) -> dict[str, Any]:
        assert np.isnan(seen.norm).all(), "not declared"
        assert np.isnan(seen.examples).all(), "not declared"
        loss, seconds = state["loss"].copy(), state["seconds"].copy()
        loss[plan.model[seen.ok], plan.client[seen.ok]] += seen.loss[seen.ok]
        np.add.at(seconds, plan.client, np.nan_to_num(seen.seconds))
        calls = state["calls"] + [0, 0, 1]
        return {**state, "loss": loss, "seconds": seconds, "calls": calls}


class Silent:
    """Has no options, no memory and no calls."""


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds that rota does not have: one with a member, and one with two."""
    begin = lambda policy, opening: policy.init(opening)  # noqa: E731
    ledger = Kind("ledger", {"ledger": Ledger}, "ledger", ("init", "observe"), begin)
    monkeypatch.setitem(KINDS, "ledger", ledger)
    silence = Kind("silence", {"quiet": Silent, "ledger": Ledger}, "quiet")
    monkeypatch.setitem(KINDS, "silence", silence)


def tasks() -> list[Task]:
    one = Task(network, federation(SIZES), batch=4, name="net")
    return [one, Task(linear, federation(SIZES, seed=1), batch=None, name="line")]


def test_an_experiment_has_it() -> None:
    experiment = Experiment(tasks())
    assert experiment.policies["ledger"] == Ledger()
    assert isinstance(experiment.policies["silence"], Silent)
    assert list(experiment.policies) == list(KINDS)
    own = experiment.using(ledger=Ledger(step=2.0))
    assert (
        own.policies["ledger"]
        == Ledger(2.0)
        == Experiment([], ledger=Ledger(2.0)).policies["ledger"]
    )
    assert own.sampler is experiment.sampler
    with pytest.raises(TypeError, match=r"unknown argument 'legder': policies are .*, ledger"):
        Experiment(tasks(), legder=Ledger())


def test_it_is_checked() -> None:
    with pytest.raises(BadInput, match=r"^ledger is 3: give an object such as"):
        rota.run(tasks(), rounds=1, ledger=3)
    with pytest.raises(BadInput, match=r"^ledger\.step is 'x', but it takes a number"):
        rota.run(tasks(), rounds=1, ledger=Ledger("x"))  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_it_remembers_observes_and_watches(engine: str) -> None:
    run = rota.run(tasks(), Full(), rounds=3, engine=engine, ledger=Ledger(2.0))
    assert run.state.policies.keys() == KINDS.keys()
    assert run.state.policies["silence"] == {}
    state = run.state.policies["ledger"]
    assert state["calls"].tolist() == [3, 3 * 2 * len(SIZES), 3]
    machine = make(engine, run.experiment, "cpu")
    before = loop.begin(run.experiment, machine)
    start = before.models
    assert [state[f"sum.{s}"].shape for s in range(2)] == [model.params.shape for model in start]
    expected = np.zeros((2, len(SIZES)))
    sums = [torch.zeros_like(model.params) for model in start]
    seconds = np.zeros(len(SIZES))
    for _ in range(3):
        plan = Full().draw({}, run.experiment.shares, np.random.default_rng(0))
        for chunk in machine.train(rota.plan.whole(before.models, plan, before.round + 1)):
            clients = plan.client[chunk.rows]
            expected[chunk.model, clients] += chunk.loss
            sums[chunk.model] += 2 * chunk.update.sum(dim=0)
            np.add.at(seconds, clients, chunk.costs.seconds)
        before, _ = loop.play(run.experiment, machine, before)
    np.testing.assert_allclose(state["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(state["seconds"], seconds)
    for s in range(2):
        torch.testing.assert_close(state[f"sum.{s}"], sums[s], rtol=1e-4, atol=1e-5)


def test_its_memory_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, and it changes nothing else of a run."""
    run = rota.run(tasks(), Uniform(2), rounds=2)
    held = sum(int(value.nbytes) for value in run.state.policies["ledger"].values())
    assert held > 8 * len(SIZES)
    assert run.records[-1]["server_bytes"] == run.state.nbytes
    with monkeypatch.context() as patch:
        patch.delitem(KINDS, "ledger")
        without = rota.run(tasks(), Uniform(2), rounds=2)
    assert run.state.nbytes - without.state.nbytes == held
    for one, other in zip(run.records, without.records, strict=True):
        assert {**one, "server_bytes": 0} == {**other, "server_bytes": 0}


def test_failed_rows_and_probes_are_not_watched() -> None:
    """Client 1 fails in each round; the sampler asks all for their norms before the draw."""
    task = Task(fragile, sick([1]))
    run = rota.run([task], Full(), rounds=2)
    assert run.state.policies["ledger"]["calls"].tolist() == [2, 4, 2]
    assert torch.isfinite(run.state.policies["ledger"]["sum.0"]).all()
    asked = rota.run(tasks(), Gvr(3), rounds=2, estimator=FedVarp())
    drawn = sum(len(each) for line in asked.records for each in line["cohort"].values())
    assert asked.state.policies["ledger"]["calls"].tolist() == [2, drawn, 2]


@pytest.mark.parametrize(
    "wanted", [set(), {"norm"}, {"seconds", "loss"}, None], ids=["nothing", "norm", "both", "all"]
)
def test_it_sees_what_it_declares(wanted: set[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a declaration it sees everything; what others see does not depend on it."""
    seen: list[Seen] = []

    class Observer:
        def observe(self, state: Any, shares: Array, plan: Plan, found: Seen) -> Any:
            seen.append(found)
            return state

    if wanted is not None:
        Observer.sees = frozenset(wanted)  # type: ignore[attr-defined]
    monkeypatch.setitem(KINDS, "silence", Kind("silence", {"observer": Observer}, "observer"))
    run = rota.run(tasks(), Full(), rounds=1)
    (found,) = seen
    known = EVERYTHING if wanted is None else wanted
    for column in ("norm", "loss", "examples", "seconds"):
        assert np.isfinite(getattr(found, column)).all() == (column in known), column
    assert (found.costs.up > 0).all() == ("seconds" in known)
    assert found.reason == [""] * 2 * len(SIZES)
    assert run.state.policies["ledger"]["loss"].all()


def test_it_is_described(tmp_path: Path) -> None:
    """A kind with one member is a table of its options; of several, the member is named."""
    run = rota.run(tasks(), Full(), rounds=1, ledger=Ledger(0.5), out=tmp_path)
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["ledger"] == describe(run.experiment)["ledger"] == {"step": 0.5}
    assert config["silence"] == {"name": "quiet"}
    named = describe(run.experiment.using(silence=Ledger()))["silence"]
    assert named == {"name": "ledger", "step": 1.0}


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_it_survives_a_checkpoint(engine: str, tmp_path: Path) -> None:
    """To the bit, arrays as arrays and tensors as tensors; with other options it is another run."""

    def play(folder: str, **more: Any) -> rota.Run:
        policies = {"ledger": Ledger(0.1), **more.pop("policies", {})}
        settings = {"rounds": 4, "seed": 2, "engine": engine, "out": tmp_path / folder}
        return rota.run(tasks(), Uniform(3), **settings, **policies, **more)

    whole = play("whole")
    with pytest.raises(Interrupted):
        play("run", watch=stop_after(2, KeyboardInterrupt()))
    with pytest.raises(BadInput, match=r"\(ledger\.step was 0\.1 and is now 0\.2\)"):
        play("run", resume=True, policies={"ledger": Ledger(0.2)})
    resumed = play("run", resume=True)
    assert same(resumed.state, whole.state)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    kinds = {name: type(value) for name, value in resumed.state.policies["ledger"].items()}
    arrays, tensors = dict.fromkeys(("loss", "seconds", "calls"), np.ndarray), torch.Tensor
    assert kinds == arrays | {"sum.0": tensors, "sum.1": tensors}


def test_a_broken_round_leaves_its_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off between two chunks, after it has watched some."""
    experiment = Experiment(tasks(), Full(), rounds=2)
    machine = make("sequential", experiment, "cpu")
    state, _ = loop.play(experiment, machine, loop.begin(experiment, machine))
    kept = copy(state)
    train = Sequential.train

    def broken(self: Sequential, job: Job) -> Iterator[Chunk]:
        for place, chunk in enumerate(train(self, job)):
            if place == 4:
                raise RuntimeError("the power failed")
            yield chunk

    with monkeypatch.context() as patch:
        patch.setattr(Sequential, "train", broken)
        with pytest.raises(RuntimeError, match="the power failed"):
            loop.play(experiment, machine, state)
    assert same(state, kept)
    loop.play(experiment, machine, state)  # a whole round, given up
    assert same(state, kept)


def copy(state: State) -> State:
    """A state that shares nothing with another."""
    policies = {
        kind: {
            name: value.clone() if isinstance(value, torch.Tensor) else value.copy()
            for name, value in remembered.items()
        }
        for kind, remembered in state.policies.items()
    }
    return State(
        state.round,
        list(state.models),
        state.shares.copy(),
        policies,
        state.seconds,
        state.bytes_up,
        state.bytes_down,
    )
