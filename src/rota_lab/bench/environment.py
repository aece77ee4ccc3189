"""The Python that runs a peer: its own virtual environment, made when it is first needed, or what is already there.

Each peer has its own, because peers pin what they need against one another. They lie in the cache folder (`$XDG_CACHE_HOME` or
`~/.cache`, then `rota/bench/PEER`); removing them is safe.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from rota.data.files import cache

PATIENCE = 1800.0  # seconds for one installation


class Skip(Exception):
    """A system that cannot be measured here, and why, in one sentence."""


@functools.cache
def interpreter(
    name: str, needs: tuple[str, ...], modules: tuple[str, ...], device: str
) -> tuple[str, list[str]]:
    """The Python for a peer, and the folders to put on its path.

    Its own environment comes first on a CPU. On a GPU the running Python does, where it has the peer: its torch or jax is the one
    that knows the GPU. For machines without a network, `ROTA_BENCH_WHEELS` names folders (of packages or of pure-Python wheels) or wheels
    to import from, separated as in PATH.
    """
    here = (sys.executable, [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p])
    if not needs:
        return here
    places = [p for p in os.environ.get("ROTA_BENCH_WHEELS", "").split(os.pathsep) if p]
    wheels = [str(path) for place in places for path in (place, *sorted(Path(place).glob("*.whl")))]
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


def imports(python: str, paths: list[str], modules: tuple[str, ...]) -> bool:
    """Whether that Python has the modules."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [python, "-c", f"import {', '.join(modules)}"]
    return (
        subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    )


def build(name: str, needs: tuple[str, ...]) -> str:
    """The Python of a peer's virtual environment, which is made if it is not there or was made for something else."""
    folder = cache("bench") / name
    python, note = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join(requirements(needs))
    if not (note.exists() and note.read_text() == wanted and python.exists()):
        print(
            f"rota: making a virtual environment for {name} in {folder}; this takes minutes, once",
            file=sys.stderr,
            flush=True,
        )
        note.unlink(missing_ok=True)
        install([sys.executable, "-m", "venv", "--clear", str(folder)])
        for requirement in wanted.split(
            "\n"
        ):  # in this order: what torch is decides what pip takes for those that need it
            install(
                [
                    str(python),
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    requirement,
                ]
            )
        note.write_text(wanted)
    return str(python)


def requirements(needs: tuple[str, ...]) -> list[str]:
    """What to install; "torch" is the version that rota itself runs on, so that all systems have the same."""
    import torch

    return [
        f"torch=={torch.__version__.split('+')[0]}" if need == "torch" else need for need in needs
    ]


def install(command: list[str]) -> None:
    """One step of an installation; raises Skip with the last thing it said."""
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
