"""Recipes: a TOML text that says what to run. `resolve` checks it and adds every default; `build`
makes the objects.

rounds = 100                        # also: seed, evaluate, target, metrics, summary
[sampler]                           # one table for each kind of policy: a name and options
name = "uniform"                    # a kind with only one member needs no name: [admission]
budget = 10                         # or `fraction = 0.1`
[[task]]                            # one for each model
data = "digits"                     # a name, or a table with a name and options
partition = { name = "iid", clients = 20 }
model = "two_nn"
lr = 0.1                            # and the other numbers of rota.Task; batch = "all" is all data
"""

from __future__ import annotations

import copy
import functools
import os
import tomllib
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from rota import rng
from rota.data.federation import Federation
from rota.errors import BadInput, at, did_you_mean, first_line, what_and_where
from rota.experiment import Experiment
from rota.hints import convert, shown
from rota.plan import Task
from rota.policies import KINDS
from rota.recipe import registry, trust
from rota.running.check import check_numbers
from rota.scores import ERRORS, MEASURES, Measure

Config = dict[str, Any]

TOP: registry.Options = {
    "summary": (str, ""),
    "rounds": (int, 100),
    "seed": (int, 0),
    "evaluate": (int, 1),
    "target": (float | None, None),
    "metrics": (tuple[str, ...], ()),
}
"""The keys of a recipe that are no tables."""
PARTS = registry.FIELDS


def _task_options() -> registry.Options:
    hints = typing.get_type_hints(Task)
    found: registry.Options = {}
    for each in fields(Task):
        if each.name not in ("model", "data", *MEASURES):
            found[each.name] = hints[each.name], each.default
    # TOML has no functions
    found["optimizer"] = typing.Literal["sgd", "adam", "adamw"], "sgd"
    # TOML has no null: "all" stands for None
    return found | {"batch": (int | typing.Literal["all"], 10)}


DEEPEST = 20
"""The most levels of tables and lists in a recipe."""
LARGEST = 10_000_000
"""The most bytes of a recipe's file."""
LONGEST = 255
"""The most bytes of a file's name on common file systems."""
TASK = _task_options()
"""The keys of a task that name nothing: the fields of rota.Task that a TOML file can hold."""
TASK_KEYS = {*TASK, *PARTS, *MEASURES}


def top_keys() -> set[str]:
    """The keys of a recipe."""
    return {*TOP, *KINDS, "task"}


def names() -> list[str]:
    """The ready recipes."""
    files = [file.name for file in resources.files("rota.recipe.ready").iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read(recipe: str, allow: Sequence[str] = ()) -> Config:
    """A ready recipe by its name, or a TOML file by its path.

    A file may name modules of code that lie beside it, and those in `allow` (trust.py).
    """
    config = parse(text(recipe), recipe)
    if recipe not in names():
        trust.check(config, Path(recipe), allow)
    return config


def parse(text: str, source: str) -> Config:
    """A TOML text as plain values; `source` names it in messages."""
    try:
        config = tomllib.loads(text)
    except RecursionError as error:
        raise BadInput(f"{source} is nested too deeply: use at most {DEEPEST} levels") from error
    except ValueError as error:  # also for a number of thousands of digits
        raise BadInput(f"{source} is not valid TOML: {first_line(error)}") from error
    _refuse_deep(config, source)
    return config


def _refuse_deep(config: Any, source: str) -> None:
    """Refuse what is nested more deeply than any recipe, and would end in a RecursionError."""
    level = [config]
    for _ in range(DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in inner for each in some if isinstance(each, dict | list)]
    if level:
        raise BadInput(f"{source} is nested too deeply: use at most {DEEPEST} levels")


def text(recipe: str) -> str:
    """The text of a ready recipe, or of a file."""
    path = Path(recipe)
    if len(os.fsencode(path.name)) > LONGEST or "\0" in recipe:
        raise BadInput(f"{shown(recipe)} is no name of a recipe or a file: give a shorter name")
    if recipe in names():
        ready = resources.files("rota.recipe.ready").joinpath(f"{recipe}.toml")
        return ready.read_text(encoding="utf-8")
    if path.is_dir() and (path / "config.toml").exists():
        raise BadInput(f"{recipe} is a folder: did you mean {path / 'config.toml'}?")
    if path.is_dir():
        raise BadInput(f"{recipe} is a folder, not a recipe: give a .toml file")
    if path.exists():
        try:
            if path.stat().st_size > LARGEST:
                size = f"{path.stat().st_size / 1e6:,.0f} MB"
                raise BadInput(
                    f"{recipe} has {size}, but a recipe has at most {LARGEST // 10**6} MB"
                )
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise BadInput(f"cannot read the recipe {recipe} ({why})") from error
    if path.suffix == ".toml":
        known = f"a name ({', '.join(names())})"
        raise BadInput(f"there is no recipe file {recipe}: give the path of a file, or {known}")
    hint = f"{did_you_mean(recipe, names())} (or give the path of a .toml file)"
    raise BadInput(f"unknown recipe '{recipe}': {hint}")


def override(config: Config, setting: str) -> Config:
    """The config with one "key=value" changed.

    `task.lr=0.1` changes all tasks, `task.0.lr=0.1` the first. `target=` removes a key, `task.0=`
    the first task. A new name for a sampler, a model ... (`sampler=full`) keeps the options of the
    old one that the new one has, too.
    """
    path, equals, text = setting.partition("=")
    if not equals or not path:
        example = "for example --set task.lr=0.05"
        raise BadInput(f"--set takes key=value, {example}, but got '{setting}'")
    return assign(config, path.strip(), value_of(text))


def value_of(text: str) -> Any:
    """A value as TOML reads it; a string if it is not TOML, None if it is empty."""
    if not text:
        return None
    try:
        value = tomllib.loads(f"value = {text}")
    except RecursionError as error:
        raise BadInput(f"{shown(text)} is nested too deeply") from error
    except ValueError:
        return text
    _refuse_deep(value, shown(text))
    return value["value"] if len(value) == 1 else text


def assign(config: Config, path: str, value: Any) -> Config:
    """The config with the value at a dotted path replaced, or removed where it is None."""
    new = copy.deepcopy(config)
    *way, last = path.split(".")
    if len(way) >= DEEPEST:
        raise BadInput(f"there is no key {shown(path)}: it has too many levels")
    if last == "name" and way and _kind(way[-1]):  # sampler.name=full is sampler=full
        *way, last = way
    places: list[Any] = [new]
    for step in way:
        places = [found for place in places for found in _into(place, step, path)]
    if way == ["task"] and last.isdecimal() and isinstance(places[0], list):
        number = _number(places[0], last, path)
        places[0][number : number + 1] = [] if value is None else [value]
        return new
    if value is None:
        _check_known(way, last, path)
    for place in places:
        for table in place if isinstance(place, list) else [place]:
            _set(table, way, last, value, path)
    return new


def _set(table: Any, way: list[str], key: str, value: Any, path: str) -> None:
    """Replace one key of a table, or remove it where the value is None."""
    if not isinstance(table, dict):
        inside = f"'{'.'.join(way)}' is {shown(table)}, not a table"
        raise BadInput(f"there is no key '{path}': {inside}")
    old, kind = table.pop(key, None), _kind(key)
    if value is None:
        return
    if kind and isinstance(value, str) and isinstance(old, dict):
        known = registry.options(kind, _find(kind, value, path))
        kept = {option: given for option, given in old.items() if option in known}
        value = {"name": value, **kept}
    table[key] = value
    for rival in _rivals(way, table, key, path):
        table.pop(rival, None)


def _rivals(way: list[str], table: Config, option: str, path: str) -> set[str]:
    """The options of a table that cannot be given together with this one."""
    key = way[-1] if way else ""
    default = KINDS[key].default if key in KINDS else None
    name = table.get("name", default)
    if key not in {*KINDS, *PARTS} or not isinstance(name, str):
        return set()
    kind = registry.listed(key) if key in KINDS else PARTS[key]
    return registry.rivals(kind, _find(kind, name, path), option)


def _check_known(way: list[str], last: str, path: str) -> None:
    """A key that is removed must exist, where the recipe's keys are fixed."""
    if not way:
        known = top_keys()
    elif way[0] == "task" and all(step.isdecimal() for step in way[1:]):
        known = TASK_KEYS
    else:
        return
    if last not in known:
        raise BadInput(f"there is no key '{path}' to remove: {did_you_mean(last, known)}")


def _find(kind: str, name: str, where: str) -> Callable[..., Any]:
    """A member of a kind by its name. Where tasks are numbered, a mistake names its place."""
    with at(where if any(step.isdecimal() for step in where.split(".")) else ""):
        return registry.find(kind, name)


def _kind(key: str) -> str | None:
    """The kind of what a key names: "samplers" for "sampler"; None if it names nothing."""
    if key in KINDS and not KINDS[key].single:
        return registry.listed(key)
    return PARTS.get(key)


def _into(place: Any, step: str, path: str) -> list[Any]:
    """What one step along a dotted path leads to: the value of a key, or items of a list.

    A missing key becomes a table, and so does a name without options.
    """
    if isinstance(place, list):
        if not step.isdecimal():
            return [found for item in place for found in _into(item, step, path)]
        return [place[_number(place, step, path)]]
    if not isinstance(place, dict):
        inside = f"'{step}' would be inside {shown(place)}, which is not a table"
        raise BadInput(f"there is no key '{path}': {inside}")
    inner = place.setdefault(step, {})
    if isinstance(inner, str) and _kind(step):
        inner = place[step] = {"name": inner}
    return [inner]


def _number(tasks: list[Any], step: str, path: str) -> int:
    """The number of a task, if there is such a task."""
    if int(step) >= len(tasks):
        count = f"the recipe has {len(tasks)} [[task]], numbered from 0"
        raise BadInput(f"there is no key '{path}': {count}")
    return int(step)


def resolve(raw: Config) -> Config:
    """The recipe with every key checked and every default added, as config.toml holds it.

    Keys with the value None are left out.
    """
    if raw.get("python") is True:
        raise BadInput(
            "this config.toml only describes a run that was started in Python:"
            " start it from there again"
        )
    _known("", raw, top_keys())
    config = _values("", raw, TOP)
    for key, kind in KINDS.items():
        given = raw.get(key, {})
        if kind.single:
            member = kind.members[kind.default]
            config[key] = registry.fill(key, registry.listed(key), member, _table(key, given))
        else:
            config[key] = _named(key, registry.listed(key), given, kind.default)
    tasks = raw.get("task", [])
    tasks = tasks if isinstance(tasks, list) else [tasks]
    if not tasks:
        raise BadInput("the recipe has no [[task]]: give at least one, with its data and model")
    where = ["task"] if len(tasks) == 1 else [f"task.{number}" for number in range(len(tasks))]
    config["task"] = [_resolve_task(*each) for each in zip(where, tasks, strict=True)]
    resolved: Config = toml(config)
    check_numbers("", resolved)
    for place, task in zip(where, resolved["task"], strict=True):
        check_numbers(f"{place}.", task)
    return resolved


def _resolve_task(where: str, raw: Any) -> Config:
    raw = _table(where, raw)
    _known(f"{where}.", raw, TASK_KEYS)
    task = _values(f"{where}.", raw, TASK)
    for key, kind in PARTS.items():
        if key in raw:
            task[key] = _named(f"{where}.{key}", kind, raw[key])
        elif key != "partition":
            known = ", ".join(registry.members(kind))
            raise BadInput(f"'{where}.{key}' is missing: name one of {known}")
    for key, measures in MEASURES.items():
        task[key] = raw.get(key, next(iter(measures)))
        measure = _measure(f"{where}.{key}", key, task[key])
        if key == "score" and task["better"] is None:
            task["better"] = "lower" if measure in ERRORS else "higher"
    name = task["data"]["name"]
    if "partition" in task and not registry.has("data", name, "partition"):
        raise BadInput(
            f"'{where}.partition' is given, but the data '{name}' come with their own clients:"
            f" leave it out (--set {where}.partition=)"
        )
    return task


def _measure(where: str, key: str, given: Any) -> Measure:
    """The loss or score of this name, rota's own or "module:attribute"."""
    known = MEASURES[key]
    if not isinstance(given, str):
        words = f"one of {', '.join(known)}, or module:attribute"
        raise BadInput(f"'{where}' is {shown(given)}, but it takes a name: {words}")
    if ":" in given:
        return registry.own(given)
    if given not in known:
        hint = f"{did_you_mean(given, known)}, or your own as module:attribute"
        raise BadInput(f"'{where}': unknown {key} '{given}': {hint}")
    return known[given]


def _values(prefix: str, raw: Config, keys: registry.Options) -> Config:
    """The values of these keys, checked, with their defaults."""
    found: Config = {}
    for key, (hint, default) in keys.items():
        found[key] = convert(prefix + key, hint, raw[key]) if key in raw else default
    return found


def _known(prefix: str, given: Config, known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise BadInput(f"unknown key '{prefix}{key}': {did_you_mean(key, known)}")


def _table(where: str, value: Any) -> Config:
    if not isinstance(value, dict):
        raise BadInput(f"'{where}' is {shown(value)}, but it takes a table of options")
    return dict(value)


def _named(where: str, kind: str, given: Any, default: str | None = None) -> Config:
    """{"name": ..., and all options}, from such a table or a name alone."""
    table = {"name": given} if isinstance(given, str) else given
    name = table.get("name", default) if isinstance(table, dict) else None
    if not isinstance(name, str):
        takes = "a name, or a table with a name and options"
        known = ", ".join(registry.members(kind))
        raise BadInput(f"'{where}' is {shown(given)}, but it takes {takes}; known: {known}")
    options = {key: value for key, value in table.items() if key != "name"}
    return {"name": name, **registry.fill(where, kind, _find(kind, name, where), options)}


def toml(value: Any) -> Any:
    """A value as TOML can hold it: without None, with lists for tuples and strings for paths."""
    if isinstance(value, dict):
        return {key: toml(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [toml(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def build(config: Config, tasks: list[Task] | None = None) -> Experiment:
    """The objects that a resolved config describes. It loads the data, unless tasks are given."""
    tasks = tasks or _build_tasks(config)
    clients = tasks[0].roster.clients
    given: Config = {key: config[key] for key in TOP if key != "summary" and key in config}
    policies = {}
    for key, kind in KINDS.items():
        table = {"name": kind.default, **config[key]}
        policies[key] = _make(registry.listed(key), table, clients)
    names = given.get("metrics", ())
    given["metrics"] = [registry.own(each) if ":" in each else each for each in names]
    return Experiment(tasks, policies=policies, **given)


def _make(kind: str, table: Config, clients: int = 0) -> Any:
    return _call(kind, table["name"], registry.arguments(kind, table, clients))


def _call(kind: str, name: str, arguments: dict[str, Any]) -> Any:
    """Call a member; a user's own may raise anything."""
    try:
        return registry.find(kind, name)(**arguments)
    except (BadInput, MemoryError):
        raise
    except Exception as error:
        if ":" not in name or os.environ.get("ROTA_DEBUG"):
            raise
        raise BadInput(f"{shown(name)} cannot be called: {what_and_where(error)}") from error


def _build_tasks(config: Config) -> list[Task]:
    tasks = []
    for number, table in enumerate(config["task"]):
        with at(f"task.{number}" if len(config["task"]) > 1 else ""):
            tasks.append(task_of(table, _build_data(table, config["seed"])))
    return tasks


def task_of(table: Config, data: Federation) -> Task:
    """The task that a resolved table describes, with these data."""
    work = {key: table[key] for key in TASK if key in table}
    if work["batch"] == "all":
        work["batch"] = None
    for key in MEASURES:
        if key in table:
            work[key] = _measure(f"task.{key}", key, table[key])
    model = table["model"]
    return Task(
        model=functools.partial(
            registry.find("models", model["name"]), **registry.arguments("models", model)
        ),
        data=data,
        **work,
    )


def _build_data(table: Config, seed: int) -> Federation:
    name = table["data"]["name"]
    arguments = registry.arguments("data", table["data"])
    if registry.has("data", name, "seed"):
        split, first = arguments.pop("split", 0), arguments.get("seed", seed)
        # 31 bits, which every generator takes
        arguments["seed"] = rng.key(first, "split", split) >> 33 if split else first
    if "partition" in table:
        arguments["partition"] = _make("partitions", table["partition"])
    data = _call("data", name, arguments)
    if not isinstance(data, Federation):
        given = f"the data '{name}' are a {type(data).__name__}"
        raise BadInput(f"{given}: return a rota.Federation, as rota.from_clients makes one")
    return data
