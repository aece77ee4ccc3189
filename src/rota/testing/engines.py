"""What every engine must do with a job: train its rows, report their costs, and decide nothing.

Each check takes a function that makes the engine for an experiment. It raises AssertionError with a
sentence that says what the engine did wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rota.data.federation import Federation
from rota.data.own import from_clients
from rota.engine import Engine, Options, Sequential
from rota.experiment import Experiment
from rota.plan import Chunk, Job, Local, Model, Plan, Task, whole
from rota.sampling.draw import everybody
from rota.weights import Weights

Build = Callable[[Experiment], Engine]
SICK = 2
"""The client whose training raises."""


def check_engine(engine: Any, same: bool = True) -> None:
    """Put an engine through all checks, on the CPU; AssertionError says what it did wrong.

    `engine` is a class with `make(experiment, options)`, as in rota.engine.ENGINES, or a function
    from an experiment to an engine. `same` is whether it must give the results of the reference
    engine: set it to false for an engine whose clients draw random numbers of their own.
    """
    build = maker(engine)
    for check in CHECKS:
        check(build)
    if same:
        for check in (check_same, check_local, check_losses):
            check(build)


def maker(engine: Any) -> Build:
    """A function that makes an engine for an experiment."""

    def build(experiment: Experiment) -> Engine:
        made: Engine = engine.make(experiment, Options(torch.device("cpu")))
        return made

    return build if hasattr(engine, "make") else engine


# --- a small experiment


def federation(sizes: list[int], seed: int = 0, spoilt: int | None = None) -> Federation:
    """Examples with four features in three classes, for clients of these sizes."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(3, 4)) * 2

    def part(number: int) -> tuple[Any, Any]:
        y = generator.integers(3, size=number)
        return (centres[y] + generator.normal(size=(number, 4))).astype(np.float32), y

    clients = [part(number) for number in sizes]
    if spoilt is not None:
        clients[spoilt][0][:] = 1e6
    return from_clients(clients, part(30), classes=3, name="blobs")


class Fragile(nn.Module):
    """A network that raises for the examples of one client."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(shape[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e5:
            raise ValueError("these examples are too large")
        return self.inner(x)  # type: ignore[no-any-return]


def two_layers(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 6), nn.Tanh(), nn.Linear(6, classes))


def normalised(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def experiment() -> Experiment:
    """Three tasks with different networks and local work; some clients have no data for some."""
    data, other = federation([5, 12, 20, 9]), federation([7, 0, 16, 11], seed=1)
    tasks = [
        Task(two_layers, data, lr=0.1, batch=4, epochs=2, momentum=0.5, lr_decay=0.9, name="a"),
        Task(normalised, other, lr=0.05, batch=None, epochs=3, weight_decay=0.01, name="b"),
        Task(two_layers, other, lr=0.2, batch=6, steps=3, prox=0.5, name="c"),
    ]
    return Experiment(tasks, seed=3)


@dataclass(frozen=True)
class Row:
    """The reply of one row."""

    update: Tensor
    buffers: Tensor
    loss: float
    steps: int
    examples: float
    reason: str


def trained(engine: Engine, job: Job) -> dict[int, Row]:
    """Train a job, and look at the form of every chunk."""
    rows: dict[int, Row] = {}
    for chunk in engine.train(job):
        _well_formed(chunk, job)
        for place, row in enumerate(chunk.rows.tolist()):
            assert row not in rows, f"the engine replies twice for row {row}"
            rows[row] = Row(
                chunk.update[place].detach().clone(),
                chunk.buffers[place].detach().clone(),
                float(chunk.loss[place]),
                int(chunk.steps[place]),
                float(chunk.examples[place]),
                chunk.reason[place],
            )
    missing = sorted(set(range(len(job.plan))) - rows.keys())
    assert not missing, f"the engine does not reply for the rows {missing}"
    return rows


def _well_formed(chunk: Chunk, job: Job) -> None:
    number, rows = len(chunk.rows), np.asarray(chunk.rows)
    inside = (rows >= 0) & (rows < len(job.plan))
    assert inside.all(), (
        f"the engine replies for row {rows[~inside][0]}, which the job does not have"
    )
    assert (job.plan.model[rows] == chunk.model).all(), (
        f"the engine replies with a chunk of model {chunk.model} for rows of other models"
    )
    assert chunk.now == job.now, f"the engine replies for round {chunk.now}, not {job.now}"
    model = job.models[chunk.model]
    for what, value, like in (
        ("update", chunk.update, model.params),
        ("buffers", chunk.buffers, model.buffers),
    ):
        assert (tuple(value.shape), value.dtype) == ((number, len(like)), like.dtype), (
            f"the {what} of a chunk has the shape {tuple(value.shape)} and {value.dtype}, not "
            f"{(number, len(like))} and {like.dtype}"
        )
    columns = {name: getattr(chunk, name) for name in ("loss", "steps", "examples")}
    columns |= vars(chunk.costs)
    for name, column in columns.items():
        assert np.shape(column) == (number,), (
            f"the column '{name}' of a chunk has the shape {np.shape(column)}, not ({number},)"
        )
        ran = np.asarray(column)[np.asarray(chunk.steps) > 0]
        assert (ran >= 0).all() or name == "loss", (
            f"the column '{name}' of rows that trained has values below 0, or NaN"
        )
    assert len(chunk.reason) == number, "a chunk needs one reason for each of its rows"


def whole_job(engine: Engine, setting: Experiment, now: int = 2) -> Job:
    """Every pair that has data trains."""
    return whole(engine.initial(), everybody(setting.shares), now)


# --- the checks


def check_initial(build: Build) -> None:
    """There is one finite model per task, and an engine that is made again has the same."""
    setting = experiment()
    one, two = build(setting).initial(), build(setting).initial()
    assert [model.task for model in one] == [0, 1, 2], (
        "`initial` must give one model per task, in the order of the tasks"
    )
    for mine, other, task in zip(one, two, setting.tasks, strict=True):
        assert torch.isfinite(mine.params).all(), (
            f"the first model of task {task.name} is not finite"
        )
        assert torch.equal(mine.params, other.params), (
            f"two engines for one experiment begin task {task.name} with different models"
        )


def check_training(build: Build) -> None:
    """Every row of a job is trained once, whatever other rows there are."""
    setting = experiment()
    engine = build(setting)
    job = whole_job(engine, setting)
    before = [model.params.clone() for model in job.models]
    rows = trained(engine, job)
    for model, old in zip(job.models, before, strict=True):
        assert torch.equal(model.params, old), "training changed a model of the job"
    for row, found in rows.items():
        assert not found.reason, f"row {row} failed: {found.reason}"
        task, client = setting.tasks[job.task[row]], int(job.plan.client[row])
        size = int(task.roster.sizes[client])
        passes = task.epochs if task.steps is None else 0
        assert passes == 0 or found.examples == passes * size, (
            f"client {client} has {size} examples of task {task.name} and trained for {passes} "
            f"epochs, but row {row} counts {found.examples:g} examples"
        )
        assert np.isfinite(found.loss), f"row {row} has trained, but its loss is {found.loss}"
        assert float(found.update.norm()) > 0, f"row {row} has trained, but its update is 0"
    assert trained(engine, job.of(np.arange(0))) == {}, "a job without rows has replies"


def check_grouping(build: Build) -> None:
    """A row's result does not depend on the other rows, on their order, or on an earlier job."""
    setting = experiment()
    engine = build(setting)
    job = whole_job(engine, setting)
    everything = trained(engine, job)
    for some in (np.array([4]), np.arange(len(job.plan))[::-2].copy()):
        for place, found in trained(engine, job.of(some)).items():
            _alike(
                found,
                everything[int(some[place])],
                f"row {some[place]} trains differently without the other rows",
            )


def check_several_models_of_a_task(build: Build) -> None:
    """Models are not tasks: two models of one task train from their own weights."""
    setting = experiment()
    engine = build(setting)
    first = engine.initial()
    moved = Weights(first[0].params + 0.1, first[0].buffers)
    models = [*first, Model(0, moved)]
    plan = Plan(np.array([1, 1, 2]), np.array([0, 3, 3]), np.ones(3), np.ones(3))
    rows = trained(engine, whole(models, plan, 2))
    first_row = replace(plan.of(np.array([1])), model=np.zeros(1, np.int64))
    alone = trained(engine, whole([Model(0, moved)], first_row, 2))
    assert not torch.allclose(rows[0].update, rows[1].update), (
        "two models of one task train as if they were one"
    )
    _alike(rows[1], alone[0], "a second model of a task trains differently from a first one")


def check_a_failing_client(build: Build) -> None:
    """A client whose training raises is a failed row, and no other row changes."""
    found = []
    for spoilt in (SICK, None):
        task = Task(Fragile, federation([5, 12, 6, 9], spoilt=spoilt), batch=4, name="fragile")
        setting = Experiment([task], seed=3)
        engine = build(setting)
        found.append(trained(engine, whole_job(engine, setting)))
    sick, healthy = found
    assert sick[SICK].reason, "a client whose training raises must be a row with a reason"
    for row in sorted(sick.keys() - {SICK}):
        assert not sick[row].reason, f"row {row} fails because another client's training raises"
        _alike(
            sick[row], healthy[row], f"row {row} changes because another client's training raises"
        )


def check_scores(build: Build) -> None:
    """`evaluate` gives a score per model, or for the models that it is asked for."""
    setting = experiment()
    engine = build(setting)
    models = engine.initial()
    every = engine.evaluate(models)
    assert len(every) == len(models), (
        f"`evaluate` gives {len(every)} scores for {len(models)} models"
    )
    some = engine.evaluate(models, [2, 0])
    assert len(some) == 2, f"`evaluate` gives {len(some)} scores for two models"
    for score, which in zip(some, (2, 0), strict=True):
        assert np.isclose(score.loss, every[which].loss), "`evaluate` scores another model"


CHECKS: tuple[Callable[[Build], None], ...] = (
    check_initial,
    check_training,
    check_grouping,
    check_several_models_of_a_task,
    check_a_failing_client,
    check_scores,
)
"""The checks that every engine must pass."""


# --- the same results as the reference engine


def reference(setting: Experiment) -> Engine:
    """The engine that the others must agree with."""
    return Sequential.make(setting, Options(torch.device("cpu")))


def check_same(build: Build) -> None:
    """The engine trains as the reference engine does, up to rounding."""
    setting = experiment()
    engine, plain = build(setting), reference(setting)
    for mine, other in zip(engine.initial(), plain.initial(), strict=True):
        assert torch.equal(mine.params, other.params), (
            f"the first model of task {mine.task} is not that of the reference engine"
        )
    _same(engine, plain, whole_job(plain, setting), "than with the reference engine")


def check_local(build: Build) -> None:
    """Rows begin, are pulled and are corrected as the job's local vectors say."""
    setting = experiment()
    engine, plain = build(setting), reference(setting)
    job = whole_job(plain, setting)
    params = [model.params for model in job.models]
    buffers = [model.buffers for model in job.models]

    def spread(values: list[Tensor]) -> Callable[[Any], Tensor]:
        def rows(wanted: Any) -> Tensor:
            parts = []
            for row in wanted.tolist():
                parts.append(values[job.plan.model[row]] * (1 + 0.1 * float(job.plan.client[row])))
            return torch.stack(parts)

        return rows

    start, around, shift = spread(params), spread([2 * each for each in params]), spread(params)
    same = spread(buffers)
    for local, what in (
        (Local(start=lambda rows: Weights(start(rows), same(rows))), "their own starts"),
        (Local(anchor=around), "their own anchors"),
        (Local(shift=shift), "shifted gradients"),
    ):
        sentence = f"with {what} than with the reference engine"
        _same(engine, plain, replace(job, local=local), sentence)


def check_losses(build: Build) -> None:
    """The losses before the draw are those of the reference engine."""
    setting = experiment()
    engine, plain = build(setting), reference(setting)
    job = whole_job(plain, setting)
    for examples in (None, 3):
        mine, other = engine.losses(job, examples), plain.losses(job, examples)
        assert np.allclose(mine.loss, other.loss, rtol=1e-3, atol=1e-5, equal_nan=True), (
            f"`losses` gives {mine.loss}, and the reference engine {other.loss}"
        )
        assert np.array_equal(mine.examples, other.examples), (
            f"`losses` counts {mine.examples} examples, and the reference engine {other.examples}"
        )


def _same(engine: Engine, plain: Engine, job: Job, sentence: str) -> None:
    expected = trained(plain, job)
    for row, found in trained(engine, job).items():
        _alike(found, expected[row], f"row {row} trains differently {sentence}")


def _alike(one: Row, two: Row, sentence: str) -> None:
    for what in ("update", "buffers"):
        mine, other = getattr(one, what), getattr(two, what)
        assert torch.allclose(mine, other, rtol=1e-3, atol=1e-5), (
            f"{sentence}: its {what} differ by {float((mine - other).abs().max()):.2g}"
        )
    for what in ("loss", "steps", "examples"):
        mine, other = getattr(one, what), getattr(two, what)
        assert np.isclose(mine, other, rtol=1e-3, equal_nan=True), (
            f"{sentence}: its {what} is {mine:g} instead of {other:g}"
        )
