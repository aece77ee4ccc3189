"""The systems that are compared, how each may use the machine, and one run of one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rota
from rota.engine.machine import cores
from rota_lab.bench.environment import Skip, interpreter

SCRIPTS = Path(__file__).parent / "peers"
DENSE = ("logistic", "two_nn")
"""On a CPU, XLA takes minutes per round for other networks if it maps them over clients, and for
convolutions in a loop."""
SEQUENCES = ("lstm_shakespeare", "transformer")
LIMIT = 3600.0
"""The most seconds for one run of one system: a longer run hangs."""


@dataclass(frozen=True)
class Way:
    """A way of using the machine: in words, as the script's argument, and how many processes."""

    how: str
    argument: str = ""
    processes: int = 1


@dataclass(frozen=True)
class System:
    """A script, and what its virtual environment needs. Without needs it runs where rota runs.

    `modules` are those that must be importable.
    """

    name: str
    script: str
    needs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


OWN = (System("rota-sequential", "own.py"), System("rota-batched", "own.py"))
_PEERS = (
    System("torch-loop", "torch_loop.py"),
    System("jax-scan", "jax_scan.py", ("jax==0.10.2",), ("jax",)),
    System("drjax", "drjax_sim.py", ("drjax==0.2.1", "jax==0.10.2"), ("drjax",)),
    System("fedjax", "fedjax_sim.py", ("fedjax==0.0.17", "jax==0.10.2"), ("fedjax",)),
    System(
        "flower",
        "flower_sim.py",
        ("torch", "flwr[simulation]==1.41.0"),
        ("torch", "flwr.serverapp", "flwr.simulation", "ray"),
    ),
    System(
        "pfl",
        "pfl_sim.py",
        ("torch", "pfl==0.6.0"),
        ("pfl.model.pytorch", "pfl.aggregate.simulate"),
    ),
)
PEERS = {system.name: system for system in _PEERS}


def ways(system: System, device: str, model: str) -> list[Way]:
    """The ways in which a system may use the machine; the fastest counts. GPUs have one thread."""
    many = [1, cores()] if device == "cpu" and cores() > 1 else [1]
    threads = [Way(f"{n} thread{'s' * (n > 1)}", str(n)) for n in many]
    together = f"{cores()} at a time"
    if system.name == "rota-sequential":
        return [Way(way.how, f"sequential {way.argument}") for way in threads]
    if system.name == "rota-batched":
        if device == "cpu":
            return [Way(f"{cores()} clients at a time", "batched")]
        graphs = "stacks in CUDA graphs"
        return [Way(f"{graphs}, {each}", f"batched {each}") for each in ("fp32", "tf32", "bf16")]
    if system.name == "torch-loop":
        return threads
    if system.name == "pfl":
        return threads + [Way(f"{n} processes", "1", n) for n in many[1:]]
    if system.name == "drjax":
        return [Way("map_fn over clients", "vmap")]
    if system.name == "flower":
        return [Way(f"{cores()} Ray workers of 1 thread")]
    if system.name == "jax-scan":
        vmap = Way("vmap over clients", "vmap")
        scan = Way(f"a scan per client, {together}", "scan")
        step = Way(f"compiled steps, {together}", "step")
        if device != "cpu":
            return [vmap]
        if model in DENSE:
            return [vmap, scan]
        return [scan, step] if model in SEQUENCES else [step]
    return [Way("as it comes")]


def find(system: System, device: str) -> tuple[str, list[str]]:
    """The Python that runs a system, and what to put on its path; raises Skip if there is none."""
    python, paths = interpreter(system.name, system.needs, system.modules, device)
    return python, paths if system.needs else [str(Path(rota.__file__).parents[1]), *paths]


def run(system: System, way: Way, folder: Path, device: str) -> dict[str, Any]:
    """What a system's script prints after one run on a prepared work; raises Skip if it fails."""
    python, paths = find(system, device)
    launch = []
    if way.processes > 1:
        launch = ["-m", "torch.distributed.run", "--standalone"]
        launch.append(f"--nproc-per-node={way.processes}")
    words = [python, *launch, str(SCRIPTS / system.script), str(folder), way.argument]
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as home:
        quiet = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": home,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        quiet["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # jax would take most of a GPU at once
        environment = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *paths])}
        out, err, status = call(words, environment, LIMIT)
    for line in reversed(out.splitlines()):
        if status == 0 and line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    said = [line.strip() for line in err.splitlines() if line.strip()]
    raise Skip(f"it ended with status {status}: {said[-1] if said else 'it said nothing'}")


def call(words: list[str], environment: dict[str, str], limit: float) -> tuple[str, str, int]:
    """Run a command: its two outputs and its status. If interrupted, end all that it started."""
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            raise Skip(f"it did not end within {limit:.0f} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return out, err, process.returncode
