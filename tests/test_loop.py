"""The round as a whole: what it keeps, what it writes, what it does when clients fail."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from torch import nn

import rota
from rota import loop, recipe
from rota.data.federation import Federation, Part
from rota.errors import BadInput
from rota.estimate import Adam, FedAvg, Sgd
from rota.plan import Plan, Question, Seen, Task, whole
from rota.recipe.describe import describe
from rota.running.summary import Stuck
from rota.sampling import SAMPLERS, Full, Lvr, Uniform
from rota.world.availability import Availability


def test_the_loop_fits_on_two_screens() -> None:
    assert len(Path(loop.__file__).read_text().splitlines()) < 200


def test_it_learns(blobs: Federation) -> None:
    run = rota.run([Task(linear, blobs, lr=0.1)], Uniform(3), estimator=FedAvg(), rounds=30)
    assert run.summary["accuracy"] > 0.85
    assert run.rounds["loss"][-1] < run.rounds["loss"][0]


def test_same_seed_same_run_and_another_seed_another(blobs: Federation) -> None:
    task = Task(network, blobs, batch=6)
    one, two, other = (
        rota.run([task], Uniform(3), rounds=4, seed=seed).records for seed in (1, 1, 2)
    )
    assert one == two
    assert one != other


def test_a_second_model_does_not_disturb_the_first(blobs: Federation) -> None:
    first, second = Task(linear, blobs, name="a"), Task(network, blobs, batch=6, name="b")
    alone = rota.run([first], Full(), rounds=3)
    both = rota.run([first, second], Full(), rounds=3)
    assert torch.equal(alone.state.models[0].params, both.state.models[0].params)
    assert [line["models"]["a"] for line in both.records] == [
        line["models"]["a"] for line in alone.records
    ]
    assert both.records[0]["accuracy"] == pytest.approx(
        np.mean([m["accuracy"] for m in both.records[0]["models"].values()])
    )


def test_full_participation_averages_by_data_size(blobs: Federation) -> None:
    """One round of Full with either estimator is the n_i-weighted mean of the local models."""
    task = Task(linear, blobs)
    engine = rota.engine.make("sequential", rota.Experiment([task]), "cpu")
    experiment = rota.Experiment([task], Full())
    start = loop.begin(experiment, engine)
    plan = Full().draw({}, experiment.shares, np.random.default_rng(0))
    updates = torch.cat([c.update for c in engine.train(whole(start.models, plan, 1))])
    sizes = torch.tensor(blobs.train.sizes, dtype=torch.float32)
    expected = start.models[0].params - sizes / sizes.sum() @ updates
    for estimator in (rota.estimate.Unbiased(), FedAvg()):
        state, _ = loop.play(experiment.using(estimator=estimator), engine, start)
        torch.testing.assert_close(state.models[0].params, expected)


@dataclass(frozen=True)
class Watching:
    """Draws the same clients every round and remembers what it was shown."""

    clients: tuple[int, ...]

    def init(self, shares: np.ndarray, rounds: int) -> dict[str, np.ndarray]:
        return {"norm": np.zeros(len(self.clients)), "failed": np.zeros(len(self.clients))}

    def draw(
        self, state: dict[str, np.ndarray], shares: np.ndarray, generator: np.random.Generator
    ) -> Plan:
        client = np.array(self.clients, np.int64)
        zero = np.zeros(len(client), np.int64)
        return Plan(client, zero, np.ones(len(client)), shares[0, client])

    def observe(
        self, state: dict[str, np.ndarray], shares: np.ndarray, plan: Plan, seen: Seen
    ) -> dict[str, np.ndarray]:
        return {"norm": seen.norm, "failed": state["failed"] + ~seen.ok}


class Fragile(nn.Linear):
    """Its outputs are NaN where an example's first feature is huge."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.where(x[:, :1] > 1e6, torch.nan, 0.0)


def sick(clients: list[int], sizes: tuple[int, ...] = (6, 6, 6)) -> Federation:
    data = federation(list(sizes))
    for client in clients:
        data.train.of(client)[0][0, 0] = 1e7
    return data


def fragile(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Fragile(shape[0], classes)


def test_a_round_of_clients_with_too_few_examples_is_passed_over() -> None:
    """Client 1 has a single example, which BatchNorm1d cannot train on.

    A round of it alone changes nothing, and the run continues.
    """
    run = rota.run([Task(network, federation([6, 1, 6]))], Watching((1,)), rounds=2)
    reason = "a single example, and the model normalises over the batch"
    assert run.records[1]["failures"] == [{"client": 1, "model": "blobs", "reason": reason}]
    engine = rota.engine.make("sequential", rota.Experiment(run.experiment.tasks), "cpu")
    assert torch.equal(run.state.models[0].params, engine.initial()[0].params)
    assert (run.records[1]["bytes_up"], run.records[1]["client_seconds"]) == (0, 0)
    with pytest.raises(
        BadInput, match=r"no client can train .*: give clients two examples or more"
    ):
        rota.run([Task(network, federation([1, 1]))], Watching((1,)), rounds=2)


def test_a_client_that_returns_nan_is_a_failed_row() -> None:
    run = rota.run([Task(fragile, sick([1]))], Watching((0, 1, 2)), rounds=3)
    assert run.records[0]["failures"] == [
        {"client": 1, "model": "blobs", "reason": "the update is not finite"}
    ]
    assert run.state.policies["sampler"]["failed"].tolist() == [0, 3, 0]
    assert np.isnan(run.state.policies["sampler"]["norm"]).tolist() == [False, True, False]
    assert torch.isfinite(run.state.models[0].params).all()
    assert run.records[0]["models"]["blobs"]["trained"] == 2
    assert run.summary["failures"] == run.summary["models"]["blobs"]["failures"] == 3


def test_who_fails_has_worked_and_sent_what_it_has() -> None:
    """The round waits for client 1, which is the largest."""
    costs = ("bytes_up", "bytes_down", "seconds", "client_seconds")
    runs = [
        rota.run([Task(fragile, sick(ill, (6, 90, 6)))], Watching((0, 1, 2)), rounds=1)
        for ill in ([1], [])
    ]
    failed, fine = ([run.records[0][key] for key in costs] for run in runs)
    assert [run.summary["failures"] for run in runs] == [1, 0]
    assert failed == fine


@pytest.mark.parametrize(("rounds", "until"), [(20, 5), (3, 3), (1, 1)])
def test_rounds_in_which_everybody_fails_end_the_run(rounds: int, until: int) -> None:
    said = (
        r"round {0}: no client's update could be used in {0} rounds? \(the update is not finite\): "
        r"a lower lr for '{1}' may help"
    )
    with pytest.raises(Stuck, match=said.format(until, "blobs")):
        rota.run([Task(fragile, sick([0, 1, 2]))], Full(), rounds=rounds)
    few = Task(network, federation([1, 1, 1]), name="few")  # which fails for another reason
    with pytest.raises(Stuck, match=said.format(until, "a' and 'b")):
        rota.run(
            [few, *(Task(fragile, sick([0, 1, 2]), name=name) for name in "ab")],
            Full(),
            rounds=rounds,
        )


@dataclass(frozen=True)
class InTurn:
    """Draws some clients in each of its rounds, again and again."""

    turns: tuple[tuple[int, ...], ...]

    def init(self, shares: np.ndarray, rounds: int) -> dict[str, np.ndarray]:
        return {"turn": np.zeros(1, np.int64)}

    def draw(
        self, state: dict[str, np.ndarray], shares: np.ndarray, generator: np.random.Generator
    ) -> Plan:
        return Watching(self.turns[int(state["turn"][0]) % len(self.turns)]).draw(
            state, shares, generator
        )

    def observe(self, state: dict[str, np.ndarray], *_: object) -> dict[str, np.ndarray]:
        return {"turn": state["turn"] + 1}


def test_only_rounds_in_a_row_end_it_and_those_without_clients_do_not_count() -> None:
    """Client 1 is ill, and drawn alone in most rounds."""
    task = Task(fragile, sick([1]))
    assert (
        rota.run([task], InTurn(((1,), (1,), (1,), (1,), (0,))), rounds=20).summary["failures"]
        == 16
    )
    with pytest.raises(Stuck, match="round 9: no client's update could be used in 5 rounds"):
        rota.run([task], InTurn(((1,), ())), rounds=20)


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in ("full", "mmfl-vre")])
def test_a_model_that_nobody_can_train_does_not_end_the_others(
    sampler: str, blobs: Federation
) -> None:
    dead = Task(fragile, sick([*range(6)], (5, 12, 20, 31, 8, 17)), name="dead")
    run = rota.run([dead, Task(linear, blobs, name="fine")], SAMPLERS[sampler](budget=2), rounds=12)
    assert sum(line["models"]["fine"]["trained"] for line in run.records) > 0
    assert {failure["model"] for line in run.records for failure in line["failures"]} == {"dead"}


class Sensitive(nn.Linear):
    """Raises on examples of a client that is ill."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and bool((x > 1e3).any()):
            raise ValueError("sensor overflow")
        return super().forward(x)


def ill(clients: list[int]) -> Federation:
    fed = federation([6, 90, 6])
    for client in clients:
        fed.train.of(client)[0][-1] = 1e4
    return fed


def test_a_client_whose_training_raises_is_a_failed_row() -> None:
    task = Task(lambda shape, classes: Sensitive(shape[0], classes), ill([1]), name="odd")
    run = rota.run([task], Full(), rounds=2)
    for line in run.records:
        assert [(f["client"], f["model"]) for f in line["failures"]] == [(1, "odd")]
        assert re.fullmatch(
            r"ValueError: sensor overflow \(test_loop.py, line \d+\)", line["failures"][0]["reason"]
        )
    well = rota.run([Task(linear, ill([]))], Full(), rounds=2)
    assert run.summary["bytes_up"] * 3 == well.summary["bytes_up"] * 2, "it sends nothing"
    assert run.summary["bytes_down"] == well.summary["bytes_down"]


def test_training_that_raises_for_everybody_ends_the_run() -> None:
    task = Task(lambda shape, classes: Sensitive(shape[0], classes), ill([0, 1, 2]), name="odd")
    said = (
        r"no client's update could be used in 2 rounds \(ValueError: sensor overflow \(.*\)\): "
        r"fix the model, the loss or the data"
    )
    with pytest.raises(Stuck, match=said):
        rota.run([task], Full(), rounds=2)


FULL = [
    torch.OutOfMemoryError("full"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_machine_without_memory_is_no_clients_failure(
    error: Exception, blobs: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(rota.engine.Sequential, "_train_row", full)
    with pytest.raises(type(error)):
        rota.run([Task(linear, blobs)], Full(), rounds=1, engine="sequential")


def test_who_raises_when_asked_for_a_loss_is_a_failed_answer() -> None:
    class Always(Sensitive):
        """While it is tested, too; the test part is well."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sensitive.forward(self.train(), x)

    run = rota.run(
        [Task(lambda shape, classes: Always(shape[0], classes), ill([1]), name="odd")],
        Lvr(2),
        rounds=2,
    )
    assert all(
        {"client": 1, "model": "odd"}.items() <= line["failures"][0].items() for line in run.records
    )
    assert [line["models"]["odd"]["trained"] for line in run.records] != [0, 0]


def test_the_traceback_of_a_clients_error_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_DEBUG", "1")
    task = Task(lambda shape, classes: Sensitive(shape[0], classes), ill([1]), name="odd")
    with pytest.raises(ValueError, match="sensor overflow"):
        rota.run([task], Full(), rounds=2)


def test_a_run_that_is_stuck_stays_so_when_it_is_gone_on_with(tmp_path: Path) -> None:
    task = Task(fragile, sick([0, 1, 2]))
    for resume in (False, True, True):
        with pytest.raises(Stuck, match="round 5: no client's update could be used in 5 rounds"):
            rota.run([task], Full(), rounds=9, out=tmp_path, resume=resume)


def test_policies_of_any_fields_are_described(tmp_path: Path) -> None:
    rota.run([Task(linear, federation([6, 6, 6]))], InTurn(((1,), ())), rounds=2, out=tmp_path)
    assert "turns = [" in (tmp_path / "config.toml").read_text()


def test_a_round_without_clients_changes_nothing(blobs: Federation) -> None:
    run = rota.run([Task(linear, blobs)], Watching(()), server=Adam(), rounds=2)
    assert run.records[0]["accuracy"] == run.records[1]["accuracy"]
    assert run.state.policies["server"] == {}
    assert run.records[0]["probability"] == {"min": None, "max": None}


def test_norms_reach_the_sampler(blobs: Federation) -> None:
    task = Task(linear, blobs)
    run = rota.run([task], Watching((4, 2)), rounds=1)
    engine = rota.engine.make("sequential", rota.Experiment([task]), "cpu")
    plan = Watching((4, 2)).draw({}, run.experiment.shares, np.random.default_rng(0))
    norms = [float(c.update.norm()) for c in engine.train(whole(engine.initial(), plan, 1))]
    assert run.state.policies["sampler"]["norm"] == pytest.approx(norms)


@pytest.mark.parametrize("models", [1, 2, 4])
def test_a_client_trains_its_models_one_after_the_other(models: int) -> None:
    run = rota.run(
        [Task(linear, federation([30, 20]), name=str(s)) for s in range(models)], Full(), rounds=1
    )
    (line,) = run.records
    flops, nbytes = 3 * 2 * 4 * 3 * np.array([30, 20]), run.state.models[0].nbytes
    profile = run.experiment.devices.profile(2, 0)
    seconds, computing = profile.seconds(np.arange(2), flops, np.full(2, 2 * nbytes), 1)
    assert line["seconds"] == pytest.approx(models * seconds[0])
    assert line["client_seconds"] == pytest.approx(models * computing.sum())


def test_the_summary_has_the_most_that_the_server_held() -> None:
    @dataclass(frozen=True)
    class Swelling(Watching):
        def observe(
            self, state: dict[str, np.ndarray], shares: np.ndarray, plan: Plan, seen: Seen
        ) -> dict[str, np.ndarray]:
            return {"norm": np.zeros(30 if len(state["norm"]) == 2 else 3)}

    run = rota.run([Task(linear, federation([6, 6, 6]))], Swelling((0, 1)), rounds=3)
    held = [line["server_bytes"] for line in run.records]
    assert run.summary["server_bytes"] == max(held) > held[-1]


def test_the_clock_waits_for_the_slowest_and_bytes_add_up(blobs: Federation) -> None:
    run = rota.run([Task(linear, blobs)], Full(), rounds=2, devices=rota.Devices(spread=1.0))
    first, second = run.records
    assert second["seconds"] == pytest.approx(2 * first["seconds"])
    assert second["bytes_up"] == 2 * 6 * (4 * 3 + 3) * 4
    assert second["server_bytes"] == (4 * 3 + 3) * 4


def test_server_memory_counts_moments(blobs: Federation) -> None:
    plain, adam = (
        rota.run([Task(linear, blobs)], Full(), rounds=1, server=s).records[0]["server_bytes"]
        for s in (Sgd(), Adam())
    )
    assert adam == pytest.approx(3 * plain, abs=8)


def test_it_stops_at_the_target_and_tests_only_when_asked(blobs: Federation) -> None:
    run = rota.run([Task(linear, blobs, lr=0.2)], Full(), rounds=50, target=0.8, evaluate=3)
    rounds = run.summary["rounds"]
    assert rounds < 50
    assert rounds % 3 == 0
    assert run.summary["models"]["blobs"]["rounds_to_target"] == rounds
    assert run.rounds["accuracy"][:2] == [None, None]
    assert run.rounds["accuracy"][-1] >= 0.8


def test_a_run_from_python_is_called_as_a_recipe_calls_it(blobs: Federation) -> None:
    tasks = [Task(linear, blobs)]
    policies = rota.sampling.KVibPairs(3), rota.estimate.StaleVr()
    known = describe(rota.Experiment(tasks, *policies, server=Adam()))
    assert [known[key]["name"] for key in ("sampler", "estimator", "server")] == [
        "mmfl-kvib",
        "stale-vr",
        "adam",
    ]
    assert known["sampler"]["budget"] == 3
    own = describe(rota.Experiment(tasks, Watching((1, 2))))
    assert own["sampler"] == {"name": "Watching", "clients": [1, 2]}
    config = recipe.resolve(recipe.read("fedavg-digits"))
    assert [
        set(own[key]) == set(config[key])
        for key in ("estimator", "server", "devices", "availability")
    ] == [True] * 4


def test_scores_that_are_not_alike_are_not_averaged(blobs: Federation, tmp_path: Path) -> None:
    def worse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -(outputs.gather(1, targets[:, None])[:, 0] ** 2)

    tasks = [Task(linear, blobs, name="a"), Task(linear, blobs, name="b", score=worse)]
    run = rota.run(tasks, Full(), rounds=3, evaluate=2, out=tmp_path / "a")
    whole = ("accuracy", "loss", "worst_accuracy", "accuracy_spread")
    assert (
        {line[key] for line in run.records for key in whole}
        == {run.summary[key] for key in whole}
        == {None}
    )
    assert ["accuracy" in line["models"]["b"] for line in run.records] == [False, True, True]
    assert run.summary["models"]["a"]["accuracy"] == run.records[-1]["models"]["a"]["accuracy"] > 0
    assert run.summary["models"]["b"]["best_accuracy"] < 0
    again = rota.run(tasks, Full(), rounds=3, evaluate=2, out=tmp_path / "a", resume=True)
    assert again.summary["models"] == run.summary["models"]
    alike = rota.run([replace(task, score=worse) for task in tasks], Full(), rounds=1)
    assert alike.summary["worst_accuracy"] <= alike.summary["accuracy"] < 0
    with pytest.raises(
        BadInput,
        match="target is one number for all models, but the tasks have different scores: leave "
        "target out",
    ):
        rota.run(tasks, Full(), rounds=3, target=0.5)


def test_the_last_round_is_always_tested(blobs: Federation) -> None:
    run = rota.run([Task(linear, blobs)], Full(), rounds=5, evaluate=3)
    assert [value is None for value in run.rounds["accuracy"]] == [True, True, False, True, False]
    assert len({len(column) for column in run.rounds.values()}) == 1


def test_the_trained_modules_are_at_hand(blobs: Federation) -> None:
    run = rota.run([Task(network, blobs)], Full(), rounds=2)
    module = run.models["blobs"].eval()
    accuracy = float((module(blobs.test.x).argmax(1) == blobs.test.y).float().mean())
    assert accuracy == pytest.approx(run.summary["accuracy"])


def test_a_module_is_a_starting_point(blobs: Federation) -> None:
    module = nn.Linear(4, 3)
    engine = rota.engine.make("sequential", rota.Experiment([Task(module, blobs)]), "cpu")
    assert torch.equal(engine.initial()[0].params[:12], module.weight.detach().flatten())
    before: Any = module.weight.detach().clone()
    rota.run([Task(module, blobs)], Full(), rounds=1)
    assert torch.equal(module.weight.detach(), before)


@dataclass(frozen=True)
class Attentive:
    """Draws everybody that can be reached, and keeps what it is given."""

    told: list[tuple[np.ndarray, np.ndarray, Seen]] = field(default_factory=list)
    heard: list[Seen] = field(default_factory=list)

    def init(self, shares: np.ndarray, rounds: int) -> dict[str, np.ndarray]:
        return {}

    def draw(
        self, state: dict[str, np.ndarray], shares: np.ndarray, generator: np.random.Generator
    ) -> Plan:
        self.told.append((shares, shares, Seen.nothing(0)))
        return rota.sampling.draw.everybody(shares)

    def observe(
        self, state: dict[str, np.ndarray], shares: np.ndarray, plan: Plan, seen: Seen
    ) -> dict[str, np.ndarray]:
        self.told[-1] = (self.told[-1][0], shares, seen)
        return state


@dataclass(frozen=True)
class Asking(Attentive):
    """Asks them before, too."""

    def ask(
        self, state: dict[str, np.ndarray], shares: np.ndarray, generator: np.random.Generator
    ) -> Question:
        return Question(rota.sampling.draw.everybody(shares), "norm")

    def hear(self, state: dict[str, np.ndarray], plan: Plan, seen: Seen) -> dict[str, np.ndarray]:
        self.heard.append(seen)
        return state


def test_a_sampler_observes_by_the_shares_that_it_drew_by(blobs: Federation) -> None:
    sampler = Attentive()
    rota.run([Task(linear, blobs)], sampler, availability=Availability(chance=0.5), rounds=6)
    assert len({shares.tobytes() for shares, _, _ in sampler.told}) > 1, "not all can be reached"
    assert all(drawn is observed for drawn, observed, _ in sampler.told)


def test_rows_have_the_pace_of_their_model_asked_and_drawn(blobs: Federation) -> None:
    """Each model's learning rate of the round, relative to the largest.

    The rates are 0.1 and 0.4, then 0.1 and 0.2, then equal, then 0.05 and 0.1 after the decay.
    """
    sampler = Asking()
    slow, fast = (
        Task(linear, blobs, lr=0.1, name="slow"),
        Task(linear, blobs, lr=0.4, lr_decay=0.5, name="fast"),
    )
    rota.run([slow, fast], sampler, rounds=4)
    expected = [(0.25, 1.0), (0.5, 1.0), (1.0, 1.0), (1.0, 0.5)]
    for seen in ([seen for _, _, seen in sampler.told], sampler.heard):
        np.testing.assert_allclose([(each.pace[0], each.pace[-1]) for each in seen], expected)


def test_soft_labels_take_the_default_loss(blobs: Federation) -> None:
    """Shares of the classes in the place of one of them."""

    def soft(part: Part) -> Part:
        return replace(part, y=torch.softmax(torch.eye(3)[part.y] * 3, dim=1))

    data = replace(blobs, train=soft(blobs.train), test=soft(blobs.test))
    task = Task(
        linear,
        data,
        score=lambda outputs, targets: (outputs.argmax(-1) == targets.argmax(-1)).float(),
    )
    assert rota.run([task], Full(), rounds=8).summary["accuracy"] > 0.6


class Judge:
    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(-1) == targets).float()


def test_one_method_of_one_object_is_one_score(blobs: Federation) -> None:
    judge = Judge()
    run = rota.run(
        [Task(linear, blobs, score=judge.score, name=name) for name in "ab"], Full(), rounds=1
    )
    assert run.summary["accuracy"] is not None


def test_python_hears_of_a_run_that_went_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """The command line's sentences about divergence and failures, as warnings."""
    data = rota.from_clients(
        [(torch.full((4, 1), 10.0), torch.zeros(4, 1))] * 3,
        (torch.full((4, 1), 1e6), torch.zeros(4, 1)),
    )
    line = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(line.weight)
    task = Task(
        line,
        data,
        lr=10,
        batch=None,
        loss=lambda outputs, targets: ((outputs - targets) ** 2).mean(dim=1),
        score=lambda outputs, targets: -(outputs - targets).abs().mean(dim=1),
        name="line",
    )
    rota.run([task], rota.sampling.Full(), rounds=3)
    assert not caplog.records
    finished = rota.run([task], rota.sampling.Full(), rounds=7)
    assert finished.summary["loss"] == np.inf
    said = [record.getMessage() for record in caplog.records]
    assert "the loss of 'line' is not finite: a lower lr may help" in said
