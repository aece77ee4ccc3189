"""The Python that runs a peer: a virtual environment of its own, or the running Python.

Each peer has its own environment, because peers pin versions that exclude one another. It is made
when it is first needed, in the cache folder (`$XDG_CACHE_HOME` or `~/.cache`, then
`rota/bench/PEER`). Removing it is safe.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from rota.data.files import cache

PATIENCE = 1800.0
"""The most seconds for one installation."""


class Skip(Exception):
    """A system cannot be measured here; the message says why in one sentence."""


@functools.cache
def interpreter(
    name: str, needs: tuple[str, ...], modules: tuple[str, ...], device: str
) -> tuple[str, list[str]]:
    """The Python for a peer, and the folders to put on its path.

    On a CPU the peer's own environment comes first. On a GPU the running Python comes first if it
    has the peer, since its torch or jax knows the GPU. For machines without a network,
    `ROTA_BENCH_WHEELS` names what to import from, separated as in PATH: wheels, or folders of
    packages or of pure-Python wheels.
    """
    here = (sys.executable, _paths("PYTHONPATH"))
    if not needs:
        return here
    wheels = []
    for place in _paths("ROTA_BENCH_WHEELS"):
        wheels += [place, *map(str, sorted(Path(place).glob("*.whl")))]
    ready = [here, (here[0], [*wheels, *here[1]])]
    if device != "cpu" or wheels:
        for python, paths in ready:
            if imports(python, paths, modules):
                return python, paths
    try:
        return build(name, needs), []
    except Skip:
        if imports(*here, modules):
            return here
        raise


def _paths(variable: str) -> list[str]:
    """The paths in an environment variable."""
    return [path for path in os.environ.get(variable, "").split(os.pathsep) if path]


def imports(python: str, paths: list[str], modules: tuple[str, ...]) -> bool:
    """Whether a Python has the modules."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [python, "-c", f"import {', '.join(modules)}"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done.returncode == 0


def build(name: str, needs: tuple[str, ...]) -> str:
    """The Python of a peer's environment, which is made unless it is there for the same needs."""
    folder = cache("bench") / name
    python, note = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join(requirements(needs))
    if not (note.exists() and note.read_text() == wanted and python.exists()):
        words = f"making a virtual environment for {name} in {folder}; this takes minutes, once"
        print(f"rota: {words}", file=sys.stderr, flush=True)
        note.unlink(missing_ok=True)
        install([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for requirement in wanted.split("\n"):  # torch first: it decides what pip takes for others
            install([*pip, requirement])
        note.write_text(wanted)
    return str(python)


def requirements(needs: tuple[str, ...]) -> list[str]:
    """What to install. "torch" means the version that rota runs on, so that all systems agree."""
    import torch

    version = torch.__version__.split("+")[0]
    return [f"torch=={version}" if need == "torch" else need for need in needs]


def install(command: list[str]) -> None:
    """Take one step of an installation; if it fails, raise Skip with the reason it gave."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skip(f"it cannot be installed here: {error}") from error
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR")] or said
        raise Skip(f"it cannot be installed here: {errors[-1] if errors else 'pip gave no reason'}")
