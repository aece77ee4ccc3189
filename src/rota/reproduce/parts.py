"""The finished parts of a long reproduction: a file each, so that nothing is run twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rota.errors import BadInput

Found = dict[str, Any]
"""A part, as its file has it."""


def read(folder: Path, names: Iterable[str]) -> dict[str, Found]:
    """Those of the named parts that the folder has."""
    out = {}
    for name in names:
        path = folder / f"{name}.json"
        try:
            out[name] = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} is not a part's file ({error}): remove it to have the part run again") from error
    return out


def write(folder: Path, name: str, found: Found) -> None:
    """Keep a part: whole, or as it was before."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}.{os.getpid()}"
    draft.write_text(json.dumps(found, allow_nan=False) + "\n")
    draft.replace(folder / f"{name}.json")
