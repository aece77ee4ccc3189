"""Recipes: a TOML text that says what to run. `resolve` checks it and fills every default; `build` makes the objects.

rounds = 100                        # also: seed, evaluate, target, summary
[sampler]                           # a name and its options; `fraction = 0.1` may stand for `budget`
name = "uniform"
budget = 10
[estimator], [server], [devices]    # likewise, each with a default
[[task]]                            # one for each model
data = "digits"                     # a name, or a table with a name and options
partition = { name = "iid", clients = 20 }
model = "two_nn"
lr = 0.1                            # also: batch ("all" for whole-data steps), epochs, steps, prox, name
"""

from __future__ import annotations

import copy
import functools
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from rota import registry
from rota.engine import Devices
from rota.errors import BadInput, did_you_mean
from rota.loop import Experiment
from rota.plan import Task

Config = dict[str, Any]

TOP: dict[str, tuple[Any, Any]] = {
    "summary": (str, ""),
    "rounds": (int, 100),
    "seed": (int, 0),
    "evaluate": (int, 1),
    "target": (float | None, None),
}
POLICIES = {"sampler": ("samplers", "uniform"), "estimator": ("estimators", "unbiased"), "server": ("servers", "sgd")}
WORK: dict[str, tuple[Any, Any]] = {
    "name": (str, ""),
    "lr": (float, 0.1),
    "batch": (int | str, 10),
    "epochs": (int, 1),
    "steps": (int | None, None),
    "prox": (float, 0.0),
}
PARTS = {"data": "data", "partition": "partitions", "model": "models"}


def names() -> list[str]:
    """The ready recipes."""
    return sorted(file.name.removesuffix(".toml") for file in resources.files("rota.recipes").iterdir() if file.name.endswith(".toml"))


def read(recipe: str) -> Config:
    """A recipe by its name, or a TOML file by its path."""
    path = Path(recipe)
    if recipe in names():
        text = resources.files("rota.recipes").joinpath(recipe + ".toml").read_text()
    elif path.suffix == ".toml" and path.is_file():
        text = path.read_text()
    elif path.suffix == ".toml":
        raise BadInput(f"there is no recipe file {recipe}")
    else:
        raise BadInput(f"unknown recipe '{recipe}': {did_you_mean(recipe, names())}; or give the path of a .toml file")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{recipe} is not valid TOML: {error}") from error


def override(config: Config, setting: str) -> Config:
    """The config with one "key=value" changed. `task.lr=0.1` changes all tasks, `task.0.lr=0.1` the first.

    A new name for a sampler, model, ... (`sampler=full`) keeps those of the old one's options that the new one also has.
    """
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise BadInput(f"--set takes key=value, for example --set task.lr=0.05, and got '{setting}'")
    return assign(config, path, value_of(text))


def value_of(text: str) -> Any:
    """A value as TOML reads it; what is not TOML is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def assign(config: Config, path: str, value: Any) -> Config:
    """The config with the value at a dotted path replaced."""
    new = copy.deepcopy(config)
    places: list[Any] = [new]
    *way, last = path.split(".")
    for step in way:
        places = [found for place in places for found in _into(place, step, path)]
    tables = [item for place in places for item in (place if isinstance(place, list) else [place])]
    for place in tables:
        if not isinstance(place, dict):
            raise BadInput(f"--set {path}: there is no table to set '{last}' in")
        old = place.get(last)
        kind = POLICIES[last][0] if last in POLICIES else PARTS.get(last)
        if kind and isinstance(value, str) and isinstance(old, dict):
            shared = {*registry.options(registry.find(kind, value)), "fraction"}
            place[last] = {"name": value, **{k: v for k, v in old.items() if k in shared}}
        else:
            place[last] = value
    return new


def _into(place: Any, step: str, path: str) -> list[Any]:
    """One step along a dotted path: a key of a table (made where missing; a short name becomes a table), or an item of a list."""
    if isinstance(place, list):
        if not step.isdigit():
            return [found for item in place for found in _into(item, step, path)]
        if int(step) >= len(place):
            raise BadInput(f"--set {path}: there are {len(place)} tasks, numbered from 0")
        return [place[int(step)]]
    inner = place.setdefault(step, {})
    if isinstance(inner, str) and (step in POLICIES or step in PARTS):
        inner = place[step] = {"name": inner}
    return [inner]


def resolve(raw: Config) -> Config:
    """The recipe with every key checked and every default filled in: what config.toml holds. Keys that are None are left out."""
    _known("", raw, {*TOP, *POLICIES, "devices", "task"})
    config = _plain("", raw, TOP)
    for key, (kind, default) in POLICIES.items():
        given = _named(key, raw.get(key, default))
        fraction = {"fraction": given.pop("fraction")} if key == "sampler" and "fraction" in given else {}
        config[key] = _table(key, kind, given) | fraction
        if fraction:
            config[key].pop("budget", None)
    config["devices"] = registry.fill("devices", Devices, _table_of("devices", raw.get("devices", {})))
    tasks = raw.get("task", [])
    tasks = [tasks] if isinstance(tasks, dict) else tasks
    if not tasks:
        raise BadInput("the recipe has no [[task]]: give at least one, with its data and model")
    config["task"] = [_resolve_task(task) for task in tasks]
    resolved: Config = _without_none(config)
    return resolved


def _resolve_task(raw: Config) -> Config:
    raw = _table_of("task", raw)
    _known("task.", raw, {*WORK, *PARTS})
    task = _plain("task.", raw, WORK)
    if isinstance(task["batch"], str) and task["batch"] != "all":
        raise BadInput(f"'task.batch' is '{task['batch']}', but it takes a whole number or \"all\"")
    for key, kind in PARTS.items():
        if key in raw:
            given = _named(f"task.{key}", raw[key])
            seed = {"seed": registry.convert("task.data.seed", int, given.pop("seed"))} if key == "data" and "seed" in given else {}
            task[key] = _table(f"task.{key}", kind, given) | seed
        elif key != "partition":
            raise BadInput(f"'task.{key}' is missing: name one of {', '.join(registry.KINDS[kind])}")
    return task


def _plain(prefix: str, raw: Config, keys: dict[str, tuple[Any, Any]]) -> Config:
    """The plain values of a table, checked, with their defaults."""
    return {key: registry.convert(prefix + key, kind, raw[key]) if key in raw else default for key, (kind, default) in keys.items()}


def _known(prefix: str, given: Config, known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise BadInput(f"unknown key '{prefix}{key}': {did_you_mean(key, known)}")


def _table_of(where: str, value: Any) -> Config:
    if not isinstance(value, dict):
        raise BadInput(f"'{where}' is {value!r}, but it takes a table of options")
    return dict(value)


def _named(where: str, value: Any) -> Config:
    """{"name": ..., options}; a plain text is a name without options."""
    table = {"name": value} if isinstance(value, str) else _table_of(where, value)
    if not isinstance(table.get("name"), str):
        raise BadInput(f"'{where}' needs a name")
    return table


def _table(where: str, kind: str, given: Config) -> Config:
    name = given.pop("name")
    return {"name": name, **registry.fill(where, registry.find(kind, name), given)}


def _without_none(value: Any) -> Any:
    """TOML has no null: absent keys mean None. Tuples become lists."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def build(config: Config) -> Experiment:
    """The objects that a resolved config describes; loads the data."""
    tasks = [_build_task(task, config["seed"]) for task in config["task"]]
    sampler = dict(config["sampler"])
    if "fraction" in sampler:
        share = registry.convert("sampler.fraction", float, sampler.pop("fraction"))
        if not 0 <= share <= 1:
            raise BadInput(f"'sampler.fraction' is {share}, but it takes a share of the clients from 0 (one client) to 1 (all)")
        sampler["budget"] = max(1, round(share * tasks[0].data.clients))
    policies = {key: _make(kind, sampler if key == "sampler" else config[key]) for key, (kind, _) in POLICIES.items()}
    plain: Config = {key: config.get(key) for key in TOP if key != "summary"}
    return Experiment(tasks=tasks, devices=Devices(**config["devices"]), **policies, **plain)


def _options(table: Config) -> Config:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k != "name"}


def _make(kind: str, table: Config, **more: Any) -> Any:
    return registry.find(kind, table["name"])(**_options(table), **more)


def _build_task(table: Config, seed: int) -> Task:
    work = {key: table[key] for key in WORK if key in table}
    work["batch"] = None if work["batch"] == "all" else work["batch"]
    more = {"partition": _make("partitions", table["partition"])} if "partition" in table else {}
    data = _make("data", {"seed": seed, **table["data"]}, **more)
    model = functools.partial(registry.find("models", table["model"]["name"]), **_options(table["model"]))
    return Task(model=model, data=data, **work)
