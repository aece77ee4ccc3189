"""rota doctor: the versions, devices and data on this machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from rota.cli import loading
from rota.cli.complete import recipes, starting
from rota.cli.options import Allow, Json, Set
from rota.cli.output import print_json, print_line
from rota.cli.profile import profile as measure
from rota.errors import BadInput

PACKAGES = (
    "rota",
    "torch",
    "numpy",
    "safetensors",
    "scikit-learn",
    "plotly",
    "rich",
    "typer",
    "flwr",
    "flwr-datasets",
)


def doctor(
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Measure instead how fast this machine trains the recipe's models.",
            autocompletion=starting(recipes),
        ),
    ] = None,
    set_: Set = [],  # noqa: B006
    allow: Allow = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --profile: add a line to this file of devices."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is installed, and which devices and data are here.

    \b
    Examples:
      rota doctor
      rota doctor --json
      rota doctor --profile fedavg-digits --set task.model=cnn --out fleet.jsonl
    """
    if profile is not None:
        measure(profile, set_, allow, out, as_json)
        return
    if set_ or allow or out:
        raise BadInput("--set, --allow and --out need --profile: name a recipe to measure")
    found = examine()
    if as_json:
        print_json(found)
        return
    for topic, entries in found.items():
        print_line(topic)
        width = max(map(len, entries))
        for name, value in entries.items():
            print_line(f"  {name:{width}}  {value}")


def examine() -> dict[str, dict[str, str]]:
    """Topic -> name -> finding."""
    with loading():
        import torch

    cores = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    return {
        "machine": {"python": platform.python_version(), "system": platform.platform()},
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": {"cpu": cores, "kernels": _kernels(), **_gpus()},
        "data": _data(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> str:
    """Whether small models train at full speed on the CPU."""
    import torch

    from rota.engine.native import build

    try:
        build.library(torch.float32)
    except build.Unavailable as reason:
        slow = "models train several times slower in torch operators"
        return f"CPU kernels not compiled: {reason}; {slow}"
    return f"CPU kernels compiled with {build.compiler()}"


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"cuda": "none"}
    return {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}


def _data() -> dict[str, str]:
    """The folder that is searched first, and whether the files of each source are there."""
    from rota import data

    found = {"ROTA_DATA": os.environ.get("ROTA_DATA") or "not set"}
    try:
        for name in data.SOURCES:
            if name != "folder":
                found[name] = "at hand" if data.at_hand(name) else "not here yet"
    except BadInput as mistake:  # ROTA_DATA is not a folder: exactly what a doctor should say
        return {"ROTA_DATA": str(mistake)}
    return found
