"""Comparisons: the same recipe run for every combination of some settings and seeds, each in its own run folder."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from rota import recipe
from rota.cli.progress import loss, score
from rota.errors import BadInput
from rota.hints import shown
from rota.plan import Task
from rota.recipe import Config, registry
from rota.report import numbers
from rota.running.check import check

COSTS: dict[str, tuple[str, numbers.Format]] = {
    "sent up": ("bytes_up", numbers.size),
    "sent down": ("bytes_down", numbers.size),
    "client computing": ("client_seconds", numbers.duration),
    "server memory": ("server_bytes", numbers.size),
}


def variants(config: Config, vary: list[str], seeds: int) -> dict[str, Config]:
    """Folder name -> config, for every combination of the varied values and `seeds` seeds from the config's own on.

    One of `vary` is "key=value,value,...", or "key+key=value+value,...". Seeds come last, so that all values see the same seeds.
    """
    if seeds < 1:
        raise BadInput(f"--seeds is {seeds}: it must be at least 1")
    axes = [[(keys, values) for values in each] for keys, each in map(parse, vary)]
    named = Counter(key for axis in axes for key in axis[0][0])
    for key in (key for key, times in named.items() if times > 1):
        raise BadInput(
            f"--vary names '{key}' twice: give all its values at once, as in --vary {key}=A,B"
        )
    if seeds > 1 and "seed" in named:
        raise BadInput("--vary seed=... and --seeds both say which seeds: leave one of them out")
    out = {}
    for combination in itertools.product(*axes):
        changed = config
        for keys, values in combination:
            for key, value in zip(keys, values, strict=True):
                changed = recipe.assign(changed, key, value)
        first = registry.convert("seed", int, changed.get("seed", 0))
        for seed in range(first, first + seeds):
            name = "-".join(
                [*("_".join(map(_slug, values)) for _, values in combination), f"seed{seed}"]
            )
            if name in out:
                raise BadInput(f"--vary gives the run '{name}' twice: leave one of the values out")
            out[name] = {**changed, "seed": seed}
    return out


def check_all(runs: dict[str, Config]) -> None:
    """Raise BadInput for the first run that could not begin, by its name, or is another one again; of several seeds the first stands for
    all.
    """
    seen: dict[str, dict[int, str]] = {}
    loaded: tuple[str, list[Task]] = "", []
    for name, raw in runs.items():
        config = recipe.resolve(raw)
        setting, tasks = (
            json.dumps(part, sort_keys=True, default=str)
            for part in ({**config, "seed": 0}, config["task"])
        )
        known = seen.setdefault(setting, {})
        if other := known.get(config["seed"]):
            raise BadInput(
                f"the runs '{other}' and '{name}' are the same: leave out a value that one of them does not take"
            )
        known[config["seed"]] = name
        if len(known) > 1:
            continue
        try:
            experiment = recipe.build(config, loaded[1] if loaded[0] == tasks else None)
            loaded = tasks, experiment.tasks
            check(experiment)
            experiment.sampler.init(experiment.shares, experiment.rounds)
        except BadInput as error:
            raise BadInput(f"the run '{name}' cannot begin: {error}") from error


def parse(vary: str) -> tuple[list[str], list[list[Any]]]:
    """ "sampler=full,uniform" as (["sampler"], [["full"], ["uniform"]]), and "a+b=1+2,3+4" as (["a", "b"], [[1, 2], [3, 4]]); commas inside
    brackets do not divide.
    """
    key, equals, text = vary.partition("=")
    keys = key.split("+")
    values = [
        part.split("+") if len(keys) > 1 else [part]
        for part in re.split(r",(?![^\[{(]*[\]})])", text)
        if part
    ]
    if not equals or not all(keys) or not values:
        raise BadInput(
            f"--vary takes key=value,value,..., for example --vary sampler=full,uniform, and got '{vary}'"
        )
    for each in values:
        if len(each) != len(keys):
            raise BadInput(
                f"--vary {key} takes {len(keys)} values joined by '+', and got '{'+'.join(each)}'"
            )
    return keys, [[recipe.value_of(part) for part in each] for each in values]


def table(results: list[Config]) -> list[str]:
    """The runs' summaries as lines, seeds together: means, with half their 95 % intervals. With several models: the mean of the accuracies,
    each of them, the worst, their standard deviation; below these the rounds until each was at the target, and the costs with their
    multiples of the least. Below all of it, what went wrong in which setting.
    """
    groups = [
        list(group)
        for _, group in itertools.groupby(
            results, key=lambda result: result["run"].rpartition("-seed")[0]
        )
    ]
    runs = [_name(group) for group in groups]
    models = list(dict.fromkeys(name for result in results for name in result["models"]))
    if len(models) == 1:
        width = max(map(len, runs))
        lines = []
        for name, group in zip(runs, groups, strict=True):
            each = [result["loss"] for result in group]
            lost = loss(None if None in each else sum(each) / len(each))
            lines.append(
                f"{name:{width}}  accuracy {_percent([result['accuracy'] for result in group])}  loss {lost}  {_rounds(group)}"
            )
        return [*lines, *_wrong(groups)]

    learnt = []
    for title, cell in _scores(models):
        values = [[cell(result) for result in group] for group in groups]
        if any(value is not None for each in values for value in each):
            learnt.append([title, *map(_percent, values)])
    learnt.append(["rounds", *(_count([result["rounds"] for result in group]) for group in groups)])
    parts = [_lines(["run", *runs], learnt)]
    if any(
        "rounds_to_target" in model for result in results for model in result["models"].values()
    ):
        parts.append(
            _lines(
                ["rounds to target", *runs],
                [[name, *(_hits(group, name) for group in groups)] for name in models],
            )
        )
    costs = []
    for title, (key, form) in COSTS.items():
        means = [sum(result[key] for result in group) / len(group) for group in groups]
        costs.append([title, *(_cost(value, form, min(means)) for value in means)])
    parts.append(_lines(["cost of", *runs], costs))
    parts += [wrong] if (wrong := _wrong(groups)) else []
    return [line for part in parts for line in ("", *part)][1:]


def _scores(models: list[str]) -> list[tuple[str, Callable[[Config], float | None]]]:
    """The columns of accuracies; those over all models are there where their scores are alike."""
    each = [
        (name, lambda result, name=name: result["models"].get(name, {}).get("accuracy"))
        for name in models
    ]
    before, after = (
        [("mean", "accuracy")],
        [("worst", "worst_accuracy"), ("spread", "accuracy_spread")],
    )
    mean, fair = (
        [(title, lambda result, key=key: result.get(key)) for title, key in some]
        for some in (before, after)
    )
    return [*mean, *each, *fair]


def _name(group: list[Config]) -> str:
    return _setting(group) + (f" ({len(group)} seeds)" if len(group) > 1 else "")


def _wrong(groups: list[list[Config]]) -> list[str]:
    """Which settings have models that diverged or trainings that could not be used, seeds together."""
    lines = []
    for group in groups:
        for say in (diverged, failed):
            some = [result for result in group if say(result)]
            if some:
                of = f" ({len(some)} of {len(group)} seeds)" if len(some) < len(group) else ""
                lines.append(f"{_setting(group)}{of}: {say(_together(some))}")
    return lines


def _together(results: list[Config]) -> Config:
    """The models' failures in all of these runs, and losses that are finite in each of them."""
    models: dict[str, Any] = {}
    for result in results:
        for name, model in result["models"].items():
            before = models.get(name, model | {"failures": 0})
            lost = diverged({"models": {name: model}})
            models[name] = {
                "loss": None if lost else before["loss"],
                "failures": before["failures"] + model["failures"],
            }
    return {"models": models, "failures": sum(result["failures"] for result in results)}


def _setting(group: list[Config]) -> str:
    name: str = group[0]["run"]
    return name if len(group) == 1 else name.rpartition("-seed")[0]


def _lines(names: list[str], columns: list[list[str]]) -> list[str]:
    """Columns side by side, behind the runs' names."""
    first, *others = (max(map(len, column)) for column in (names, *columns))
    return [
        "  ".join([name.ljust(first), *map(str.rjust, row, others)])
        for name, *row in zip(names, *columns, strict=True)
    ]


def rounds(summary: Config) -> str:
    """2 rounds."""
    return f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}"


def _rounds(group: list[Config]) -> str:
    return (
        rounds(group[0])
        if len(group) == 1
        else f"{_count([each['rounds'] for each in group])} rounds"
    )


def _hits(group: list[Config], model: str) -> str:
    """A model's rounds to the target, and how many of the seeds came there if not all did."""
    known = [
        hit
        for result in group
        if (hit := result["models"].get(model, {}).get("rounds_to_target")) is not None
    ]
    if not known:
        return "-"
    words = numbers.mean(known, numbers.count).replace(numbers.SPACE, " ")
    return words if len(known) == len(group) else f"{words} ({len(known)} of {len(group)})"


def _count(values: list[int]) -> str:
    return f"{sum(values) / len(values):.4g}"


def _percent(values: list[float | None]) -> str:
    """41.23%, or of several 41.2 ± 1.5 %; scores that are no shares as they are."""
    if len(values) == 1:
        return "-" if values[0] is None else score(values[0])
    form = numbers.score(all(0 <= value <= 1 for value in values if value is not None))
    return numbers.mean(values, form).replace(numbers.SPACE, " ")


def _cost(value: float, form: numbers.Format, least: float) -> str:
    text = form(value).replace(numbers.SPACE, " ")
    return f"{text} {value / least:.1f}x" if least > 0 else text


def _slug(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", shown(value)).strip("_")


def reached(summary: Config) -> str:
    """Which of several models reached the target, and when; nothing where there is none."""
    when = {
        name: model["rounds_to_target"]
        for name, model in summary["models"].items()
        if "rounds_to_target" in model
    }
    if len(when) < 2:
        return ""
    done = [f"{name} after {n} round{'s' * (n != 1)}" for name, n in when.items() if n is not None]
    words = [f"reached by {', '.join(done)}"] if done else []
    words += (
        [f"not reached by {', '.join(name for name, n in when.items() if n is None)}"]
        if len(done) < len(when)
        else []
    )
    return f"target {'; '.join(words)}"


def failed(summary: Config) -> str:
    """How many trainings could not be used, and of several models whose; nothing where all could."""
    n, models = summary["failures"], summary["models"]
    each = [f"{name} {model['failures']}" for name, model in models.items() if model["failures"]]
    of = f" ({', '.join(each)})" if len(models) > 1 else ""
    return f"{n} training{'s' * (n != 1)} could not be used{of}: the report says why" if n else ""


def diverged(summary: Config) -> str:
    """Which models' losses are not finite any more; nothing where all are."""
    lost = [
        f"'{name}'"
        for name, model in summary["models"].items()
        if model["loss"] is None or not math.isfinite(model["loss"])
    ]
    return f"the loss of {' and '.join(lost)} is not finite: a lower lr may help" if lost else ""
