"""rota_lab is a package of its own: only two commands of rota import it, when they are called."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def imported(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """The modules that a syntax tree imports, and whether it does so inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, inside
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", inside
        yield from imported(node, inside or isinstance(node, FUNCTIONS))


def test_only_commands_import_the_lab_and_only_when_they_are_called() -> None:
    users = set()
    for path in sorted((SOURCE / "rota").rglob("*.py")):
        for module, inside in imported(ast.parse(path.read_text())):
            if module.partition(".")[0] == "rota_lab":
                assert inside, f"{path} imports {module} when it is loaded"
                users.add(path.relative_to(SOURCE / "rota").parts[0])
    assert users == {"cli"}


def test_no_module_of_rota_loads_the_lab() -> None:
    code = """
import importlib, pkgutil, sys
import rota
loaded = 0
for module in pkgutil.walk_packages(rota.__path__, "rota."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        loaded += 1
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("rota", "rota_lab"):
            raise
assert loaded > 50, loaded
print([name for name in sys.modules if name.partition(".")[0] == "rota_lab"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_all_of_the_lab_is_installed() -> None:
    """An installation takes packages, and data named in pyproject.toml, which names none here."""
    files = [path for path in (SOURCE / "rota_lab").rglob("*") if "__pycache__" not in path.parts]
    for path in files:
        if path.is_dir():
            assert (path / "__init__.py").exists(), f"{path} is no package"
        else:
            assert path.suffix == ".py", f"{path} is not installed"
