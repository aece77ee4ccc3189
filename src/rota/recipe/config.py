"""Recipes: a TOML text that says what to run. `resolve` checks it and fills every default; `build` makes the objects.

rounds = 100                        # also: seed, evaluate, target, metrics, summary
[sampler]                           # a name and its options; `fraction = 0.1` may stand for `budget`
name = "uniform"
budget = 10
[estimator], [server]               # likewise, each with a default name
[devices], [availability]           # options alone
[[task]]                            # one for each model
data = "digits"                     # a name, or a table with a name and options
partition = { name = "iid", clients = 20 }
model = "two_nn"
lr = 0.1                            # also: batch ("all" for whole-data steps), epochs, steps, name ...: all numbers of rota.Task
"""

from __future__ import annotations

import copy
import functools
import inspect
import tomllib
import typing
from collections.abc import Callable, Collection
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from rota import rng
from rota.data.federation import Federation
from rota.errors import BadInput, at, did_you_mean
from rota.experiment import Experiment
from rota.hints import shown
from rota.plan import Task
from rota.policies import KINDS
from rota.recipe import registry
from rota.running.check import check_numbers

Config = dict[str, Any]

TOP: dict[str, tuple[Any, Any]] = {
    "summary": (str, ""),
    "rounds": (int, 100),
    "seed": (int, 0),
    "evaluate": (int, 1),
    "target": (float | None, None),
    "metrics": (tuple[str, ...], ()),
}
WORLD = {key: kind.members[key] for key, kind in KINDS.items() if kind.single}
"""What the clients are like: tables of options without a name."""
POLICIES = {key: (f"{key}s", kind.default) for key, kind in KINDS.items() if not kind.single}
_hints = typing.get_type_hints(Task)
WORK: dict[str, tuple[Any, Any]] = {
    **{
        each.name: (_hints[each.name], each.default)
        for each in fields(Task)
        if each.name not in ("model", "data", "loss", "score")
    },
    "batch": (int | str, 10),  # TOML has no null: "all" stands for None
}
SIZES = ("budget", "fraction")
"""Two ways to say how many clients a sampler draws."""
PARTS = {"data": "data", "partition": "partitions", "model": "models"}
KEYS = {*TOP, *POLICIES, *WORLD, "task"}
TASK_KEYS = {*WORK, *PARTS}


def names() -> list[str]:
    """The ready recipes."""
    return sorted(
        file.name.removesuffix(".toml")
        for file in resources.files("rota.recipe.ready").iterdir()
        if file.name.endswith(".toml")
    )


def read(recipe: str) -> Config:
    """A recipe by its name, or a TOML file by its path."""
    path = Path(recipe)
    if recipe in names():
        text = (
            resources.files("rota.recipe.ready")
            .joinpath(recipe + ".toml")
            .read_text(encoding="utf-8")
        )
    elif path.is_dir():
        inside = (
            f": did you mean {path / 'config.toml'}?"
            if (path / "config.toml").exists()
            else ", not a recipe: give a .toml file"
        )
        raise BadInput(f"{recipe} is a folder{inside}")
    elif path.exists():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"cannot read the recipe {recipe} ({getattr(error, 'strerror', None) or error})"
            ) from error
    elif path.suffix == ".toml":
        raise BadInput(
            f"there is no recipe file {recipe}: give the path of one, or a name ({', '.join(names())})"
        )
    else:
        raise BadInput(
            f"unknown recipe '{recipe}': {did_you_mean(recipe, names())} (or give the path of a .toml file)"
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{recipe} is not valid TOML: {error}") from error


def override(config: Config, setting: str) -> Config:
    """The config with one "key=value" changed. `task.lr=0.1` changes all tasks, `task.0.lr=0.1` the first; `target=` unsets a key, and
    `task.0=` takes the first task away.

    A new name for a sampler, model, ... (`sampler=full`) keeps those of the old one's options that the new one also has.
    """
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise BadInput(
            f"--set takes key=value, for example --set task.lr=0.05, but got '{setting}'"
        )
    return assign(config, path.strip(), value_of(text))


def value_of(text: str) -> Any:
    """A value as TOML reads it; what is not TOML is a text, and nothing is None."""
    if not text:
        return None
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return value["value"] if len(value) == 1 else text


def assign(config: Config, path: str, value: Any) -> Config:
    """The config with the value at a dotted path replaced, or removed where it is None."""
    new = copy.deepcopy(config)
    places: list[Any] = [new]
    *way, last = path.split(".")
    if last == "name" and way and _kind(way[-1]):  # sampler.name=full says the same as sampler=full
        *way, last = way
    for step in way:
        places = [found for place in places for found in _into(place, step, path)]
    if way == ["task"] and last.isdecimal() and isinstance(tasks := places[0], list):
        number = _number(tasks, last, path)
        tasks[number : number + 1] = [] if value is None else [value]
        return new
    here = (
        KEYS
        if not way
        else TASK_KEYS
        if way[0] == "task" and all(step.isdecimal() for step in way[1:])
        else {last}
    )
    if value is None and last not in here:
        raise BadInput(f"there is no key '{path}' to take away: {did_you_mean(last, here)}")
    tables = [item for place in places for item in (place if isinstance(place, list) else [place])]
    for place in tables:
        if not isinstance(place, dict):
            raise BadInput(
                f"there is no key '{path}': '{'.'.join(way)}' is {shown(place)}, not a table"
            )
        old, kind = place.pop(last, None), _kind(last)
        if value is None:
            continue
        if kind and isinstance(value, str) and isinstance(old, dict):
            known = registry.options(kind, _find(kind, value, path))
            place[last] = {
                "name": value,
                **{option: given for option, given in old.items() if option in known},
            }
        else:
            place[last] = value
        if way[-1:] == ["sampler"] and last in SIZES:  # the new one counts
            place.pop(SIZES[1 - SIZES.index(last)], None)
    return new


def _find(kind: str, name: str, where: str) -> Callable[..., Any]:
    """A member of a kind by its name; where tasks are numbered, a mistake says in which one it is."""
    with at(where if any(step.isdecimal() for step in where.split(".")) else ""):
        return registry.find(kind, name)


def _kind(key: str) -> str | None:
    """The kind of thing that a key names: "samplers" for "sampler"."""
    return POLICIES[key][0] if key in POLICIES else PARTS.get(key)


def _into(place: Any, step: str, path: str) -> list[Any]:
    """One step along a dotted path: a key of a table (made where missing; a short name becomes a table), or an item of a list."""
    if isinstance(place, list):
        if not step.isdecimal():
            return [found for item in place for found in _into(item, step, path)]
        return [place[_number(place, step, path)]]
    if not isinstance(place, dict):
        raise BadInput(
            f"there is no key '{path}': '{step}' is looked for in {shown(place)}, which is not a table"
        )
    inner = place.setdefault(step, {})
    if isinstance(inner, str) and _kind(step):
        inner = place[step] = {"name": inner}
    return [inner]


def _number(tasks: list[Any], step: str, path: str) -> int:
    """The number of a task, if there is one of that number."""
    if int(step) >= len(tasks):
        raise BadInput(
            f"there is no key '{path}': the recipe has {len(tasks)} [[task]], numbered from 0"
        )
    return int(step)


def resolve(raw: Config) -> Config:
    """The recipe with every key checked and every default filled in: what config.toml holds. Keys that are None are left out."""
    if raw.get("python") is True:
        raise BadInput(
            "this config.toml describes a run that was made in Python, whose objects it cannot make: run it from there"
        )
    _known("", raw, KEYS)
    config = _plain("", raw, TOP)
    for key, (kind, default) in POLICIES.items():
        config[key] = _table(key, kind, raw.get(key, {}), default)
    for key, world in WORLD.items():
        config[key] = registry.fill(key, key, world, _table_of(key, raw.get(key, {})))
    tasks = raw.get("task", [])
    tasks = tasks if isinstance(tasks, list) else [tasks]
    if not tasks:
        raise BadInput("the recipe has no [[task]]: give at least one, with its data and model")
    where = ["task"] if len(tasks) == 1 else [f"task.{number}" for number in range(len(tasks))]
    config["task"] = [_resolve_task(*each) for each in zip(where, tasks, strict=True)]
    resolved: Config = _without_none(config)
    check_numbers("", resolved)
    for place, task in zip(where, resolved["task"], strict=True):
        check_numbers(f"{place}.", task)
    return resolved


def _resolve_task(where: str, raw: Any) -> Config:
    raw = _table_of(where, raw)
    _known(f"{where}.", raw, TASK_KEYS)
    task = _plain(f"{where}.", raw, WORK)
    if isinstance(task["batch"], str) and task["batch"] != "all":
        raise BadInput(
            f"'{where}.batch' is '{task['batch']}', but it takes a whole number or \"all\""
        )
    for key, kind in PARTS.items():
        if key in raw:
            task[key] = _table(f"{where}.{key}", kind, raw[key])
        elif key != "partition":
            raise BadInput(
                f"'{where}.{key}' is missing: name one of {', '.join(registry.KINDS[kind])}"
            )
    if "partition" in task and "partition" not in _parameters("data", task["data"]["name"]):
        why = f"the data '{task['data']['name']}' come with their own clients"
        raise BadInput(
            f"'{where}.partition' is given, but {why}: leave it out (--set {where}.partition=)"
        )
    return task


def _plain(prefix: str, raw: Config, keys: dict[str, tuple[Any, Any]]) -> Config:
    """The plain values of a table, checked, with their defaults."""
    return {
        key: registry.convert(prefix + key, kind, raw[key]) if key in raw else default
        for key, (kind, default) in keys.items()
    }


def _known(prefix: str, given: Config, known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise BadInput(f"unknown key '{prefix}{key}': {did_you_mean(key, known)}")


def _table_of(where: str, value: Any) -> Config:
    if not isinstance(value, dict):
        raise BadInput(f"'{where}' is {value!r}, but it takes a table of options")
    return dict(value)


def _table(where: str, kind: str, given: Any, default: str | None = None) -> Config:
    """{"name": ..., options}, all of them; a plain text is a name without options, `default` the name where none is given."""
    table = {"name": given} if isinstance(given, str) else given
    name = table.get("name", default) if isinstance(table, dict) else None
    if not isinstance(name, str):
        takes = "a name, or a table with a name and options"
        raise BadInput(
            f"'{where}' is {shown(given)}, but it takes {takes}; known: {', '.join(registry.KINDS[kind])}"
        )
    table = {key: value for key, value in table.items() if key != "name"}
    filled = registry.fill(where, kind, _find(kind, name, where), table)
    if kind == "samplers" and "budget" in filled and filled.get("fraction") is not None:
        _check_fraction(filled["fraction"], table)
        filled.pop("budget")
    return {"name": name, **filled}


def _check_fraction(share: float, table: Config) -> None:
    if "budget" in table:
        raise BadInput(
            "the recipe has 'sampler.fraction' and 'sampler.budget': leave one of them out"
        )
    if not 0 <= share <= 1:
        raise BadInput(
            f"'sampler.fraction' is {share}, but it takes a share of the clients from 0 (one client) to 1 (all)"
        )


def _without_none(value: Any) -> Any:
    """TOML has no null: absent keys mean None. Tuples become lists."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def build(config: Config, tasks: list[Task] | None = None) -> Experiment:
    """The objects that a resolved config describes; loads the data, unless its tasks are given."""
    tasks = tasks or _build_tasks(config)
    sampler = dict(config["sampler"])
    if "fraction" in sampler and "budget" in _parameters("samplers", sampler["name"]):
        sampler["budget"] = max(1, round(sampler.pop("fraction") * tasks[0].roster.clients))
    policies = {
        key: _make(kind, sampler if key == "sampler" else config[key])
        for key, (kind, _) in POLICIES.items()
    }
    plain: Config = {key: config.get(key) for key in TOP if key != "summary"}
    world = {key: make(**config[key]) for key, make in WORLD.items()}
    return Experiment(tasks=tasks, policies={**policies, **world}, **plain)


def _options(table: Config) -> Config:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k != "name"}


def _make(kind: str, table: Config) -> Any:
    return registry.find(kind, table["name"])(**_options(table))


def _parameters(kind: str, name: str) -> Collection[str]:
    return inspect.signature(registry.find(kind, name)).parameters


def _build_tasks(config: Config) -> list[Task]:
    tables, tasks = config["task"], []
    for number, table in enumerate(tables):
        with at(f"task.{number}" if len(tables) > 1 else ""):
            tasks.append(_build_task(table, config["seed"]))
    return tasks


def _build_task(table: Config, seed: int) -> Task:
    work = {key: table[key] for key in WORK if key in table}
    work["batch"] = None if work["batch"] == "all" else work["batch"]
    source = dict(table["data"])
    if "seed" in _parameters("data", source["name"]):
        split, first = source.pop("split", 0), source.get("seed", seed)
        source["seed"] = (
            rng.key(first, "split", split) >> 33 if split else first
        )  # of 31 bits, which every generator takes
    if "partition" in table:
        source["partition"] = _make("partitions", table["partition"])
    data = _make("data", source)
    if not isinstance(data, Federation):
        raise BadInput(
            f"the data '{source['name']}' are a {type(data).__name__}: return a rota.Federation, as rota.from_clients makes one"
        )
    model = functools.partial(
        registry.find("models", table["model"]["name"]), **_options(table["model"])
    )
    return Task(model=model, data=data, **work)
