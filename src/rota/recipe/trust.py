"""Which modules a recipe may name.

`module:attribute` imports the module and calls the attribute, so a recipe that names one can run
any code. A recipe may name modules that lie in its own folder, and modules that the user allows
(`--allow MODULE`). Names in `--set` and `--vary` are the user's own and are not checked.

The check happens once, when a recipe is read and before anything in it is imported. Later every
name is either one that passed here or one that the user typed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rota.errors import BadInput
from rota.recipe import registry


def check(config: dict[str, Any], recipe: Path, allow: Sequence[str] = ()) -> None:
    """Refuse a recipe that names a module from elsewhere, and import those beside it."""
    for name in own(config):
        module = name.partition(":")[0]
        if any(module == each or module.startswith(f"{each}.") for each in allow):
            continue
        folder = recipe.absolute().parent
        file = _beside(folder, module)
        if file is None:
            raise BadInput(
                f"the recipe {recipe} names '{name}', which runs code from a module that does not "
                f"lie beside the recipe: add --allow {module} if you trust it"
            )
        registry.own(name, str(folder))
        found = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
        if not found or not os.path.exists(found) or not os.path.samefile(found, file):
            raise BadInput(
                f"the recipe {recipe} names '{name}', but another module has this name already: "
                f"rename {file}"
            )


def own(config: Any) -> Iterator[str]:
    """All names of the form module:attribute, wherever in a recipe something can be named."""
    waiting = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            for key in (*registry.naming(), "loss", "score"):
                given = value.get(key)
                name = given.get("name") if isinstance(given, dict) else given
                if isinstance(name, str) and ":" in name:
                    yield name
            metrics = value.get("metrics")
            for name in metrics if isinstance(metrics, list) else ():
                if isinstance(name, str) and ":" in name:
                    yield name


def _beside(folder: Path, module: str) -> Path | None:
    """The file of a module that lies in this folder; None if there is none."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for file in (folder / f"{parts[0]}.py", folder / parts[0] / "__init__.py"):
        if file.is_file():
            return file
    return None
