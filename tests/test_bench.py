"""The benchmarks: works, systems on tiny versions of them, output, and peers that cannot run."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import rota
from rota import policies
from rota.cli import app as commands
from rota.data.federation import Federation
from rota.data.files import cache
from rota.engine import machine
from rota.estimate import StaleVre
from rota.models import MODELS
from rota.plan import Task
from rota.sampling import SAMPLERS
from rota_lab import bench
from rota_lab.bench import (
    environment,
    floors,
    groups,
    growth,
    layers,
    processes,
    systems,
    works,
)
from rota_lab.bench.environment import Skip
from rota_lab.bench.page import BEGIN, END, NAMES, page, summary
from rota_lab.bench.peers import work as shared
from rota_lab.bench.systems import OWN, PEERS, System, Way
from rota_lab.bench.works import WORKS, Work

TINY: dict[str, dict[str, Any]] = {
    "2nn": {"clients": 4, "examples": 12, "cohort": 2},
    "cnn": {"clients": 3, "examples": 4, "cohort": 2},
    "2nn-100": {"clients": 3, "examples": 12, "cohort": 3},
    "cnn-100": {"clients": 3, "examples": 4, "cohort": 3},
    "cifar10": {"clients": 3, "examples": 4, "cohort": 2},
    "logistic": {"cohort": 3},
    "lstm": {"clients": 3, "examples": 4, "cohort": 2},
    "transformer": {"clients": 3, "examples": 4, "cohort": 2},
    "resnet8": {"clients": 3, "examples": 4, "cohort": 2},
    "lenet": {"clients": 3, "examples": 4, "cohort": 2, "epochs": 1},
}
ALL = {"2nn": 12, "cnn": 4, "logistic": 6000, "lstm": 4, "transformer": 4, "resnet8": 4, "lenet": 4}
"""Batches that hold all examples of any client."""
COLUMNS = {"work", "system", "device", "seconds_per_round", "accuracy"}


def tiny(name: str, **more: Any) -> Work:
    return replace(WORKS[name], **{**TINY[name], **more})


@pytest.fixture(autouse=True)
def _bare(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No data at hand, one core, one pass: tiny works, and the same ones on every machine."""
    monkeypatch.setenv("ROTA_DATA", str(tmp_path_factory.mktemp("data")))
    monkeypatch.setattr(systems, "cores", lambda: 1)
    monkeypatch.setattr(bench, "PASSES", 1)
    for name in TINY:
        monkeypatch.setitem(WORKS, name, tiny(name))
    environment.interpreter.cache_clear()
    yield
    environment.interpreter.cache_clear()


def call(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = commands.status(["bench", *map(str, words)])
    return status, out.getvalue(), err.getvalue()


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """Replace runs by set times per way; a way without a time fails. Returns the tried ways."""
    tried: list[str] = []

    def play(system: System, way: Way, folder: Path, device: str) -> dict[str, Any]:
        tried.append(way.how)
        if way.how not in seconds:
            raise Skip(f"{way.how} is broken")
        return {"seconds": [seconds[way.how]] * 2, "accuracy": 0.5, "loss": 1.0, "version": "1"}

    monkeypatch.setattr(bench, "run", play)
    return tried


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A peer's script as a module of this process, with its neighbours on the path."""
    monkeypatch.syspath_prepend(systems.SCRIPTS)
    for each in ("work", name):
        sys.modules.pop(each, None)
    return importlib.import_module(name)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", TINY)
def test_a_work_is_the_same_for_every_system(name: str, tmp_path: Path) -> None:
    size = works.prepare(WORKS[name], tmp_path, 2, "cpu")
    found = shared.load(str(tmp_path))
    assert name in bench.names()
    assert WORKS[name].model in MODELS
    assert found.cohorts.shape == (works.WARMUP + 2, WORKS[name].cohort)
    assert found.y.max() < found.classes
    sizes = np.diff(found.offsets)[found.cohorts[works.WARMUP :]]
    assert size.steps.tolist() == np.ceil(sizes / found.batch).sum(1).tolist()
    assert size.examples.tolist() == sizes.sum(1).tolist()
    assert (size.flops > 0).all()

    # the network that the peers write out is rota's, and starts where rota starts
    ours = MODELS[found.model](found.x.shape[1:], found.classes)
    with torch.no_grad():
        for parameter, value in zip(ours.parameters(), found.start, strict=True):
            parameter.copy_(torch.from_numpy(value))
        x = torch.from_numpy(found.x[:3])
        torch.testing.assert_close(ours.eval()(x), shared.network(found).eval()(x))
    assert size.params == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("name", ALL)
def test_rota_and_the_plain_loop_train_the_same_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One mini-batch of all examples leaves nothing to chance.

    Cohorts, weights, steps and learning rate decide the result.
    """
    works.prepare(replace(WORKS[name], batch=ALL[name], epochs=2), tmp_path, 1, "cpu")
    script("own", monkeypatch).main(str(tmp_path), "sequential", "1")
    ours = printed(capsys)
    script("torch_loop", monkeypatch).main(str(tmp_path), "1")
    theirs = printed(capsys)
    assert len(ours["seconds"]) == len(theirs["seconds"]) == 1
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=2e-3)


def test_made_up_images_can_be_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = works.prepare(tiny("2nn", examples=300), tmp_path, 2, "cpu")
    script("torch_loop", monkeypatch).main(str(tmp_path), "1")
    assert size.data == "made-up mnist"
    assert printed(capsys)["accuracy"] > 0.5


def test_made_up_text_can_be_learnt() -> None:
    letters = works.text(2000)
    assert letters.shape == (2000, 81)
    follows = np.zeros((80, 80))
    np.add.at(follows, (letters[:, :-1].ravel(), letters[:, 1:].ravel()), 1)
    assert (
        follows.max(1).sum() / follows.sum() > 0.6
    )  # the likeliest next letter is right that often


@pytest.mark.parametrize("name", ["2nn", "logistic"])
def test_json_is_what_the_contract_says(name: str, tmp_path: Path) -> None:
    status, out, err = call(
        name,
        "--json",
        "--peers",
        "none",
        "--device",
        "cpu",
        "--rounds",
        2,
        "--out",
        tmp_path / "out.json",
    )
    rows = json.loads(out)
    assert status == 0, err
    assert [row["system"] for row in rows] == ["rota-sequential", "rota-batched"]
    for row in rows:
        assert row.keys() >= COLUMNS, err
        assert "skipped" not in row, row
        assert (row["work"], row["device"]) == (name, "cpu")
        assert row["seconds_per_round"] > 0
        assert 0 <= row["accuracy"] <= 1
        assert row["microseconds_per_client_step"] > 0
        assert row["share_of_floor"] == row["floor_seconds"] / row["seconds_per_round"] > 0
        assert row["ratio"] == row["seconds_per_round"] / rows[1]["seconds_per_round"]
        assert row["rounds"] == 2
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-3)
    assert f"{name}: rota-batched" in err
    page = json.loads((tmp_path / "out.json").read_text())
    assert page["results"] == rows
    assert page.keys() >= {"date", "machine", "versions", "work", "rates", "floors"}
    assert page["finished"]


def test_a_bench_that_is_stopped_has_written_what_it_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def play(system: System, way: Way, folder: Path, device: str) -> dict[str, Any]:
        if out.exists():
            seen.append([row["system"] for row in json.loads(out.read_text())["results"]])
        if system.name == "torch-loop":
            raise KeyboardInterrupt
        return {"seconds": [2.0, 2.0], "accuracy": 0.5, "loss": 1.0, "version": "1"}

    out = tmp_path / "out.json"
    monkeypatch.setattr(bench, "run", play)
    with pytest.raises(KeyboardInterrupt):
        bench.bench(
            "2nn", device="cpu", peers=[PEERS["torch-loop"]], rounds=2, out=out, say=lambda _: None
        )
    assert seen == [["rota-sequential"], ["rota-sequential", "rota-batched"]]
    page = json.loads(out.read_text())
    assert not page["finished"]
    assert [(row["system"], row["seconds_per_round"], row["ratio"]) for row in page["results"]] == [
        ("rota-sequential", 2.0, 1.0),
        ("rota-batched", 2.0, 1.0),
    ]
    assert page["results"][0]["floor_seconds"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_table_has_a_line_a_system_and_the_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"1 thread": 3.0, "1 clients at a time": 2.0})
    status, out, err = call("2nn", "--peers", "torch-loop,flower", "--device", "cpu", "--rounds", 2)
    lines = out.splitlines()
    assert status == 0, err
    assert [line.split()[0] for line in lines[1:4]] == [
        "rota-sequential",
        "rota-batched",
        "torch-loop",
    ]
    assert [line.split()[1:3] for line in lines[1:4]] == [
        ["3000", "1.50"],
        ["2000", "1.00"],
        ["3000", "1.50"],
    ]
    assert lines[4] == "flower          skipped: 1 Ray workers of 1 thread is broken"
    assert any(line.startswith("arithmetic floor") for line in lines)
    assert any(line.startswith("memory floor") for line in lines)
    assert "made-up mnist" in out


def test_without_a_work_it_lists_them() -> None:
    status, out, _ = call()
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [*WORKS, *bench.ALONE]
    assert [entry["name"] for entry in json.loads(call("--json")[1])] == [*WORKS, *bench.ALONE]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["2n"], "unknown work '2n': did you mean '2nn'?"),
        (["2nn", "--peers", "flowr"], "unknown peer 'flowr': did you mean 'flower'?"),
        (["2nn", "--rounds", "0"], "--rounds is 0: it must be at least 1"),
        (
            ["2nn", "--out", "/no/such/folder/x.json"],
            "there is no folder /no/such/folder for --out",
        ),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], complaint: str) -> None:
    status, out, err = call(*words)
    assert status == 2
    assert out == ""
    assert complaint in err
    assert len(err.splitlines()) == 1


def test_cuda_without_a_gpu_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU here" in call("2nn", "--device", "cuda")[2]


def test_peers_are_chosen_by_name() -> None:
    assert bench.chosen("all") == list(PEERS.values())
    assert bench.chosen("none") == []
    assert [system.name for system in bench.chosen("pfl,jax-scan")] == ["pfl", "jax-scan"]


def test_the_floors_are_positive(tmp_path: Path) -> None:
    rates = floors.measure_rates("cpu")
    size = works.prepare(WORKS["2nn"], tmp_path, 1, "cpu")
    least = floors.lowest(size, rates)
    assert min(rates.flops, rates.bytes, least.arithmetic, least.memory) > 0
    assert least.seconds == max(least.arithmetic, least.memory)
    # 24 examples: two flops per weight of a matrix, forward once and backward twice;
    # four steps read and write the weights
    assert size.flops[0] == 24 * 6 * (784 * 200 + 200 * 200 + 200 * 10)
    assert floors.traffic(size)[0] == 4 * 199_210 * 8 + 24 * 784 * 4


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_timed_sampler_does_what_the_sampler_does(name: str, blobs: Federation) -> None:
    task = Task(MODELS["logistic"], blobs, batch=4)
    plain, spent = SAMPLERS[name](**({} if name == "full" else {"budget": 3})), list[float]()
    estimator = {"mmfl-vre": StaleVre()}.get(name)
    runs = [
        rota.run([task], sampler, rounds=2, engine="sequential", estimator=estimator)
        for sampler in (plain, growth.timed(plain, spent))
    ]
    assert spent
    assert min(spent) >= 0
    assert policies.sees(growth.timed(plain, spent)) == policies.sees(plain)
    assert runs[0].records == runs[1].records, "it is shown the same, and watches the same"


def test_growth_counts_the_servers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "CLIENTS": (5, 20),
        "COHORTS": (1, 3),
        "COHORT": 2,
        "AMONG": 20,
        "FLEET": (6, 4),
        "TASKS": 3,
        "PEOPLE": 12,
        "MILLIONS": 30,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(growth, name, value)
    monkeypatch.setattr(processes, "NAMES", ("cnn",))
    monkeypatch.setitem(WORKS, "cnn", tiny("cnn"))
    status, out, err = call("growth", "--json", "--rounds", 2, "--device", "cpu")
    everything = json.loads(out)
    assert status == 0, err
    rows = [row for row in everything if "processes" not in row]
    assert [
        (row["model"], row["models"], row["clients"], row["cohort"], row["sampler"]) for row in rows
    ] == [
        *(("logistic", 1, clients, 2, "kvib") for clients in (5, 20)),
        *(("logistic", 1, 20, 3, sampler) for sampler in ("kvib", *growth.OTHERS)),
        *(("logistic", 1, 20, cohort, "kvib") for cohort in (1, 3)),
        *(("logistic", 3, 12, 3, sampler) for sampler in growth.ASSIGN),
        ("cnn", 1, 6, 4, "kvib"),
        *(("logistic", 1, 30, 3, sampler) for sampler in growth.LARGE),
    ]
    assert all(row["peak_bytes"] > 1e7 for row in rows[-3:])
    assert set(growth.ASSIGN) == {
        name for name, kind in SAMPLERS.items() if kind.__module__.startswith("rota.sampling.mmfl")
    }
    for row in rows:
        assert row.keys() >= COLUMNS
        assert 0 < row["server_seconds_per_round"] < row["seconds_per_round"]
        assert 0 < row["server_share"] < 1
    spread = [row for row in everything if "processes" in row]
    assert [row["processes"] for row in spread] == [1, 2, 4, 8]
    assert [row["same_bytes"] for row in spread] == [True, True, True, None]
    assert [row["seconds_per_round"] is None for row in spread] == [False, False, False, True]
    assert [row["predicted_seconds"] is None for row in spread] == [True, False, False, False]
    result = bench.Timings("growth", everything)
    assert len(bench.table(result)) == 1 + len(rows) + 3 + 1 + len(spread) + 2


def test_the_prediction_is_a_sum_of_its_parts() -> None:
    """Ten clients in four processes: three train in process 0, and seven updates come back."""
    connection = processes.Connection(latency=0.5, rate=100.0)
    assert processes.predict(2.0, 10, 4, 50, connection) == 2.0 + (3 + 7) * 50 / 100 + 0.5
    found = processes.measure_connection(1 << 20)
    assert found.latency > 0
    assert 0 < found.rate < 1e13


def test_groups_are_formed_in_a_time_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SIZES", ((70, 1400), (140, 1400)))
    status, text, err = call("groups", "--json", "--rounds", 1)
    assert status == 0, err
    rows = json.loads(text)
    assert [(row["clients"], row["groups"], row["accuracy"]) for row in rows] == [
        (70, 7, 1.0),
        (140, 7, 1.0),
    ]
    assert len(bench.table(bench.Timings("groups", rows))) == 1 + len(rows) + 2


def test_rounds_with_parts_are_measured_against_rounds_without(tmp_path: Path) -> None:
    out = tmp_path / "parts-2-cores.json"
    status, text, err = call("parts", "--json", "--rounds", 1, "--device", "cpu", "--out", out)
    rows = json.loads(text)
    assert status == 0, err
    widths = (1.0, 0.95, 0.85, 0.75, 0.5)
    assert [(row["model"], row["width"]) for row in rows] == [("two_nn", each) for each in widths]
    for row in rows:
        assert row.keys() >= COLUMNS
        assert row["ratio"] == row["seconds_per_round"] / rows[0]["seconds_per_round"]
        assert row["share"] == (0.2 if row["width"] < 1 else 0)
    assert len(bench.table(bench.Timings("parts", rows))) == 1 + len(rows) + 2
    assert "| two_nn | 3 | 20% | 0.5 |" in page(tmp_path)


def test_layers_are_measured_on_both_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    networks = {name: layers.MODELS[name] for name in ("logistic", "transformer")}
    some = {name: layers.LAYERS[name] for name in ("attention, dropout", "GRU", "AdamW")}
    monkeypatch.setattr(layers, "MODELS", networks)
    monkeypatch.setattr(layers, "LAYERS", some)
    monkeypatch.setattr(layers, "EXAMPLES", 3)
    monkeypatch.setattr(layers, "LEAST", 0.0)
    out = tmp_path / "layers-2-cores.json"
    status, text, err = call("layers", "--json", "--rounds", 1, "--device", "cpu", "--out", out)
    rows = json.loads(text)
    assert status == 0, err
    assert [row["model"] for row in rows] == [*networks, *some]
    for row in rows:
        assert row.keys() >= COLUMNS
        assert row["ratio"] == row["plain_seconds"] / row["seconds_per_round"]
        assert row["how"] != "one by one", "every layer here has a fast way"
    assert len(bench.table(bench.Timings("layers", rows))) == 1 + len(rows) + 2
    assert "| attention, dropout |" in page(tmp_path)


def test_the_floor_is_counted_at_the_machines_best_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's products are slower than rota's own, they are no floor."""
    monkeypatch.setattr(floors, "TRIES", 3)
    monkeypatch.setattr(floors, "_own_products", lambda threads: 1e18)
    assert floors.measure_rates("cpu").flops == 1e18 * machine.cores()


def test_a_fleet_is_measured_beside_flowers_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its table and page; the rounds themselves are real processes of a faults test."""
    pytest.importorskip("flwr")
    from rota_lab.bench import fleet

    monkeypatch.setattr(fleet, "resident", lambda nodes, clients, rounds: ([0.1 * nodes], 2**20))
    monkeypatch.setattr(fleet, "by_flower", lambda system, nodes, rounds: [2.0 * nodes] * rounds)
    out = tmp_path / "fleet-2-cores.json"
    status, text, err = call("fleet", "--json", "--rounds", 3, "--out", out)
    rows = json.loads(text)
    assert status == 0, err
    for row in rows:
        assert row.keys() >= COLUMNS
        own = row["system"] == fleet.RESIDENT
        assert row["ratio"] == pytest.approx(1 if own else None if row["nodes"] == 100 else 20)
        assert (row["server_bytes"] is None) != own
    assert {row["clients"] for row in rows} == {5, 20, 100}
    assert len(bench.table(bench.Timings("fleet", rows))) == 1 + len(rows) + 2
    assert "| flower-fedavg | 5 | 5 | 10 | 10 | 20.00 | – |" in page(tmp_path)

    def stopped(system: str, nodes: int, rounds: int) -> list[float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet, "by_flower", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench.bench("fleet", device="cpu", peers=[], rounds=3, out=out, say=lambda _: None)
    known = json.loads(out.read_text())
    assert not known["finished"]
    assert known["results"] == rows[:1]


def test_a_peer_that_cannot_be_installed_is_skipped_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(command: list[str]) -> None:
        raise Skip(f"it cannot be installed here: no index has {command[-1]}")

    monkeypatch.setattr(environment, "install", offline)
    monkeypatch.setattr(environment, "imports", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = pretend(monkeypatch, {"1 thread": 3.0, "1 clients at a time": 2.0})
    result = bench.bench("2nn", device="cpu", peers=[PEERS["pfl"]], rounds=1, say=lambda _: None)
    row = result.rows[-1]
    assert row["system"] == "pfl"
    assert tried == ["1 thread", "1 clients at a time"]
    assert row.keys() >= COLUMNS
    assert row["seconds_per_round"] is row["accuracy"] is row["ratio"] is None
    assert row["skipped"].startswith("it cannot be installed here: no index has")
    assert f"pfl             skipped: {row['skipped']}" in bench.table(result)


def test_a_failed_installation_gives_the_reason_that_pip_gave() -> None:
    words = "noise\\nERROR: No matching distribution found for pfl\\nmore"
    said = f"import sys; print('{words}', file=sys.stderr); sys.exit(1)"
    with pytest.raises(
        Skip, match=r"^it cannot be installed here: No matching distribution found for pfl$"
    ):
        environment.install([sys.executable, "-c", said])
    with pytest.raises(Skip, match="it cannot be installed here"):
        environment.install(["/no/such/python"])


def test_an_environment_is_made_once_for_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    def make(command: list[str]) -> None:
        done.append(command[-1])
        (cache("bench") / "peer" / "bin").mkdir(parents=True, exist_ok=True)
        (cache("bench") / "peer" / "bin" / "python").touch()

    monkeypatch.setattr(environment, "install", make)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    version = torch.__version__.split("+")[0]
    folder = str(tmp_path / "rota" / "bench" / "peer")
    assert environment.build("peer", ("torch", "pfl==0.6.0")) == f"{folder}/bin/python"
    assert done == [
        folder,
        f"torch=={version}",
        "pfl==0.6.0",
    ]  # torch first: it decides what pip takes for the rest
    environment.build("peer", ("torch", "pfl==0.6.0"))
    assert len(done) == 3
    environment.build("peer", ("torch", "pfl==0.7.0"))
    assert done[3:] == [folder, f"torch=={version}", "pfl==0.7.0"]


def test_a_gpu_machine_uses_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = mock.Mock(side_effect=Skip("no network"))
    monkeypatch.setattr(environment, "build", refuse)
    assert environment.interpreter("jax-scan", ("jax",), ("numpy",), "cuda")[0] == sys.executable
    monkeypatch.setenv("ROTA_BENCH_WHEELS", "/wheels/pfl.whl")
    monkeypatch.setattr(environment, "imports", lambda _, paths, __: "/wheels/pfl.whl" in paths)
    assert environment.interpreter("pfl", ("pfl",), ("pfl",), "cuda")[1][0] == "/wheels/pfl.whl"
    refuse.assert_not_called()
    monkeypatch.setattr(environment, "imports", lambda *_: False)
    with pytest.raises(Skip, match="no network"):
        environment.interpreter("other", ("other",), ("other",), "cuda")


def test_a_system_that_fails_says_why(tmp_path: Path) -> None:
    works.prepare(WORKS["2nn"], tmp_path, 1, "cpu")
    with pytest.raises(Skip, match=r"it ended with status 1: .*unknown engine 'bached'"):
        systems.run(OWN[0], Way("", "bached"), tmp_path, "cpu")


def test_a_system_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    start = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    note = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))"
    nap = f"import pathlib, subprocess, sys, time; {start}; {note}; time.sleep(60)"
    with pytest.raises(Skip, match="it did not end within 2 s"):
        systems.call([sys.executable, "-c", nap], {}, 2.0)
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 20
    while (
        child.exists() and child.read_text().split()[2] != "Z"
    ):  # an orphan that is dead may wait to be reaped
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_fastest_way_counts_and_a_broken_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch, {"slow": 2.0, "fair": 1.2, "fast": 1.0})
    monkeypatch.setattr(bench, "PASSES", 2)
    monkeypatch.setattr(
        bench, "ways", lambda *_: [Way(how) for how in ("broken", "slow", "fair", "fast")]
    )
    result = bench.bench("2nn", device="cpu", peers=[], rounds=2, say=lambda _: None)
    assert (
        tried == ["broken", "slow", "fair", "fast"] * 2 + ["fair", "fast"] * 2
    )  # the second pass leaves the slow one out
    for row in result.rows:
        assert (row["how"], row["seconds_per_round"], row["rounds"]) == ("fast", 1.0, 4)
        assert {how: way["seconds_per_round"] for how, way in row["ways"].items()} == {
            "slow": 2.0,
            "fair": 1.2,
            "fast": 1.0,
        }


def test_the_page_of_kept_results_has_every_way_of_every_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, {"slow": 2.0, "fast": 1.0})
    monkeypatch.setattr(bench, "ways", lambda *_: [Way(how) for how in ("slow", "fast")])
    bench.bench(
        "2nn", device="cpu", peers=[], rounds=2, out=tmp_path / "one.json", say=lambda _: None
    )
    lines = [line for line in page(tmp_path).splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[:4] for line in lines[1:3]] == [
        ["| rota-sequential", "fast", "1000", "1.00"],
        ["| ", "slow", "2000", "2.00"],
    ]
    assert len(lines) == 1 + 2 * 2
    assert all("50.00%" in line for line in lines[1:])


def test_the_pages_show_the_kept_results() -> None:
    root = Path(__file__).parents[1]
    kept = root / "benchmarks" / "results"
    assert (kept / "README.md").read_text() == page(kept)
    assert BEGIN + summary(kept) + END in (root / "README.md").read_text()
    assert summary(kept).count("\n") > 2
    assert NAMES.keys() == PEERS.keys()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_system_has_a_way(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "cores", lambda: 4)
    for system in [*OWN, *PEERS.values()]:
        found = systems.ways(system, device, "two_nn")
        assert found
        assert len({way.how for way in found}) == len(found)
        assert (systems.SCRIPTS / system.script).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2nn", "cnn", "logistic", "lstm"])
@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer != "torch-loop"])
def test_a_peer_trains_the_same_model(peer: str, name: str, tmp_path: Path) -> None:
    """As in the plain loop, the same steps on all examples give the same model."""
    if not (cache("bench") / peer / "ready").exists():
        pytest.skip(f"there is no environment for {peer}: `rota bench 2nn --peers {peer}` makes it")
    works.prepare(replace(WORKS[name], batch=ALL[name]), tmp_path, 1, "cpu")
    ours = systems.run(OWN[0], Way("", "sequential 1"), tmp_path, "cpu")
    for way in systems.ways(PEERS[peer], "cpu", WORKS[name].model):
        theirs = systems.run(PEERS[peer], way, tmp_path, "cpu")
        assert math.isclose(theirs["loss"], ours["loss"], rel_tol=1e-4), way
