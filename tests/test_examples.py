"""The docs: every example runs, every block does what it says, every link leads somewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import rota
from rota import recipe
from rota.cli import app as cli_app
from rota.data import _NEEDED as NEEDS_FILES
from rota.engine import ENGINES
from rota.policies import KINDS
from rota.recipe import config, registry
from rota.running.record import columns
from rota_lab import reproduce

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN = ["README.md", "docs/channels.md", "docs/recipes.md", "docs/samplers.md", "docs/own.md"]
RUN += ["docs/submodels.md", "docs/devices.md", "docs/groups.md", "docs/tour.md"]
RUN += [f"docs/howto/{name}.md" for name in ("data", "model", "sampler", "metric")]
RUN += ["docs/howto/compare.md", "docs/howto/resume.md"]
"""Pages that are run from top to bottom."""
README = (ROOT / "README.md").read_text()
ROUNDS = 2


# --- the examples


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_learns(example: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) > 0.85


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_without_results(notebook: Path, tmp_path: Path) -> None:
    """Its last cells check what it has shown."""
    play = (
        "import sys, nbformat\n"
        "from jupyter_client.manager import AsyncKernelManager\n"
        "from nbclient import NotebookClient\n"
        "cells, kernel = nbformat.read(sys.argv[1], 4), AsyncKernelManager(transport='ipc')\n"
        "NotebookClient(cells, km=kernel, timeout=1800).execute()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", play, notebook],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert any("assert " in "".join(cell["source"]) for cell in code)
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert f"(examples/{notebook.name})" in README


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_linked(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 24
    assert f"(examples/{example.name})" in README


def test_excerpts_are_what_the_examples_say() -> None:
    classes = [
        text for kind, text in blocks(README) if kind == "python" and text.startswith("class ")
    ]
    assert classes
    for text in classes:
        assert any(text in example.read_text() for example in EXAMPLES)


# --- the pages, run from top to bottom


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a page: (language, text)."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page, flags=re.M | re.S):
        yield found[1], found[2]


def commands(text: str) -> list[list[str]]:
    """The rota commands in a shell block, as words."""
    whole = text.replace("\\\n", "")
    lines = [shlex.split(line, comments=True) for line in whole.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "rota"]


def quickly(words: list[str], number: int) -> list[str] | None:
    """The same command made short, with a folder of its own; None if its data may not be here."""
    if words[0] in ("run", "compare"):
        raw = recipe.read(words[1])
        for setting in (words[i + 1] for i, word in enumerate(words) if word == "--set"):
            raw = recipe.override(raw, setting)
        if {task["data"]["name"] for task in recipe.resolve(raw)["task"]} & set(NEEDS_FILES):
            return None
        few = [
            "--set",
            f"rounds={ROUNDS}",
            "--engine",
            "sequential",
        ]  # the batched engine's tracing would take longer than two rounds
        if "--jobs" in words:  # tests/test_jobs.py starts processes
            place = words.index("--jobs")
            words = [*words[:place], *words[place + 2 :]]
        return [*words, *few, *([] if "--out" in words else ["--out", f"runs/{number}"])]
    # these take long, or want others
    if words[0] in ("bench", "demo", "serve", "client", "keys", "ui"):
        return [words[0], "--help"]
    return [*words, "--quick"] if words[0] == "reproduce" and len(words) > 1 else words


def call(words: list[str]) -> tuple[int, str, str]:
    """One rota command in this process: its status and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["rota", *words]),
    ):
        return cli_app.status(words), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("page", RUN)
def test_a_page_does_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python blocks share their names, as in one session, and commands run between them.

    A block that begins with "# NAME" is a file. Functions called test_... are called.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("rota.cli.profile.SECONDS", 0.0)
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for kind, text in blocks((ROOT / page).read_text()):
        file = re.match(r"# (\w+)\.(py|toml)\n", text)
        assert file or kind != "toml", "give a recipe a name to be run by: # NAME.toml"
        if file:
            Path(f"{file[1]}.{file[2]}").write_text(text)
            monkeypatch.setitem(
                sys.modules, file[1], None
            )  # so that what is imported from it is forgotten afterwards
            del sys.modules[file[1]]
        elif kind == "python":
            ran += 1
            exec(compile(text, page, "exec"), names)
            for test in [name for name in names if name.startswith("test_")]:
                names.pop(test)()
        elif kind == "sh":
            for words in commands(text):
                if quick := quickly(words, ran):
                    status, out, err = call(quick)
                    assert status == 0, f"rota {shlex.join(quick)}: {err}"
                    assert out
                    ran += 1
    assert ran > 1


def test_no_two_pages_write_into_one_folder() -> None:
    """So that a reader can follow one page after the other."""
    folders: dict[str, str] = {}
    for page in PAGES:
        shell = [text for kind, text in blocks(page.read_text()) if kind == "sh"]
        for words in (words for text in shell for words in commands(text)):
            if words[0] in ("run", "compare") and "--out" in words and "--resume" not in words:
                folder, command = words[words.index("--out") + 1], shlex.join(words)
                assert folders.setdefault(folder, command) == command, (
                    f"{page.name}: {folder} is taken"
                )


# --- what the pages name


@dataclass(frozen=True)
class Link:
    page: Path
    target: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.target}"


def links() -> list[Link]:
    outside = re.compile(r"^(https?:|mailto:)")
    found = [
        Link(page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^()\s]+)\)", prose(page.read_text()))
    ]
    return [link for link in found if not outside.match(link.target)]


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links call them."""
    return {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    }


def test_links_lead_somewhere() -> None:
    assert len(links()) > 20
    for link in links():
        path, _, anchor = link.target.partition("#")
        target = (link.page.parent / path).resolve() if path else link.page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} does not exist"
        assert not anchor or anchor in anchors(target), f"{link} has no such heading"


def table(page: str, first: str) -> dict[str, str]:
    """The rows of the table whose header begins so: first cell -> the rest of the row."""
    rows = page[page.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    return {row.split("|")[1].strip(): row.split("|", 2)[2] for row in rows}


def test_the_table_of_what_is_in_names_what_there_is() -> None:
    known = {
        **{kind: set(members) for kind, members in registry.kinds().items()},
        "engines": set(ENGINES),
    }
    known["reproductions"] = set(reproduce.REPRODUCTIONS)
    rows = table(README, "kind")
    assert set(rows) == {*known, "local work"}
    for kind, members in known.items():
        named = set(re.findall(r"`([^`]+)`", rows[kind]))
        assert named, kind
        assert named <= members, f"there are no {kind} {named - members}"


def test_every_public_name_comes_when_it_is_used() -> None:
    found: dict[str, Any] = {}
    exec("from rota import *", found)
    assert set(rota.__all__) <= found.keys()
    assert set(rota.__all__) <= set(dir(rota))
    with pytest.raises(AttributeError, match="'rota' has no attribute 'samplers'"):
        rota.samplers  # noqa: B018


def test_every_command_is_in_the_readme() -> None:
    shown = {words[0] for kind, text in blocks(README) if kind == "sh" for words in commands(text)}
    known = {
        command.name or command.callback.__name__
        for command in cli_app.app.registered_commands
        if command.callback
    }
    assert shown == known


def test_every_key_of_a_recipe_is_explained() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    keys = {*config.TOP, *config.TASK, *config.PARTS, *registry.SPLIT}
    for others in registry.ALTERNATIVES.values():
        keys |= {*others, *(other.option for other in others.values())}
    for key, kind in KINDS.items():
        if kind.single:
            keys |= registry.options(key, kind.members[kind.default]).keys()
    missing = {key for key in keys if f"`{key}`" not in page}
    missing |= {key for key in KINDS if f"`[{key}]`" not in page}
    assert not missing


def test_every_column_of_a_round_is_explained(tmp_path: Path) -> None:
    from rota.running.run import execute

    resolved = recipe.resolve(recipe.override(recipe.read("fedavg-digits"), "rounds=1"))

    run = execute(
        recipe.build(resolved),
        engine="sequential",
        device="cpu",
        out=tmp_path / "run",
        config=resolved,
    )
    page = (ROOT / "docs" / "runs.md").read_text()
    keys = {*run.records[0], *(name.removeprefix("digits.") for name in columns(run.records))}
    assert not {key for key in keys if f"`{key}`" not in page}
    files = {path.name for path in (tmp_path / "run").iterdir()} | {"report.html"}
    assert files == set(re.findall(r"^- `([\w.]+)", page.partition("## ")[0], re.M))
    assert files == {
        re.findall(r"`([\w.]+)", name)[0] for name in table(README, "in the run's folder")
    }
