"""What a sampler asks before it draws: answers are those of training, and are paid for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HERE, federation, linear, network
from test_loop import fragile, sick
from torch import nn

import rota
from rota import loop, weights
from rota.arrays import Array
from rota.data.federation import Federation
from rota.engine import Engine, Sequential, make
from rota.estimate import FedStale, FedVarp, Mifa, Scaffold, StaleVr, StaleVre, Unbiased
from rota.experiment import Experiment, State
from rota.metrics import variance
from rota.plan import Chunk, Job, Model, Plan, Question, Seen, Task, whole
from rota.sampling import SAMPLERS, Uniform, draw

SIZES = [5, 12, 20, 31, 8, 17]
DEVICES = rota.Devices(spread=1.0)
UNBIASED = Unbiased()


class Asks:
    """Asks some clients one thing, remembers what it heard and watched, then draws others."""

    def __init__(
        self, what: Any, clients: list[int], drawn: list[int], examples: int | None = None
    ) -> None:
        self.question, self.drawn = Question(rows(clients), what, examples), rows(drawn)

    def init(self, shares: Array, rounds: int) -> dict[str, Array]:
        return {}

    def ask(self, *_: Any) -> Question:
        return self.question

    def hear(self, state: dict[str, Array], plan: Plan, seen: Seen) -> dict[str, Array]:
        assert plan is self.question.rows
        return {**state, "norm": seen.norm, "loss": seen.loss, "ok": seen.ok}

    def watch(self, state: dict[str, Array], job: Job) -> dict[str, Array]:
        return {}

    def see(self, watched: dict[str, Array], job: Job, chunk: Chunk) -> None:
        assert len(chunk.rows), "what is not admitted is not seen"
        if job.plan is self.question.rows:
            for row, ok, update in zip(chunk.rows, chunk.ok, chunk.update.numpy(), strict=True):
                watched[f"update.{row}" if ok else f"failed.{row}"] = update.copy()

    def learn(self, state: dict[str, Array], watched: dict[str, Array]) -> dict[str, Array]:
        return {**state, **watched}

    def draw(self, *_: Any) -> Plan:
        return self.drawn

    def observe(self, state: dict[str, Array], *_: Any) -> dict[str, Array]:
        return state


def rows(clients: list[int]) -> Plan:
    return Plan(
        np.array(clients, np.int64),
        np.zeros(len(clients), np.int64),
        np.ones(len(clients)),
        np.ones(len(clients)),
    )


def one_round(
    task: Task, sampler: Any, engine: str = "sequential", estimator: Any = UNBIASED
) -> tuple[State, dict[str, Any], Engine]:
    experiment = rota.Experiment([task], sampler, estimator, devices=DEVICES)
    machine = make(engine, experiment, "cpu")
    return *loop.play(experiment, machine, loop.begin(experiment, machine)), machine


def seconds(clients: list[int] | Array, examples: Array, nbytes: float) -> Array:
    """How long clients take to train a linear model on examples and to move bytes."""
    profile = DEVICES.profile(len(SIZES), 0)
    # a product has two operations per weight, and the backward pass takes twice the forward pass
    flops, moved = 3 * 2 * 4 * 3 * examples, np.full(len(clients), nbytes)
    return profile.seconds(np.asarray(clients, np.int64), flops, moved, 1)[0]


def test_a_watching_sampler_sees_each_admitted_chunk_of_the_probe() -> None:
    """Those of rows that failed, too: with a reason."""
    state, _, _ = one_round(Task(fragile, sick([1])), Asks("norm", [0, 1, 2], [0]))
    memory = state.policies["sampler"]
    assert {"update.0", "failed.1", "update.2"} <= memory.keys()
    assert not {"failed.0", "update.1", "failed.2"} & memory.keys()
    norms = [np.linalg.norm(memory[f"update.{row}"]) for row in (0, 2)]
    assert memory["norm"][[0, 2]] == pytest.approx(norms)


@pytest.mark.parametrize("engine", HERE)
def test_norms_and_updates_are_those_of_training(blobs: Federation, engine: str) -> None:
    task, asked = Task(network, blobs, batch=6), [4, 1, 5]
    state, _, machine = one_round(task, Asks("update", asked, [0]), engine)
    chunks = machine.train(whole(machine.initial(), rows(asked), 1))
    updates = {
        int(row): update
        for chunk in chunks
        for row, update in zip(chunk.rows, chunk.update.numpy(), strict=True)
    }
    for row, update in updates.items():
        assert state.policies["sampler"][f"update.{row}"] == pytest.approx(update, abs=1e-6)
        assert state.policies["sampler"]["norm"][row] == pytest.approx(np.linalg.norm(update))
    plain, _, _ = one_round(task, Asks("norm", asked, [0]), engine)
    assert plain.policies["sampler"]["norm"] == pytest.approx(state.policies["sampler"]["norm"])


@pytest.mark.parametrize("engine", HERE)
def test_losses_are_the_global_models_on_the_clients_training_examples(
    blobs: Federation, engine: str
) -> None:
    tasks = [
        Task(network, blobs, batch=6, name="a"),
        Task(linear, federation(SIZES, seed=3), name="b"),
    ]
    machine = make(engine, Experiment(tasks, devices=DEVICES), "cpu")
    plan = Plan(np.array([2, 0, 5, 2]), np.array([0, 1, 0, 1]), np.ones(4), np.ones(4))
    answers = machine.losses(whole(machine.initial(), plan, 1))
    assert answers.examples.tolist() == [20, 5, 17, 20]
    assert answers.reason == [""] * 4
    assert np.isnan(answers.norm).all()
    for client, model, loss in zip(plan.client, plan.model, answers.loss, strict=True):
        module = tasks[model].build()
        weights.load(module, machine.initial()[model].weights)
        x, y = tasks[model].data.train.of(client)
        with torch.no_grad():
            assert loss == pytest.approx(
                float(torch.nn.functional.cross_entropy(module.eval()(x), y)), rel=1e-5
            )


def test_losses_on_some_examples_are_addressed(blobs: Federation) -> None:
    """They depend on the round and the client, not on who else is asked.

    With enough of them they are all examples.
    """
    machine = make("sequential", Experiment([Task(linear, blobs)], devices=DEVICES), "cpu")
    start = machine.initial()
    alone = machine.losses(whole(start, rows([3]), 1), 4)
    among = machine.losses(whole(start, rows([5, 3, 0]), 1), 4)
    later = machine.losses(whole(start, rows([3]), 2), 4)
    assert among.examples.tolist() == [4, 4, 4]
    assert among.loss[1] == pytest.approx(alone.loss[0])
    assert later.loss[0] != pytest.approx(alone.loss[0])
    many = machine.losses(whole(start, rows([3]), 1), 100)
    every = machine.losses(whole(start, rows([3]), 1))
    assert (many.loss, many.examples) == (pytest.approx(every.loss), [31])


@pytest.mark.parametrize(
    ("estimator", "vectors"),
    [(UNBIASED, 1), (FedVarp(), 1), (Scaffold(), 2)],
    ids=["plain", "fedvarp", "scaffold"],
)
@pytest.mark.parametrize("what", ["loss", "norm", "update"])
def test_a_probe_is_paid_for_and_nothing_is_paid_twice(
    blobs: Federation, what: str, estimator: Any, vectors: int
) -> None:
    """Clients 0 to 3 are asked; 2 and 3 are drawn, and 4, which has done nothing yet.

    With SCAFFOLD two vectors go each way, but only the model where the loss is asked.
    """
    _, record, machine = one_round(
        Task(linear, blobs), Asks(what, [0, 1, 2, 3], [2, 3, 4]), estimator=estimator
    )
    model = machine.initial()[0].nbytes
    training, down, up = {
        "loss": (1 / 3, 1, 0),
        "norm": (1, vectors, 0),
        "update": (1, vectors, vectors),
    }[what]

    def time(clients: list[int], work: float, ways: float) -> Array:
        return seconds(clients, work * np.array(SIZES)[clients], ways * model)

    left = float(what == "loss"), 2 * vectors - down - up
    first = time([0, 1, 2, 3], training, down + up)
    then = np.concatenate([time([2, 3], *left), time([4], 1, 2 * vectors)])
    assert record["seconds"] == pytest.approx(first.max() + then.max())
    computing = [time([0, 1, 2, 3], training, 0), time([2, 3], left[0], 0), time([4], 1, 0)]
    assert record["client_seconds"] == pytest.approx(np.concatenate(computing).sum())
    assert record["bytes_down"] == (4 * down + 2 * (vectors - down) + vectors) * model
    assert record["bytes_up"] == (
        5 * vectors * model if what == "update" else 4 * 8 + 3 * vectors * model
    )


def test_who_was_asked_for_one_model_pays_for_another(blobs: Federation) -> None:
    """Two clients are asked for a norm of one model each, and drawn for the second model."""
    tasks = [Task(linear, blobs, name=name) for name in "ab"]
    asked = Plan(np.array([0, 1]), np.array([0, 1]), np.ones(2), np.ones(2))
    drawn = Plan(np.array([0, 1]), np.array([1, 1]), np.ones(2), np.ones(2))
    sampler = Asks("norm", [], [])
    sampler.question, sampler.drawn = Question(asked, "norm"), drawn
    experiment = Experiment(tasks, sampler, devices=DEVICES)
    machine = make("sequential", experiment, "cpu")
    _, record = loop.play(experiment, machine, loop.begin(experiment, machine))
    model = machine.initial()[0].nbytes
    assert record["bytes_down"] == (2 + 1) * model, "client 1 has fetched model b already"
    assert record["bytes_up"] == 2 * 8 + 2 * model
    work = seconds([0, 1, 0], np.array(SIZES)[[0, 1, 0]], 0)
    assert record["client_seconds"] == pytest.approx(work.sum())


def test_controls_have_no_buffers(blobs: Federation) -> None:
    def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], classes))

    _, record, machine = one_round(Task(normed, blobs), Uniform(3), estimator=Scaffold())
    start = machine.initial()[0]
    assert len(start.buffers) == 8
    assert record["bytes_up"] == record["bytes_down"] == 3 * (start.nbytes + start.params.nbytes)


@pytest.mark.parametrize(
    ("what", "reason"), [("loss", "the loss is not finite"), ("norm", "the update is not finite")]
)
def test_those_who_failed_when_asked_are_written_down(what: str, reason: str) -> None:
    """Once each: client 2 fails again when it is drawn."""
    _, record, _ = one_round(Task(fragile, sick([1, 2])), Asks(what, [0, 1, 2], [0, 2]))
    assert record["failures"] == [
        {"client": 1, "model": "blobs", "reason": f"{reason}, asked before the draw"},
        {"client": 2, "model": "blobs", "reason": "the update is not finite"},
    ]


@pytest.mark.parametrize("engine", HERE)
def test_what_estimators_pay(blobs: Federation, engine: str) -> None:
    """In a round of six clients, three of them drawn."""
    model, sizes = (4 * 3 + 3) * 4, np.array(SIZES)
    for estimator, vectors in (
        (FedVarp(), 1),
        (FedStale(), 1),
        (StaleVre(), 1),
        (Mifa(), 1),
        (Scaffold(), 2),
    ):
        _, record, _ = one_round(Task(linear, blobs), Uniform(3), engine, estimator)
        drawn = np.array(record["cohort"]["blobs"])
        assert (record["bytes_down"], record["bytes_up"]) == (
            3 * vectors * model,
            3 * vectors * model,
        )
        time = seconds(drawn, sizes[drawn], 2 * vectors * model)
        assert record["seconds"] == pytest.approx(time.max())
        assert record["client_seconds"] == pytest.approx(seconds(drawn, sizes[drawn], 0).sum())


@pytest.mark.parametrize(
    ("estimator", "numbers"), [(FedVarp(), 1), (StaleVr(), 2)], ids=["fedvarp", "stale-vr"]
)
def test_norms_by_all_then_updates_by_the_drawn(
    blobs: Federation, estimator: Any, numbers: int
) -> None:
    """mmfl-gvr: every client fetches the model, trains and reports its norm.

    To StaleVR it reports its beta, too. The drawn clients send the update that they have.
    """
    task = Task(linear, blobs)
    model, sizes = (4 * 3 + 3) * 4, np.array(SIZES)
    experiment = rota.Experiment([task], SAMPLERS["mmfl-gvr"](budget=2), estimator, devices=DEVICES)
    machine = make("sequential", experiment, "cpu")
    state, total = loop.begin(experiment, machine), 0.0
    for _ in range(3):
        before = state
        state, record = loop.play(experiment, machine, state)
        drawn = np.array(record["cohort"]["blobs"], np.int64)
        assert state.bytes_down - before.bytes_down == 6 * model
        assert state.bytes_up - before.bytes_up == 6 * 8 * numbers + len(drawn) * model
        first, then = seconds(np.arange(6), sizes, model), seconds(drawn, 0 * drawn, model)
        computing = seconds(np.arange(6), sizes, 0).sum()
        assert record["client_seconds"] == pytest.approx(computing)
        total += first.max() + then.max(initial=0.0)
        assert record["seconds"] == pytest.approx(total)


def test_what_the_estimator_expects_costs_nothing(blobs: Federation) -> None:
    task, model = Task(linear, blobs), (4 * 3 + 3) * 4
    experiment = rota.Experiment(
        [task], SAMPLERS["mmfl-vre"](budget=2), StaleVre(), devices=DEVICES
    )
    machine = make("sequential", Experiment([task], devices=DEVICES), "cpu")
    state = loop.begin(experiment, machine)
    for _ in range(8):
        before = state
        state, record = loop.play(experiment, machine, state)
        drawn = np.array(record["cohort"]["blobs"], np.int64)
        assert (
            state.bytes_down - before.bytes_down
            == state.bytes_up - before.bytes_up
            == len(drawn) * model
        )
        computing = seconds(drawn, np.array(SIZES)[drawn], 0).sum()
        assert record["client_seconds"] == pytest.approx(computing)
        known = before.policies["estimator"]
        asked = known["norm"].numpy() * np.abs(1 - known["beta"].numpy())
        assert state.policies["sampler"]["norm"] == pytest.approx(asked, nan_ok=True)
    assert (state.policies["sampler"]["norm"] > 0).any()


@pytest.mark.parametrize("place", ["device", "cpu", "disk"])
def test_server_memory_counts_what_is_remembered(blobs: Federation, place: Any) -> None:
    """One vector per client, those of drawn clients that wait to be written, and a few numbers."""
    model = (4 * 3 + 3) * 4
    waiting = 2 * (model + 8)
    for estimator, numbers, vectors in (
        (FedVarp(place), 3, 0),
        (StaleVr(place), 4, 0),
        (StaleVre(place), 5, 0),
        (Scaffold(place), 1, 1),
    ):
        sampler = SAMPLERS["optimal"](budget=6) if isinstance(estimator, StaleVr) else Uniform(2)
        state, record, _ = one_round(Task(linear, blobs), sampler, estimator=estimator)
        rest = sum(array.nbytes for array in state.policies["sampler"].values()) + model
        expected = (
            6 * model
            + vectors * model
            + 6 * 8 * numbers
            + (3 * waiting if isinstance(estimator, StaleVr) else waiting)
        )
        assert record["server_bytes"] - rest == expected


class Listening(Asks):
    """Asks everybody for norms in every round, and draws the same two."""

    def observe(
        self, state: dict[str, Array], shares: Array, plan: Plan, seen: Seen
    ) -> dict[str, Array]:
        return {**state, "seen": seen.norm}


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize(
    "estimator", [FedVarp(), FedStale(beta=0.5), StaleVr(), StaleVre(), Mifa()], ids=repr
)
def test_samplers_hear_and_see_what_is_weighed(
    blobs: Federation, engine: str, estimator: Any
) -> None:
    """|G - beta h| for remembered clients, |G| for the others: both before and after the draw."""
    task = Task(linear, blobs)
    experiment = rota.Experiment([task], Listening("norm", [0, 1, 2, 3, 4, 5], [4, 1]), estimator)
    machine = make(engine, Experiment([task], devices=DEVICES), "cpu")
    first, _ = loop.play(experiment, machine, loop.begin(experiment, machine))
    one, two = (
        updates(machine, state.models, now)
        for now, state in ((1, loop.begin(experiment, machine)), (2, first))
    )
    assert first.policies["sampler"]["norm"] == pytest.approx(np.linalg.norm(one, axis=1), rel=1e-4)
    second, _ = loop.play(experiment, machine, first)
    best = (one * two).sum(axis=1) / (one * one).sum(axis=1)
    beta = {FedStale: np.full(6, 0.5), StaleVr: best, StaleVre: np.full(6, 0.9)}.get(
        type(estimator), np.ones(6)
    ) * np.isin(np.arange(6), [4, 1])
    expected = np.linalg.norm(two - beta[:, None] * one, axis=1)
    assert second.policies["sampler"]["norm"] == pytest.approx(expected, rel=1e-4)
    assert second.policies["sampler"]["seen"] == pytest.approx(expected[[4, 1]], rel=1e-4)


@pytest.mark.parametrize("engine", HERE)
def test_who_is_asked_trains_as_the_drawn_do(blobs: Federation, engine: str) -> None:
    """SCAFFOLD's corrections are made before the draw too."""
    task = Task(linear, blobs, epochs=3)
    experiment = rota.Experiment([task], Listening("norm", [0, 1, 2, 3, 4, 5], [4, 1]), Scaffold())
    machine = make(engine, Experiment([task], devices=DEVICES), "cpu")
    state, _ = loop.play(experiment, machine, loop.begin(experiment, machine))
    plain = updates(machine, state.models, 2)
    state, _ = loop.play(experiment, machine, state)
    assert state.policies["sampler"]["norm"][[4, 1]] == pytest.approx(
        state.policies["sampler"]["seen"], rel=1e-4
    )
    assert (np.abs(state.policies["sampler"]["norm"] - np.linalg.norm(plain, axis=1)) > 1e-3).all()


def updates(machine: Engine, models: list[Model], now: int) -> Array:
    out = np.empty((6, len(models[0].params)))
    for chunk in machine.train(whole(models, rows([0, 1, 2, 3, 4, 5]), now)):
        out[chunk.rows] = chunk.update.numpy()
    return out


def test_what_samplers_pay(blobs: Federation) -> None:
    """In a round of six clients: bytes in models, but for answers of 8 bytes."""
    model = (4 * 3 + 3) * 4
    paid = {}
    for name, options in (
        ("full", {}),
        ("kvib", {"budget": 2}),
        ("optimal", {"budget": 2}),
        ("kvib-full", {"budget": 2}),
    ):
        _, record, _ = one_round(Task(linear, blobs), SAMPLERS[name](**options))
        paid[name] = (
            record["bytes_down"] // model,
            (record["bytes_up"] - record["bytes_up"] % model) // model,
            record["bytes_up"] % model,
        )
        assert paid[name][1] == len(record["cohort"]["blobs"])
    assert paid["full"] == (6, 6, 0)
    assert paid["kvib"][::2] == (paid["kvib"][1], 0)
    assert paid["optimal"][::2] == paid["kvib-full"][::2] == (6, 6 * 8)
    _, record, _ = one_round(Task(linear, blobs), SAMPLERS["pow-d"](budget=2, candidates=4))
    assert (record["bytes_down"], record["bytes_up"]) == (4 * model, 2 * model + 4 * 8)
    state, record, machine = one_round(Task(linear, blobs), SAMPLERS["divfl"](budget=2))
    assert (record["bytes_down"], record["bytes_up"]) == (6 * model, 6 * model)
    experiment = rota.Experiment(
        [Task(linear, blobs)], SAMPLERS["divfl"](budget=2), devices=DEVICES
    )
    _, second = loop.play(experiment, machine, state)
    assert (second["bytes_down"], second["bytes_up"]) == (8 * model, 8 * model)


@pytest.mark.parametrize("what", ["norm", "update", "loss"])
def test_a_client_that_answers_nonsense_has_no_answer(what: str) -> None:
    """But it has worked for it, and sent it."""
    state, record, machine = one_round(Task(fragile, sick([1])), Asks(what, [0, 1], [2]))
    assert state.policies["sampler"]["ok"].tolist() == [True, False]
    assert np.isnan(state.policies["sampler"]["loss" if what == "loss" else "norm"]).tolist() == [
        False,
        True,
    ]
    assert "update.1" not in state.policies["sampler"]
    reason = "the loss is not finite" if what == "loss" else "the update is not finite"
    assert record["failures"] == [
        {"client": 1, "model": "blobs", "reason": f"{reason}, asked before the draw"}
    ]
    model = machine.initial()[0].nbytes
    assert record["bytes_up"] == model + 2 * (model if what == "update" else 8)
    _, fine, _ = one_round(Task(fragile, sick([])), Asks(what, [0, 1], [2]))
    assert (record["client_seconds"], record["seconds"]) == (
        fine["client_seconds"],
        fine["seconds"],
    )


@pytest.mark.parametrize("estimator", [UNBIASED, FedVarp(), StaleVr(), StaleVre()], ids=repr)
def test_replies_that_were_not_asked_for_change_nothing(
    blobs: Federation, estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Second replies, and those of other rounds, models and rows, before the draw and after it."""
    train = Sequential.train

    def noisy(self: Sequential, job: Job) -> Iterator[Chunk]:
        for chunk in train(self, job):
            yield replace(chunk, now=job.now + 1)
            yield replace(chunk, model=7)
            yield replace(chunk, rows=chunk.rows + 100)
            yield chunk
            yield chunk

    sampler = Asks("norm", [0, 1, 2, 3], [2, 3, 4])
    quiet, line, _ = one_round(Task(linear, blobs), sampler, estimator=estimator)
    monkeypatch.setattr(Sequential, "train", noisy)
    state, record, _ = one_round(Task(linear, blobs), sampler, estimator=estimator)
    assert record == line
    assert torch.equal(state.models[0].params, quiet.models[0].params)


def test_the_oracle_has_the_least_variance(blobs: Federation) -> None:
    """With its own norms, no other coins are better: against uniform ones on the same updates."""
    state, _, machine = one_round(Task(linear, blobs), SAMPLERS["optimal"](budget=2))
    shares = rota.Experiment([Task(linear, blobs)], SAMPLERS["full"]()).shares
    scores = shares[0] * state.policies["sampler"]["norm"][0]
    rates: Array = SAMPLERS["optimal"](budget=2).rates(state.policies["sampler"], shares)[0]
    even = 2 * draw.uniform(shares)[0]
    assert variance.independent(rates, scores) < 0.9 * variance.independent(even, scores)
    norms = [
        float(chunk.update.norm())
        for chunk in machine.train(whole(machine.initial(), draw.everybody(shares), 1))
    ]
    assert state.policies["sampler"]["norm"][0] == pytest.approx(norms)
