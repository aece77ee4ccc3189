"""A model is not a task: a run may have several models of one task, each with its own clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from safetensors.torch import load_file
from test_store import PARTNERS, contents, same, stop_after

import rota
from rota import loop, rng, weights
from rota.arrays import Array
from rota.engine import ENGINES, Engine, make
from rota.estimate import ESTIMATORS, Adam
from rota.experiment import Experiment, State
from rota.plan import Local, Model, Plan, Seen, Task, whole
from rota.policies import KINDS
from rota.running.run import Interrupted, Run, execute
from rota.sampling import SAMPLERS, Full
from rota.submodel import Fixed
from rota.weights import Weights
from rota.world.availability import Availability

SIZES = [5, 12, 7, 9, 8, 6, 10, 4, 11, 7, 9, 6]
GROUPS = [[0, 3, 6, 8, 11], [1, 4, 7, 10], [2, 5, 9]]
"""Which clients have which of the three models of the first task."""
OWN_ENGINES = [name for name in ENGINES if name in ("sequential", "batched")]


@pytest.fixture(params=[*OWN_ENGINES, "stacks"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine's name; "stacks" is the batched one without the C library."""
    monkeypatch.setenv("ROTA_NATIVE", "0" if request.param == "stacks" else "1")
    return "batched" if request.param == "stacks" else str(request.param)


def digits() -> Task:
    return Task(linear, federation(SIZES), batch=4, name="digits")


def dropping() -> Task:
    """Dropout, BatchNorm, momentum and the proximal term."""
    work: dict[str, Any] = {"batch": 4, "momentum": 0.5, "prox": 0.1}
    return Task(network, federation(SIZES), name="digits", **work)


def other() -> Task:
    return Task(linear, federation(SIZES, classes=4, seed=1), batch=None, name="other")


def apart(task: Task, number: int, index: int = 0) -> list[Model]:
    """Models of one task that have not begun alike."""
    seeds = [rng.key(7, "model", k) for k in range(number)]
    return [Model(index, weights.read(task.build(seed))) for seed in seeds]


BEGIN = loop.begin


@dataclass
class Start:
    """An engine that only knows where models begin."""

    models: list[Model]

    def initial(self) -> list[Model]:
        return self.models


def several(experiment: Experiment) -> State:
    """Three models of the first task, each with a group of clients, and one of every other task."""
    models = apart(experiment.tasks[0], len(GROUPS))
    rows = np.zeros((len(GROUPS), len(SIZES)))
    for row, group in zip(rows, GROUPS, strict=True):
        row[group] = np.array(SIZES)[group] / np.array(SIZES)[group].sum()
    for index, task in list(enumerate(experiment.tasks))[1:]:
        models += apart(task, 1, index)
    shares = np.concatenate([rows, experiment.shares[1:]])
    grouped = replace(experiment)
    vars(grouped)["shares"] = shares  # a property that is computed once
    return BEGIN(grouped, Start(models))  # type: ignore[arg-type]


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new run begins with three models of its first task."""
    monkeypatch.setattr(loop, "begin", lambda experiment, engine: several(experiment))


def rows(pairs: list[tuple[int, int]]) -> Plan:
    client, model = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    return Plan(client, model, np.ones(len(pairs)), np.ones(len(pairs)))


def trained(
    engine: Engine, models: list[Model], pairs: list[tuple[int, int]], local: Local | None = None
) -> dict[tuple[int, int], tuple[Any, ...]]:
    """What each pair of a client and a model reports."""
    job, out = whole(models, rows(pairs), 2, local), {}
    for chunk in engine.train(job):
        assert set(job.plan.model[chunk.rows]) == {chunk.model}, "a chunk is of one model"
        for place, row in enumerate(chunk.rows.tolist()):
            numbers = chunk.loss, chunk.steps, chunk.examples, *vars(chunk.costs).values()
            vectors = chunk.update[place], chunk.buffers[place]
            assert chunk.reason[place] == ""
            out[pairs[row]] = (*vectors, *(float(each[place]) for each in numbers), chunk.lr)
    assert len(out) == len(pairs)
    return out


def alike(one: dict[Any, Any], two: dict[Any, Any]) -> None:
    assert one.keys() == two.keys()
    for key, (update, buffers, *numbers) in one.items():
        torch.testing.assert_close(two[key][0], update, rtol=1e-4, atol=3e-5)
        torch.testing.assert_close(two[key][1], buffers, rtol=1e-4, atol=3e-5)
        assert two[key][2:] == pytest.approx(tuple(numbers), rel=1e-4), key


# ---- engines


@pytest.mark.parametrize("task", [digits, dropping])
def test_engines_train_the_models_of_one_task_apart(name: str, task: Callable[[], Task]) -> None:
    """What a client makes of a model does not depend on the other models, nor on its number."""
    experiment = Experiment([task(), other()])
    engine = make(name, experiment, "cpu")
    a, b, c = apart(experiment.tasks[0], 3)
    (d,) = apart(experiment.tasks[1], 1, index=1)
    pairs = [(0, 0), (1, 1), (0, 2), (5, 3), (3, 0), (4, 1), (0, 1), (8, 2), (7, 3), (2, 2)]
    together = trained(engine, [a, b, c, d], pairs)
    for model, alone in ((0, a), (1, b), (2, c), (3, d)):
        mine = [(client, 0) for client, number in pairs if number == model]
        found = trained(engine, [alone], mine)
        expected = {(client, model): each for (client, _), each in found.items()}
        alike(expected, {pair: together[pair] for pair in expected})
    moved = trained(engine, [d, c, b, a], [(client, 3 - model) for client, model in pairs])
    alike({(client, 3 - model): each for (client, model), each in moved.items()}, together)
    updates = [together[0, model][0] for model in range(3)]
    assert not torch.equal(updates[0], updates[1]), "they do not begin alike"
    twins = trained(engine, [a, a], [(0, 0), (0, 1)])
    alike({0: twins[0, 0]}, {0: twins[0, 1]})


@pytest.mark.parametrize("vector", ["start", "shift", "anchor"])
@pytest.mark.parametrize("task", [digits, dropping])
def test_engines_agree_on_several_models_of_one_task(
    name: str, task: Callable[[], Task], vector: str
) -> None:
    """Also where rows have starts, anchors and shifts of their own."""
    experiment = Experiment([task(), other()])
    models = [*apart(experiment.tasks[0], 3), *apart(experiment.tasks[1], 1, index=1)]
    pairs = [(c, m) for m in (2, 0, 1) for c in (0, 3, 5, 8)] + [(1, 3), (6, 3)]
    engines = [make(each, experiment, "cpu") for each in ("sequential", name)]
    one, two = (trained(engine, models, pairs) for engine in engines)
    alike(one, two)
    three = [(client, model) for client, model in pairs if model < 3]
    starts = [models[(model + 1) % 3].weights for _, model in three]

    def start(few: Array) -> Weights:
        params, buffers = (torch.stack([starts[row][i] for row in few.tolist()]) for i in range(2))
        return Weights(params, buffers)

    def noise(few: Array) -> torch.Tensor:
        keys = rng.as_tensor([rng.key(1, int(row)) for row in few.tolist()])
        return rng.uniform(keys, len(models[0].params)).to(models[0].params) / 10

    local = Local(**{vector: start if vector == "start" else noise})
    own, same_own = (trained(engine, models[:3], three, local) for engine in engines)
    alike(own, same_own)
    used = vector != "anchor" or experiment.tasks[0].prox > 0
    assert all(torch.equal(own[pair][0], one[pair][0]) != used for pair in three)


@pytest.mark.parametrize("task", [digits, dropping])
def test_engines_score_the_models_of_one_task_apart(name: str, task: Callable[[], Task]) -> None:
    experiment = Experiment([task(), other()])
    engine = make(name, experiment, "cpu")
    a, b, c = apart(experiment.tasks[0], 3)
    (d,) = apart(experiment.tasks[1], 1, index=1)
    models = [a, d, b, c]
    scores = engine.evaluate(models)
    assert len({score.loss for score in scores}) == 4
    for s, model in enumerate(models):
        (alone,) = engine.evaluate([model])
        assert (alone.loss, alone.accuracy) == pytest.approx((scores[s].loss, scores[s].accuracy))
    some = engine.evaluate(models, [3, 1])
    assert [each.loss for each in some] == pytest.approx([scores[3].loss, scores[1].loss])
    pairs = [(0, 0), (0, 2), (5, 1), (0, 3), (8, 2)]
    answers: Seen = engine.losses(whole(models, rows(pairs), 2), 4)
    for row, (client, model) in enumerate(pairs):
        one = engine.losses(whole([models[model]], rows([(client, 0)]), 2), 4)
        assert answers.loss[row] == pytest.approx(one.loss[0], rel=1e-5)
        assert answers.seconds[row] == pytest.approx(one.seconds[0])
        assert answers.examples[row] == one.examples[0]
    assert answers.loss[0] != pytest.approx(answers.loss[1])


# ---- rounds


@pytest.mark.parametrize("task", [digits, dropping])
def test_each_model_is_trained_by_its_clients_only(name: str, task: Callable[[], Task]) -> None:
    experiment = Experiment([task()], Full(), rounds=2)
    engine = make(name, experiment, "cpu")
    state = several(experiment)
    for now in (1, 2):
        before = state
        state, record = loop.play(experiment, engine, state)
        assert record["cohort"] == {f"digits.{s}": group for s, group in enumerate(GROUPS)}
        for s, group in enumerate(GROUPS):
            job = whole([before.models[s]], rows([(client, 0) for client in group]), now)
            expected = before.models[s].params.clone()
            for chunk in engine.train(job):
                mine = before.shares[s, job.plan.client[chunk.rows]]
                expected -= torch.from_numpy(mine).float() @ chunk.update
            torch.testing.assert_close(state.models[s].params, expected, rtol=1e-4, atol=1e-6)
            assert record["models"][f"digits.{s}"]["trained"] == len(group)
            assert state.models[s].task == 0
        nbytes = sum(state.models[s].nbytes * len(group) for s, group in enumerate(GROUPS))
        assert state.bytes_up - before.bytes_up == state.bytes_down - before.bytes_down == nbytes
        np.testing.assert_array_equal(state.shares, before.shares)


def test_what_one_group_has_does_not_reach_the_others(name: str) -> None:
    experiment = Experiment([dropping()], Full(), server=Adam(), rounds=3)
    data = federation(SIZES)
    for client in GROUPS[1]:
        data.train.of(client)[0].add_(3.0)
    elsewhere = replace(experiment, tasks=[replace(dropping(), data=data)])
    ends = []
    for each in (experiment, elsewhere):
        engine, state = make(name, each, "cpu"), several(experiment)
        for _ in range(3):
            state, _ = loop.play(each, engine, state)
        ends.append(state)
    equal = [
        torch.equal(one.params, two.params)
        for one, two in zip(ends[0].models, ends[1].models, strict=True)
    ]
    assert equal == [True, False, True]


@pytest.mark.usefixtures("grouped")
def test_records_and_folders_name_the_models(name: str, tmp_path: Path) -> None:
    experiment = Experiment([digits(), other()], Full(), rounds=2)
    run = execute(experiment, engine=name, out=tmp_path)
    names = ["digits.0", "digits.1", "digits.2", "other"]
    for record in run.records:
        assert list(record["models"]) == list(record["cohort"]) == names
        accuracies = [record["models"][each]["accuracy"] for each in names]
        assert record["accuracy"] == pytest.approx(np.mean(accuracies))
        assert record["worst_accuracy"] == min(accuracies)
    assert list(run.summary["models"]) == list(run.models) == names
    assert set(run.rounds) >= {f"{each}.accuracy" for each in names}
    files = {path.name: load_file(path) for path in (tmp_path / "models").iterdir()}
    assert files.keys() == {f"{each}.safetensors" for each in names}
    for each, model in zip(names, run.state.models, strict=True):
        flat = torch.cat([part.flatten() for part in files[f"{each}.safetensors"].values()])
        module = run.models[each]
        assert torch.equal(torch.sort(flat).values, torch.sort(model.params).values)
        assert torch.equal(weights.read(module).params, model.params)


def test_checkpoint_and_resume_are_exact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run does not begin with these models any more: they and their shares are read."""
    experiment = Experiment(
        [dropping(), other()],
        SAMPLERS["kvib"](budget=3),  # type: ignore[call-arg]
        ESTIMATORS["fedvarp"](),
        server=Adam(),
        availability=Availability(0.8, memory=0.5),
        rounds=4,
        seed=5,
    )

    def run(folder: str, resume: bool = False, watch: Any = None) -> Run:
        return execute(experiment, engine=name, out=tmp_path / folder, resume=resume, watch=watch)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "begin", lambda experiment, engine: several(experiment))
        whole_run = run("whole")
        for folder in ("patched", "plain"):
            with pytest.raises(Interrupted):
                run(folder, watch=stop_after(2, KeyboardInterrupt()))
        again = run("patched", resume=True)
    plainly = run("plain", resume=True)
    for resumed, folder in ((again, "patched"), (plainly, "plain")):
        assert same(resumed.state, whole_run.state)
        assert resumed.records == whole_run.records
        assert contents(tmp_path / folder) == contents(tmp_path / "whole")


MEMBERS = [
    (kind, name)
    for kind in ("sampler", "estimator", "capacity", "submodel")
    for name in KINDS[kind].members
]


@pytest.mark.parametrize(("kind", "member"), MEMBERS)
@pytest.mark.usefixtures("grouped")
def test_every_policy_takes_several_models_of_one_task(
    kind: str, member: str, tmp_path: Path
) -> None:
    policy = KINDS[kind].members[member]
    tasks = [replace(dropping(), momentum=0.0), replace(other(), model=network)]
    partners = {"capacity": Fixed((1.0, 0.5))} if kind == "submodel" else PARTNERS.get(policy, {})
    experiment = Experiment(tasks, Full(), rounds=5).using(**{kind: policy()}, **partners)
    whole_run = execute(experiment, engine="sequential", out=tmp_path / "whole")
    groups = {f"digits.{s}": set(group) for s, group in enumerate(GROUPS)}
    for record in whole_run.records:
        assert not record["failures"]
        for name, group in groups.items():
            assert set(record["cohort"][name]) <= group
    stop = stop_after(3, KeyboardInterrupt())
    with pytest.raises(Interrupted):
        execute(experiment, engine="sequential", out=tmp_path / "run", watch=stop)
    resumed = execute(experiment, engine="sequential", out=tmp_path / "run", resume=True)
    assert same(resumed.state, whole_run.state)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("grouped")
def test_metrics_and_targets_of_several_models(tmp_path: Path) -> None:
    experiment = Experiment(
        [digits(), other()],
        SAMPLERS["kvib"](budget=3),  # type: ignore[call-arg]
        rounds=40,
        target=0.7,
        metrics=["regret", "variance"],
    )
    run = execute(experiment, engine="sequential")
    assert run.state.round < 40
    assert all(entry["accuracy"] >= 0.7 for entry in run.records[-1]["models"].values())
    assert all(record["regret"] >= -1e-12 for record in run.records)
    reached = [entry["rounds_to_target"] for entry in run.summary["models"].values()]
    assert max(reached) == run.state.round


@pytest.mark.usefixtures("grouped")
def test_a_page_of_several_models_of_one_task(tmp_path: Path) -> None:
    """rota report knows whose data each model's are."""
    from rota.cli.report import write_page

    execute(Experiment([digits(), other()], Full(), rounds=2), out=tmp_path)
    page = write_page([tmp_path], tmp_path / "report.html").read_text()
    assert all(name in page for name in ("digits.0", "digits.1", "digits.2", "other"))


def test_three_models_cost_three_rows(tmp_path: Path) -> None:
    """A client that has two of them trains one after the other, and pays for both."""
    experiment = Experiment([digits()], Full(), rounds=1)
    engine, state = make("sequential", experiment, "cpu"), several(experiment)
    alone, _ = loop.play(experiment, engine, state)
    shares = state.shares / [[1], [2], [1]]
    shares[1, 0] = 0.5
    both, record = loop.play(experiment, engine, replace(state, shares=shares))
    assert record["cohort"]["digits.1"] == [0, *GROUPS[1]]
    assert both.bytes_up - alone.bytes_up == state.models[0].nbytes
    assert rota.Experiment([digits()]).models([Model(0, state.models[0].weights)]) == ["digits"]
