"""The shape of the code: how large the core is, what it may import, and how wide lines are."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "rota"
CORE = [
    *(path for path in HOUSE.glob("*.py") if path.name != "hints.py"),  # a part of recipes
    *(HOUSE / "plan").glob("*.py"),
    *(HOUSE / "sampling").glob("*.py"),
    *(HOUSE / "estimate").glob("*.py"),
    *(HOUSE / "running").glob("*.py"),
    *(HOUSE / "data" / f"{name}.py" for name in ("federation", "partition", "roster")),
    *(HOUSE / "engine" / f"{name}.py" for name in ("__init__", "sequential", "batched", "local")),
    *(HOUSE / "engine" / f"{name}.py" for name in ("schedule", "score")),
]
"""The loop, the nouns, sampling, estimate, the engine without its back ends, and running."""


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_core_is_small_enough_to_read() -> None:
    assert all(path.exists() for path in CORE)
    assert sum(map(lines, CORE)) <= 8000
    assert lines(HOUSE / "loop.py") <= 200


def test_the_core_imports_only_torch_and_numpy() -> None:
    """At module level, and the standard library; files belong to running and recipes."""
    light = [path for path in CORE if path.parent.name != "running"]
    allowed = {"torch", "numpy", "rota"}
    for path in light:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                first = name.partition(".")[0]
                known = first in allowed or first in __import__("sys").stdlib_module_names
                assert known, f"{path} imports {name}"


def test_the_engine_of_the_contract_test_is_short() -> None:
    """An engine whose data live elsewhere takes at most 80 lines."""
    assert lines(ROOT / "tests" / "contract.py") <= 80


def test_lines_have_at_most_100_columns() -> None:
    """Ruff checks Python; rows of tables and addresses cannot be broken."""
    folders = ("docs", "src", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    kinds = {".md", ".js", ".css", ".html", ".c", ".h", ".toml"}
    for path in paths:
        if path.suffix not in kinds or path.parent.name == "results":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            fixed = line.lstrip().startswith("|") or "://" in line
            assert len(line) <= 100 or fixed, f"{path}:{number} has {len(line)} columns"
