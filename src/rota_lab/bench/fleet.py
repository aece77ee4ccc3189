"""Rounds of real processes: rota's clients, its plain Flower app, and Flower's own FedAvg.

All train McMahan's 2NN (0.8 MB) for one step per client and round, so a round's seconds are what it
takes besides the work. The systems run one after the other on this machine. The last one is
Flower's FedAvg with a client that does not even load torch, but sends back what it got.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rota import loop
from rota.data.federation import Federation
from rota.data.own import from_clients
from rota.engine import Options
from rota.experiment import Experiment
from rota.flower import demo, store, superlink
from rota.flower.engine import Remote, await_clients
from rota.flower.serve import fleet_at
from rota.models import two_nn
from rota.plan import Task
from rota.sampling import Full

RESIDENT, PUBLIC, FEDAVG, IDLE = "rota", "rota-flower-app", "flower-fedavg", "flower-fedavg-idle"
SETTINGS = (
    (RESIDENT, 5, 5),
    (PUBLIC, 5, 5),
    (FEDAVG, 5, 5),
    (IDLE, 5, 5),
    (RESIDENT, 5, 20),
    (RESIDENT, 5, 100),
    (RESIDENT, 20, 20),
    (FEDAVG, 20, 20),
    (IDLE, 20, 20),
    (IDLE, 100, 100),
)
"""Systems, nodes, and clients. A stock SuperNode is one client. A hundred processes with torch do
not fit into a small machine."""
LONGEST = 3600.0
"""Seconds after which a run of Flower's is given up."""
RESET = Path("/proc/self/clear_refs")
"""Linux begins to measure a process's largest memory anew after a 5 is written here."""
APP = """
import time
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()
SHAPES = [(200, 784), (200,), (200, 200), (200,), (10, 200), (10,)]


@client.train()
def train(message, context):
    arrays = message.content["arrays"].to_numpy_ndarrays()
    if WORK:
        import torch
        from rota.models import two_nn

        torch.set_num_threads(1)
        net = two_nn()
        with torch.no_grad():
            for p, a in zip(net.parameters(), arrays):
                p.copy_(torch.from_numpy(a))
        loss = torch.nn.functional.cross_entropy(
            net(torch.ones(10, 1, 28, 28)), torch.zeros(10, dtype=torch.long)
        )
        loss.backward()
        arrays = [(p - 0.1 * p.grad).detach().numpy() for p in net.parameters()]
    metrics = MetricRecord({"num-examples": 10})
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(content, reply_to=message)


class Timed(FedAvg):
    def aggregate_train(self, server_round, replies):
        found = super().aggregate_train(server_round, replies)
        with open(FILE, "a") as file:
            file.write(f"{server_round}\\n")
        return found


@server.main()
def main(grid, context):
    start = ArrayRecord([np.full(shape, 0.01, np.float32) for shape in SHAPES])
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
    strategy.start(grid=grid, initial_arrays=start, num_rounds=ROUNDS)
"""
PROJECT = """
[project]
name = "bench"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "rota"
[tool.flwr.app.components]
serverapp = "{module}:server"
clientapp = "{module}:client"
[tool.flwr.app.config]
"""
RECIPE = """
rounds = {rounds}
evaluate = {rounds}
sampler = "full"
[[task]]
data = {{ name = "folder", path = "{path}" }}
model = "two_nn"
batch = 10
steps = 1
"""


def measure(rounds: int, say: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """All settings: the rows so far, after each one.

    A large fleet of Flower's own plays two rounds, because they take minutes.
    """
    import flwr

    superlink.installed()
    rows, ours = list[dict[str, Any]](), dict[tuple[int, int], float]()
    for system, nodes, clients in SETTINGS:
        say(f"fleet: {system}, {nodes} nodes with {clients} clients")
        few = rounds if system == RESIDENT or nodes <= 5 else min(rounds, 2)
        grown = None
        if system == RESIDENT:
            seconds, grown = resident(nodes, clients, few)
            ours[nodes, clients] = float(np.median(seconds))
        else:
            seconds = by_flower(system, nodes, few)
        usual, mine = float(np.median(seconds)), ours.get((nodes, clients))
        rows.append(
            {
                "work": "fleet",
                "system": system,
                "device": "cpu",
                "seconds_per_round": usual,
                "slowest_round": max(seconds),
                "ratio": usual / mine if mine else None,
                "accuracy": None,
                "nodes": nodes,
                "clients": clients,
                "rounds": few,
                "server_bytes": grown,
                "version": flwr.__version__,
            }
        )
        yield rows


def examples(clients: int) -> Federation:
    """Noise: ten examples per client."""
    dice = np.random.default_rng(0)
    pairs = [
        (dice.normal(size=(10, 1, 28, 28)).astype(np.float32), np.arange(10))
        for _ in range(clients)
    ]
    return from_clients(pairs, pairs[0], name="bench")


def resident(nodes: int, clients: int, rounds: int) -> tuple[list[float], int]:
    """Seconds of each round with rota's clients, and what the server's memory grew by at most."""
    task = Task(two_nn, examples(clients), batch=10, steps=1, name="a")
    experiment = Experiment([task], sampler=Full(), rounds=10 * rounds, evaluate=10 * rounds)
    address, seconds = f"127.0.0.1:{superlink.free_port()}", list[float]()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-bench-")))
        folders = store.write(task.federation, root, nodes)
        stack.enter_context(demo.nodes_of(folders, address, -1, 1.0))
        fleet = stack.enter_context(fleet_at(address))
        fleet.tasks = ["a"]
        await_clients(fleet, [str(client) for client in range(clients)], 600)
        engine = Remote(experiment, fleet, Options(torch.device("cpu")), ())
        state, before = loop.begin(experiment, engine), 0
        for now in range(rounds + 1):
            began = time.perf_counter()
            state, record = loop.play(experiment, engine, state)
            seconds.append(time.perf_counter() - began)
            if record["failures"]:
                raise RuntimeError(f"clients failed: {record['failures'][0]['reason']}")
            if not now:  # in the first round the nodes build their networks
                seconds.clear()
                RESET.write_text("5")
                before = memory("VmRSS")
    return seconds, memory("VmHWM") - before


def memory(what: str) -> int:
    """What this process has (VmRSS), or had at most since the last reset (VmHWM), in bytes."""
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def by_flower(system: str, nodes: int, rounds: int) -> list[float]:
    """Seconds of each round of an app on Flower's SuperLink and SuperNodes."""
    superlink.quiet()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-bench-")))
        folders = store.write(examples(nodes), root, nodes)
        port, home = superlink.free_port(), root / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
            "insecure = true\n"
        )
        lines = public(root, nodes, rounds + 1) if system == PUBLIC else root / "times"
        if system != PUBLIC:
            fedavg(root, system == FEDAVG, nodes, rounds + 1)
        environment = {**os.environ, "FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
        scripts = Path(sys.executable).parent
        environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
        common = ["--insecure", "--disable-runtime-dependency-installation"]
        link = ["flower-superlink", *common, "--port", str(port)]
        stack.enter_context(process(link, environment, root / "link.log"))
        while not superlink.answers("127.0.0.1", port):
            time.sleep(0.1)
        for node, folder in enumerate(folders):
            words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            words += ["--host", "127.0.0.1", "--port", str(superlink.free_port())]
            words += ["--node-config", f'data="{folder}"']
            stack.enter_context(process(words, environment, root / f"node{node}.log"))
        started = subprocess.run(
            ["flwr", "run", str(root), "here", "--format", "json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if '"run-id"' not in started.stdout:
            raise RuntimeError(f"flwr run failed: {started.stdout}{started.stderr}")
        try:
            return watched(lines, rounds)
        except TimeoutError as error:
            raise RuntimeError((root / "link.log").read_text()[-2000:]) from error


def fedavg(root: Path, work: bool, nodes: int, rounds: int) -> None:
    """Write the app of Flower's own FedAvg."""
    names = {"WORK": work, "FILE": str(root / "times"), "NODES": nodes, "ROUNDS": rounds}
    (root / "bench").mkdir()
    (root / "bench" / "__init__.py").write_text("")
    head = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    (root / "bench" / "app.py").write_text(head + APP)
    (root / "pyproject.toml").write_text(PROJECT.format(module="bench.app"))


def public(root: Path, nodes: int, rounds: int) -> Path:
    """Write rota's plain Flower app, and return the file that gets a line per round."""
    test = examples(1).test
    np.savez(root / "test.npz", x=test.x.numpy(), y=test.y.numpy())
    (root / "recipe.toml").write_text(RECIPE.format(rounds=rounds, path=root))
    config = f'recipe = "{root / "recipe.toml"}"\nout = "{root / "out"}"\nclients = {nodes}\n'
    (root / "pyproject.toml").write_text(PROJECT.format(module="rota.flower.app") + config)
    return root / "out" / "rounds.jsonl"


def watched(file: Path, rounds: int) -> list[float]:
    """The seconds between the lines of a file, as they are written."""
    times: list[float] = []
    end = time.monotonic() + LONGEST
    while len(times) <= rounds:
        if time.monotonic() > end:
            raise TimeoutError
        written = file.read_bytes().count(b"\n") if file.exists() else 0
        times += [time.monotonic()] * (written - len(times))
        time.sleep(0.02)
    return np.diff(times).tolist()


@contextmanager
def process(words: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A process of Flower, until the end of the block."""
    with log.open("ab") as file:
        running = subprocess.Popen(
            words, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield
    finally:
        superlink.stop(running)
