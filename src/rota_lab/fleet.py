"""The time that a round of real processes takes besides the work: rota's nodes and Flower's own.

    python -m rota_lab.fleet [NODES [ROUNDS]] > docs/results/flower.md

Three fleets train McMahan's 2NN (0.8 MB) for one step per round, one after the other on this
machine: rota's clients, Flower's SuperNodes with Flower's FedAvg, and the latter with a client that
does not even load torch, but sends back what it got.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from rota import loop
from rota.data.own import from_clients
from rota.engine import Options
from rota.engine.machine import cores
from rota.experiment import Experiment
from rota.flower import demo, store, superlink
from rota.flower.engine import Remote, await_clients
from rota.flower.serve import fleet_at
from rota.models import two_nn
from rota.plan import Task
from rota.sampling import Full
from rota_lab.machine import described

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
    def configure_train(self, server_round, arrays, config, grid):
        self.began = time.time()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        found = super().aggregate_train(server_round, replies)
        with open(FILE, "a") as file:
            file.write(f"{time.time() - self.began}\\n")
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
serverapp = "bench.app:server"
clientapp = "bench.app:client"
"""


def ours(nodes: int, rounds: int) -> list[float]:
    """Seconds of each round with rota's clients."""
    generator = np.random.default_rng(0)
    pairs = [
        (generator.normal(size=(10, 1, 28, 28)).astype(np.float32), np.arange(10))
        for _ in range(nodes)
    ]
    task = Task(two_nn, from_clients(pairs, pairs[0], name="bench"), batch=10, steps=1, name="a")
    experiment = Experiment([task], sampler=Full(), rounds=10 * rounds, evaluate=10 * rounds)
    address, seconds = f"127.0.0.1:{superlink.free_port()}", list[float]()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-bench-")))
        folders = store.write(task.federation, root, nodes)
        stack.enter_context(demo.nodes_of(folders, address, -1, 1.0))
        fleet = stack.enter_context(fleet_at(address))
        fleet.tasks = ["a"]
        await_clients(fleet, [str(node) for node in range(nodes)], 300)
        engine = Remote(experiment, fleet, Options(torch.device("cpu")), ())
        state = loop.begin(experiment, engine)
        for _ in range(rounds + 1):
            began = time.perf_counter()
            state, record = loop.play(experiment, engine, state)
            seconds.append(time.perf_counter() - began)
            if record["failures"]:
                raise RuntimeError(f"clients failed: {record['failures'][0]['reason']}")
    return seconds[1:]  # in the first one the nodes build their networks


def theirs(nodes: int, rounds: int, work: bool) -> list[float]:
    """Seconds of each round with Flower's SuperNodes and FedAvg."""
    superlink.quiet()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-bench-")))
        (root / "bench").mkdir()
        times = root / "times"
        names = {"WORK": work, "FILE": str(times), "NODES": nodes, "ROUNDS": rounds + 1}
        head = "\n".join(f"{name} = {value!r}" for name, value in names.items())
        (root / "bench" / "app.py").write_text(head + APP)
        (root / "bench" / "__init__.py").write_text("")
        (root / "pyproject.toml").write_text(PROJECT)
        port, home = superlink.free_port(), root / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
            "insecure = true\n"
        )
        environment = {**os.environ, "FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
        scripts = Path(sys.executable).parent
        environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
        common = ["--insecure", "--disable-runtime-dependency-installation"]
        link = ["flower-superlink", *common, "--port", str(port)]
        stack.enter_context(process(link, environment, root / "link.log"))
        while not superlink.answers("127.0.0.1", port):
            time.sleep(0.1)
        for node in range(nodes):
            words = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            words += ["--host", "127.0.0.1", "--port", str(superlink.free_port())]
            stack.enter_context(process(words, environment, root / f"node{node}.log"))
        started = subprocess.run(
            ["flwr", "run", str(root), "here", "--format", "json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not re.search(r'"run-id"', started.stdout):
            raise RuntimeError(f"flwr run failed: {started.stdout}{started.stderr}")
        end = time.monotonic() + 600
        while not times.exists() or len(times.read_text().split()) <= rounds:
            if time.monotonic() > end:
                raise RuntimeError((root / "link.log").read_text()[-2000:])
            time.sleep(0.5)
        return [float(each) for each in times.read_text().split()][1:]


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


def page(nodes: int, rounds: int) -> str:
    """The page with what was measured."""
    import flwr

    found = {
        "rota's clients": ours(nodes, rounds),
        "Flower's SuperNodes and FedAvg": theirs(nodes, rounds, True),
        "the same, with a client that does nothing": theirs(nodes, rounds, False),
    }
    lines = [f"| {name} | {np.median(t):.2f} | {max(t):.2f} |" for name, t in found.items()]
    first = np.median(found["rota's clients"])
    ratios = [float(first / np.median(each)) for each in found.values()]
    return "\n".join(
        [
            "# A round of real processes",
            "",
            "`python -m rota_lab.fleet > docs/results/flower.md` wrote this page: the seconds of a",
            f"round in which {nodes} nodes train McMahan's 2NN (0.8 MB) for one step, over",
            f"{rounds} rounds of each fleet in one run, with flwr {flwr.__version__}.",
            "",
            "| fleet | median | slowest |",
            "|---|---|---|",
            *lines,
            "",
            f"rota's round takes {ratios[1]:.2f} of the time of Flower's FedAvg, and",
            f"{ratios[2]:.2f} of the time of its round without any work.",
            "",
            f"Measured on {described('cpu')}, {cores()} cores, which others may use, too.",
        ]
    )


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    print(page(*(numbers + [5, 5][len(numbers) :])))
