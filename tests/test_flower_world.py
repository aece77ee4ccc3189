"""What may happen to real nodes: full disks, wrong clocks, little memory, cut networks, moves."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import federation
from fleets import HASTY, PATIENT, Nodes, bench, until

from rota.flower import keys as made
from rota.flower.superlink import Kept
from rota.models import two_nn
from rota.plan import Task

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rota[flower]'")
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # flwr's own
]
HOURS = 5
MEMORY = Path("/sys/fs/cgroup/memory")
LITTLE = 30 << 20
"""Bytes that a worker may take besides what it has, which is less than its training takes."""
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")


def test_nodes_that_join_and_clients_that_move(tmp_path: Path) -> None:
    with bench(tmp_path) as one:
        new, moved = tmp_path / "new", tmp_path / "moved"
        new.mkdir()
        np.savez(new / "somebody.npz", x=np.ones((3, 4), np.float32), y=np.zeros(3, int))
        shutil.copytree(one.nodes.folders[2], moved, ignore=shutil.ignore_patterns(".rota"))
        more = Nodes(one.nodes.address, [new])
        try:  # a client that is not in the run: it is asked nothing
            until(lambda: one.fleet.wait(lambda: "somebody" in one.fleet.home, 1), 240)
            one.play(set())
            # a machine dies, and another one has its data
            before = one.fleet.home["2"]
            one.nodes.end(2)
            more.folders.append(moved)
            more.start(1)
            one.fleet.rules = HASTY
            until(lambda: not one.play(), 240)
            assert one.fleet.home["2"] != before
            assert one.fleet.home["2"] == one.fleet.home["5"]
        finally:
            more.close()


def fill(pid: int) -> None:
    """Let no file of a process grow any more, as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def test_full_disks(tmp_path: Path) -> None:
    """A node's, which then is killed and comes back; and the SuperLink's, with its database."""
    kept: list[Kept] = []
    with bench(tmp_path / "data", kept, tmp_path / "link.db") as one:
        fill(one.nodes.running[1].pid)
        one.play(set())
        one.nodes.end(1)
        one.nodes.start(1, prefix=["prlimit", "--fsize=0"])  # it cannot even write its log
        one.fleet.rules = HASTY
        until(lambda: not one.play(), 240)
        one.back(1)
        one.fleet.rules = PATIENT
        one.play(set())
        fill(kept[-1].process.pid)
        one.fleet.rules = HASTY
        one.play()
        kept[-1].process.kill()  # the disk has room again
        one.fleet.rules = PATIENT
        until(lambda: not one.play(), 240)


@pytest.fixture
def shifted(tmp_path: Path) -> Path:
    """A library that shifts a process's clock."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    library = tmp_path / "shifted.so"
    source = Path(__file__).with_name("shifted.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_clocks_that_differ_by_hours(tmp_path: Path, shifted: Path) -> None:
    """With keys: who signs at a wrong time is not let in, until the node takes the server's."""
    keys = tmp_path / "keys"
    made.certify(keys, ["fleet.example.org"])
    for name in "012":
        made.node_key(keys / "nodes" / name)
    with bench(tmp_path / "data", host="0.0.0.0", keys=keys) as one:
        for node, hours in ((1, HOURS), (2, -HOURS)):
            seconds = str(3600 * hours)
            one.nodes.more = {"LD_PRELOAD": str(shifted), "ROTA_SHIFT": seconds}
            one.back(node)
            assert "clock is off" in one.nodes.log(node).read_text()
            for _ in range(2):
                one.play(set())


@root
@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="no memory cgroup can be made")
def test_a_worker_is_killed_by_memory(tmp_path: Path) -> None:
    data = federation([9, 12, 20, 31, 8, 17], features=20_000)
    with bench(tmp_path, task=Task(two_nn, data, batch=4, name="a")) as one:
        group = MEMORY / f"rota-{os.getpid()}"
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(LITTLE))
            (group / "cgroup.procs").write_text(str(one.worker(1)))
            reasons = one.play({1, 4})
            assert all("memory was full" in reason for reason in reasons.values()), reasons
            one.play(set())  # by another worker
        finally:
            group.rmdir()
        # one that cannot take more memory, but is not killed
        pid = one.worker(2)
        has = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (has, resource.RLIM_INFINITY))
        reasons = one.play()
        assert all("memory" in reason for reason in reasons.values()), reasons
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        one.play(set())


@contextmanager
def namespace() -> Iterator[tuple[str, str, str]]:
    """A network namespace: its name, our address in its network, and the name of its device."""
    number = os.getpid()
    name, ours, theirs = f"rota{number}", f"ra{number}", f"rb{number}"
    net = f"10.{200 + number // 65536 % 50}.{number // 256 % 256}"

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)

    ip(f"netns add {name}")
    try:
        ip(f"link add {ours} type veth peer name {theirs} netns {name}")
        ip(f"addr add {net}.1/24 dev {ours}")
        ip(f"link set {ours} up")
        ip(f"-n {name} addr add {net}.2/24 dev {theirs}")
        ip(f"-n {name} link set {theirs} up")
        yield name, f"{net}.1", theirs
    finally:
        ip(f"netns del {name}")


@root
@pytest.mark.skipif(shutil.which("ip") is None, reason="ip is missing")
def test_a_network_is_cut(tmp_path: Path) -> None:
    """Between two namespaces: the server and node 0 in ours, nodes 1 and 2 in the other one."""
    with namespace() as (name, here, device), bench(tmp_path, host="0.0.0.0") as one:

        def link(state: str) -> None:
            words = ["ip", "-n", name, "link", "set", device, state]
            subprocess.run(words, check=True)

        one.nodes.address = one.nodes.address.replace("127.0.0.1", here)
        for node in (1, 2):
            one.back(node, prefix=["ip", "netns", "exec", name])
        one.play(set())
        link("down")
        one.fleet.rules = HASTY
        reasons = one.play({1, 2, 4, 5})
        assert all("no reply" in why or "offline" in why for why in reasons.values()), reasons
        for _ in range(2):  # until the nodes count as offline
            time.sleep(10)
            one.play({1, 2, 4, 5})
        link("up")
        one.fleet.rules = PATIENT
        until(lambda: not one.play(), 240)
        # for a moment, in the middle of rounds
        stop = threading.Event()

        def cut_and_mend() -> None:
            while not stop.wait(0.5):
                link("down")
                time.sleep(0.5)
                link("up")

        cutter = threading.Thread(target=cut_and_mend)
        cutter.start()
        try:
            for _ in range(5):
                one.play()
        finally:
            stop.set()
            cutter.join()
        until(lambda: not one.play(), 240)
