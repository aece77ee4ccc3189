"""A new kind of policy is one class and one entry in KINDS: everything else reads the table."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_cli import call, lines

import rota
from rota.policies import KINDS, Kind

SMALL = ("fedavg-digits", "--set", "sampler.budget=2", "--set", "task.steps=2")


@dataclass(frozen=True)
class Rows:
    """Counts the rows of all rounds."""

    step: int = 1

    def observe(self, state: Any, shares: Any, plan: Any, seen: Any) -> Any:
        return {"count": state["count"] + self.step * len(plan)}


@dataclass(frozen=True)
class Rounds(Rows):
    """Counts the rounds."""

    step: int = 1
    first: float = 0.5

    def observe(self, state: Any, shares: Any, plan: Any, seen: Any) -> Any:
        return {"count": state["count"] + self.step}


def count(policy: Any, opening: Any) -> Any:
    return {"count": np.full(1, getattr(policy, "first", 0.0))}


COUNTER = Kind("counter", {"rows": Rows, "rounds": Rounds}, "rows", ("observe",), count)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "counter", COUNTER)


def counted(folder: Path) -> float:
    """What the counter remembers in the run's last checkpoint."""
    last = sorted((folder / "checkpoint").iterdir())[-1]
    return float(load_file(last / "state.safetensors")["counter.count"][0])


def configured(folder: Path) -> Any:
    return tomllib.loads((folder / "config.toml").read_text())["counter"]


@pytest.mark.usefixtures("counter")
def test_a_recipe_has_a_table_of_it(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    task = "[[task]]\ndata = 'digits'\npartition = 'iid'\nmodel = 'logistic'\nsteps = 1\n"
    recipe.write_text(f"rounds = 3\n[counter]\nname = 'rounds'\nstep = 2\n{task}")
    outcome = call("run", recipe, "--out", tmp_path / "a")
    assert outcome.status == 0, outcome.err
    assert configured(tmp_path / "a") == {"name": "rounds", "step": 2, "first": 0.5}
    assert counted(tmp_path / "a") == 6.5
    recipe.write_text(f"rounds = 3\ncounter = 'rounds'\n{task}")
    assert call("run", recipe, "--out", tmp_path / "b").status == 0
    assert counted(tmp_path / "b") == 3.5
    again = call("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "c")
    assert again.status == 0, again.err
    for name in ("config.toml", "rounds.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


@pytest.mark.usefixtures("counter")
def test_rota_list_shows_it() -> None:
    assert "counters\n  rows    Counts the rows of all rounds.\n" in call("list").out
    rows, rounds = json.loads(call("list", "counters", "--json").out)
    assert rows == {
        "name": "rows",
        "summary": "Counts the rows of all rounds.",
        "options": ["step"],
    }
    assert (rounds["name"], rounds["options"]) == ("rounds", ["step", "first"])


@pytest.mark.usefixtures("counter")
def test_settings_change_it(tmp_path: Path) -> None:
    sets = ("--set", "rounds=2", "--set", "counter.step=3", "--set", "counter=rounds")
    outcome = call("run", *SMALL, *sets, "--out", tmp_path / "a")
    assert outcome.status == 0, outcome.err
    assert configured(tmp_path / "a") == {"name": "rounds", "step": 3, "first": 0.5}
    assert counted(tmp_path / "a") == 6.5
    for setting, complaint in (
        ("countr.step=3", "unknown key 'countr': did you mean 'counter'?"),
        ("counter.stp=3", "unknown key 'counter.stp': did you mean 'step'?"),
        ("counter=round", "unknown counter 'round': did you mean 'rounds'?"),
        ("counter.step=x", "'counter.step' is 'x', but it takes a whole number"),
    ):
        refused = call("run", *SMALL, "--set", setting, "--out", tmp_path / "b")
        assert (refused.status, refused.err) == (2, f"rota: {complaint}\n")


@pytest.mark.usefixtures("counter")
def test_a_checkpoint_holds_its_state(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert call("run", *SMALL, "--set", "rounds=5", "--out", whole).status == 0
    assert call("run", *SMALL, "--set", "rounds=2", "--out", parts).status == 0
    assert counted(parts) == 4
    resumed = call("run", *SMALL, "--set", "rounds=5", "--out", parts, "--resume")
    assert resumed.status == 0, resumed.err
    assert counted(parts) == counted(whole) == 10
    assert lines(parts)[2:] == lines(whole)[2:]
    other = call("run", *SMALL, "--set", "counter=rounds", "--out", parts, "--resume")
    assert other.status == 2
    assert 'counter.name was "rows" and is now "rounds"' in other.err


@pytest.mark.usefixtures("counter")
def test_a_comparison_varies_it_and_the_report_names_it(tmp_path: Path) -> None:
    words = ("--set", "rounds=2", "--vary", "counter=rows,rounds", "--seeds", 2)
    outcome = call("compare", *SMALL, *words, "--out", tmp_path / "a")
    assert outcome.status == 0, outcome.err
    assert [line.split(" (")[0] for line in outcome.out.splitlines()[:2]] == ["rows", "rounds"]
    page = (tmp_path / "a" / "report.html").read_text()
    assert 'data-series="run 0"><i></i><span>rows</span>' in page
    assert 'data-series="run 1"><i></i><span>rounds</span>' in page
    assert '<th scope="col">counter.name</th>' in page
    assert "config.toml of rounds (seed 0; the same with 1)" in page
    alone = (tmp_path / "b.html",)
    assert call("report", tmp_path / "a" / "rows-seed0", "--out", *alone).status == 0
    assert "server sgd · counter rows</p>" in alone[0].read_text()


@pytest.mark.usefixtures("counter")
def test_python_takes_it_and_describes_it(tmp_path: Path) -> None:
    task = rota.Task(rota.models.logistic, rota.data.digits(), steps=1)
    run = rota.run([task], rounds=2, counter=Rounds(step=4), out=tmp_path / "a")
    assert run.state.policies["counter"]["count"].tolist() == [8.5]
    assert configured(tmp_path / "a") == {"name": "rounds", "step": 4, "first": 0.5}
    with pytest.raises(rota.BadInput, match=r"counter\.step is 'a', but it takes a whole number"):
        rota.run([task], rounds=2, counter=Rounds(step="a"))  # type: ignore[arg-type]


def test_a_kind_with_one_member_is_options_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "tally", Kind("tally", {"tally": Rows}, "tally", begin=count))
    out = tmp_path / "a"
    sets = ("--set", "rounds=2", "--set", "tally.step=5")
    outcome = call("run", *SMALL, *sets, "--out", out)
    assert outcome.status == 0, outcome.err
    assert tomllib.loads((out / "config.toml").read_text())["tally"] == {"step": 5}
    assert [entry["options"] for entry in json.loads(call("list", "tally", "--json").out)] == [
        ["step"]
    ]
    refused = call("run", *SMALL, "--set", "tally=5", "--out", tmp_path / "b")
    assert refused.err == "rota: 'tally' is 5, but it takes a table of options\n"
