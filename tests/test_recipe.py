"""Recipes: the ready ones run, overrides do what they say, and a config.toml repeats its run."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from test_cli import call

from rota import data, loop, recipe
from rota.errors import BadInput
from rota.hints import convert, fits
from rota.recipe import Config, config, registry

SLOW = {"mmfl-fashion", "shakespeare-roles"}
LESS = ("sampler=uniform", "sampler.budget=2", "task.steps=2")
"""What makes two rounds of the larger recipes short."""


def source(name: str) -> str:
    return str(recipe.resolve(recipe.read(name))["task"][0]["data"]["name"])


def settings(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@pytest.mark.parametrize("name", recipe.names())
def test_ready_recipes_resolve_to_a_config_that_resolves_to_itself(name: str) -> None:
    config = recipe.resolve(recipe.read(name))
    written = tomli_w.dumps(config)
    assert config["summary"]
    assert len(config["summary"]) < 120
    assert recipe.resolve(tomllib.loads(written)) == config
    assert tomli_w.dumps(recipe.resolve(tomllib.loads(written))) == written


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in recipe.names()],
)
def test_ready_recipes_run(name: str, tmp_path: Path) -> None:
    if not data.at_hand(source(name)):
        pytest.skip(f"the data '{source(name)}' are not here: set ROTA_DATA to their folder")
    outcome = call(
        "run",
        name,
        *settings("rounds=2", *(() if source(name) in ("digits", "synthetic") else LESS)),
        "--out",
        tmp_path / "a",
    )
    assert outcome.status == 0, outcome.err
    assert "after 2 rounds" in outcome.out


def test_a_runs_config_gives_the_same_run_again(tmp_path: Path) -> None:
    first = call(
        "run",
        "fedavg-digits",
        *settings("rounds=3", "seed=5", "sampler.fraction=0.2", "devices.spread=0.5"),
        "--out",
        tmp_path / "a",
    )
    again = call("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b")
    assert (first.status, again.status) == (0, 0), first.err + again.err
    for name in ("config.toml", "rounds.jsonl", "data.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    other = call(
        "run", tmp_path / "a" / "config.toml", *settings("seed=-6"), "--out", tmp_path / "c"
    )
    assert other.status == 0
    assert (tmp_path / "c" / "rounds.jsonl").read_bytes() != (
        tmp_path / "a" / "rounds.jsonl"
    ).read_bytes()


@pytest.mark.parametrize("kind", registry.kinds())
def test_defaults_are_written_as_if_they_were_given(kind: str) -> None:
    for name, member in registry.members(kind).items():
        required = {
            key: {int: 1, float: 1.0, str: "a"}.get(hint, "a")
            for key, (hint, default) in registry.options(kind, member).items()
            if default is registry.REQUIRED
        }
        filled = config.toml(registry.fill(name, kind, member, required))
        again = config.toml(registry.fill(name, kind, member, filled))
        assert tomli_w.dumps(again) == tomli_w.dumps(filled)


# --- changing a recipe


def changed(*changes: str, start: str = "fedavg-digits") -> Config:
    config = recipe.read(start)
    for change in changes:
        config = recipe.override(config, change)
    return recipe.resolve(config)


def at(config: Any, path: str) -> Any:
    for step in path.split("."):
        config = config[int(step) if step.isdigit() else step]
    return config


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        (["rounds=7"], "rounds", 7),
        (["task.lr=1"], "task.0.lr", 1.0),
        (["task.0.lr=0.5"], "task.0.lr", 0.5),
        (["task.optimizer=adam"], "task.0.optimizer", "adam"),
        (["task.batch=all"], "task.0.batch", "all"),
        (["summary=what I try"], "summary", "what I try"),
        (["sampler=full"], "sampler", {"name": "full"}),
        (["sampler.name=full"], "sampler", {"name": "full"}),
        (
            ["sampler.procedure=independent"],
            "sampler",
            {"name": "uniform", "budget": 5.0, "procedure": "independent"},
        ),
        (['sampler={name="uniform", budget=3}'], "sampler.budget", 3.0),
        (
            ["sampler.fraction=0.1"],
            "sampler",
            {"name": "uniform", "procedure": "fixed", "fraction": 0.1},
        ),
        (
            ["sampler.fraction=0.1", "sampler.budget=4"],
            "sampler",
            {"name": "uniform", "procedure": "fixed", "budget": 4.0},
        ),
        (["server.momentum=0.9"], "server", {"name": "sgd", "lr": 1.0, "momentum": 0.9}),
        (["server=adam", "server.lr=0.5", "server=yogi"], "server.lr", 0.5),
        (["devices.spread=0.5"], "devices.spread", 0.5),
        (
            ["task.partition=shards"],
            "task.0.partition",
            {"name": "shards", "clients": 20, "per_client": 2},
        ),
        (
            ["task.partition=high-low", "task.partition.low_size=[1, 2]"],
            "task.0.partition.low_size",
            [1, 2],
        ),
        (
            ["task.data=mnist"],
            "task.0.data",
            {"name": "mnist", "matched_test": True, "validation": 0},
        ),
        (["task.data.seed=3"], "task.0.data.seed", 3),
        (
            ["task.data.split=2", "task.data=mnist"],
            "task.0.data",
            {"name": "mnist", "matched_test": True, "validation": 0, "split": 2},
        ),
        (
            ["task.data.split=2"],
            "task.0.data",
            {"name": "digits", "matched_test": True, "validation": 0, "split": 2},
        ),
        (
            ["task.partition=", "task.data=synthetic", "task.data.classes=3"],
            "task.0.data.classes",
            3,
        ),
        (["task.model=cnn"], "task.0.model", {"name": "cnn"}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_overrides(changes: list[str], path: str, value: Any) -> None:
    assert at(changed(*changes), path) == value


def test_an_empty_value_unsets_a_key() -> None:
    assert "target" not in changed("target=", start="fedavg-mnist")
    assert "partition" not in changed("task.partition=")["task"][0]
    assert changed("rounds=")["rounds"] == 100


def test_an_empty_value_takes_a_task_away() -> None:
    def names(*changes: str) -> list[str]:
        return [task["name"] for task in changed(*changes, start="mmfl-digits")["task"]]

    assert names("task.0=") == ["small", "wide"]
    assert names("task.2=", "task.0=") == ["small"]
    assert names('task.1={name="other", data="digits", model="cnn"}') == ["linear", "other", "wide"]


def test_splits_are_the_runs_chance_and_apart_from_one_another() -> None:
    def labels(*settings: str) -> list[int]:
        return recipe.build(changed(*settings)).tasks[0].data.train.y.tolist()

    first, second = labels("task.data.split=1"), labels("task.data.split=2")
    assert (
        len(
            {
                tuple(each)
                for each in (labels(), first, second, labels("task.data.split=1", "seed=1"))
            }
        )
        == 4
    )
    assert labels("task.data.split=0") == labels()
    assert labels("task.data.split=1", "task.data.seed=7", "seed=1") == labels(
        "task.data.split=1", "seed=7"
    )


def test_overrides_leave_the_recipe_they_start_from_alone() -> None:
    config = recipe.read("fedavg-digits")
    before = json.dumps(config)
    recipe.override(config, "task.data.seed=3")
    assert json.dumps(config) == before


def test_a_key_of_task_is_a_key_of_every_task() -> None:
    config = {
        "task": [{"data": "digits", "model": "two_nn"}, {"data": "digits", "model": "logistic"}]
    }
    assert [
        task["lr"] for task in recipe.resolve(recipe.override(config, "task.lr=0.3"))["task"]
    ] == [0.3, 0.3]
    assert [
        task["lr"] for task in recipe.resolve(recipe.override(config, "task.1.lr=0.3"))["task"]
    ] == [0.1, 0.3]
    assert [
        task["model"]["name"]
        for task in recipe.resolve(recipe.override(config, "task.model=cnn"))["task"]
    ] == ["cnn", "cnn"]


def test_a_fraction_is_a_share_of_the_clients() -> None:
    budgets = [
        recipe.build(changed(f"sampler.fraction={share}")).sampler.budget
        for share in (0, 0.1, 0.5, 1)
    ]  # type: ignore[attr-defined]
    assert budgets == [1, 2, 10, 20]
    assert not hasattr(
        recipe.build(changed("sampler.fraction=0.1", "sampler=full")).sampler, "budget"
    )


def test_any_option_can_have_another_way_to_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = registry.Alternative("lr", float, lambda x: x > 0, "a positive number", halved)
    monkeypatch.setitem(registry.ALTERNATIVES, "servers", {"twice_lr": halves})
    assert changed("server.twice_lr=1")["server"] == {
        "name": "sgd",
        "momentum": 0.0,
        "twice_lr": 1.0,
    }
    assert "lr" in changed("server.twice_lr=1", "server.lr=3")["server"]
    assert "twice_lr" not in changed("server.twice_lr=1", "server.lr=3")["server"]
    assert changed("server.twice_lr=1", "server=adam")["server"]["twice_lr"] == 1.0
    assert recipe.build(changed("server.twice_lr=1")).server.lr == 10.5  # type: ignore[attr-defined]
    listed = {entry["name"]: entry["options"] for entry in registry.table("servers")}
    assert "twice_lr" in listed["adam"]
    with pytest.raises(
        BadInput, match=r"'server.twice_lr' is -1.0, but it takes a positive number"
    ):
        changed("server.twice_lr=-1")
    with pytest.raises(BadInput, match=r"the recipe has 'server.twice_lr' and 'server.lr': leave"):
        recipe.resolve({**changed(), "server": {"twice_lr": 1.0, "lr": 1.0}})
    small = ["rounds=1", "sampler.budget=2", "task.steps=1", "task.model=logistic"]
    words = ["--vary", "server.twice_lr=1,2", "--out", tmp_path / "a"]
    outcome = call("compare", "fedavg-digits", *settings(*small), *words)
    assert outcome.status == 0, outcome.err
    config = tomllib.loads((tmp_path / "a" / "2-seed0" / "config.toml").read_text())
    assert config["server"]["twice_lr"] == 2.0


def halved(value: float, clients: int) -> float:
    return value / 2 + clients / 2


KEYS = [
    "rounds",
    "seed",
    "target",
    "sampler",
    "sampler.budget",
    "sampler.fraction",
    "server.lr",
    "devices",
    "task",
    "task.0",
    "task.lr",
]
KEYS += ["task.1", "task.².lr"]
KEYS += ["task.batch", "task.data", "task.data.seed", "task.data.split"]
KEYS += ["task.partition", "task.partition.clients", "task.model", "task.model.classes", ""]
VALUES = [
    "",
    "0",
    "-1",
    "1.5",
    "nan",
    "1e999",
    "true",
    '""',
    "[]",
    "[1, 2]",
    "{}",
    "{name=1}",
    "full",
    "two_nn",
    "iid",
    "2020-01-01",
    "a=b",
]
WORD = st.text(st.characters(codec="utf-8", exclude_characters=":"), max_size=8)


@given(
    st.lists(st.tuples(st.sampled_from(KEYS) | WORD, st.sampled_from(VALUES) | WORD), max_size=3)
)
def test_any_setting_is_taken_or_refused(pairs: list[tuple[str, str]]) -> None:
    try:
        config = changed(*(f"{key}={value}" for key, value in pairs))
    except BadInput:
        return
    assert recipe.resolve(tomllib.loads(tomli_w.dumps(config))) == config


# --- the user's own


OWN = '''
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import rota
from rota.sampling import draw

if TYPE_CHECKING:
    from nowhere import Nothing


@dataclass(frozen=True)
class Odd:
    """Every client with an odd number, or `step` apart."""

    step: int = 2

    def init(self, shares, rounds):
        return {"rounds": np.zeros(1)}

    def draw(self, state, shares, generator):
        wanted = np.zeros(shares.shape)
        wanted[:, 1 :: self.step] = 1.0
        return draw.independent(wanted, shares, generator)

    def observe(self, state, shares, plan, seen):
        return {"rounds": state["rounds"] + 1}


@dataclass(frozen=True)
class Share(Odd):
    """A fraction that is not rota's, for there is no budget."""

    fraction: float = 2.5


@dataclass(frozen=True)
class Both(Odd):
    """A budget and a fraction that are two things."""

    budget: int = 1
    fraction: float = 0.5


@dataclass(frozen=True)
class Must(Odd):
    """A budget without a default."""

    budget: int = field(kw_only=True)


class Net(nn.Module):
    def __init__(self, shape, classes: int, width: int = 4, note: "Nothing" = None) -> None:
        super().__init__()
        self.inner = nn.Linear(int(np.prod(shape)), width)
        self.outer = nn.Linear(width, classes)

    def forward(self, x):
        return self.outer(self.inner(x.flatten(1)).relu())


def load(clients: int = 3):
    """Data without a seed and without a partition."""
    generator = torch.Generator().manual_seed(1)
    def pair(n):
        x = torch.randn(n, 5, generator=generator)
        return x, (x[:, 0] > 0).long()
    return rota.from_clients([pair(20) for _ in range(clients)], pair(30))


def nothing():
    return 5


table = {}
'''
OWN_RECIPE = """
rounds = 2
[sampler]
name = "own_parts:Odd"
[[task]]
data = { name = "own_parts:load", clients = 6 }
model = { name = "own_parts:Net", width = 7 }
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_parts.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(OWN_RECIPE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_parts", None)


def test_own_sampler_model_and_data(own: Path) -> None:
    outcome = call("run", "own.toml", "--set", "sampler.step=4", "--out", "a")
    assert outcome.status == 0, outcome.err
    first = json.loads((own / "a" / "rounds.jsonl").read_text().splitlines()[0])
    assert first["cohort"] == {"own": [1, 5]}
    config = tomllib.loads((own / "a" / "config.toml").read_text())
    assert config["sampler"] == {"name": "own_parts:Odd", "step": 4}
    assert config["task"][0]["model"]["width"] == 7
    assert call("run", "a/config.toml", "--out", "b", "--allow", "own_parts").status == 0
    assert (own / "a" / "rounds.jsonl").read_bytes() == (own / "b" / "rounds.jsonl").read_bytes()
    assert "" not in sys.path
    assert call("run", "own.toml", "--set", "sampler=own_parts:Share", "--out", "c").status == 0
    assert tomllib.loads((own / "c" / "config.toml").read_text())["sampler"]["fraction"] == 2.5


@pytest.mark.usefixtures("own")
def test_a_fraction_stands_for_the_budget_of_an_own_sampler_but_not_for_another_fraction() -> None:
    def sampler(*changes: str) -> Any:
        config = recipe.read("own.toml")
        for change in changes:
            config = recipe.override(config, change)
        return recipe.build(recipe.resolve(config)).sampler

    both = sampler("sampler=own_parts:Both", "sampler.budget=3", "sampler.fraction=2.5")
    assert (both.budget, both.fraction) == (3, 2.5)
    must = sampler("sampler=own_parts:Must", "sampler.fraction=0.5")
    assert (must.budget, must.step) == (3, 2)
    with pytest.raises(BadInput, match=r"'sampler.budget' is missing: it takes a whole number"):
        sampler("sampler=own_parts:Must")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "sampler=own_parts:Even",
            "cannot import 'own_parts:Even' (AttributeError: module 'own_parts' has no attribute",
        ),
        (
            "sampler=no_such_module:Odd",
            "cannot import 'no_such_module:Odd' (ModuleNotFoundError: No module named 'no_such_mod",
        ),
        ("sampler=:Odd", "cannot import ':Odd'"),
        ("sampler=own_parts:table", "'own_parts:table' is not a class or function, but {}"),
        ("sampler.steps=3", "unknown key 'sampler.steps': did you mean 'step'?"),
        ("sampler.step=wide", "'sampler.step' is 'wide', but it takes a whole number"),
        (
            "task.data=own_parts:nothing",
            "the data 'own_parts:nothing' are a int: return a rota.Federation",
        ),
        (
            "task.partition=iid",
            "'task.partition' is given, but the data 'own_parts:load' come with their own clients",
        ),
        ("task.data.seed=1", "unknown key 'task.data.seed'"),
        ("task.data.split=1", "unknown key 'task.data.split'"),
    ],
)
@pytest.mark.usefixtures("own")
def test_own_parts_that_cannot_be_used(change: str, sentence: str) -> None:
    outcome = call("run", "own.toml", "--set", change, "--out", "a")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith(f"rota: {sentence}")
    assert outcome.err.count("\n") == 1


def test_a_module_that_breaks_while_it_is_imported(own: Path) -> None:
    (own / "broken_parts.py").write_text("def f(:\n")
    outcome = call("run", "own.toml", "--set", "sampler=broken_parts:f", "--out", "a")
    assert outcome.status == 2
    assert outcome.err.startswith("rota: cannot import 'broken_parts:f' (SyntaxError: ")


def refused(*words: str) -> str:
    """The one sentence of a command that is refused."""
    outcome = call(*words)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    return outcome.err


def test_a_recipe_runs_no_code_from_elsewhere(
    own: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Before anything is imported, whatever place names it; only the user may allow a module."""
    away = tmp_path_factory.mktemp("away")
    (own / "marks.py").write_text(
        f"open({str(own / 'ran')!r}, 'w').close()\nfrom own_parts import *\n"
    )
    for number, (old, new) in enumerate(
        [
            ("own_parts:Odd", "marks:Odd"),
            ("own_parts:load", "marks:load"),
            ("own_parts:Net", "marks:Net"),
            ("[sampler]", '[estimator]\nname = "marks:Odd"\n[sampler]'),
            ("[sampler]", 'server = "marks:Odd"\n[sampler]'),
        ]
    ):
        text = OWN_RECIPE.replace("own_parts:", "rota.sampling:").replace(
            old.replace("own_parts:", "rota.sampling:"), new
        )
        (away / f"{number}.toml").write_text(text)
        commands = (
            ("run", f"{away}/{number}.toml", "--set", "sampler.step=2", "--out", "x"),
            ("compare", f"{away}/{number}.toml", "--vary", "sampler=full", "--out", "x"),
        )
        for words in commands:
            sentence = refused(*words, "--allow", "rota")
            assert "names 'marks:" in sentence
            assert "does not lie beside the recipe: add --allow marks if you trust it" in sentence
    assert not (own / "ran").exists()
    assert not Path("x").exists()


def test_a_module_beside_the_recipe_needs_no_permission(
    own: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever rota is started; and the command that resumes names the recipe beside it."""
    monkeypatch.chdir(away := tmp_path_factory.mktemp("away"))
    words = ("run", f"{own}/own.toml", "--set", "rounds=2", "--out", "a")
    with mock.patch.object(loop, "play", side_effect=KeyboardInterrupt):
        stopped = call(*words)
    assert stopped.status == 130, stopped.err
    again = shlex.split(stopped.err.split("to resume: rota ")[1])
    assert again == [*words, "--resume"]
    assert call(*again).status == 0
    assert (away / "a" / "summary.json").exists()
    assert "which runs code" in refused("run", "a/config.toml", "--out", "b")


def test_a_module_that_only_seems_to_lie_beside_the_recipe(own: Path) -> None:
    (own / "shutil.py").write_text(OWN)
    (own / "sly.toml").write_text(OWN_RECIPE.replace("own_parts:Odd", "shutil:rmtree"))
    sentence = "another module has this name already: rename"
    assert sentence in refused("run", "sly.toml", "--out", "a")
    for name in ("os.path:join", "..own_parts:Odd", "../own_parts:Odd", "own_parts/:Odd", ":Odd"):
        (own / "sly.toml").write_text(OWN_RECIPE.replace("own_parts:Odd", name))
        assert "does not lie beside the recipe" in refused("run", "sly.toml", "--out", "a")


@pytest.mark.parametrize("place", ["sampler", "task.model", "task.data", "server"])
def test_a_builtin_is_no_member(place: str) -> None:
    sentence = refused("run", "fedavg-digits", "--set", f"{place}=builtins:dict", "--out", "/x")
    assert "'builtins:dict' does not say which parameters it takes" in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("a = " + "{ b = " * 30 + "1" + "}" * 30, "is nested too deeply: use at most 20 levels"),
        (".".join("a" * 400) + " = 1", "is nested too deeply: use at most 20 levels"),
        ("a = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
        ("rounds = 0x" + "f" * 9000, "'rounds' is a very long int, but it takes a whole number"),
        ("# " + "a" * 100_000_000, "has 100 MB, but a recipe has at most 10 MB"),
    ],
)
def test_deep_and_huge_recipes(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "huge.toml").write_text(text)
    assert words in refused("run", str(tmp_path / "huge.toml"), "--out", str(tmp_path / "a"))


@pytest.mark.parametrize(
    "setting",
    [
        "rounds=" + "9" * 5000,
        "rounds=0x" + "f" * 9000,
        "task.lr=" + "[" * 5000,
        ".".join("a" * 5000) + "=1",
        "sampler=" + "a" * 9999 + ":b",
        "task.name=" + "a" * 300,
    ],
)
def test_deep_and_huge_settings(setting: str, tmp_path: Path) -> None:
    sentence = refused("run", "fedavg-digits", "--set", setting, "--out", str(tmp_path / "a"))
    assert len(sentence) < 600


def test_names_too_long_for_a_file_system(tmp_path: Path) -> None:
    assert "give a shorter name" in refused("run", "a" * 300, "--out", str(tmp_path / "a"))
    assert "give a shorter name" in refused("run", "a" * 300 + ".toml", "--out", "a")
    words = ("run", "fedavg-digits", "--out", str(tmp_path / ("a" * 300)))
    assert "cannot use the output folder" in refused(*words)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, True, "'k' is true, but it takes a whole number"),
        (int, 1.0, "'k' is 1.0, but it takes a whole number"),
        (int, "1", "'k' is '1', but it takes a whole number"),
        (float, True, "'k' is true, but it takes a number"),
        (float, float("nan"), "'k' is nan, but it takes a number"),
        (float | None, "a", "'k' is 'a', but it takes a number"),
        (int | str, [1], "'k' is [1], but it takes a whole number or a string"),
        (str | Path, 1, "'k' is 1, but it takes a string or a path"),
        (bool, 1, "'k' is 1, but it takes true or false"),
        (tuple[int, int], [1], "'k' is [1], but it takes a list of 2 values, each a whole number"),
        (tuple[int, ...], 3, "'k' is 3, but it takes a list"),
        (Literal["a", "b"], "c", "'k' is 'c', but it takes one of 'a', 'b'"),
        (Literal[1], True, "'k' is true, but it takes '1'"),
        (int | Literal["all"], "none", "'k' is 'none', but it takes a whole number or 'all'"),
        (
            int | tuple[int, ...] | str,
            True,
            "'k' is true, but it takes a whole number, a list or a string",
        ),
        (tuple[float, ...], [1.0, math.inf], "'k' is [1.0, inf], but it takes a list"),
        (float, 10**400, f"'k' is {'1' + '0' * 99}..., but it takes a number"),
        (int, 2**63, f"'k' is {2**63}, but it takes a whole number"),
    ],
)
def test_a_wrong_type_in_a_users_words(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(BadInput) as mistake:
        convert("k", kind, value)
    assert str(mistake.value) == words


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (float, 1, 1.0),
        (tuple[int, int], [1, 2], (1, 2)),
        (tuple[float, ...], [1, 2.5], (1.0, 2.5)),
        (float | tuple[float, ...] | None, [1], (1.0,)),
        (list[int], [1], [1]),
        (int | str, "all", "all"),
        (Any, [1], [1]),
        (str | Path, "a", "a"),
        (Path, "a", Path("a")),
        (str, datetime.date(2020, 1, 1), "2020-01-01"),
    ],
)
def test_what_toml_writes_becomes_what_is_asked_for(kind: Any, value: Any, result: Any) -> None:
    converted = convert("k", kind, value)
    assert converted == result
    assert type(converted) is type(result)


def hints() -> set[Any]:
    """The type hints of everything that a recipe can set."""
    found = {hint for keys in (config.TOP, config.TASK) for hint, _ in keys.values()}
    for kind, members in registry.kinds().items():
        for member in members.values():
            found |= {hint for hint, _ in registry.options(kind, member).values()}
    return found


HINTS = sorted(hints() | {Path, list[int], tuple[str, float]}, key=str)
NUMBERS = st.integers() | st.floats() | st.booleans()
STRINGS = st.sampled_from(["fixed", "mixed", "cpu", "all", "sgd", ""]) | st.text(max_size=3)
DATES = st.dates() | st.times() | st.datetimes()
ITEMS = NUMBERS | STRINGS | DATES
TOML = st.recursive(
    ITEMS | st.lists(NUMBERS, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=2),
    max_leaves=5,
)


def means(hint: Any, value: Any) -> bool:
    """Whether a value from TOML is what a hint asks for: the rules, spelled out once more."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Any:
        return True
    if kind is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if kind in (typing.Union, types.UnionType):
        return any(means(part, value) for part in inner)
    if kind in (list, Sequence) or inner[1:] == (...,):
        return type(value) is list and all(means(inner[0], item) for item in value)
    if kind is tuple:
        fit = type(value) is list and len(value) == len(inner)
        return fit and all(map(means, inner, value))
    return type(value) in {float: (float, int), Path: (str,)}.get(kind, (kind,))


def finite(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(finite, value.values() if isinstance(value, dict) else value))
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is not float or math.isfinite(value)


def holds(hint: Any, value: Any) -> bool:
    """Whether a converted value has exactly the hint's types."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Any:
        return True
    if kind is typing.Literal:
        return value in inner
    if kind in (typing.Union, types.UnionType):
        return any(holds(part, value) for part in inner)
    if kind is tuple and inner[1:] != (...,):
        return type(value) is tuple and all(map(holds, inner, value))
    if inner:
        made = tuple if kind is Sequence else kind
        return type(value) is made and all(holds(inner[0], item) for item in value)
    return isinstance(value, kind) if kind is Path else type(value) is kind


def written(value: Any) -> Any:
    """A value as TOML would write it."""
    if isinstance(value, dict):
        return {key: written(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [written(inner) for inner in value]
    return str(value) if isinstance(value, Path | datetime.date | datetime.time) else value


@pytest.mark.parametrize("hint", HINTS, ids=str)
@given(value=TOML)
def test_what_is_converted_and_what_is_refused(hint: Any, value: Any) -> None:
    plain = written(value)
    if not (means(hint, plain) and finite(value)):
        with pytest.raises(BadInput, match=r"^'k' is .*, but it takes .*$"):
            convert("k", hint, value)
        return
    converted = convert("k", hint, value)
    assert holds(hint, converted)
    assert fits(converted, hint)
    assert converted == Path(plain) if hint is Path else written(converted) == plain
