"""Bad input: each mistake is one clear sentence and status 2, before anything is trained."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from conftest import federation, linear
from test_cli import Outcome, call
from torch import nn

import rota
from rota.data import files
from rota.data.federation import Federation
from rota.errors import BadInput, did_you_mean
from rota.estimate import Adam, FedStale, Sgd, StaleVr, Yogi
from rota.plan import Plan, Task, checked
from rota.sampling import SAMPLERS, Full, Gvr, PowD, Uniform, draw
from rota.world.availability import Availability
from rota.world.devices import Devices

if TYPE_CHECKING:
    from nowhere import Nothing


def refused(outcome: Outcome, *parts: str) -> None:
    """Status 2, nothing on standard output, and one line that has all the parts."""
    assert (outcome.status, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("rota: ")
    for part in parts:
        assert part in line


MISTAKES = {
    # the words
    "rnu": "no such command 'rnu'. Did you mean 'run'?",
    "run": "missing argument 'RECIPE' (see rota run --help)",
    "run a b": "unexpected extra argument",
    "run fedavg-digits --enigne auto": "unknown option --enigne: did you mean '--engine'?",
    "run fedavg-digits --rounds 5": (
        "unknown option --rounds: it is a key of the recipe, so use --set rounds=5 (see rota run "
        "--help)"
    ),
    "run fedavg-digits --lr=0.5": (
        "unknown option --lr: it is a key of the recipe, so use --set task.lr=0.5"
    ),
    "run fedavg-digits --sampler.budget 3": "use --set sampler.budget=3",
    "compare fedavg-digits --vary task.lr=1,2 --out x --epochs": "use --set task.epochs=VALUE",
    "report finished --rounds 5": "unknown option --rounds: did you mean '--out'?",
    "run fedavg-digits --out": "option '--out' requires an argument",
    "run fedavg-digits --engine seqential": "did you mean 'sequential'? (see rota run --help)",
    "run fedavg-digits --device gpu": (
        "invalid value for '--device': 'gpu' is not one of auto, cpu, cuda (see"
    ),
    "run mmfl-digits --set task.1.lr=-1": "task.1.lr is -1.0: it must be above 0",
    "compare fedavg-digits --out x --vary seed=1,2 --seeds 2": (
        "--vary seed=... and --seeds both set the seeds"
    ),
    "run fedavg-digits --resume": "--resume needs --out",
    "list modles": "unknown kind or name 'modles': did you mean 'models'?",
    "reproduce gdbound": "unknown reproduction 'gdbound': did you mean 'gd-bound'?",
    "report": "missing argument",
    # recipes
    "run fedavg-digit": "unknown recipe 'fedavg-digit': did you mean 'fedavg-digits'?",
    "run nothing.toml": "there is no recipe file nothing.toml",
    "run broken.toml": "broken.toml is not valid TOML: ",
    "run bytes.toml": "cannot read the recipe bytes.toml ('utf-8' codec",
    "run folder.toml": "folder.toml is a folder, not a recipe",
    "run finished": "finished is a folder: did you mean finished/config.toml?",
    "run empty.toml": "the recipe has no [[task]]: give at least one, with its data and model",
    "run notask.toml": "'task' is 5, but it takes a table of options",
    "run nodata.toml": "'task.data' is missing: name one of digits, ",
    "run both.toml": (
        "the recipe has 'sampler.fraction' and 'sampler.budget': leave one of them out"
    ),
    # keys
    "run fedavg-digits --set rounds": (
        "--set takes key=value, for example --set task.lr=0.05, but got 'rounds'"
    ),
    "run fedavg-digits --set =3": "--set takes key=value",
    "run fedavg-digits --set task.5.lr=1": (
        "there is no key 'task.5.lr': the recipe has 1 [[task]], numbered from 0"
    ),
    "run fedavg-digits --set task.1=": (
        "there is no key 'task.1': the recipe has 1 [[task]], numbered from 0"
    ),
    "run mmfl-digits --set task.-1=": "there is no key 'task.-1' to remove: known: batch,",
    "run mmfl-digits --set targt=": "there is no key 'targt' to remove: did you mean 'target'?",
    "run fedavg-digits --set task.0=": (
        "the recipe has no [[task]]: give at least one, with its data and model"
    ),
    "run mmfl-digits --set task.1=3": "'task.1' is 3, but it takes a table of options",
    "run fedavg-digits --set task.².lr=3": "unknown key 'task.²'",
    "run fedavg-digits --set rounds.x=1": (
        "there is no key 'rounds.x': 'rounds' is 100, not a table"
    ),
    "run fedavg-digits --set rounds.x.y=1": "there is no key 'rounds.x.y'",
    "run fedavg-digits --set sampelr=full": "unknown key 'sampelr': did you mean 'sampler'?",
    "run fedavg-digits --set task.learning_rate=1": (
        "unknown key 'task.learning_rate': known: batch, better, clip, data, "
    ),
    "run fedavg-digits --set task.bach=1": "unknown key 'task.bach': did you mean 'batch'?",
    "run fedavg-digits --set sampler.bugdet=1": (
        "unknown key 'sampler.bugdet': did you mean 'budget'?"
    ),
    "run fedavg-digits --set estimator.lr=1": (
        "unknown key 'estimator.lr': estimator has no options"
    ),
    "run fedavg-digits --set devices.gflop=1": (
        "unknown key 'devices.gflop': did you mean 'gflops'?"
    ),
    "run fedavg-digits --set sampler=unifrom": "unknown sampler 'unifrom': did you mean 'uniform'?",
    "run fedavg-digits --set sampler=gvr": "unknown sampler 'gvr': did you mean 'mmfl-gvr'?",
    "run fedavg-digits --set estimator=fedavgg": (
        "unknown estimator 'fedavgg': did you mean 'fedavg'?"
    ),
    "run fedavg-digits --set task.model=two_n": "unknown model 'two_n': did you mean 'two_nn'?",
    "run fedavg-digits --set task.data=minst": "unknown data 'minst': did you mean 'mnist'?",
    "run fedavg-digits --set task.partition=shard": (
        "unknown partition 'shard': did you mean 'shards'?"
    ),
    "run fedavg-digits --set task.data.splt=2": (
        "unknown key 'task.data.splt': did you mean 'split'?"
    ),
    "run fedavg-digits --set task.data.x=2": (
        "unknown key 'task.data.x': known: matched_test, seed, split"
    ),
    "run fedavg-digits --set sampler.fracton=0.1": (
        "unknown key 'sampler.fracton': did you mean 'fraction'?"
    ),
    "run heart-hospitals --set sampler.fraction=0.5": (
        "unknown key 'sampler.fraction': sampler has no options"
    ),
    # types
    "run fedavg-digits --set rounds=many": "'rounds' is 'many', but it takes a whole number",
    "run fedavg-digits --set rounds=1.5": "'rounds' is 1.5, but it takes a whole number",
    "run fedavg-digits --set seed=true": "'seed' is true, but it takes a whole number",
    "run fedavg-digits --set task.lr=nan": "'task.lr' is nan, but it takes a number",
    "run fedavg-digits --set task.batch=half": (
        "'task.batch' is 'half', but it takes a whole number or 'all'"
    ),
    "run fedavg-digits --set sampler=5": (
        "'sampler' is 5, but it takes a name, or a table with a name and options; known: "
        "uniform, full"
    ),
    "run fedavg-digits --set devices=5": "'devices' is 5, but it takes a name, or a table with a",
    "run fedavg-digits --set availability=5": (
        "'availability' is 5, but it takes a table of options"
    ),
    "run fedavg-digits --set sampler.procedure=fxed": (
        "'sampler.procedure' is 'fxed', but it takes one of 'fixed', 'independent'"
    ),
    "run fedavg-digits --set task.data.matched_test=1": (
        "'task.data.matched_test' is 1, but it takes true or false"
    ),
    "run fedavg-digits --set task.data.split=a": (
        "'task.data.split' is 'a', but it takes a whole number"
    ),
    "run fedavg-digits --set task.data=folder": (
        "'task.data.path' is missing: it takes a string or a path"
    ),
    # numbers
    "run fedavg-digits --set rounds=0": "rounds is 0: it must be at least 1",
    "run fedavg-digits --set evaluate=0": "evaluate is 0: it must be at least 1",
    "run fedavg-digits --set target=97": (
        "target is 97: it must be an accuracy above 0 and at most 1 (97 % is 0.97)"
    ),
    "run fedavg-digits --set task.lr=0": "task.lr is 0.0: it must be above 0",
    "run fedavg-digits --set task.batch=0": "task.batch is 0: it must be at least 1",
    "run fedavg-digits --set task.prox=-1": "task.prox is -1.0: it must be at least 0",
    "run fedavg-digits --set task.lr_cosine=0": "task.lr_cosine is 0: it must be at least 1",
    "run fedavg-digits --set task.lr_warmup=-1": "task.lr_warmup is -1: it must be at least 0",
    "run fedavg-digits --set task.lr_local_decay=0": (
        "task.lr_local_decay is 0.0: it must be above 0"
    ),
    "run fedavg-digits --set task.lr_steps=[5]": (
        "task.lr_steps is given, but lr_decay is 1: set lr_decay, for example to 0.1"
    ),
    "run fedavg-digits --set task.optimizer=adan": (
        "'task.optimizer' is 'adan', but it takes one of 'sgd', 'adam', 'adamw'"
    ),
    "run fedavg-digits --set task.nesterov=true": (
        "task.nesterov is true, but momentum is 0: set momentum, for example to 0.9"
    ),
    "run fedavg-digits --set task.clip=0": "task.clip is 0.0: it must be above 0",
    "run fedavg-digits --set task.optimizer=admm": (
        "'task.optimizer' is 'admm', but it takes one of 'sgd', 'adam'"
    ),
    "run fedavg-digits --set sampler.fraction=1.5": (
        "'sampler.fraction' is 1.5, but it takes a share of the clients from 0 (one client)"
    ),
    "run fedavg-digits --set sampler.budget=21": (
        "sampler.budget is 21 clients per round, but there are 20: give a number from 1 to 20"
    ),
    "run fedavg-digits --set sampler.budget=0": "sampler.budget is 0 clients per round",
    "run fedavg-digits --set devices.gflops=0": "devices.gflops is 0.0: it must be above 0",
    "run fedavg-digits --set server.lr=1e300": (
        "server.lr is 1e+300: it must be above 0 and at most 1e+30"
    ),
    "run fedavg-digits --set server.lr=-1": "server.lr is -1.0: it must be above 0",
    "run fedavg-digits --set server.momentum=-1": (
        "server.momentum is -1.0: it must be at least 0 and below 1"
    ),
    "run fedavg-digits --set server=yogi --set server.beta2=1": (
        "server.beta2 is 1.0: it must be at least 0 and below 1"
    ),
    "run fedavg-digits --set task.momentum=1": (
        "task.momentum is 1.0: it must be at least 0 and below 1"
    ),
    "run fedavg-digits --set task.partition.clients=0": (
        "clients is 0, but it must be a whole number from 1 on"
    ),
    "run fedavg-digits --set task.partition.clients=5000": "lower clients",
    "run fedprox-synthetic --set task.data.clients=1000000000000": "GB of memory: lower clients",
    "run fedprox-synthetic --set task.data.alpha=1e300": (
        "a standard deviation: give a number from 0"
    ),
    "run fedavg-digits --set task.partition=high-low --set task.partition.labels=0": (
        "labels is 0, but it must be above 0"
    ),
    # parts that do not go together
    "run fedavg-digits --set task.model=kvib_cnn": "kvib_cnn takes images from ",
    "run fedavg-digits --set task.model=lstm_shakespeare": "model",
    "run fedavg-digits --set task.partition=natural": (
        "these data have no natural clients; use iid, shards or dirichlet"
    ),
    "run fedavg-digits --set task.data=synthetic": (
        "'task.partition' is given, but the data 'synthetic' come with their own clients"
    ),
    "run fedavg-digits --set task.data=folder --set task.partition= --set task.data.path=nowhere": (
        "nowhere is not a folder"
    ),
    # several tasks: which one
    "run mmfl-digits --set task.1.model=two_n": (
        "rota: task.1.model: unknown model 'two_n': did you mean 'two_nn'?"
    ),
    "run two.toml": "rota: task.1.data: unknown data 'digit': did you mean 'digits'?",
    "run mmfl-digits --set task.1.model=leaf_lstm": (
        "rota: task 'small': leaf_lstm takes sequences of characters"
    ),
    "run mmfl-digits --set task.1.partition.missing=1": (
        "rota: task.1: high-low: missing = 1.0 left all 30 clients without data"
    ),
    "run mmfl-digits --set task.1.partition.clients=20": (
        "rota: task 'linear' has 30 clients, 'small' 20, 'wide' 30: all tasks of"
    ),
    # comparisons
    "compare fedavg-digits --out x": "missing option '--vary'",
    "compare fedavg-digits --vary task.lr=1": "missing option '--out'",
    "compare fedavg-digits --out x --vary sampler": (
        "--vary takes key=value,value,..., for example --vary sampler=full,uniform"
    ),
    "compare fedavg-digits --out x --vary sampler=": "--vary takes key=value,value,...",
    "compare fedavg-digits --out x --vary task.lr=0.1,0.10": (
        "--vary gives the run '0.1-seed0' twice: leave one of the values out"
    ),
    "compare fedavg-digits --out x --vary sampler=full,unifrom": (
        "unknown sampler 'unifrom': did you mean 'uniform'?"
    ),
    "compare fedavg-digits --out x --vary task.lr=0.1,-1": "task.lr is -1.0: it must be above 0",
    "compare fedavg-digits --out x --vary task.lr=0.1 --seeds 0": (
        "--seeds is 0: it must be at least 1"
    ),
    "compare fedavg-digits --out x --vary task.lr=0.1 --seeds some": "invalid value for '--seeds'",
    "compare fedavg-digits --out x --vary seed=a,b": "'seed' is 'a', but it takes a whole number",
    "compare fedavg-digits --out x --vary task.lr=0.1 --resume": (
        "there is no comparison to resume in x"
    ),
    # folders
    "run fedavg-digits --out finished": (
        "the output folder finished is already in use: add --resume to resume its run, or"
    ),
    "run fedavg-digits --out busy": (
        "the output folder busy is already in use: choose another --out"
    ),
    "run fedavg-digits --out broken.toml": (
        "the output folder broken.toml is a file: choose another --out"
    ),
    "run fedavg-digits --out broken.toml/below": (
        "cannot write to the output folder broken.toml/below (Not a directory): choose"
    ),
    "run fedavg-digits --out /proc/rota": (
        "cannot write to the output folder /proc/rota (No such file or directory): choose "
        "another --out"
    ),
    "run fedavg-digits --out nothing --resume": (
        "there is no run to resume in nothing: leave --resume out to start one there"
    ),
    "run fedavg-digits --out busy --resume": "there is no run to resume in busy",
    "run finished/config.toml --out finished --resume --set task.lr=0.5": (
        "(task.lr was 0.1 and is now 0.5): resume it with "
    ),
    "run finished/config.toml --out finished --resume --set seed=5": (
        "(seed was 0 and is now 5): resume it with the one it was made with (only rounds, "
        "target, evaluate may change)"
    ),
    "run finished/config.toml --out finished --resume --set rounds=0": (
        "rounds is 0: it must be at least 1"
    ),
    "run fedavg-digits --out damaged --resume": "damaged/config.toml cannot be read (",
    "report nothing": (
        "nothing is not a run folder and holds none: name a folder that has a config.toml in it"
    ),
    "report busy": "busy is not a run folder and holds none",
    "report damaged": "cannot read",
    "report finished --out broken.toml/page.html": (
        "cannot write the report to broken.toml/page.html ("
    ),
    "reproduce gd-bound --out broken.toml/below": (
        "cannot write to the output folder broken.toml/below (Not a directory): choose"
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything in it that the mistakes are made with."""
    here = tmp_path_factory.mktemp("mistakes")
    (here / "broken.toml").write_text("rounds = = 3\n")
    (here / "bytes.toml").write_bytes(b"summary = '\xff\xfe'\n")
    (here / "empty.toml").write_text("")
    (here / "notask.toml").write_text("task = 5\n")
    (here / "nodata.toml").write_text("[[task]]\nmodel = 'two_nn'\n")
    (here / "two.toml").write_text(
        "[[task]]\ndata = 'digits'\nmodel = 'two_nn'\n[[task]]\ndata = 'digit'\nmodel = 'two_nn'\n"
    )
    (here / "both.toml").write_text(
        "[sampler]\nbudget = 3\nfraction = 0.1\n[[task]]\ndata = 'digits'\nmodel = 'two_nn'\n"
    )
    for folder in ("folder.toml", "busy", "damaged"):
        (here / folder).mkdir()
    (here / "busy" / "notes.txt").write_text("mine")
    (here / "damaged" / "config.toml").write_text("rounds = ")
    assert call("run", "fedavg-digits", "--set", "rounds=1", "--out", here / "finished").status == 0
    return here


@pytest.mark.parametrize("command", MISTAKES)
def test_every_mistake_is_one_sentence(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    refused(call(*command.split()), MISTAKES[command])
    assert sorted(place.rglob("*")) == before, "a refused command leaves nothing behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    refused(
        call("run", "fedavg-digits", "--device", "cuda", "--out", tmp_path / "a"),
        "device is 'cuda', but torch sees no GPU here",
    )
    assert not (tmp_path / "a").exists()


def test_a_folder_that_may_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", deny)
    refused(
        call("run", "fedavg-digits", "--out", tmp_path),
        f"cannot use the output folder {tmp_path} (Permission denied): choose another",
    )


def test_missing_data_without_a_network_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))

    monkeypatch.setenv("ROTA_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(files, "urlopen", unreachable)
    outcome = call("run", "fedavg-mnist", "--out", tmp_path / "a")
    refused(
        outcome,
        "mnist is not on this machine",
        "$ROTA_DATA/mnist",
        "or use the data 'digits' or 'synthetic', which need no files",
    )
    assert not (tmp_path / "a").exists()


def test_a_rota_data_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_DATA", str(tmp_path / "nowhere"))
    refused(
        call("run", "fedavg-mnist", "--out", tmp_path / "a"),
        "ROTA_DATA is",
        "which is not a folder",
    )


# --- the user's own data, through a recipe


def write_clients(folder: Path, change: Callable[[list[dict[str, np.ndarray]]], None]) -> None:
    generator = np.random.default_rng(0)
    clients: list[dict[str, np.ndarray]] = []
    for _ in range(4):
        x, y = generator.normal(size=(5, 4)).astype(np.float32), np.arange(5) % 3
        clients.append({"x": x, "y": y, "x_test": x[:2] * 0 + 1, "y_test": np.ones(2, int)})
    change(clients)
    folder.mkdir()
    for number, arrays in enumerate(clients):
        np.savez(folder / f"{number}.npz", **arrays)


def nothing(clients: list[dict[str, np.ndarray]]) -> None:
    pass


def a_nan(clients: list[dict[str, np.ndarray]]) -> None:
    clients[2]["x"][3, 1] = np.nan


def no_rows(clients: list[dict[str, np.ndarray]]) -> None:
    clients[1] |= {"x": np.zeros((0, 4), np.float32), "y": np.zeros(0, int)}


def another_shape(clients: list[dict[str, np.ndarray]]) -> None:
    clients[3]["x"] = np.ones((5, 6), np.float32)


def a_token(clients: list[dict[str, np.ndarray]]) -> None:
    for client in clients:
        client["x"] = np.tile(np.arange(4) % 3, (5, 1))
        client["x_test"] = client["x"][:2].copy()
    clients[2]["x_test"][1, 3] = 97


@pytest.mark.parametrize(
    ("change", "setting", "parts"),
    [
        (
            a_token,
            "task.model=leaf_lstm",
            ("data 'clients': test token 97 at client 2, row 1 is outside the model's embedding",),
        ),
        (a_nan, "rounds=1", ("2.npz", "NaN")),
        (no_rows, "rounds=1", ("1.npz", "at least one")),
        (another_shape, "rounds=1", ("3.npz", "shape")),
        (
            nothing,
            "task.data.classes=2",
            ("data 'clients': train label outside 0..1 at client 0, row 2 and in 3 more rows",),
        ),
        (
            nothing,
            "task.model=cnn",
            ("cnn takes images of shape (channels, height, width), not examples of shape (4,)",),
        ),
    ],
    ids=["token", "nan", "empty client", "shape", "labels", "model"],
)
def test_own_files(
    tmp_path: Path,
    change: Callable[[list[dict[str, np.ndarray]]], None],
    setting: str,
    parts: tuple[str, ...],
) -> None:
    write_clients(tmp_path / "clients", change)
    path = json.dumps(str(tmp_path / "clients"))
    task = f"[[task]]\nmodel = 'logistic'\n[task.data]\nname = 'folder'\npath = {path}\n"
    (tmp_path / "own.toml").write_text(f"sampler = 'full'\n{task}")
    refused(call("run", tmp_path / "own.toml", "--set", setting, "--out", tmp_path / "a"), *parts)


def test_own_files_that_are_right_run(tmp_path: Path) -> None:
    write_clients(tmp_path / "clients", nothing)
    words = [
        "task.data=folder",
        f"task.data.path={tmp_path / 'clients'}",
        "task.partition=",
        "task.model=logistic",
        "sampler=full",
        "rounds=1",
    ]
    settings = [word for setting in words for word in ("--set", setting)]
    outcome = call("run", "fedavg-digits", *settings, "--out", tmp_path / "a")
    assert outcome.status == 0, outcome.err


# --- the same from Python: rota.run raises BadInput


def spoilt(part: str, what: str, row: int, value: float) -> Task:
    """A task of six clients (5, 12, 20, ... examples) with one bad number in its data."""
    data = federation([5, 12, 20, 31, 8, 17])
    piece = getattr(data, part)
    values = getattr(piece, what).clone()
    values[row] = value
    return Task(linear, replace(data, **{part: replace(piece, **{what: values})}))


def task(**more: object) -> Task:
    return Task(**{"model": linear, "data": federation([5, 12, 20]), **more})


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return super().forward(x), 0


def frozen(shape: tuple[int, ...], classes: int) -> nn.Module:
    return linear(shape, classes).requires_grad_(False)


def failing() -> nn.Module:
    raise KeyError("width")


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs[:, 0] - targets) ** 2).float()


def line(**more: object) -> Task:
    """A task whose targets are real numbers."""
    generator = np.random.default_rng(0)
    pairs = [(x := generator.normal(size=(8, 4)), x.sum(axis=1)) for _ in range(3)]
    return Task(
        **{
            "model": lambda: nn.Linear(4, 1),
            "data": rota.from_clients(pairs, pairs[0], name="line"),
            **more,
        }
    )  # type: ignore[arg-type]


class Picky:
    """A user's own server that refuses its numbers; its lr may be anything."""

    lr = -1.0

    def step(self, *_: object) -> None:
        raise ValueError("my rate is too high")


@pytest.mark.parametrize(
    ("tasks", "more", "sentence"),
    [
        ([], {}, "there is no task: give at least one"),
        (task(), {}, "tasks are a list of rota.Task: give one"),
        (
            [task()],
            {"sampler": "unifrom"},
            "unknown sampler 'unifrom': did you mean 'uniform'?",
        ),
        (
            [task()],
            {"sampler": rota.sampling.Uniform},
            "sampler is <class 'rota.sampling.uniform.Uniform'>: give an object",
        ),
        (
            [task()],
            {"estimator": rota.sampling.Full()},
            "estimator is Full(): give an object such as rota.estimate.Unbiased()",
        ),
        ([task()], {"target": [0.5]}, "target is [0.5]: it must be one number, for all models"),
        (
            [task()],
            {"estimator": StaleVr()},
            "the estimator 'stale-vr' needs the norms of all clients",
        ),
        (
            [spoilt("train", "x", 7, np.nan)],
            {},
            "data 'blobs': train x is NaN or infinite at client 1, row 2: fix or remove it",
        ),
        (
            [spoilt("train", "x", slice(17, 19), np.inf)],
            {},
            "train x is NaN or infinite at client 2, row 0 and in 1 more rows: fix",
        ),
        ([spoilt("test", "x", 5, np.nan)], {}, "test x is NaN or infinite at row 5: fix"),
        (
            [spoilt("train", "y", 4, 3)],
            {},
            "data 'blobs': train label outside 0..2 at client 0, row 4: fix or remove it",
        ),
        ([spoilt("train", "y", 4, -1)], {}, "train label outside 0..2 at client 0, row 4"),
        ([spoilt("test", "y", 0, 9)], {}, "test label outside 0..2 at row 0"),
        (
            [task(data=federation([5, 0, 20, 0]))],
            {},
            "client 1 has no training examples (2 of 4 clients have none): leave such clients out, "
            "or lower partition.missing",
        ),
        (
            [task(), task(data=federation([5, 12]))],
            {},
            "task 'blobs-0' has 3 clients, 'blobs-1' 2: all tasks of a run must have the same",
        ),
        (
            [task(name="a"), replace(spoilt("train", "x", 7, np.nan), name="b")],
            {},
            "task 'b': data 'blobs': train x is NaN or infinite at client 1, row 2: fix or remove "
            "it",
        ),
        ([task(name="a"), task(name="a-0"), task(name="a")], {}, "two tasks share the name 'a'"),
        ([task(), task(), task(name="blobs-0")], {}, "two tasks share the name 'blobs-0'"),
        (
            [task(model=lambda: nn.Linear(5, 3))],
            {},
            "task 'blobs': the model does not fit examples of shape (4,): mat1 and mat2 shapes",
        ),
        (
            [task(model=failing)],
            {},
            "task 'blobs': the model does not fit examples of shape (4,): 'width'",
        ),
        (
            [task(model=lambda: nn.Linear(4, 2))],
            {},
            "task 'blobs': the model has 2 outputs but the data have 3 classes",
        ),
        (
            [task(model=lambda: Pair(4, 3))],
            {},
            "task 'blobs': the model gives a tuple: it must give one tensor",
        ),
        (
            [
                task(
                    model=lambda: nn.Sequential(
                        nn.Flatten(), nn.ReLU(inplace=True), linear((4,), 3)
                    )
                )
            ],
            {},
            "task 'blobs': the model changes its inputs in place: let it make new tensors, such as",
        ),
        (
            [task(loss=lambda o, t: nn.functional.cross_entropy(o, t.mul_(1), reduction="none"))],
            {},
            "task 'blobs': the loss changes its targets in place: let it make new tensors",
        ),
        ([task(model=frozen)], {}, "task 'blobs': the model has no parameters to train"),
        (
            [task(loss=nn.CrossEntropyLoss())],
            {},
            "the loss must give one number per example, shape (2,), and gives ()",
        ),
        (
            [task(loss=lambda outputs, targets: outputs @ targets)],
            {},
            "task 'blobs': the loss does not take the model's outputs",
        ),
        (
            [task(loss=lambda outputs, targets: [outputs, targets])],
            {},
            "the loss must give one number per example, shape (2,), and gives a list",
        ),
        (
            [task(score=lambda outputs, targets: outputs + targets[:, None])],
            {},
            "the score must give one number per example, shape (2,), and gives (2, 3)",
        ),
        (
            [task(score=lambda outputs: outputs)],
            {},
            "task 'blobs': the score does not take the model's outputs: <lambda>() takes 1",
        ),
        (
            [line()],
            {},
            "task 'line': the targets are real numbers, and accuracy is for classes: set score to "
            "'mse', 'mae' or 'r2', or give class labels as whole numbers",
        ),
        (
            [line(loss=squares)],
            {},
            "accuracy is for classes: set score to 'mse', 'mae' or 'r2'",
        ),
        (
            [line(score=squares)],
            {},
            "task 'line': the targets are real numbers, and the default loss is for classes: set "
            "loss to 'mse', 'mae' or 'huber'",
        ),
        ([task(lr=0.0)], {}, "task 'blobs': lr is 0.0: it must be above 0"),
        ([task(lr=float("nan"))], {}, "task 'blobs': lr is nan: it must be above 0"),
        ([task(lr_decay=1e300)], {}, "task 'blobs': lr_decay is 1e+300: it must be above 0"),
        (
            [task(lr_decay=10.0)],
            {"rounds": 400},
            "task 'blobs': lr_decay is 10: lr grows too large",
        ),
        ([task(weight_decay=1e31)], {}, "weight_decay is 1e+31: it must be at least 0, at most"),
        ([task(epochs=0)], {}, "task 'blobs': epochs is 0: it must be at least 1"),
        ([task(steps=0)], {}, "task 'blobs': steps is 0: it must be at least 1"),
        ([task(prox=-0.1)], {}, "task 'blobs': prox is -0.1: it must be at least 0"),
        ([task()], {"rounds": 0}, "rounds is 0: it must be at least 1"),
        (
            [task()],
            {"target": 97},
            "target is 97: it must be an accuracy above 0 and at most 1 (97 % is 0.97)",
        ),
        (
            [task()],
            {"sampler": rota.sampling.Uniform(budget=4)},
            "sampler.budget is 4 clients per round, but there are 3",
        ),
        ([task()], {"devices": Devices(mbps=-1)}, "devices.mbps is -1: it must be above 0"),
        ([task()], {"devices": Devices(spread=-1)}, "devices.spread is -1: it must be at least 0"),
        (
            [task(momentum=1.0)],
            {},
            "task 'blobs': momentum is 1.0: it must be at least 0 and below 1",
        ),
        ([task()], {"rounds": np.int64(0)}, "rounds is 0: it must be at least 1"),
        ([task()], {"server": Sgd(lr=-1)}, "server.lr is -1: it must be above 0"),
        ([task()], {"server": Sgd(lr=0)}, "server.lr is 0: it must be above 0"),
        (
            [task()],
            {"server": Sgd(momentum=-1)},
            "server.momentum is -1: it must be at least 0 and below 1",
        ),
        (
            [task()],
            {"server": Adam(beta1=2)},
            "server.beta1 is 2: it must be at least 0 and below 1",
        ),
        ([task()], {"server": Yogi(eps=-1)}, "server.eps is -1: it must be at least 0"),
        ([task()], {"server": Picky()}, "server: my rate is too high"),
        (
            [task()],
            {"engine": "seqential"},
            "unknown engine 'seqential': did you mean 'sequential'?",
        ),
        ([task()], {"device": "gpu"}, "unknown device 'gpu'"),
        (
            [task()],
            {"out": os.devnull},
            "cannot write to the output folder /dev/null (File exists)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_in_python(tasks: list[Task], more: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput) as mistake:
        rota.run(tasks, **{"rounds": 1, "sampler": rota.sampling.Full(), **more})
    assert str(mistake.value).startswith(sentence) or sentence in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_a_score_of_ones_own_may_have_any_target() -> None:
    points = task(score=lambda outputs, targets: 100.0 * (outputs.argmax(-1) == targets))
    assert rota.run([points], rota.sampling.Full(), rounds=30, target=60).summary["rounds"] < 30


def test_real_targets_with_a_score_are_taken() -> None:
    fits = line(loss=squares, score=lambda outputs, targets: -squares(outputs, targets), lr=0.02)
    accuracy = rota.run([fits], Full(), rounds=5).rounds["accuracy"]
    assert accuracy[-1] > accuracy[0]


# --- types, by the hints of the dataclasses


TYPES: list[tuple[dict[str, object], dict[str, object], str]] = [
    # (of the task, of the run, the sentence)
    (
        {"optimizer": "Adam"},
        {},
        "task 'blobs': optimizer is 'Adam', but it takes one of 'sgd', 'adam'",
    ),
    (
        {"optimizer": "rmsprop"},
        {},
        "task 'blobs': optimizer is 'rmsprop', but it takes one of 'sgd', 'adam'",
    ),
    (
        {"optimizer": "adan"},
        {},
        "task 'blobs': optimizer is 'adan', but it takes one of 'sgd', 'adam', 'adamw' or a "
        "function",
    ),
    ({"lr": "0.1"}, {}, "task 'blobs': lr is '0.1', but it takes a number"),
    ({"lr": None}, {}, "task 'blobs': lr is None, but it takes a number"),
    ({"lr": True}, {}, "task 'blobs': lr is true, but it takes a number"),
    ({"momentum": "a"}, {}, "task 'blobs': momentum is 'a', but it takes a number"),
    ({"nesterov": 1}, {}, "task 'blobs': nesterov is 1, but it takes true or false"),
    ({"clip": "x"}, {}, "task 'blobs': clip is 'x', but it takes a number or None"),
    ({"batch": "10"}, {}, "task 'blobs': batch is '10', but it takes a whole number or None"),
    ({"batch": 2.5}, {}, "task 'blobs': batch is 2.5, but it takes a whole number or None"),
    ({"epochs": "1"}, {}, "task 'blobs': epochs is '1', but it takes a whole number"),
    ({"steps": 1.0}, {}, "task 'blobs': steps is 1.0, but it takes a whole number or None"),
    ({"score": "acc"}, {}, "unknown score 'acc': did you mean 'auc'?"),
    ({"loss": 3}, {}, "task 'blobs': loss is 3, but it takes a function"),
    ({"model": "two_m"}, {}, "unknown model 'two_m': did you mean 'two_nn'?"),
    ({"data": None}, {}, "task '0': data is None, but it takes a Federation"),
    ({"data": [torch.zeros(9, 9)]}, {}, "task '0': data is [tensor([[0., 0., 0."),
    (
        {"data": replace(federation([5, 12, 20]), classes="3")},
        {},
        "task 'blobs': data.classes is '3', but it takes a whole number",
    ),  # type: ignore[arg-type]
    ({"name": 3}, {}, "task '3': name is 3, but it takes a string"),
    ({}, {"sampler": Gvr(budget="2")}, "sampler.budget is '2', but it takes a number"),
    ({}, {"sampler": Gvr(budget=None)}, "sampler.budget is None, but it takes a number"),
    ({}, {"sampler": Gvr(budget=[3, 3])}, "sampler.budget is [3, 3], but it takes a number"),
    (
        {},
        {"sampler": Gvr(2, distinct="yes")},
        "sampler.distinct is 'yes', but it takes true or false",
    ),  # type: ignore[arg-type]
    (
        {},
        {"sampler": Gvr(2, per_rate="no")},
        "sampler.per_rate is 'no', but it takes true or false",
    ),  # type: ignore[arg-type]
    (
        {},
        {"sampler": Gvr(2, 1.5)},
        "sampler.processors is 1.5, but it takes a whole number, a list or 'mixed'",
    ),  # type: ignore[arg-type]
    (
        {},
        {"sampler": Gvr(2, "mixt")},
        "sampler.processors is 'mixt', but it takes a whole number, a list or 'mixed'",
    ),  # type: ignore[arg-type]
    (
        {},
        {"sampler": Gvr(2, uploads="many")},
        "sampler.uploads is 'many', but it takes a number or a list or None",
    ),  # type: ignore[arg-type]
    (
        {},
        {"sampler": Gvr(2, uploads=np.array(["a"]))},
        "sampler.uploads is array(['a'], dtype='<U1'), but it takes a number or a",
    ),  # type: ignore[arg-type]
    (
        {},
        {"sampler": Uniform(2, "fxed")},
        "sampler.procedure is 'fxed', but it takes one of 'fixed', 'independent', ",
    ),  # type: ignore[arg-type]
    (
        {},
        {"sampler": PowD(2, candidates=2.5)},
        "sampler.candidates is 2.5, but it takes a whole number",
    ),  # type: ignore[arg-type]
    ({}, {"estimator": FedStale(beta="1")}, "estimator.beta is '1', but it takes a number"),
    (
        {},
        {"estimator": FedStale(memory=3)},
        "estimator.memory is 3, but it takes one of 'device', 'cpu', 'disk'",
    ),  # type: ignore[arg-type]
    ({}, {"server": Sgd(lr="1")}, "server.lr is '1', but it takes a number"),
    ({}, {"server": Adam(eps=None)}, "server.eps is None, but it takes a number"),
    ({}, {"devices": Devices(mbps="20")}, "devices.mbps is '20', but it takes a number"),
    (
        {},
        {"devices": {"mpbs": 20}},
        "unknown key 'devices.mpbs': did you mean 'mbps'?",
    ),
    ({}, {"devices": 3}, "devices is 3: give an object such as rota.Devices()"),
    ({}, {"out": 3}, "out is 3, but it takes a folder's path or None"),
    (
        {},
        {"availability": Availability(day=2.5)},
        "availability.day is 2.5, but it takes a whole number",
    ),  # type: ignore[arg-type]
    ({}, {"availability": 0.5}, "availability is 0.5: give an object such as rota.Availability()"),
    ({}, {"rounds": "5"}, "rounds is '5', but it takes a whole number"),
    ({}, {"rounds": 5.0}, "rounds is 5.0, but it takes a whole number"),
    ({}, {"rounds": True}, "rounds is true, but it takes a whole number"),
    ({}, {"seed": "a"}, "seed is 'a', but it takes a whole number"),
    ({}, {"seed": None}, "seed is None, but it takes a whole number"),
    ({}, {"evaluate": 1.5}, "evaluate is 1.5, but it takes a whole number"),
    ({}, {"target": True}, "target is true, but it takes a number or None"),
    ({}, {"metrics": "regret"}, "metrics is 'regret', but it takes a list, such as ['regret']"),
    ({}, {"metrics": None}, "metrics is None, but it takes a list"),
    ({}, {"engine": None}, "unknown engine 'None': known: auto, batched, flower, sequential"),
]


@pytest.mark.parametrize(
    ("work", "more", "sentence"), TYPES, ids=[sentence for _, _, sentence in TYPES]
)
def test_wrong_types_in_python(
    work: dict[str, object], more: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadInput) as mistake:
        rota.run([task(**work)], **{"rounds": 1, "sampler": Full(), **more})
    assert str(mistake.value).startswith(sentence)
    assert "\n" not in str(mistake.value)
    assert len(str(mistake.value)) < 250


@pytest.mark.parametrize(
    ("work", "more"),
    [
        ({"lr": 1, "batch": None, "clip": np.float32(5)}, {}),
        ({"lr": np.float32(0.1), "batch": np.int64(4), "steps": np.int32(2)}, {}),
        ({"model": nn.Linear(4, 3), "loss": nn.CrossEntropyLoss(reduction="none")}, {}),
        ({}, {"rounds": np.int64(1), "target": 1, "metrics": ()}),
        ({}, {"sampler": Gvr(2, [1, 2, 1], uploads=[1, 0.9, 1])}),
        ({}, {"sampler": Gvr(2, np.array([1, 2, 1]), uploads=np.array([1.0, 0.9, 1.0]))}),
        ({}, {"sampler": Gvr(2, torch.tensor([1, 2, 1]), uploads=np.float32(0.9))}),
        ({}, {"sampler": Gvr(np.int32(2), "mixed")}),
        ({}, {"sampler": Uniform(2), "metrics": ["regret"]}),
    ],
)
def test_right_types_in_python(work: dict[str, object], more: dict[str, object]) -> None:
    assert (
        rota.run([task(**work)], **{"rounds": 1, "sampler": Full(), **more}).summary["rounds"] == 1
    )  # type: ignore[arg-type]


class Plain:
    """A sampler of one's own without fields."""

    def __init__(self, step: Any = "1") -> None:
        self.step = step

    def init(self, *_: object) -> dict[str, Any]:
        return {}

    def draw(self, _: object, shares: Any, generator: Any) -> Any:
        return draw.independent((shares > 0) * 1.0, shares, generator)

    def observe(self, *_: object) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Unresolved(Plain):
    step: int = 1
    note: Nothing | None = None


@dataclass(frozen=True)
class Loose(Plain):
    """Hints that say something else than what the defaults are, and some that cannot be asked."""

    step: int = None  # type: ignore[assignment]
    parts: dict[str, int] = field(default_factory=dict)
    inner: rota.sampling.Sampler = field(default_factory=Full)
    data: Federation | None = None


@pytest.mark.parametrize(
    "sampler", [Plain(), Unresolved("a"), Loose(), Loose(2, {"a": 1}, Plain())]
)  # type: ignore[arg-type]
def test_ones_own_policies_are_checked_as_far_as_they_say_what_they_take(sampler: Plain) -> None:
    assert rota.run([task()], sampler, rounds=1).summary["rounds"] == 1
    with pytest.raises(BadInput, match=r"^sampler\.step is 'a', but it takes a whole number$"):
        rota.run([task()], Loose("a"), rounds=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("gvr", "did you mean 'mmfl-gvr'?"),
        ("robin", "did you mean 'round-robin' or 'round-robin-server'?"),
        ("mmfl-gvrr", "did you mean 'mmfl-gvr'?"),
        (
            "mmfl-foo",
            "did you mean 'mmfl-gvr', 'mmfl-kvib', 'mmfl-lvr', 'mmfl-random' or 'mmfl-vre'?",
        ),
        ("", "known: aocs, avare, "),
        (None, "known: aocs, avare, "),
    ],
)
def test_what_was_meant(word: object, hint: str) -> None:
    assert did_you_mean(word, SAMPLERS).startswith(hint)


def columns(
    client: Any = (1,), model: Any = (0,), probability: Any = (0.5,), weight: Any = (2.0,)
) -> Plan:
    return Plan(*map(np.array, (client, model, probability, weight)))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (None, "the sampler's draw returned a NoneType: return a rota.Plan"),
        (
            columns(client=[-1]),
            "the sampler's plan has a wrong 'client': give whole numbers from 0 to 2",
        ),
        (
            columns(client=[3]),
            "the sampler's plan has a wrong 'client': give whole numbers from 0 to 2",
        ),
        (columns(client=[1.0]), "the sampler's plan has a wrong 'client'"),
        (
            columns(model=[2]),
            "the sampler's plan has a wrong 'model': give whole numbers from 0 to 1",
        ),
        (
            columns(weight=[1.0, 2.0]),
            "the sampler's plan has no one-dimensional array 'weight' of the same length as "
            "'client': give four arrays of one length",
        ),
        (
            columns(probability=0.5),
            "the sampler's plan has no one-dimensional array 'probability' of the same length",
        ),
        (
            Plan([1], [0], [0.5], [2.0]),  # type: ignore[arg-type]
            "the sampler's plan has no one-dimensional array 'client' of the same length",
        ),
        (
            columns(model=[1]),
            "the sampler drew client 1 for model 1, but this client has no data for it or cannot "
            "be reached: draw only pairs whose share is above 0",
        ),
        (
            columns(weight=[np.nan]),
            "the sampler's plan has wrong numbers: weights must be finite, and probabilities "
            "above 0 and at most 1 (NaN where unknown)",
        ),
        (columns(probability=[1.5]), "the sampler's plan has wrong numbers"),
        (columns(probability=[0.0]), "the sampler's plan has wrong numbers"),
        (
            columns([1, 1], [0, 0], [0.5, 0.5], [2.0, 2.0]),
            "the sampler drew a client twice for one model: give one row with twice the weight",
        ),
    ],
)
def test_plans_of_a_users_own_sampler(plan: Any, sentence: str) -> None:
    shares = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    with pytest.raises(BadInput) as mistake:
        checked(plan, shares)
    assert str(mistake.value).startswith(sentence)
    right = columns(probability=[np.nan])
    for name, column in vars(checked(right, shares)).items():
        np.testing.assert_array_equal(column, getattr(right, name))
    nobody = columns(np.empty(0, int), np.empty(0, int), [], [])
    assert len(checked(nobody, shares)) == 0


def test_a_run_looks_at_its_samplers_plans() -> None:
    class Nobody(rota.sampling.Full):
        def draw(self, *_: Any) -> Any:
            return None

    with pytest.raises(BadInput, match="draw returned a NoneType: return a"):
        rota.run([task()], Nobody(), rounds=1)
