"""The public way: rota as a Flower app, and rota's samplers in somebody else's ServerApp."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear
from fleets import dealt

from rota import loop
from rota.engine import Options, make
from rota.experiment import Experiment
from rota.flower.engine import Remote, await_clients
from rota.flower.fleet import Fleet, Rules
from rota.plan import Task
from rota.sampling import Full, Uniform

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rota[flower]'")

NUMBERS = itertools.count(1)


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages want to know whose they are."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class StubGrid:
    """A Grid that hands messages to functions, as Flower would to ClientApps."""

    def __init__(self, nodes: dict[int, Any]) -> None:
        self.apps, self.box = nodes, dict[str, Any]()

    def get_node_ids(self) -> list[int]:
        return list(self.apps)

    def push_messages(self, messages: Any) -> list[str]:
        keys = []
        for message in messages:
            key = f"message {next(NUMBERS)}"
            message.metadata.__dict__["_message_id"] = key
            self.box[key] = self.apps[message.metadata.dst_node_id](message)
            keys.append(key)
        return keys

    def pull_messages(self, keys: Any) -> list[Any]:
        return [self.box.pop(key) for key in keys if key in self.box]

    def send_and_receive(self, messages: Any, **_: Any) -> list[Any]:
        return self.pull_messages(self.push_messages(messages))


def test_the_client_app_and_the_grid(tmp_path: Path) -> None:
    """The same models as the reference engine, with Flower's own message objects between."""
    from flwr.app import Context, RecordDict

    from rota.flower.app import GridWire, client

    experiment = Experiment(
        [Task(linear, federation([5, 9, 7]), batch=3, name="a")], sampler=Full(), seed=2
    )
    apps = {}
    for node, folder in enumerate(dealt(experiment, tmp_path, 2), start=1):
        config: Any = {"data": str(folder), "allow": "conftest"}
        context = Context(1, node, config, RecordDict(), {})
        apps[node] = lambda message, context=context: client(message, context)
    wire: Any = GridWire(StubGrid(apps))  # type: ignore[arg-type]
    fleet = Fleet(wire, Rules(ordered=True), ["a"])
    await_clients(fleet, ["0", "1", "2"], 10)
    engine = Remote(experiment, fleet, Options(torch.device("cpu")), ())
    plain = make("sequential", experiment, "cpu")
    mine, other = loop.begin(experiment, engine), loop.begin(experiment, plain)
    for _ in range(2):
        mine, line = loop.play(experiment, engine, mine)
        other, _ = loop.play(experiment, plain, other)
        assert not line["failures"]
    assert torch.equal(mine.models[0].params, other.models[0].params)


@pytest.mark.parametrize("reason", [None, "", "Error: it failed"])
def test_an_error_without_a_reason_ends_nobody(reason: str | None) -> None:
    """Neither a server, for which it is a failed row, nor a node, which refuses it."""
    from flwr.app import Error, Message, RecordDict

    from rota.flower.letter import Refused
    from rota.flower.records import from_message, read

    asked = Message(RecordDict({}), dst_node_id=1, message_type="train", ttl=10)
    asked.metadata.__dict__["_message_id"] = "asked"
    message = Message(Error(1, reason), reply_to=asked)
    assert str(read(message)) == ("it failed" if reason else "error 1, without a reason")
    with pytest.raises(Refused):
        from_message(message)


def test_a_node_without_data_says_so() -> None:
    from flwr.app import Context, Message, RecordDict

    from rota.flower.app import answer
    from rota.flower.letter import VERSION, Letter
    from rota.flower.records import read, to_records

    letter = Letter("query", {"version": VERSION, "tasks": ["a"]})
    message = Message(to_records(letter), dst_node_id=1, message_type="query")
    message.metadata.__dict__["_message_id"] = "1"
    reply = answer(message, Context(1, 1, {}, RecordDict(), {}))
    assert "does not name its data" in str(read(reply))


SIZES = {3: 10, 5: 20, 8: 30, 9: 40}


def own_client(message: Any) -> Any:
    """Somebody's ClientApp: it adds its node's number to all that it gets."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    node = message.metadata.dst_node_id
    arrays = [a + np.float32(node) for a in message.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": SIZES[node], "train_loss": 1.0})
    return Message(
        RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message
    )


def test_a_sampler_in_a_strategy_is_unbiased() -> None:
    """Over many draws the step is the mean of all nodes' steps, weighted by their examples."""
    from flwr.app import ArrayRecord, ConfigRecord

    from rota.flower.strategy import Sampled

    grid: Any = StubGrid(dict.fromkeys(SIZES, own_client))
    strategy = Sampled(Uniform(2), seed=1)
    steps = []
    for now in range(1, 1501):
        arrays = ArrayRecord([np.zeros(3, np.float32), np.zeros((2, 2), np.float32)])
        sent = strategy.configure_train(now, arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(sent)
        assert len(replies) == 2
        new, metrics = strategy.aggregate_train(now, replies)
        assert new is not None
        assert metrics is not None
        assert list(new) == list(arrays)
        if len(strategy.sizes) == len(SIZES):  # once it knows everybody's number of examples
            steps.append(new.to_numpy_ndarrays()[0][0])
    expected = sum(node * size for node, size in SIZES.items()) / sum(SIZES.values())
    error = np.std(steps) / np.sqrt(len(steps))
    assert abs(np.mean(steps) - expected) < 4 * error
    assert error < 0.1


def test_a_strategy_of_all_nodes_is_fedavg() -> None:
    from flwr.app import ArrayRecord, ConfigRecord

    from rota.flower.strategy import Sampled

    grid: Any = StubGrid(dict.fromkeys(SIZES, own_client))
    strategy = Sampled(Full())
    for now in (1, 2):
        arrays = ArrayRecord([np.full(3, 7, np.float32)])
        sent = strategy.configure_train(now, arrays, ConfigRecord(), grid)
        new, _ = strategy.aggregate_train(now, grid.send_and_receive(sent))
    assert new is not None
    expected = 7 + sum(node * size for node, size in SIZES.items()) / sum(SIZES.values())
    np.testing.assert_allclose(new.to_numpy_ndarrays()[0], expected, rtol=1e-6)


@dataclass(frozen=True)
class Watcher(Full):
    """Draws all that are there, and remembers what it was given."""

    given: tuple[list[Any], list[Any], list[Any]] = field(default=([], [], []))

    def draw(self, state: Any, shares: Any, generator: Any) -> Any:
        self.given[0].append(shares)
        return super().draw(state, shares, generator)

    def observe(self, state: Any, shares: Any, plan: Any, seen: Any) -> Any:
        self.given[1].append(shares)
        self.given[2].append(list(seen.reason))
        return state


BAD: dict[str, Any] = {
    "one number for all": lambda arrays: ([a[:1] for a in arrays], 10),
    "another shape": lambda arrays: ([np.ones((7, 7), np.float32) for _ in arrays], 10),
    "infinite": lambda arrays: ([a * np.float32(np.inf) for a in arrays], 10),
    "fewer examples than none": lambda arrays: (arrays, -10),
    "no examples": lambda arrays: (arrays, 0),
    "no number": lambda arrays: (arrays, float("nan")),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_strategy_leaves_bad_replies_out(bad: Any) -> None:
    """And its sampler observes the shares that it drew with."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

    from rota.flower.strategy import Sampled

    def spoilt(message: Any) -> Any:
        arrays = message.content["arrays"]
        changed, size = bad([each + np.float32(1) for each in arrays.to_numpy_ndarrays()])
        record = ArrayRecord(dict(zip(arrays, ArrayRecord(changed).values(), strict=True)))
        metrics = MetricRecord({"num-examples": size, "train_loss": 1.0})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    grid: Any = StubGrid({3: own_client, 5: spoilt, 8: own_client})
    strategy = Sampled(sampler := Watcher())
    arrays = ArrayRecord([np.full(3, 7, np.float32)])
    sent = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    new, metrics = strategy.aggregate_train(1, grid.send_and_receive(sent))
    assert new is not None
    assert metrics is not None
    np.testing.assert_allclose(new.to_numpy_ndarrays()[0], 7 + (3 + 8) / 3, rtol=1e-6)
    assert strategy.sizes == {3: 10, 8: 30}
    del grid.apps[8]
    strategy.configure_train(2, arrays, ConfigRecord(), grid)
    strategy.aggregate_train(2, grid.send_and_receive(sent[:1]))
    drawn, observed, reasons = sampler.given
    assert all((a == b).all() for a, b in zip(drawn, observed, strict=True))
    assert [bool(reason) for reason in reasons[0]] == [False, True, False]


@pytest.mark.parametrize("name", ["client", "server"])
def test_flower_finds_the_apps(name: str) -> None:
    from flwr.supercore.object_ref import validate

    assert validate(f"rota.flower.app:{name}") == (True, None)


PROJECT = """
[project]
name = "with-rota"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "rota.flower.app:server"
clientapp = "rota.flower.app:client"
[tool.flwr.app.config]
"""


@pytest.mark.faults
def test_flwr_run_on_stock_supernodes(tmp_path: Path) -> None:
    """Processes of Flower's own alone."""
    from rota.flower import superlink
    from rota_lab.bench.fleet import process

    superlink.quiet()
    data, port = federation([9, 12, 20, 31]), superlink.free_port()
    folders = dealt(Experiment([Task(linear, data, name="a")]), tmp_path / "nodes", 2)
    (tmp_path / "test").mkdir()
    np.savez(tmp_path / "test" / "test.npz", x=data.test.x.numpy(), y=data.test.y.numpy())
    recipe, out = tmp_path / "recipe.toml", tmp_path / "out"
    recipe.write_text(
        "rounds = 2\nsampler = 'full'\n[[task]]\n"
        f"data = {{ name = 'folder', path = '{tmp_path / 'test'}' }}\nmodel = 'logistic'\n"
    )
    app, home = tmp_path / "app", tmp_path / "home"
    app.mkdir()
    home.mkdir()
    config = f'recipe = "{recipe}"\nout = "{out}"\nclients = 4\n'
    (app / "pyproject.toml").write_text(PROJECT + config)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    environment = {**os.environ, "FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    common = ["--insecure", "--disable-runtime-dependency-installation"]
    with ExitStack() as stack:
        words = ["flower-superlink", *common, "--port", str(port)]
        stack.enter_context(process(words, environment, tmp_path / "link.log"))
        while not superlink.answers("127.0.0.1", port):
            time.sleep(0.1)
        for folder in folders:
            words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            words += ["--host", "127.0.0.1", "--port", str(superlink.free_port())]
            words += ["--node-config", f'data="{folder}"']
            stack.enter_context(process(words, environment, folder.with_suffix(".log")))
        words = ["flwr", "run", str(app), "here", "--format", "json"]
        started = subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False
        )
        assert '"run-id"' in started.stdout, started.stdout + started.stderr
        end = time.monotonic() + 240
        while not (out / "summary.json").exists():
            assert time.monotonic() < end, (tmp_path / "link.log").read_text()[-3000:]
            time.sleep(0.5)
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 2
    assert '"failures": []' in (out / "rounds.jsonl").read_text().splitlines()[-1]
