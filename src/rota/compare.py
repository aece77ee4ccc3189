"""Comparisons: the same recipe run for every combination of some settings and seeds, each in its own run folder."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from rota import recipe, registry
from rota.check import check
from rota.errors import BadInput
from rota.plan import Task
from rota.progress import loss
from rota.recipe import Config
from rota.report import numbers

COSTS: dict[str, tuple[str, numbers.Format]] = {
    "sent up": ("bytes_up", numbers.size),
    "sent down": ("bytes_down", numbers.size),
    "client computing": ("client_seconds", numbers.duration),
    "server memory": ("server_bytes", numbers.size),
}


def variants(config: Config, vary: list[str], seeds: int) -> dict[str, Config]:
    """Folder name -> config, for every combination of the varied values and `seeds` seeds from the config's own on.

    One of `vary` is "key=value,value,...". Seeds come last, so that all values see the same seeds.
    """
    if seeds < 1:
        raise BadInput(f"--seeds is {seeds}: it must be at least 1")
    axes = [[(key, value) for value in values] for key, values in map(parse, vary)]
    if seeds > 1 and any(key == "seed" for axis in axes for key, _ in axis):
        raise BadInput("--vary seed=... and --seeds both say which seeds: leave one of them out")
    out = {}
    for combination in itertools.product(*axes):
        changed = config
        for key, value in combination:
            changed = recipe.assign(changed, key, value)
        first = registry.convert("seed", int, changed.get("seed", 0))
        for seed in range(first, first + seeds):
            name = "-".join([*(_slug(value) for _, value in combination), f"seed{seed}"])
            if name in out:
                raise BadInput(f"--vary gives the run '{name}' twice: leave one of the values out")
            out[name] = {**changed, "seed": seed}
    return out


def check_all(runs: dict[str, Config]) -> None:
    """Raise BadInput for the first run that could not begin, by its name; of several seeds the first stands for all."""
    seen: set[str] = set()
    loaded: tuple[str, list[Task]] = "", []
    for name, raw in runs.items():
        config = recipe.resolve(raw)
        setting, tasks = (json.dumps(part, sort_keys=True, default=str) for part in ({**config, "seed": 0}, config["task"]))
        if setting in seen:
            continue
        seen.add(setting)
        try:
            experiment = recipe.build(config, loaded[1] if loaded[0] == tasks else None)
            loaded = tasks, experiment.tasks
            check(experiment)
            experiment.sampler.init(experiment.shares, experiment.rounds)
        except BadInput as error:
            raise BadInput(f"the run '{name}' cannot begin: {error}") from error


def parse(vary: str) -> tuple[str, list[Any]]:
    """ "sampler=full,uniform" as ("sampler", ["full", "uniform"]); commas inside brackets do not divide."""
    key, equals, text = vary.partition("=")
    values = [recipe.value_of(part) for part in re.split(r",(?![^\[{(]*[\]})])", text) if part]
    if not equals or not key or not values:
        raise BadInput(f"--vary takes key=value,value,..., for example --vary sampler=full,uniform, and got '{vary}'")
    return key, values


def table(results: list[Config]) -> list[str]:
    """The runs' summaries as lines. With several models: the mean of the accuracies, each of them, the worst, their standard deviation, the
    rounds until each was at the target; and below these the costs with their multiples of the least."""
    runs, models = [result["run"] for result in results], list(dict.fromkeys(name for result in results for name in result["models"]))
    if len(models) == 1:
        width = max(map(len, runs))
        lines = []
        for result in results:
            lines.append(f"{result['run']:{width}}  accuracy {result['accuracy']:.2%}  loss {loss(result['loss'])}  {rounds(result)}")
        return lines
    learnt = [["mean", *(_percent(result["accuracy"]) for result in results)]]
    for name in models:
        learnt.append([name, *(_percent(result["models"].get(name, {}).get("accuracy")) for result in results)])
    learnt.append(["worst", *(_percent(result.get("worst_accuracy")) for result in results)])
    learnt.append(["spread", *(_percent(result.get("accuracy_spread")) for result in results)])
    learnt.append(["rounds", *(f"{result['rounds']}" for result in results)])
    if any("rounds_to_target" in model for result in results for model in result["models"].values()):
        learnt.append(["to target", *(_hits(result, models) for result in results)])
    costs = []
    for title, (key, form) in COSTS.items():
        least = min(result[key] for result in results)
        costs.append([title, *(_cost(result[key], form, least) for result in results)])
    return [*_lines(["run", *runs], learnt), "", *_lines(["cost of", *runs], costs)]


def _lines(names: list[str], columns: list[list[str]]) -> list[str]:
    """Columns side by side, behind the runs' names."""
    first, *others = (max(map(len, column)) for column in (names, *columns))
    return ["  ".join([name.ljust(first), *map(str.rjust, row, others)]) for name, *row in zip(names, *columns, strict=True)]


def rounds(summary: Config) -> str:
    """2 rounds."""
    return f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}"


def _hits(result: Config, models: list[str]) -> str:
    return " ".join(f"{result['models'].get(name, {}).get('rounds_to_target') or '-'}" for name in models)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _cost(value: float, form: numbers.Format, least: float) -> str:
    text = form(value).replace(numbers.SPACE, " ")
    return f"{text} {value / least:.1f}x" if least > 0 else text


def _slug(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", str(value)).strip("_")


def reached(summary: Config) -> str:
    """Which of several models reached the target, and when; nothing where there is none."""
    when = {name: model["rounds_to_target"] for name, model in summary["models"].items() if "rounds_to_target" in model}
    if len(when) < 2:
        return ""
    done = [f"{name} after {n} round{'s' * (n != 1)}" for name, n in when.items() if n is not None]
    words = [f"reached by {', '.join(done)}"] if done else []
    words += [f"not reached by {', '.join(name for name, n in when.items() if n is None)}"] if len(done) < len(when) else []
    return f"target {'; '.join(words)}"


def failed(summary: Config) -> str:
    """How many trainings could not be used; nothing where all could."""
    n = summary["failures"]
    return f"{n} training{'s' * (n != 1)} could not be used: the report says why" if n else ""
