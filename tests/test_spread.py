"""Several processes: the bytes of one whatever the policies, and a checkpoint if one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, network
from test_contract import PARTNERS, sampler_of
from test_store import contents
from torch import nn

import rota
from rota import channel, loop, spread, submodel
from rota.data.federation import Examples
from rota.engine import make
from rota.errors import BadInput
from rota.estimate import ESTIMATORS
from rota.experiment import Experiment
from rota.grouping import GROUPINGS
from rota.sampling import SAMPLERS
from rota.spread.hands import Hand, Hands, Hello
from rota.spread.wire import Wire

SIZES = [9, 12, 20, 31, 8, 17, 5, 14]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 16), nn.ReLU(), nn.Linear(16, classes))


def tasks() -> list[rota.Task]:
    data = federation(SIZES, own_test=True)
    data = replace(data, validation=Examples(data.test.x[:20], data.test.y[:20]))
    return [
        rota.Task(mlp, data, batch=4, lr=0.1, prox=0.01, name="mlp"),
        rota.Task(network, data, batch=4, lr=0.05, epochs=2, name="net"),
    ]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """The batched engine in one process and in three."""
    base = Experiment(tasks(), seed=3)
    one, many = make("auto", base, "cpu"), make(spread.Processes(3), base, "cpu")
    yield one, many
    many.close()


def agree(engines: tuple[Any, Any], rounds: int = 4, **policies: Any) -> None:
    """Both engines give the same states and records, to the bit."""
    experiment = Experiment(tasks(), rounds=rounds, seed=3, **policies)
    ends, records = [], []
    for engine in engines:
        state, lines = loop.begin(experiment, engine), []
        for _ in range(rounds):
            state, line = loop.play(experiment, engine, state)
            lines.append(line)
        ends.append(state)
        records.append(repr(lines))
    assert records[0] == records[1]
    one, many = ends
    for mine, other in zip(one.models, many.models, strict=True):
        assert torch.equal(mine.params, other.params)
        assert torch.equal(mine.buffers, other.buffers)
    for kind, state in one.policies.items():
        assert state.keys() == many.policies[kind].keys()
        for name, value in state.items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(many.policies[kind][name]))
    assert all(hand.pieces for hand in engines[1].hands.hands), "somebody trained nothing"


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler(name: str, pair: tuple[Any, Any]) -> None:
    estimator = ESTIMATORS[PARTNERS.get(name, "unbiased")]()
    agree(pair, sampler=sampler_of(name), estimator=estimator)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator(name: str, pair: tuple[Any, Any]) -> None:
    sampler = sampler_of("mmfl-gvr" if name == "stale-vr" else "uniform")
    agree(pair, sampler=sampler, estimator=ESTIMATORS[name]())


@pytest.mark.parametrize("name", GROUPINGS)
def test_every_grouping(name: str, pair: tuple[Any, Any]) -> None:
    agree(pair, sampler=sampler_of("full"), grouping=GROUPINGS[name]())


@pytest.mark.parametrize("name", submodel.SUBMODELS)
def test_every_choice_of_units(name: str, pair: tuple[Any, Any]) -> None:
    """FjORD's mini-batches have widths of their own: their rows train one by one."""
    some = {"capacity": submodel.Fixed((1.0, 0.5)), "submodel": submodel.SUBMODELS[name]()}
    agree(pair, sampler=sampler_of("full"), **some)


@pytest.mark.parametrize("name", channel.CHANNELS)
def test_every_channel(name: str, pair: tuple[Any, Any]) -> None:
    agree(pair, sampler=sampler_of("uniform"), channel=channel.CHANNELS[name]())


@pytest.mark.parametrize("engine", ["sequential", "stacks"])
def test_rows_one_by_one_and_in_stacks(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vectors of local work as well: FedProx's and SCAFFOLD's."""
    if engine == "stacks":
        monkeypatch.setenv("ROTA_NATIVE", "0")
    name = "sequential" if engine == "sequential" else "batched"
    base = Experiment(tasks(), seed=3)
    many = make(spread.Processes(3, name), base, "cpu")
    one = make(name, base, "cpu")
    try:
        agree((one, many), sampler=sampler_of("full"), estimator=rota.estimate.Scaffold())
        agree((one, many), sampler=sampler_of("full"), channel=channel.TopK())
    finally:
        many.close()


def failing(x: torch.Tensor) -> torch.Tensor:
    if (x > 100).any():
        raise RuntimeError("this client's data are wrong")
    return x


class Picky(nn.Module):
    """It fails over one client's data, and cannot be stacked."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(failing(x))


def test_a_client_that_fails_is_a_failed_row_wherever_it_trained() -> None:
    clients = [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(6)]
    clients[2] = clients[2][0] + 1000, clients[2][1]
    task = rota.Task(Picky, rota.from_clients(clients, clients[0]), batch=3)
    runs = [
        rota.run([task], rota.sampling.Full(), rounds=2, engine=engine)
        for engine in ("auto", spread.Processes(2))
    ]
    assert repr(runs[0].records) == repr(runs[1].records)
    assert [each["client"] for each in runs[1].records[0]["failures"]] == [2]


# --- faults


class Kill:
    """A watcher that kills another process of the run after a round."""

    def __init__(self, now: int) -> None:
        self.now, self.others = now, multiprocessing.active_children()

    def __call__(self, record: dict[str, Any]) -> None:
        if record["round"] == self.now:
            (child,) = set(multiprocessing.active_children()) - set(self.others)
            child.kill()
            child.join()


@pytest.mark.parametrize("processes", [1, 3])
def test_a_run_whose_process_dies_is_resumed_by_any_number(tmp_path: Path, processes: int) -> None:
    def run(where: str, engine: Any, **more: Any) -> rota.Run:
        sampler, estimator = rota.sampling.KVib(budget=4), rota.estimate.Scaffold()
        out = tmp_path / where
        return rota.run(
            tasks(), sampler, estimator=estimator, rounds=8, engine=engine, out=out, **more
        )

    run("unbroken", "auto")
    with pytest.raises(spread.Lost, match=r"process 1 of 2 \(process id \d+ on .*\) has ended"):
        run("broken", spread.Processes(2), watch=Kill(5))
    assert [path.name for path in (tmp_path / "broken" / "checkpoint").iterdir()] == ["00000005"]
    resumed = run("broken", spread.Processes(processes), resume=True)
    assert resumed.state.round == 8
    assert contents(tmp_path / "broken") == contents(tmp_path / "unbroken")


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lines(folder: Path) -> int:
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    path = folder / "rounds.jsonl"
    while process.poll() is None and not (
        path.exists() and len(path.read_bytes().splitlines()) >= number
    ):
        time.sleep(0.01)


def test_the_command_line_says_it_in_one_sentence_and_how_to_resume(tmp_path: Path) -> None:
    rota_ = [sys.executable, "-m", "rota", "run"]
    folder = tmp_path / "run"
    words = ["fedavg-digits", "--set", "rounds=100000", "--processes", "2", "--out", str(folder)]
    process = subprocess.Popen(
        [*rota_, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    wait_for_rounds(process, folder, 3)
    (other,) = children(process.pid)
    os.kill(other, signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    *_, sentence, advice = said.splitlines()
    assert sentence.startswith("rota: the run failed: process 1 of 2 (process id")
    assert "Traceback" not in said
    assert "--processes 2" in advice
    assert "--resume" in advice
    assert any((folder / "checkpoint").iterdir())


@pytest.mark.faults
def test_torchrun_starts_a_run_again_and_it_goes_on(tmp_path: Path) -> None:
    """The bytes are those of a run of one process that nobody disturbed."""
    words = ["-m", "rota", "run", "fedavg-digits", "--set", "rounds=300", "--out"]
    one = tmp_path / "one"
    subprocess.run(
        [sys.executable, *words, str(one)], check=True, env=ENVIRONMENT, capture_output=True
    )
    two = tmp_path / "two"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "2"]
    process = subprocess.Popen(
        [*torchrun, *words, str(two)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    wait_for_rounds(process, two, 5)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert contents(two) == contents(one)


# --- what users get wrong


def test_engines_that_train_elsewhere_and_numbers_that_are_none_are_refused() -> None:
    base = Experiment(tasks(), seed=3)
    with pytest.raises(BadInput, match="'flower' does not run in several processes"):
        make(spread.Processes(2, "flower"), base, "cpu")
    with pytest.raises(BadInput, match="processes is 0: give a number from 1"):
        make(spread.Processes(0), base, "cpu")


# --- the wire, and who gets what


def exchange(sent: list[Any]) -> list[Any]:
    """What comes back from a process that returns all that it gets."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other = multiprocessing.get_context("fork").Process(target=echo, args=(store.port, len(sent)))
    other.start()
    wire, got = Wire(store, 0, 2, "127.0.0.1"), []
    for each in sent:
        wire.send(1, each)
        got.append(wire.receive(1))
    other.join()
    return got


def echo(port: int, number: int) -> None:
    from torch._C._distributed_c10d import TCPStore

    wire = Wire(TCPStore("127.0.0.1", port, None, False), 1, 2, "127.0.0.1")
    for _ in range(number):
        wire.send(0, wire.receive(0))


def test_what_travels_arrives_as_it_was() -> None:
    fixed = np.arange(100_000)
    fixed.flags.writeable = False
    large = torch.randn(300, 200)
    sent = [
        large,
        large.T,
        large[::3, 5:],
        large.to(torch.bfloat16),
        torch.tensor(3.5),
        torch.empty(0, 7, dtype=torch.float64),
        torch.arange(5) > 2,
        fixed,
        np.asfortranarray(large.numpy()),
        np.array(["a", "bc"]),
        {"rows": [large, (1, None)], "text": "x" * 50_000},
    ]
    got = exchange(sent)
    for mine, theirs in zip(sent, got, strict=True):
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine, theirs)
        elif isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert torch.equal(mine["rows"][0], theirs["rows"][0])
            assert (mine["rows"][1], mine["text"]) == (theirs["rows"][1], theirs["text"])


def test_a_speed_follows_what_is_measured_but_not_a_single_outlier() -> None:
    hand = Hand(1, "", 1, 1e10)
    for _ in range(20):
        hand.learn(4e9, 1e6, 1.0, 0.1)
    assert hand.speed == pytest.approx(4e9, rel=0.01)
    assert hand.rate == pytest.approx(1e7, rel=0.01)
    hand.learn(4e9, 1e6, 1e-6, 100.0)
    assert hand.speed < 1e10
    assert hand.rate > 4e6
    before = hand.speed
    hand.forget()
    assert hand.speed > before, "what is not asked for long is tried again"


class Silent:
    """A wire that leads nowhere."""

    def send(self, to: int, what: Any) -> None:
        pass


def test_rows_are_dealt_out_so_that_all_finish_together() -> None:
    hands = Hands(Silent(), [Hello(1, str(rank), "") for rank in range(3)])  # type: ignore[arg-type]
    flops = np.random.default_rng(0).lognormal(23, 1, 200)
    for speeds in ([1e9, 1e9, 1e9], [1e9, 4e9, 2e9]):
        for hand, speed in zip(hands.hands, speeds, strict=True):
            hand.speed, hand.rate = speed, np.inf
        owner = hands.owners(flops, 4.0)
        ends = np.bincount(owner, flops, minlength=3) / speeds
        assert ends.max() / ends.min() < 1.02
    for hand in hands.hands[1:]:
        hand.rate = 1.0  # a slow connection: the updates are better not sent
    assert not hands.owners(np.full(8, 1e6), 1e6).any()
    hands.close(0.0)
