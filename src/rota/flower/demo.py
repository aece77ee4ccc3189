"""A fleet on this machine: real processes, one of them really slow, with FLuID and without.

The slow node's worker is stopped and continued again and again, so it computes, sends and waits as
a slow device does. Rounds with FLuID and rounds without alternate, so that whatever else this
machine does slows both alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rota import loop
from rota.data.digits import digits
from rota.data.federation import Federation
from rota.data.own import from_clients
from rota.engine import Options
from rota.engine.machine import cores
from rota.errors import BadInput
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.flower import store, superlink
from rota.flower.engine import Remote, await_clients
from rota.flower.serve import fleet_at
from rota.models import two_nn
from rota.plan import Task
from rota.sampling import Full
from rota.submodel import Stragglers, Whole

SIDE = 28
"""The digits are enlarged to so many pixels each way, so that training takes a while."""
WORK = 0.8
"""Seconds of one core that a node computes in a round."""
SLOWER = 2.5
"""How many times slower the slow node is than its fair share of this machine."""


@dataclass
class Side:
    """One of the two runs: each round's seconds, each node's, and the accuracy."""

    name: str
    rounds: list[float] = field(default_factory=list)
    nodes: list[list[float]] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    """What the slow node's time should have been in each round."""
    width: float = 1.0
    accuracy: float = 0.0


@dataclass
class Seen:
    """What the demonstration has measured."""

    slow: int
    sides: list[Side]

    @property
    def faster(self) -> float:
        """How much faster the run with FLuID is, as a share."""
        fluid, plain = (sum(side.rounds) for side in self.sides)
        return 1 - fluid / plain

    @property
    def off(self) -> float:
        """How far the slow node's time is from the target, as a share: the second half's median."""
        mine = np.array([each[self.slow] for each in self.sides[0].nodes])
        return _second_half(mine / self.sides[0].targets) - 1

    @property
    def behind(self) -> float:
        """How far it is from the slowest other node's time in the same round, in the same way."""
        each = np.array(self.sides[0].nodes)
        return _second_half(each[:, self.slow] / np.delete(each, self.slow, 1).max(1)) - 1


def _second_half(ratios: Any) -> float:
    return float(np.median(ratios[len(ratios) // 2 :]))


def data(nodes: int) -> Federation:
    """Enlarged digits, dealt evenly to the nodes."""
    small = digits()

    def large(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.reshape(-1, 1, 8, 8), (SIDE, SIDE), mode="bilinear")

    x, y = large(small.train.x), small.train.y
    pairs = [(x[node::nodes], y[node::nodes]) for node in range(nodes)]
    return from_clients(pairs, (large(small.test.x), small.test.y), classes=10, name="digits")


def steps_for(task: Task) -> int:
    """How many steps of a task take WORK seconds of one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module, x, y = task.build(), *(part[: task.batch] for part in task.federation.train.of(0))
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        task.loss(module(x), y).mean().backward()
        best = min(best, time.perf_counter() - began)
    torch.set_num_threads(threads)
    return max(1, round(WORK / best))


@contextmanager
def nodes_of(folders: list[Path], address: str, slow: int, times: float) -> Iterator[None]:
    """Real nodes, until the end of the block."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for node, folder in enumerate(folders):
            words = [sys.executable, "-m", "rota", "client", "--data", str(folder)]
            words += ["--server", address, "--threads", "1", "--idle", "0.2"]
            words += ["--slow", str(times)] if node == slow else []
            environment = {**os.environ, "ROTA_PARENT": str(os.getpid())}
            with folder.with_suffix(".log").open("ab") as log:
                running.append(
                    subprocess.Popen(
                        words, stdout=log, stderr=log, env=environment, start_new_session=True
                    )
                )
        yield
    finally:
        for process in running:
            superlink.stop(process)


def demo(rounds: int, nodes: int, say: Callable[[str], None], show: Callable[[Any], None]) -> Seen:
    """Play rounds with FLuID and without on the same nodes."""
    if rounds < 4 or nodes < 3:
        raise BadInput("the demonstration needs at least 4 rounds and 3 nodes")
    superlink.installed()
    task = Task(two_nn, data(nodes), lr=0.05, batch=200, name="digits")
    task = Task(two_nn, task.data, lr=0.05, batch=200, steps=steps_for(task), name="digits")
    slow, times = nodes - 1, SLOWER * max(1.0, nodes / cores())
    fluid = Stragglers(share=1 / nodes, sizes=())
    policies = {"sampler": Full(), "estimator": FedAvg()}
    experiments = [
        Experiment([task], rounds=rounds, capacity=capacity, policies=policies)
        for capacity in (fluid, Whole())
    ]
    address = f"127.0.0.1:{superlink.free_port()}"
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-demo-")))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "torch")  # torch makes it in any case
        folders = store.write(task.federation, root, nodes)
        say(f"starting a SuperLink at {address} and {nodes} nodes; node {slow} is slow")
        stack.enter_context(nodes_of(folders, address, slow, times))
        fleet = stack.enter_context(fleet_at(address))
        fleet.tasks = ["digits"]
        await_clients(fleet, [str(node) for node in range(nodes)], 120)
        say("all nodes are there; rounds with FLuID and without take turns")
        sides = [Side("with FLuID"), Side("without")]
        engines = [Remote(each, fleet, Options(torch.device("cpu")), ()) for each in experiments]
        states = [loop.begin(*each) for each in zip(experiments, engines, strict=True)]
        say("a first round, in which the nodes build their networks, does not count")
        loop.play(experiments[1], engines[1], states[1])
        for _ in range(rounds):
            sides[0].targets.append(float(states[0].policies["capacity"]["target"]))
            for place, side in enumerate(sides):
                began = time.perf_counter()
                seconds = Watched(engines[place], nodes)
                states[place], record = loop.play(experiments[place], seconds, states[place])
                side.rounds.append(time.perf_counter() - began)
                side.nodes.append(seconds.each)
                side.accuracy = record["accuracy"]
            sides[0].width = float(states[0].policies["capacity"]["width"][slow])
            show(sides)
        return Seen(slow, sides)


class Watched:
    """An engine that remembers each client's seconds of a round."""

    def __init__(self, engine: Remote, clients: int) -> None:
        self.engine, self.each = engine, [float("nan")] * clients
        self.initial, self.evaluate, self.losses = engine.initial, engine.evaluate, engine.losses

    def train(self, job: Any) -> Iterator[Any]:
        for chunk in self.engine.train(job):
            self.each[int(job.plan.client[chunk.rows[0]])] = float(chunk.costs.seconds[0])
            yield chunk
