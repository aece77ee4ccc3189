"""Trackers, each with the library that it writes for."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import federation, linear
from test_cli import SMALL, call

import rota
from rota import track
from rota.errors import BadInput
from rota.plan import Task
from rota.running.run import Interrupted
from rota.sampling import Uniform
from rota.track import tracker
from rota.track.numbers import numbers

ROUNDS = 4
Told = dict[int, dict[str, float]]
"""Round -> name -> number."""


def play(out: Path, *watch: Any, **more: Any) -> rota.Run:
    task = Task(linear, federation([6, 7, 8]), name="blobs", lr=0.05)
    how = {"rounds": ROUNDS, "evaluate": 2, "engine": "sequential", **more}
    return rota.run([task], Uniform(2), out=out, watch=list(watch), **how)


def stop(record: dict[str, Any]) -> None:
    if record["round"] == 2:
        raise KeyboardInterrupt


# what each library reads


def of_csv(out: Path) -> Told:
    with (out / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        int(row["round"]): {name: float(value) for name, value in row.items() if value}
        for row in rows
    }


def of_parquet(out: Path) -> Told:
    from pyarrow import parquet

    rows = parquet.read_table(out / "rounds.parquet").to_pylist()
    return {row["round"]: {k: v for k, v in row.items() if v is not None} for row in rows}


def of_tensorboard(out: Path) -> Told:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    told: Told = {}
    for tag in events.Tags()["scalars"]:
        for each in events.Scalars(tag):
            entry = told.setdefault(each.step, {})
            assert tag not in entry
            entry[tag] = each.value
    return told


def of_mlflow(out: Path) -> Told:
    from mlflow import MlflowClient

    client, run = MlflowClient(), (out / "mlflow.txt").read_text()
    told: Told = {}
    for name in client.get_run(run).data.metrics:
        for each in client.get_metric_history(run, name):
            told.setdefault(each.step, {})[name] = each.value
    return told


def of_wandb(out: Path) -> Told:
    told: Told = {}
    for record in wandb_records(out):
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            told[row["round"]] = {k: v for k, v in row.items() if not k.startswith("_")}
    return told


def wandb_records(out: Path) -> Iterator[Any]:
    """The records of the offline files; their last one is written a moment after the end."""
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        until = time.monotonic() + 60
        while not any(record.HasField("exit") for record in wandb_file(path)):
            assert time.monotonic() < until
            time.sleep(0.05)
        yield from wandb_file(path)


def wandb_file(path: Path) -> Iterator[Any]:
    """The records of one file: parts of 32 KiB blocks, as in LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if at > len(data):
            return
        if kind in (1, 4):  # a whole record, or its last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


READ: dict[str, Callable[[Path], Told]] = {
    "csv": of_csv,
    "parquet": of_parquet,
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
    "wandb": of_wandb,
}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """Nothing is written outside the tests' folders, and nothing is sent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's libraries
@pytest.mark.parametrize("name", READ)
def test_a_tracker_has_every_round_once(tmp_path: Path, name: str) -> None:
    """Of a run that was interrupted and resumed, and of no other round than it has."""
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        play(out, tracker(name, out), stop)
    run = play(out, tracker(name, out), resume=True)
    join = "." if name in ("csv", "parquet") else "/"
    told = READ[name](out)
    expected = {record["round"]: numbers(record, join) for record in run.records}
    assert list(told) == [1, 2, 3, 4]
    for number, row in expected.items():
        assert told[number] == pytest.approx(row, rel=1e-6), number


def test_rounds_that_are_played_again_replace_the_earlier_ones(tmp_path: Path) -> None:
    """After kill -9 a run goes on from a checkpoint that is older than what was tracked."""
    records = play(tmp_path / "run").records
    for name in ("csv", "parquet", "tensorboard"):
        out = tmp_path / name
        for first in (1, 3):
            watch = tracker(name, out)
            watch.begin({"rounds": 4})
            for record in records[first - 1 :]:
                watch.round({**record, "seconds": 100.0 * first + record["round"]})
            watch.end({})
        told = READ[name](out)
        assert [told[n]["seconds"] for n in (1, 2, 3, 4)] == [101, 102, 303, 304], name


def test_the_numbers_of_a_record() -> None:
    entry = {"trained": 2, "train_loss": None, "client_accuracy": {"p10": 0.1}}
    record = {
        "round": 3,
        "accuracy": None,
        "models": {"loss": entry},
        "cohort": {"loss": [4, 7, 9]},
        "loss": 0.5,
        "own": {"late": True, "list": [1]},
        "failures": [{"client": 9}],
    }
    assert numbers(record) == {
        "round": 3,
        "loss": 0.5,
        "failures": 1,
        "loss/trained": 2,
        "loss/client_accuracy/p10": 0.1,
        "loss/drawn": 3,
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's libraries
def test_mlflow_knows_the_configuration_and_the_end(tmp_path: Path) -> None:
    """Also where there are more parameters than it takes at once, or odd names."""
    from mlflow import MlflowClient

    for end, status in (
        ({"accuracy": 1.0}, "FINISHED"),
        (KeyboardInterrupt(), "KILLED"),
        (ValueError(), "FAILED"),
    ):
        out = tmp_path / status
        watch = tracker("mlflow", out)
        config = {f"key{i}": i for i in range(230)} | {"odd (name)": "x" * 900, "rounds": 1}
        watch.begin(config)
        watch.begin({**config, "rounds": 2})  # resumed with more rounds
        watch.end(end)
        found = MlflowClient().get_run((out / "mlflow.txt").read_text())
        assert found.info.status == status
        assert found.info.run_name == status
        assert len(found.data.params) == 232
        assert found.data.params["odd _name_"] == "x" * 500
        assert found.data.params["rounds"] == "1"


def test_wandb_stays_offline_and_knows_the_end(tmp_path: Path) -> None:
    for end, status in (({"accuracy": 0.5}, 0), (ValueError(), 1)):
        out = tmp_path / str(status)
        watch = tracker("wandb", out)
        watch.begin({"rounds": 1, "sampler": {"name": "uniform"}})
        watch.end(end)
        records = {record.WhichOneof("record_type"): record for record in wandb_records(out)}
        assert records["exit"].exit.exit_code == status
        assert records["run"].run.display_name == str(status)
        assert records["run"].run.run_id == (out / "wandb" / "run.txt").read_text()


def test_the_command_line_tracks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("run", *SMALL, "--out", out, "--track", "csv", "--track", "tensorboard").status == 0
    assert of_csv(out).keys() == of_tensorboard(out).keys() != set()
    vary = ("--vary", "sampler.budget=2,3", "--track", "csv")
    assert call("compare", *SMALL, *vary, "--out", tmp_path / "all").status == 0
    assert of_csv(tmp_path / "all" / "2-seed0").keys() == of_csv(out).keys()
    wrong = call("run", *SMALL, "--track", "tensorbord")
    assert wrong.status == 2
    assert "did you mean 'tensorboard'?" in wrong.err


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    wrong = call("run", *SMALL, "--out", tmp_path / "run", "--track", "parquet")
    assert wrong.status == 2
    assert "the tracker 'parquet' needs pyarrow: pip install 'rota[parquet]'" in wrong.err
    assert not (tmp_path / "run").exists()
    with pytest.raises(BadInput, match="unknown tracker 'excel'"):
        tracker("excel", tmp_path)


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __init__(self, folder: Path) -> None:
            self.told = 0

        def begin(self, config: dict[str, Any]) -> None:
            pass

        def round(self, record: dict[str, Any]) -> None:
            raise ConnectionError("the server\nis away")

        end = round

    monkeypatch.setattr("rota.track.table.as_csv", Broken)
    with caplog.at_level(logging.WARNING, "rota"):
        run = play(tmp_path / "run", tracker("csv", tmp_path / "run"))
    assert len(run.records) == ROUNDS
    said = "the tracker 'csv' failed (ConnectionError: the server is away)"
    assert [each.getMessage() for each in caplog.records] == [f"{said}: the run goes on without it"]


def test_naming_the_trackers_loads_none_of_them() -> None:
    """Nor torch: the command line completes their names."""
    heavy = {"torch", "mlflow", "wandb", "tensorboard", "pyarrow"}
    code = f"import sys, rota.track; print({heavy} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(Path(rota.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "set()\n"
    assert list(track.TRACKERS) == ["tensorboard", "mlflow", "wandb", "csv", "parquet"]
