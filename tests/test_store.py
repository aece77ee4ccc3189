"""Exact resume: however a run ends, a resumed run gives the bytes of an unbroken one."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from conftest import federation, linear, network
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import SafetensorError
from safetensors.torch import load_file

import rota
from rota import loop, recipe, rng, weights
from rota.admission import Admission
from rota.arrays import Array
from rota.channel import TopK
from rota.data import describe as describing
from rota.data.federation import Federation
from rota.engine import ENGINES, Score, Sequential
from rota.errors import BadInput
from rota.estimate import ESTIMATORS, SERVERS, Adam, Sgd, StaleVr, StaleVre, Yogi
from rota.experiment import Experiment, State
from rota.grouping import Ifca
from rota.personal import Ditto
from rota.plan import Chunk, Costs, Job, Model, Plan, Seen, Task
from rota.policies import KINDS
from rota.recipe.describe import describe
from rota.recipe.differences import differences, flat
from rota.running import folder as folders
from rota.running import run as running
from rota.running.folder import Folder, checkpoint, refuse_used
from rota.running.record import Record
from rota.running.run import Interrupted, Run, execute
from rota.sampling import SAMPLERS, Gvr, Uniform
from rota.submodel import Fixed, Ordered
from rota.weights import Weights
from rota.world.availability import Availability
from rota.world.drift import Drift

SIZES = [5, 12, 7, 9, 8, 6, 5, 4, 6, 5, 7, 3]


@dataclass(frozen=True)
class Curious:
    """A sampler with every kind of memory: whom it draws depends on all that it has seen."""

    def init(self, shares: Array, rounds: int) -> dict[str, Array]:
        clients = shares.shape[1]
        return {
            "loss": np.ones(clients),
            "norm": np.ones((2, clients), np.float32),
            "drawn": np.zeros(clients, np.int64),
            "known": np.zeros(clients, bool),
            "round": np.array(0, np.uint8),
            "nothing": np.empty((0, 3), np.float16),
        }

    def draw(self, state: dict[str, Array], shares: Array, generator: np.random.Generator) -> Plan:
        score = (
            state["loss"]
            + state["norm"].sum(axis=0) / (1 + state["drawn"])
            + 3 * ~state["known"]
            + state["round"] / 100
        )
        probability = np.minimum(1, 3 * score / score.sum()) * (shares > 0)
        model, client = np.nonzero(generator.random(shares.shape) < probability)
        p = probability[model, client]
        return Plan(client, model, p, shares[model, client] / p)

    def observe(
        self, state: dict[str, Array], shares: Array, plan: Plan, seen: Seen
    ) -> dict[str, Array]:
        new = {name: value.copy() for name, value in state.items()}
        new["loss"][plan.client] = seen.loss
        new["norm"][:, plan.client] = seen.norm
        new["drawn"][plan.client] += 1
        new["known"][plan.client] = True
        new["round"] = np.array(state["round"] + 1, np.uint8)
        return new


def make(**changes: Any) -> Experiment:
    """Two models, BatchNorm and dropout in one of them, a sampler and a server with a memory."""
    data = federation(SIZES, own_test=True)
    tasks = [
        Task(network, data, batch=4, name="net"),
        Task(linear, federation(SIZES, seed=1), batch=None, name="line"),
    ]
    return Experiment(
        **{
            "tasks": tasks,
            "sampler": Curious(),
            "server": Adam(),
            "rounds": 4,
            "seed": 3,
            **changes,
        }
    )


class Toy:
    """An engine that takes no time.

    An update is made of the model, the row's stream and its shift.
    """

    def __init__(self, experiment: Experiment) -> None:
        tasks = experiment.tasks
        self.models = [Model(t, weights.read(task.build())) for t, task in enumerate(tasks)]

    @classmethod
    def make(cls, experiment: Experiment, options: Any) -> Toy:
        return cls(experiment)

    def initial(self) -> list[Model]:
        return self.models

    def train(self, job: Job) -> Iterator[Chunk]:
        for row, (client, s) in enumerate(zip(job.plan.client, job.plan.model, strict=True)):
            place, one, model = np.array([row]), np.ones(1), job.models[s]
            key = rng.key(job.now, int(client), int(s))
            update = model.params[None] / 10 + rng.uniform(rng.as_tensor([key]), len(model.params))
            if job.local.shift is not None:
                update = update + job.local.shift(place) / 10
            time = np.array([1.0 + 2 * model.nbytes + s + client])
            yield Chunk(
                rows=place,
                model=int(s),
                now=job.now,
                lr=0.1,
                update=update,
                buffers=model.buffers[None] / 2,
                loss=update.mean(1).numpy(),
                steps=one,
                examples=one,
                costs=Costs(time, time, job.duty.up[place], job.duty.down[place]),
                reason=[""],
            )

    def evaluate(self, models: list[Model]) -> list[Score]:
        return [Score(float(m.params.sum()), float(m.params.sigmoid().mean())) for m in models]


def contents(folder: Path) -> dict[str, Any]:
    """All that must not depend on how often the run was interrupted.

    That is every byte but those of the wall-clock time, and a digest that includes it.
    """
    newest = max((folder / "checkpoint").iterdir())
    out: dict[str, Any] = {
        "checkpoint": newest.name,
        "state": (newest / "state.safetensors").read_bytes(),
    }
    for path in (newest / "state.json", folder / "summary.json"):
        out[path.name] = json.loads(path.read_text())
        assert out[path.name].pop("wall_seconds") >= 0
        out[path.name].pop("digest", None)
    for path in (
        folder / "config.toml",
        folder / "rounds.jsonl",
        folder / "data.json",
        *folder.glob("models/*"),
    ):
        out[path.name] = path.read_bytes()
    return out


def tidy(folder: Path) -> bool:
    """Nothing half-written, and no more checkpoints than are kept."""
    return (
        not list(folder.rglob("*.part"))
        and len(list((folder / "checkpoint").iterdir())) <= checkpoint.KEPT
    )


def play(experiment: Experiment, **more: Any) -> Run:
    """`execute` on the toy engine: most tests are not about training."""
    return execute(experiment, **{"engine": "toy", **more})


def resume_or_start(experiment: Experiment, folder: Path, engine: str = "toy") -> None:
    """Resume as a user would after a crash, or start where nothing had begun."""
    execute(experiment, out=folder, resume=(folder / "config.toml").exists(), engine=engine)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy engine; and no waiting for the disk.

    That matters when the power fails, but not to a process that dies.
    """
    monkeypatch.setitem(ENGINES, "toy", Toy)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every round, as if rounds took long."""
    monkeypatch.setattr(running, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(running, "CHECKPOINT_COSTS", -1.0)


@pytest.fixture
def unbroken(tmp_path: Path) -> dict[str, Any]:
    """What an unbroken run of `make()` leaves."""
    play(make(), out=tmp_path / "unbroken")
    assert tidy(tmp_path / "unbroken")
    return contents(tmp_path / "unbroken")


def stop_after(number: int, error: BaseException) -> Callable[[Record], None]:
    def watch(record: Record) -> None:
        if record["round"] == number:
            raise error

    return watch


# ---- a State goes to disk and comes back


def bits(value: Any) -> tuple[Any, ...]:
    """A tensor's or an array's dtype, shape and bytes: NaNs and minus zero count."""
    if isinstance(value, torch.Tensor):
        content = (
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if value.numel()
            else b""
        )
        return str(value.dtype), tuple(value.shape), content
    return str(value.dtype), value.shape, value.tobytes()


def same(one: State, other: State) -> bool:
    """Whether two states are the same in every bit, and under the same names."""

    def named(state: State) -> dict[str, Any]:
        out: dict[str, Any] = {"shares": bits(state.shares)}
        for kind, remembered in state.policies.items():
            out[kind] = sorted(remembered)
            out |= {f"{kind} {name}": bits(value) for name, value in remembered.items()}
        for s, model in enumerate(state.models):
            out[f"model {s}"] = (model.task, bits(model.params), bits(model.buffers))
        return out

    def numbers(state: State) -> list[Any]:
        return [state.round, state.seconds, state.bytes_up, state.bytes_down]

    return named(one) == named(other) and numbers(one) == numbers(other)


DTYPES = [
    np.bool_,
    np.uint8,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    )
)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
REMEMBERED = st.dictionaries(
    NAMES, ARRAYS | ARRAYS.map(np.transpose) | ARRAYS.map(torch.from_numpy), max_size=3
)
FLAT = arrays.arrays(np.float32, st.integers(0, 9)).map(torch.from_numpy)
WEIGHTS = st.builds(Weights, FLAT, FLAT)
CONFIG = st.dictionaries(NAMES, st.integers() | st.text(max_size=5) | st.just([1.5, {"a": 1}]))


@st.composite
def states(draw: st.DrawFn) -> State:
    """Any state: several models may have one task, and every kind of policy remembers anything."""
    tasks = draw(st.lists(WEIGHTS, min_size=1, max_size=4))
    numbers = draw(st.lists(st.integers(0, len(tasks) - 1), min_size=1, max_size=11))
    models = []
    for task in numbers:
        like = tasks[task]
        params = draw(arrays.arrays(np.float32, len(like.params)).map(torch.from_numpy))
        buffers = draw(arrays.arrays(np.float32, len(like.buffers)).map(torch.from_numpy))
        models.append(Model(task, Weights(params, buffers)))
    return State(
        round=draw(st.integers(0, 10**7)),
        models=models,
        shares=draw(arrays.arrays(np.float64, (len(models), 3))),
        policies={kind: draw(REMEMBERED) for kind in KINDS},
        seconds=draw(st.floats(0, allow_nan=False)),
        bytes_up=draw(st.integers(0, 2**70)),
        bytes_down=draw(st.integers(0, 2**70)),
    )


def begun(state: State) -> State:
    """A first state for a run with this state: of each task one model, and empty memories."""
    first = {model.task: model for model in state.models}
    return replace(
        state,
        round=0,
        models=[first[task] for task in sorted(first)],
        policies={kind: {} for kind in state.policies},
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states") / "checkpoint"


@settings(deadline=None, max_examples=60)
@given(state=states(), wall=st.floats(0, 1e9), config=CONFIG)
def test_state_round_trip(place: Path, state: State, wall: float, config: dict[str, Any]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    checkpoint.save(place, state, wall, config)
    read: list[dict[str, Any]] = []
    loaded = checkpoint.load(place, begun(state), read.append)
    assert loaded is not None
    found, seconds = loaded
    assert same(found, state)
    assert seconds == wall
    assert read == [config]


def test_all_of_the_state_is_kept() -> None:
    """A field added to State must be added to the checkpoint, and to `same` here."""
    kept = {"round", "models", "shares", "policies", "seconds", "bytes_up", "bytes_down"}
    assert {field.name for field in fields(State)} == kept


def small(**policies: Any) -> State:
    """A state with one model of three parameters, and these memories."""
    model = Model(0, Weights(torch.arange(3.0), torch.zeros(0)))
    return State(1, [model], np.ones((1, 2)) / 2, {kind: {} for kind in KINDS} | policies)


def test_awkward_arrays(tmp_path: Path) -> None:
    """What policies may well return.

    Views, the same array twice, arrays that are read-only or laid out backwards.
    """
    base = torch.arange(12.0)
    locked = np.arange(3)
    locked.flags.writeable = False
    state = replace(
        small(
            sampler={
                "locked": locked,
                "backwards": np.arange(4)[::-1],
                "again": locked,
                "columns": np.eye(3)[:, 1],
            },
            estimator={
                "model": base[:4],
                "row": base.view(3, 4)[1],
                "columns": base.view(3, 4).T,
                "base": base,
                "half": base[6:].to(torch.bfloat16),
            },
            server={"0.momentum": base, "0.step": torch.tensor(3.0)},
        ),
        models=[Model(0, Weights(base[:4], base[4:4]))],
    )
    checkpoint.save(tmp_path, state, 0.0, {})
    loaded = checkpoint.load(tmp_path, begun(state), lambda _: None)
    assert loaded is not None
    after, _ = loaded
    assert same(after, state)
    assert all(array.flags.writeable for array in after.policies["sampler"].values())
    weights = after.models[0].weights
    assert all(
        t.data_ptr() % 64 == 0
        for t in (*after.policies["estimator"].values(), *weights)
        if t.numel()
    )


def test_numbering(tmp_path: Path) -> None:
    run = play(make(), out=tmp_path / "run")
    assert run.state.round == 4
    assert [record["round"] for record in run.records] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "checkpoint" / "00000004").is_dir()
    assert run.rounds["round"] == [1, 2, 3, 4]


def test_models_are_written_by_their_own_names(tmp_path: Path) -> None:
    """A task's name may be anything; a module loads its file."""
    data = federation(SIZES)
    experiment = make(tasks=[Task(network, data, name="a/b ü"), Task(linear, data, name="..")])
    run = play(experiment, out=tmp_path / "run")
    files = sorted((tmp_path / "run" / "models").iterdir())
    assert [file.name for file in files] == ["...safetensors", "a%2Fb %C3%BC.safetensors"]
    for file, name in zip(files, ["..", "a/b ü"], strict=True):
        module = experiment.tasks[experiment.names.index(name)].build(seed=9)
        module.load_state_dict(load_file(file))
        assert all(
            torch.equal(one, other)
            for one, other in zip(module.parameters(), run.models[name].parameters(), strict=True)
        )


# ---- a run is interrupted, with time to save


@pytest.mark.parametrize("server", [Sgd(), Sgd(momentum=0.9), Adam(), Yogi()], ids=repr)
@pytest.mark.parametrize("engine", [name for name in ENGINES if name in ("sequential", "batched")])
def test_resume_after_any_round(tmp_path: Path, server: Any, engine: str) -> None:
    """Stopped in every round, each time by something else."""
    experiment = make(server=server, evaluate=3, rounds=5)
    execute(experiment, engine=engine, out=tmp_path / "whole")
    folder = tmp_path / "broken"
    for number in range(1, 5):
        error: BaseException = (
            KeyboardInterrupt() if number % 2 else RuntimeError("the screen broke")
        )
        with pytest.raises((Interrupted, RuntimeError)):
            execute(
                experiment,
                engine=engine,
                out=folder,
                resume=number > 1,
                watch=stop_after(number, error),
            )
        assert [path.name for path in (folder / "checkpoint").iterdir()].count(f"{number:08d}") == 1
    run = execute(experiment, engine=engine, out=folder, resume=True)
    assert contents(folder) == contents(tmp_path / "whole")
    assert tidy(folder)
    assert [record["accuracy"] is not None for record in run.records] == [
        n % 3 == 0 or n == 5 for n in range(1, 6)
    ]


MEMBERS = [("sampler", SAMPLERS[name]) for name in SAMPLERS]
MEMBERS += [("estimator", ESTIMATORS[name]) for name in ESTIMATORS]
MEMBERS += [("server", SERVERS[name]) for name in SERVERS]
PARTNERS: dict[Any, Any] = {
    SAMPLERS["mmfl-vre"]: {"estimator": StaleVre()},
    StaleVr: {"sampler": SAMPLERS["mmfl-gvr"]()},
}
"""What a policy cannot do without."""


@pytest.mark.parametrize(
    ("kind", "member"), MEMBERS, ids=[f"{kind}-{member.__name__}" for kind, member in MEMBERS]
)
def test_every_policy_survives_ctrl_c_inside_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, member: Any
) -> None:
    """The checkpoint of an interrupted round is that of the round before.

    So no policy may have written into its state yet.
    """
    experiment = make(
        **{kind: member(), **PARTNERS.get(member, {})},
        availability=Availability(0.8, memory=0.5, known=False),
        admission=Admission(1e6),
    )
    chunks = total = 0
    train = Sequential.train

    def interrupted(self: Sequential, job: Job) -> Iterator[Chunk]:
        nonlocal chunks
        for chunk in train(self, job):
            yield chunk
            chunks += job.now == 3
            if chunks == total and job.now == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sequential, "train", interrupted)
        execute(experiment, engine="sequential", out=tmp_path / "whole")
    # in the middle of a round or of its probe, and after its last update came in
    for total in (max(1, chunks // 2), chunks):
        chunks = 0
        folder = tmp_path / f"after {total}"
        with monkeypatch.context() as patch:
            patch.setattr(Sequential, "train", interrupted)
            with pytest.raises(Interrupted) as stop:
                execute(experiment, engine="sequential", out=folder)
        assert stop.value.folder == folder
        assert max((folder / "checkpoint").iterdir()).name == "00000002"
        execute(experiment, engine="sequential", out=folder, resume=True)
        assert contents(folder) == contents(tmp_path / "whole")


REMEMBERING = [name for name in ESTIMATORS if name not in ("unbiased", "fedavg")]
PLACES = ["device", "cpu", "disk"]


def remembering(name: str, place: str) -> Experiment:
    member: Any = ESTIMATORS[name]
    return make(**{"estimator": member(memory=place), "rounds": 5, **PARTNERS.get(member, {})})


def breaking(number: int, chunks: int) -> Callable[..., Iterator[Chunk]]:
    """Training that fails in one round, or in its probe, after some chunks."""
    train = Toy.train

    def broken(self: Toy, job: Job) -> Iterator[Chunk]:
        for at, chunk in enumerate(train(self, job)):
            if job.now == number and at == min(chunks, len(job.plan) - 1):
                raise RuntimeError("the power failed")
            yield chunk

    return broken


def mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a mapped file, as the system says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(place, 16) for place in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "rota-memory-" in line
    return False


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REMEMBERING)
def test_memories_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """Interrupted in the middle of every round, and after it.

    A memory that was on disk is there again, and nowhere else.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    experiment = remembering(name, place)
    play(experiment, out=tmp_path / "whole")
    folder = tmp_path / "broken"
    for number in range(1, 6):
        with monkeypatch.context() as patch:
            patch.setattr(Toy, "train", breaking(number, number))
            with pytest.raises(RuntimeError, match="the power failed"):
                play(experiment, out=folder, resume=number > 1)
        assert max((folder / "checkpoint").iterdir()).name == f"{number - 1:08d}"
        if number < 5:
            with pytest.raises(Interrupted):
                play(
                    experiment,
                    out=folder,
                    resume=True,
                    watch=stop_after(number, KeyboardInterrupt()),
                )
    run = play(experiment, out=folder, resume=True)
    assert contents(folder) == contents(tmp_path / "whole")
    if Path("/proc/self/maps").exists():
        assert [mapped(run.state.policies["estimator"][f"memory.{s}"]) for s in range(2)] == [
            place == "disk"
        ] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "broken"}, (
        "nothing is left behind"
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REMEMBERING)
def test_a_broken_round_can_be_played_again(
    monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """From the state before it, in the same process: its memory may have been written to."""
    experiment = remembering(name, place)
    machine = Toy(experiment)
    whole, broken = (loop.begin(experiment, machine) for _ in range(2))
    for now in range(1, 6):
        whole, _ = loop.play(experiment, machine, whole)
        for chunks in (0, 3, 99):
            with monkeypatch.context() as patch:
                patch.setattr(Toy, "train", breaking(now, chunks))
                with pytest.raises(RuntimeError, match="the power failed"):
                    loop.play(experiment, machine, broken)
        loop.play(experiment, machine, broken)  # a whole round, given up
        broken, _ = loop.play(experiment, machine, broken)
        assert same(broken, whole), f"round {now}"


def test_a_memory_is_read_into_the_one_there_is(tmp_path: Path) -> None:
    """There may be no room for a second; but what two names share is not written to."""
    memory, rows = torch.randn(4, 3), torch.randn(2, 3)
    state = small(
        estimator={"memory": memory, "rows": rows, "one": torch.ones(2), "two": torch.zeros(2)}
    )
    checkpoint.save(tmp_path, state, 0.0, {})
    shared = torch.full((2,), 5.0)
    held = torch.zeros(4, 3)
    like = small(
        estimator={"memory": held, "rows": torch.zeros(0, 3), "one": shared, "two": shared}
    )
    loaded = checkpoint.load(tmp_path, like, lambda _: None)
    assert loaded is not None
    found, _ = loaded
    assert same(found, state)
    assert found.policies["estimator"]["memory"].data_ptr() == held.data_ptr()
    assert shared.tolist() == [5, 5]


@pytest.mark.usefixtures("every_round")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a file opened, and interrupted before its `with`
def test_ctrl_c_at_any_line(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """Ctrl-C anywhere in the code that plays and keeps the rounds: the run resumes exactly."""
    watched = {running.__file__, checkpoint.__file__, sys.modules[Folder.__module__].__file__}
    experiment = make()

    def interrupt_at(line: int, folder: Path) -> bool:
        """Run with a Ctrl-C at one line; False where the run ended before it came there."""
        left = line
        armed = False

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left, armed
            if frame.f_code.co_filename not in watched or frame.f_code.co_name == "locked":
                return (
                    None  # a lock that is not released lasts until the process ends, as it should
                )
            armed = armed or frame.f_code.co_name == "_play"
            if event == "line" and armed:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            play(experiment, out=folder)
        except Interrupted:
            return True
        finally:
            sys.settrace(None)
        return False

    line = 1
    while interrupt_at(line, folder := tmp_path / str(line)):
        play(experiment, out=folder, resume=True)
        assert contents(folder) == unbroken, f"line {line}"
        assert tidy(folder)
        line += 11
    assert line > 200


def test_target_survives_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that had reached its target does nothing more, and still writes its summary."""
    data = federation([30] * 12)
    experiment = make(tasks=[Task(linear, data)], server=Sgd(), rounds=50, target=0.8)
    whole = execute(experiment, engine="sequential", out=tmp_path / "whole")
    assert 2 < whole.state.round < 50
    with pytest.raises(Interrupted):
        execute(
            experiment,
            engine="sequential",
            out=tmp_path / "run",
            watch=stop_after(whole.state.round, KeyboardInterrupt()),
        )
    assert not (tmp_path / "run" / "summary.json").exists()
    monkeypatch.setattr(Sequential, "train", None)
    for _ in range(2):
        run = execute(experiment, engine="sequential", out=tmp_path / "run", resume=True)
        assert contents(tmp_path / "run") == contents(tmp_path / "whole")
        assert {**run.summary, "wall_seconds": 0} == {**whole.summary, "wall_seconds": 0}
        assert run.rounds == whole.rounds


def test_what_differs_is_told_by_the_keys_that_set_takes() -> None:
    one = {"rounds": 3, "sampler": {"name": "kvib"}, "task": [{"lr": 0.1, "sizes": [1, 2]}]}
    assert flat(one) == {"rounds": 3, "sampler.name": "kvib", "task.lr": 0.1, "task.sizes": [1, 2]}
    two = {"task": [{"lr": 0.1}, {"lr": 0.1, "data": {"seed": 1}}]}
    assert flat(two) == {"task.0.lr": 0.1, "task.1.lr": 0.1, "task.1.data.seed": 1}
    assert (
        differences(two, {"task": [{"lr": 0.1}, {"lr": 0.2}]})
        == "task.1.lr was 0.1 and is now 0.2, task.1.data.seed was 1 and is now not set"
    )
    assert (
        differences({"metrics": []}, {"metrics": ["cost"]}) == 'metrics was [] and is now ["cost"]'
    )
    assert differences({"n": 5}, {"n": 5.0}) == ""
    many = differences({"sizes": [1] * 1000}, {"sizes": [2] * 1000})
    assert many.startswith("sizes was [1, 1, ")
    assert len(many) < 250


def test_from_python(tmp_path: Path) -> None:
    """rota.run with the same objects, which are described in a recipe's words and compared."""
    task = Task(network, federation(SIZES), batch=4)
    settings: dict[str, Any] = {
        "sampler": Curious(),
        "server": Yogi(lr=0.1),
        "rounds": 4,
        "evaluate": 3,
        "engine": "sequential",
        "device": "cpu",
    }
    rota.run([task], out=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        rota.run(
            [task], out=str(tmp_path / "run"), watch=stop_after(2, KeyboardInterrupt()), **settings
        )
    run = rota.run([task], out=tmp_path / "run", resume=True, **settings)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert len(run.records) == 4
    with pytest.raises(BadInput, match=r"server\.lr was 0\.1 and is now 0\.2"):
        rota.run([task], out=tmp_path / "run", resume=True, **{**settings, "server": Yogi(lr=0.2)})
    with pytest.raises(BadInput, match="already in use: add --resume"):
        rota.run([task], out=tmp_path / "run", **settings)
    with pytest.raises(BadInput, match="only describes a run that was started in Python"):
        recipe.resolve(recipe.read(str(tmp_path / "run" / "config.toml")))


def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) - targets).abs().float()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda task: replace(task, data=federation(SIZES, seed=1)),
            "the data of 'blobs' are not the data that the run in .* started with",
        ),
        (lambda task: replace(task, data=moved(task.data)), "the data of 'blobs' are not the data"),
        (
            lambda task: replace(task, score=absolute),
            r"task\.score was \"accuracy\" and is now \"absolute\"",
        ),
        (
            lambda task: replace(task, loss=absolute),
            r"task\.loss was \"cross_entropy\" and is now \"absolute\"",
        ),
    ],
)
def test_another_experiment_is_not_gone_on_with(
    change: Callable[[Task], Task], said: str, tmp_path: Path
) -> None:
    task = Task(linear, federation(SIZES))
    settings: dict[str, Any] = {"rounds": 4, "engine": "sequential", "device": "cpu"}
    with pytest.raises(Interrupted):
        rota.run([task], out=tmp_path / "run", watch=stop_after(2, KeyboardInterrupt()), **settings)
    before = {
        path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()
    }
    with pytest.raises(BadInput, match=said):
        rota.run([change(task)], out=tmp_path / "run", resume=True, **settings)
    assert {
        path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()
    } == before
    assert len(rota.run([task], out=tmp_path / "run", resume=True, **settings).records) == 4


def moved(data: Federation) -> Federation:
    """One example's input is another."""
    x = data.train.x.clone()
    x[3] += 1
    return replace(data, train=replace(data.train, x=x))


def test_damaged_notes_on_the_data_are_named(tmp_path: Path) -> None:
    task = Task(linear, federation(SIZES))
    settings: dict[str, Any] = {"rounds": 2, "engine": "sequential", "device": "cpu"}
    rota.run([task], out=tmp_path, **settings)
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(BadInput, match=r"data\.json is damaged .* fix it"):
        rota.run([task], out=tmp_path, resume=True, **settings)


def test_the_digest_of_large_data_is_of_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    data = federation([40, 60])
    whole = describing.digest(data)
    monkeypatch.setattr(describing, "DIGESTED", 800)
    assert describing.digest(data) == describing.digest(federation([40, 60])) != whole
    assert describing.digest(data) != describing.digest(federation([41, 59]))


def test_going_on_needs_a_folder() -> None:
    with pytest.raises(BadInput, match="resume is True, but out is not given"):
        rota.run([Task(linear, federation(SIZES))], resume=True)


def test_a_ctrl_c_in_python_says_how_to_resume(tmp_path: Path) -> None:
    task = Task(linear, federation(SIZES))
    with pytest.raises(KeyboardInterrupt, match=r"rota\.run\(\.\.\., out='.*', resume=True\)"):
        rota.run([task], out=tmp_path, rounds=3, watch=stop_after(1, KeyboardInterrupt()))


def test_numpys_numbers_are_numbers(tmp_path: Path) -> None:
    """In the configuration, and as seeds."""

    def run(name: str, whole: Any, real: Any) -> str:
        task = Task(network, federation(SIZES), lr=real(0.5), batch=whole(4))
        sampler, server = rota.sampling.Uniform(budget=whole(2)), Yogi(lr=real(0.25))
        rota.run(
            [task], sampler, server=server, rounds=whole(2), seed=whole(3), out=tmp_path / name
        )
        return (tmp_path / name / "config.toml").read_text()

    assert run("numpy", np.int64, np.float32) == run("plain", int, float)
    assert contents(tmp_path / "numpy") == contents(tmp_path / "plain")


def test_numbers_for_each_client_are_part_of_the_configuration(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 2, "device": "cpu", "out": tmp_path / "run"}
    task = Task(network, federation([5, 6, 7]), batch=4)
    rota.run([task], Gvr(2, (1, 2, 1), uploads=(0.9, 0.9, 2.0)), **settings)
    with pytest.raises(
        BadInput, match=r"sampler\.processors was \[1, 2, 1\] and is now \[3, 3, 3\]"
    ):
        rota.run([task], Gvr(2, (3, 3, 3), uploads=(0.9, 0.9, 2.0)), resume=True, **settings)


# ---- what may change when a run is resumed, and what may not


def files(folder: Path) -> dict[str, bytes]:
    """All of a folder, byte for byte."""
    inside = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in inside}


def stopped_at(number: int, folder: Path, **changes: Any) -> None:
    with pytest.raises(Interrupted):
        play(make(**changes), out=folder, watch=stop_after(number, KeyboardInterrupt()))


@pytest.mark.parametrize("before", [2, 4], ids=["interrupted", "finished"])
def test_more_rounds(tmp_path: Path, before: int) -> None:
    """To the byte what a run with that many rounds from the beginning is; config.toml says so."""
    play(make(rounds=6), out=tmp_path / "whole")
    folder = tmp_path / "run"
    if before == 4:
        play(make(), out=folder)
        lines = (folder / "rounds.jsonl").read_bytes()
    else:
        stopped_at(before, folder)
    run = play(make(rounds=6), out=folder, resume=True)
    assert len(run.records) == run.summary["rounds"] == 6
    assert contents(folder) == contents(tmp_path / "whole")
    assert "\nrounds = 6\n" in (folder / "config.toml").read_text()
    assert before < 4 or (folder / "rounds.jsonl").read_bytes().startswith(lines)
    with pytest.raises(
        BadInput, match=r"^rounds is 4, but the run has already played 6: set rounds"
    ):
        play(make(), out=folder, resume=True)


def test_fewer_rounds(tmp_path: Path) -> None:
    """As long as they have not been played, and the last one is a round with a test."""
    play(make(rounds=4), out=tmp_path / "whole")
    stopped_at(3, tmp_path / "run", rounds=90)
    play(make(rounds=4), out=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    stopped_at(3, tmp_path / "few", rounds=90, evaluate=90)
    before = files(tmp_path / "few")
    for rounds, least in ((2, 4), (3, 4)):
        with pytest.raises(
            BadInput, match=f"rounds is {rounds}, .* set rounds to at least {least}"
        ):
            play(make(rounds=rounds, evaluate=90), out=tmp_path / "few", resume=True)
    assert files(tmp_path / "few") == before
    run = play(make(rounds=4, evaluate=90), out=tmp_path / "few", resume=True)
    assert [accuracy is None for accuracy in run.rounds["accuracy"]] == [True, True, True, False]


def test_another_target_and_another_evaluate(tmp_path: Path) -> None:
    stopped_at(2, tmp_path / "run", rounds=9, evaluate=4)
    run = play(make(rounds=9, evaluate=3), out=tmp_path / "run", resume=True)
    assert [n for n, each in enumerate(run.rounds["accuracy"], 1) if each is not None] == [3, 6, 9]
    assert "evaluate = 3" in (tmp_path / "run" / "config.toml").read_text()

    def until(target: float | None) -> int:
        task = Task(linear, federation([30] * 12))
        experiment = make(tasks=[task], server=Sgd(), rounds=50, target=target)
        folder = tmp_path / "target"
        resume = folder.exists()
        run = execute(experiment, engine="sequential", out=folder, resume=resume)
        said = f"\ntarget = {target}\n" if target else "\nseed = 3\n"
        assert said in (folder / "config.toml").read_text()
        assert run.summary["rounds"] == run.state.round
        return run.state.round

    low, high = until(0.7), until(0.85)
    assert 1 <= low < high < 50
    assert until(0.7) == high, "a lower target is reached already"
    assert until(None) == 50


OWN_TESTS = [
    make().tasks[0],
    Task(linear, federation(SIZES, seed=1, own_test=True), batch=None, name="line"),
]
KINDS_OF_CHANGE: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 4}, "seed was 3 and is now 4"),
    "metrics": ({"metrics": ["cost"]}, 'metrics was [] and is now ["cost"]'),
    "sampler": ({"sampler": SAMPLERS["full"]()}, 'sampler.name was "uniform" and is now "full"'),
    "estimator": (
        {"estimator": StaleVre()},
        'estimator.name was "unbiased" and is now "stale-vre"',
    ),
    "server": ({"server": Adam(lr=0.5)}, "server.lr was 0.01 and is now 0.5"),
    "devices": ({"devices": rota.Devices(mbps=1)}, "devices.mbps was 20.0 and is now 1"),
    "availability": (
        {"availability": Availability(0.5)},
        "availability.chance was 1.0 and is now 0.5",
    ),
    "capacity": ({"capacity": Fixed()}, 'capacity.name was "whole" and is now "fixed"'),
    "submodel": ({"submodel": Ordered()}, 'submodel.name was "invariant" and is now "ordered"'),
    "grouping": ({"grouping": Ifca()}, 'grouping.name was "one" and is now "ifca"'),
    "channel": ({"channel": TopK()}, 'channel.name was "none" and is now "top-k"'),
    "drift": ({"drift": Drift(every=3)}, "drift.every was not set and is now 3"),
    "personal": ({"personal": Ditto()}, 'personal.name was "none" and is now "ditto"'),
    "admission": ({"admission": Admission(9.0)}, "admission.times was not set and is now 9.0"),
    "task": (
        {"tasks": [make().tasks[0], replace(make().tasks[1], lr=0.7)]},
        "task.1.lr was 0.1 and is now 0.7",
    ),
    "a task less": ({"tasks": make().tasks[:1]}, "task."),
}


def test_every_kind_of_change_is_looked_at() -> None:
    """What an experiment consists of may change, or is refused below."""
    looked_at = {"task" if key == "tasks" else key for key in vars(make()) if key != "policies"}
    looked_at = (looked_at | KINDS.keys()) - {"shares"}
    assert looked_at == {*folders.CHANGEABLE, *KINDS_OF_CHANGE} - {"a task less"}


@pytest.mark.parametrize(("change", "said"), KINDS_OF_CHANGE.values(), ids=KINDS_OF_CHANGE)
@pytest.mark.parametrize("edited", [False, True], ids=["given", "edited"])
def test_nothing_else_may_change(
    tmp_path: Path, change: dict[str, Any], said: str, edited: bool
) -> None:
    """Not by what is given, nor by editing config.toml: the checkpoint has its configuration."""
    same: dict[str, Any] = {"sampler": Uniform(2)}
    if "personal" in change:  # clients with models of their own have test sets of their own
        same["tasks"] = OWN_TESTS
    change = same | change
    stopped_at(2, tmp_path, **same)
    if edited:
        text = tomli_w.dumps(describe(make(**change)))
        (tmp_path / "config.toml").write_text("# tried something\n" + text)
    before = files(tmp_path)
    with pytest.raises(BadInput, match=re.escape(said)) as refused:
        play(make(rounds=9, target=None, **change), out=tmp_path, resume=True)
    assert f"the run in {tmp_path} was made with another configuration" in str(refused.value)
    assert "rounds was" not in str(refused.value)
    assert files(tmp_path) == before


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """It was copied here, with its lines or without."""
    for seed in (3, 4):
        stopped_at(2, tmp_path / str(seed), seed=seed)
    shutil.rmtree(tmp_path / "3" / "checkpoint")
    shutil.copytree(tmp_path / "4" / "checkpoint", tmp_path / "3" / "checkpoint")
    for name in ("rounds.jsonl", "data.json"):
        before = files(tmp_path / "3")
        with pytest.raises(BadInput, match=r"\(seed was 4 and is now 3\): resume it with the one"):
            play(make(seed=3), out=tmp_path / "3", resume=True)
        assert files(tmp_path / "3") == before
        shutil.copy(tmp_path / "4" / name, tmp_path / "3" / name)


def test_config_toml_keeps_its_words_where_nothing_changes(tmp_path: Path) -> None:
    stopped_at(2, tmp_path)
    text = "# for the paper, figure 3\n" + (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text)
    play(make(), out=tmp_path, resume=True)
    assert (tmp_path / "config.toml").read_text() == text
    play(make(rounds=5), out=tmp_path, resume=True)
    assert "rounds = 5" in (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text + "\n[day]\nof = 2026-01-01\n")
    with pytest.raises(BadInput, match=r'day\.of was "2026-01-01" and is now not set'):
        play(make(rounds=5), out=tmp_path, resume=True)


def test_a_run_with_rounds_left_has_no_summary(tmp_path: Path) -> None:
    """Its report would take it for a run that has ended."""
    play(make(), out=tmp_path)
    assert (tmp_path / "summary.json").exists()
    with pytest.raises(Interrupted):
        play(make(rounds=6), out=tmp_path, resume=True, watch=stop_after(5, KeyboardInterrupt()))
    assert not (tmp_path / "summary.json").exists()
    play(make(rounds=6), out=tmp_path, resume=True)
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 6


def test_killed_at_every_file_operation_of_more_rounds(tmp_path: Path, every_round: None) -> None:
    play(make(rounds=2), out=tmp_path / "short")
    play(make(rounds=3), out=tmp_path / "whole")
    operation, status = 0, 137
    while status == 137:
        operation += 1
        folder = tmp_path / str(operation)
        shutil.copytree(tmp_path / "short", folder)
        status = die_at(operation, False, make(rounds=3), folder)
        resume_or_start(make(rounds=3), folder)
        assert contents(folder) == contents(tmp_path / "whole"), f"operation {operation}"
        assert tidy(folder)
    assert status == 0
    assert operation > 20


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_takes_more_rounds(tmp_path: Path, sampler: str) -> None:
    """Some are tuned to the number of rounds; none may rely on it."""
    member = SAMPLERS[sampler]

    def run(rounds: int, resume: bool) -> Run:
        more = PARTNERS.get(member, {})
        experiment = make(sampler=member(), rounds=rounds, **more)
        return execute(experiment, engine="sequential", out=tmp_path, resume=resume)

    run(2, False)
    assert run(6, True).state.round == 6


# ---- the process dies, without time for anything


OPERATIONS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
}


def die_at(operation: int, torn: bool, experiment: Experiment, folder: Path) -> int:
    """Run or resume in a process that dies just before its n-th file operation: its status.

    The status is 0 where it finished before. `torn`: what it wrote last is only half there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking while there are threads
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = operation

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and (event != "open" or str(folder) in str(arguments[0])):
            left -= 1
            if left == 0:
                if torn:
                    tear(folder)
                os._exit(137)

    try:
        sys.addaudithook(hook)
        resume_or_start(experiment, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def tear(folder: Path) -> None:
    """Cut the file that was written last.

    A file aside loses half, rounds.jsonl the end of its last line. Other files were complete
    before.
    """
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    last = max(files, key=lambda path: path.stat().st_mtime_ns, default=folder)
    if last.name == "rounds.jsonl":
        os.truncate(last, max(0, last.stat().st_size - 20))
    elif ".part" in str(last):
        os.truncate(last, last.stat().st_size // 2)


@pytest.mark.usefixtures("every_round")
def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    """For every k: die before operation k, resume and die there again, resume and finish.

    One of the two processes dies inside a write.
    """
    experiment = make(rounds=3)
    play(experiment, out=tmp_path / "unbroken")
    operation, status = 0, 137
    while status == 137:
        operation += 1
        folder = tmp_path / str(operation)
        status = die_at(operation, operation % 2 == 0, experiment, folder)
        assert die_at(operation, operation % 2 == 1, experiment, folder) in (0, 137)
        resume_or_start(experiment, folder)
        assert contents(folder) == contents(tmp_path / "unbroken"), f"operation {operation}"
        assert tidy(folder)
    assert status == 0
    assert operation > 50


@pytest.mark.usefixtures("every_round")
def test_nothing_counts_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gets its final name is on the disk before, in case the power fails.

    So are the lines that a checkpoint relies on.
    """
    synced: dict[int, int] = {}
    renamed = []

    def fsync(handle: int) -> None:
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def checked(rename: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def call(source: Path, target: Path) -> None:
            files = [source, *source.rglob("*")]
            if source.is_dir():
                files.append(tmp_path / "run" / "rounds.jsonl")
            for file in files:
                assert synced.get(file.stat().st_ino) == file.stat().st_size, file
            rename(source, target)
            renamed.append(target.name)

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", checked(os.rename))
    monkeypatch.setattr(os, "replace", checked(os.replace))
    play(make(rounds=2), out=tmp_path / "run")
    models = ["net.safetensors", "line.safetensors"]
    assert renamed == ["config.toml", "data.json", "00000001", "00000002", *models, "summary.json"]


def test_half_a_line(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """A kill inside `append` may leave any part of the line."""
    experiment = make()
    with pytest.raises(Interrupted):
        play(experiment, out=tmp_path / "run", watch=stop_after(2, KeyboardInterrupt()))
    lines = unbroken["rounds.jsonl"].splitlines(keepends=True)
    for length in (0, 1, len(lines[2]) // 2, len(lines[2]) - 1, len(lines[2]), len(lines[2]) + 5):
        folder = tmp_path / str(length)
        shutil.copytree(tmp_path / "run", folder)
        (folder / "rounds.jsonl").write_bytes(
            b"".join([*lines[:2], (lines[2] + lines[3])[:length]])
        )
        play(experiment, out=folder, resume=True)
        assert contents(folder) == unbroken


# ---- the disk forgets, or is full


@pytest.fixture
def stopped(tmp_path: Path, every_round: None) -> Path:
    """`make()` stopped after its third round, with checkpoints of rounds 2 and 3."""
    with pytest.raises(Interrupted):
        play(make(), out=tmp_path / "run", watch=stop_after(3, KeyboardInterrupt()))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == [
        "00000002",
        "00000003",
    ]
    return tmp_path / "run"


def flip(path: Path, position: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 16
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped bit in a tensor": lambda path: flip(path / "state.safetensors", 0.9),
    "flipped bit in the header": lambda path: flip(path / "state.safetensors", 0.01),
    "flipped bit in a number": lambda path: flip(path / "state.json", 0.1),
    "another digit": lambda path: (path / "state.json").write_text(
        (path / "state.json").read_text().replace('"bytes_up": ', '"bytes_up": 1')
    ),
    "not text": lambda path: (path / "state.json").write_bytes(b"\xff\xfe" * 40),
    "half a tensor file": lambda path: os.truncate(path / "state.safetensors", 500),
    "empty tensor file": lambda path: os.truncate(path / "state.safetensors", 0),
    "half a number file": lambda path: os.truncate(path / "state.json", 20),
    "empty number file": lambda path: os.truncate(path / "state.json", 0),
    "no tensor file": lambda path: (path / "state.safetensors").unlink(),
    "no number file": lambda path: (path / "state.json").unlink(),
    "nothing": lambda path: [file.unlink() for file in path.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint(
    stopped: Path,
    unbroken: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    """The one before is taken, and said so; its own round is saved anew."""
    damage(stopped / "checkpoint" / "00000003")
    play(make(), out=stopped, resume=True, watch=(seen := []).append)
    assert [record["round"] for record in seen] == [3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoint {stopped / 'checkpoint' / '00000003'} is damaged: resuming from round 2"
    ]
    assert contents(stopped) == unbroken
    shutil.rmtree(stopped / "checkpoint" / "00000004")
    play(make(), out=stopped, resume=True, watch=(again := []).append)
    assert [record["round"] for record in again] == [4]


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_damage_is_noticed(place: Path, data: st.DataObject) -> None:
    """A flipped bit or a lost end never goes unnoticed: every byte matters but the last newline."""
    shutil.rmtree(place, ignore_errors=True)
    state = replace(small(sampler={"p": np.arange(3)}), seconds=1.5, bytes_up=7, bytes_down=8)
    checkpoint.save(place, state, 0.0, {"rounds": 3})
    path = place / "00000001" / data.draw(st.sampled_from(["state.safetensors", "state.json"]))
    content = bytearray(path.read_bytes())
    last = len(content) - 1 - (path.name == "state.json")
    position = data.draw(st.integers(0, last))
    if data.draw(st.booleans()):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[position:]
    path.write_bytes(content)
    logging.disable()
    try:
        assert checkpoint.load(place, state, lambda _: None) is None
    finally:
        logging.disable(logging.NOTSET)


def test_no_checkpoint_is_whole(
    stopped: Path, unbroken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Then the run starts again from its beginning: slower, but the same."""
    for name in ("00000002", "00000003"):
        os.truncate(stopped / "checkpoint" / name / "state.safetensors", 100)
    play(make(), out=stopped, resume=True)
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == [
        "resuming from round 0"
    ] * 2
    assert contents(stopped) == unbroken


def test_half_deleted_old_checkpoint(stopped: Path, unbroken: dict[str, Any]) -> None:
    """A kill while a checkpoint is being deleted or written leaves pieces, which are removed."""
    for name, missing in (
        ("00000001", "state.json"),
        ("00000000", "state.safetensors"),
        (".00000009.part", "state.json"),
    ):
        shutil.copytree(stopped / "checkpoint" / "00000002", stopped / "checkpoint" / name)
        (stopped / "checkpoint" / name / missing).unlink()
    play(make(), out=stopped, resume=True)
    assert contents(stopped) == unbroken
    assert tidy(stopped)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_lost_lines(stopped: Path, kept: int) -> None:
    """rounds.jsonl shorter than the checkpoint: nothing of what is left may be thrown away."""
    lines = (stopped / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "rounds.jsonl").write_bytes(b"".join(lines[:kept]))
    for _ in range(2):
        with pytest.raises(
            BadInput, match=rf"rounds\.jsonl has {kept} lines, but the checkpoint is of round 3"
        ):
            play(make(), out=stopped, resume=True)
    (stopped / "rounds.jsonl").write_bytes(b"".join(lines))
    play(make(), out=stopped, resume=True)


def test_damaged_line(stopped: Path) -> None:
    lines = (stopped / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "rounds.jsonl").write_bytes(lines[0] + b"\xff" + lines[1][1:] + lines[2])
    with pytest.raises(BadInput, match=r"line 2 of .* is damaged"):
        play(make(), out=stopped, resume=True)


def test_another_model_in_the_checkpoint(stopped: Path) -> None:
    """Where the words for two networks are the same, their sizes still tell them apart."""
    config = (stopped / "config.toml").read_text()
    tasks = [
        replace(make().tasks[0], model=lambda shape, classes: network(shape, classes + 1)),
        make().tasks[1],
    ]
    other = make(tasks=tasks)
    with (
        Folder.reopen(stopped, describe(make())) as folder,
        pytest.raises(BadInput, match="holds other models"),
    ):
        folder.read_state(play(replace(other, rounds=1)).state)
    assert (stopped / "config.toml").read_text() == config
    assert len(list((stopped / "checkpoint").iterdir())) == 2


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("victim", ["tensors", "line"])
def test_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: dict[str, Any], victim: str
) -> None:
    """The run fails, the last good checkpoint stays, and with room on the disk it is resumed."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    append, save_file = Folder.append, checkpoint.save_file

    def no_room_for_the_line(self: Folder, record: Record) -> None:
        append(self, record)
        if record["round"] == 3:
            os.truncate(
                self.path / "rounds.jsonl", (self.path / "rounds.jsonl").stat().st_size - 30
            )
            raise full

    def no_room_for_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "00000003" in str(path):
            path.write_bytes(b"half")
            raise SafetensorError(str(full))
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        if victim == "line":
            patch.setattr(Folder, "append", no_room_for_the_line)
        else:
            patch.setattr(checkpoint, "save_file", no_room_for_tensors)
        with pytest.raises((OSError, SafetensorError), match="No space left"):
            play(make(), out=tmp_path / "run")
    good = [
        path.name
        for path in sorted((tmp_path / "run" / "checkpoint").iterdir())
        if not path.name.startswith(".")
    ]
    assert good == ["00000001", "00000002"]
    play(make(), out=tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == unbroken
    assert tidy(tmp_path / "run")


# ---- which folder a run may use


def test_new_folder(tmp_path: Path) -> None:
    refuse_used(tmp_path / "absent")
    refuse_used(tmp_path)
    (tmp_path / "config.toml.part").write_text("ro")  # a run that died before it began
    refuse_used(tmp_path)
    with Folder.create(tmp_path, {"rounds": 1}):
        assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    with pytest.raises(
        BadInput, match="already in use: add --resume to resume its run, or choose another --out"
    ):
        refuse_used(tmp_path)
    (tmp_path / "config.toml").rename(tmp_path / "notes.txt")
    with pytest.raises(BadInput, match="already in use: choose another --out"):
        refuse_used(tmp_path)
    with pytest.raises(BadInput, match="is a file: choose another --out"):
        refuse_used(tmp_path / "notes.txt")
    with (
        pytest.raises(
            BadInput, match=r"cannot write to the output folder .*notes.txt/run \(Not a directory\)"
        ),
        Folder.create(tmp_path / "notes.txt" / "run", {}),
    ):
        pass


def test_resume_says_what_differs(tmp_path: Path) -> None:
    made = {
        "rounds": 3,
        "target": 0.5,
        "sampler": {"name": "uniform", "budget": 5.0},
        "task": [{"lr": 0.1}, {"lr": 0.1, "sizes": [1, 2]}],
    }
    with (
        pytest.raises(BadInput, match=r"no run to resume in .*: leave --resume out"),
        Folder.reopen(tmp_path, made),
    ):
        pass
    with Folder.create(tmp_path, made):
        pass

    def refusal(**changes: Any) -> str:
        with pytest.raises(BadInput) as refused, Folder.reopen(tmp_path, {**made, **changes}):
            pass
        return str(refused.value)

    assert "(seed was not set and is now 4)" in refusal(seed=4)
    assert f"the run in {tmp_path} was made with another configuration" in refusal(seed=4)
    assert "(only rounds, target, evaluate may change)" in refusal(seed=4)
    assert "(task.1.lr was 0.1 and is now 0.2)" in refusal(
        task=[{"lr": 0.1}, {"lr": 0.2, "sizes": [1, 2]}]
    )
    assert "(task.1.sizes was [1, 2] and is now [1])" in refusal(
        task=[{"lr": 0.1}, {"lr": 0.1, "sizes": [1]}]
    )
    assert (
        '(sampler.name was "uniform" and is now "full", sampler.budget was 5.0 and is now not set)'
        in refusal(sampler={"name": "full"})
    )
    assert (
        "(sampler.budget was 5.0 and is now 4, seed was not set and is now 2, "
        'metrics was not set and is now ["cost"] and 1 more)'
        in refusal(sampler={"name": "uniform", "budget": 4}, seed=2, metrics=["cost"], stray=1)
    )
    # the same values in other words are the same configuration
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text("# my run\n" + text.replace("5.0", "5"))
    with Folder.reopen(tmp_path, made):
        pass
    (tmp_path / "config.toml").write_text(text[:-4])
    assert "cannot be read" in refusal()


def hold(folder: Path, ready: Any, done: Any) -> None:
    with Folder.reopen(folder, {}):
        ready.set()
        done.wait()


def test_one_process_a_folder(tmp_path: Path) -> None:
    """Another process is told so; a killed one leaves no lock behind."""
    with (
        Folder.create(tmp_path, {}),
        pytest.raises(BadInput, match="another process is running in"),
        Folder.reopen(tmp_path, {}),
    ):
        pass
    context = multiprocessing.get_context("forkserver")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(60)
    with (
        pytest.raises(
            BadInput,
            match=r"another process is running in .*: wait until it ends, or choose another --out",
        ),
        Folder.reopen(tmp_path, {}),
    ):
        pass
    other.kill()
    other.join()
    with Folder.reopen(tmp_path, {}):
        pass
