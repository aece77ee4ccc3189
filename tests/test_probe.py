"""What a sampler asks before it draws: the answers are those of training, and everything is paid for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from test_loop import fragile, sick

import rota
from rota import loop, weights
from rota.data.federation import Array, Federation
from rota.engine import ENGINES, Engine, make
from rota.plan import Plan, Question, Seen, Task
from rota.sampling import SAMPLERS, draw, variance

SIZES = [5, 12, 20, 31, 8, 17]
DEVICES = rota.Devices(spread=1.0)


class Asks:
    """Asks some clients one thing, remembers what it heard, and then draws some others."""

    def __init__(self, what: Any, clients: list[int], drawn: list[int], examples: int | None = None) -> None:
        self.question, self.drawn = Question(rows(clients), what, examples), rows(drawn)

    def init(self, shares: Array, rounds: int) -> dict[str, Array]:  # noqa: ARG002
        return {}

    def ask(self, *_: Any) -> Question:
        return self.question

    def hear(self, state: dict[str, Array], plan: Plan, seen: Seen) -> dict[str, Array]:
        assert plan is self.question.rows
        update = {f"update.{row}": value for row, value in (seen.update or {}).items()}
        return {**state, "norm": seen.norm, "loss": seen.loss, "ok": seen.ok, **update}

    def draw(self, *_: Any) -> Plan:
        return self.drawn

    def observe(self, state: dict[str, Array], *_: Any) -> dict[str, Array]:
        return state


def rows(clients: list[int]) -> Plan:
    return Plan(np.array(clients, np.int64), np.zeros(len(clients), np.int64), np.ones(len(clients)), np.ones(len(clients)))


def one_round(task: Task, sampler: Any, engine: str = "sequential") -> tuple[loop.State, dict[str, Any], Engine]:
    machine = make(engine, [task], DEVICES, 0, "cpu")
    experiment = rota.Experiment([task], sampler, devices=DEVICES)
    return *loop.play(experiment, machine, loop.begin(experiment, machine)), machine


@pytest.mark.parametrize("engine", ENGINES)
def test_norms_and_updates_are_those_of_training(blobs: Federation, engine: str) -> None:
    task, asked = Task(network, blobs, batch=6), [4, 1, 5]
    state, _, machine = one_round(task, Asks("update", asked, [0]), engine)
    chunks = machine.train(machine.initial(), rows(asked), 1)
    updates = {int(row): update for chunk in chunks for row, update in zip(chunk.rows, chunk.update.numpy(), strict=True)}
    for row, update in updates.items():
        assert state.sampler[f"update.{row}"] == pytest.approx(update, abs=1e-6)
        assert state.sampler["norm"][row] == pytest.approx(np.linalg.norm(update))
    plain, _, _ = one_round(task, Asks("norm", asked, [0]), engine)
    assert plain.sampler["norm"] == pytest.approx(state.sampler["norm"])
    assert not any(name.startswith("update") for name in plain.sampler)


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_are_the_global_models_on_the_clients_training_examples(blobs: Federation, engine: str) -> None:
    tasks = [Task(network, blobs, batch=6, name="a"), Task(linear, federation(SIZES, seed=3), name="b")]
    machine = make(engine, tasks, DEVICES, 0, "cpu")
    plan = Plan(np.array([2, 0, 5, 2]), np.array([0, 1, 0, 1]), np.ones(4), np.ones(4))
    losses, examples = machine.losses(machine.initial(), plan, 1)
    assert examples.tolist() == [20, 5, 17, 20]
    for client, model, loss in zip(plan.client, plan.model, losses, strict=True):
        module = tasks[model].build()
        weights.load(module, machine.initial()[model])
        x, y = tasks[model].data.train.of(client)
        with torch.no_grad():
            assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(module.eval()(x), y)), rel=1e-5)


def test_losses_on_some_examples_are_addressed(blobs: Federation) -> None:
    """They depend on the round and the client, not on who else is asked; and with enough of them they are all."""
    machine = make("sequential", [Task(linear, blobs)], DEVICES, 0, "cpu")
    start = machine.initial()
    alone, _ = machine.losses(start, rows([3]), 1, 4)
    among, examples = machine.losses(start, rows([5, 3, 0]), 1, 4)
    later, _ = machine.losses(start, rows([3]), 2, 4)
    assert examples.tolist() == [4, 4, 4]
    assert among[1] == pytest.approx(alone[0])
    assert later[0] != pytest.approx(alone[0])
    assert machine.losses(start, rows([3]), 1, 100)[0] == pytest.approx(machine.losses(start, rows([3]), 1)[0])


@pytest.mark.parametrize(
    ("what", "before", "after"),
    [("loss", (1 / 3, 1), (1, 1)), ("norm", (1, 1), (0, 1)), ("update", (1, 2), (0, 0))],
)
def test_a_probe_is_paid_for_and_nothing_is_paid_twice(blobs: Federation, what: str, before: Any, after: Any) -> None:
    """Clients 0-3 are asked; 2 and 3 are drawn after it, and so is 4, who has done nothing yet."""
    _, record, machine = one_round(Task(linear, blobs), Asks(what, [0, 1, 2, 3], [2, 3, 4]))
    model = machine.initial()[0].nbytes

    def seconds(clients: list[int], work: float, ways: float) -> Array:
        return machine.seconds(0, np.array(clients), work * np.array(SIZES)[clients], ways / 2 * model)

    first, then = seconds([0, 1, 2, 3], *before), np.concatenate([seconds([2, 3], *after), seconds([4], 1, 2)])
    assert record["seconds"] == pytest.approx(first.max() + then.max())
    assert record["client_seconds"] == pytest.approx(first.sum() + then.sum())
    assert record["bytes_down"] == 5 * model
    assert record["bytes_up"] == (5 * model if what == "update" else 4 * 8 + 3 * model)


def test_what_samplers_pay(blobs: Federation) -> None:
    """In a round of six clients: bytes in models, but for answers of 8 bytes."""
    model = (4 * 3 + 3) * 4
    paid = {}
    for name, options in (("full", {}), ("kvib", {"budget": 2}), ("optimal", {"budget": 2}), ("kvib-full", {"budget": 2})):
        _, record, _ = one_round(Task(linear, blobs), SAMPLERS[name](**options))
        paid[name] = (record["bytes_down"] // model, (record["bytes_up"] - record["bytes_up"] % model) // model, record["bytes_up"] % model)
        assert paid[name][1] == len(record["cohort"]["blobs"])
    assert paid["full"] == (6, 6, 0)
    assert paid["kvib"][::2] == (paid["kvib"][1], 0)
    assert paid["optimal"][::2] == paid["kvib-full"][::2] == (6, 6 * 8)
    _, record, _ = one_round(Task(linear, blobs), SAMPLERS["pow-d"](budget=2, candidates=4))  # type: ignore[call-arg]
    assert (record["bytes_down"], record["bytes_up"]) == (4 * model, 2 * model + 4 * 8)
    state, record, machine = one_round(Task(linear, blobs), SAMPLERS["divfl"](budget=2))  # type: ignore[call-arg]
    assert (record["bytes_down"], record["bytes_up"]) == (6 * model, 6 * model)
    experiment = rota.Experiment([Task(linear, blobs)], SAMPLERS["divfl"](budget=2), devices=DEVICES)  # type: ignore[call-arg]
    _, second = loop.play(experiment, machine, state)
    assert (second["bytes_down"], second["bytes_up"]) == (8 * model, 8 * model)


@pytest.mark.parametrize("what", ["norm", "update", "loss"])
def test_a_client_that_fails_to_answer_has_no_answer(what: str) -> None:
    state, record, machine = one_round(Task(fragile, sick([1])), Asks(what, [0, 1], [2]))
    assert state.sampler["ok"].tolist() == [True, False]
    assert np.isnan(state.sampler["loss" if what == "loss" else "norm"]).tolist() == [False, True]
    assert "update.1" not in state.sampler
    assert record["failures"] == []
    model = machine.initial()[0].nbytes
    assert record["bytes_up"] == model + (model if what == "update" else 8)


def test_the_oracle_has_the_least_variance(blobs: Federation) -> None:
    """With its own norms, no other coins are better: against uniform ones on the same updates."""
    state, _, machine = one_round(Task(linear, blobs), SAMPLERS["optimal"](budget=2))  # type: ignore[call-arg]
    shares = rota.Experiment([Task(linear, blobs)], SAMPLERS["full"]()).shares
    scores = shares[0] * state.sampler["norm"][0]
    rates: Array = SAMPLERS["optimal"](budget=2).rates(state.sampler, shares)[0]  # type: ignore[attr-defined,call-arg]
    even = 2 * draw.uniform(shares)[0]
    assert variance.independent(rates, scores) < 0.9 * variance.independent(even, scores)
    norms = [float(chunk.update.norm()) for chunk in machine.train(machine.initial(), draw.everybody(shares), 1)]
    assert state.sampler["norm"][0] == pytest.approx(norms)
