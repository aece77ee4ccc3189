"""Comparisons: one recipe with every combination of some settings and seeds."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rota import recipe
from rota.errors import BadInput, at
from rota.hints import convert, shown
from rota.plan import Task
from rota.recipe import Config, registry
from rota.report.numbers import half_width
from rota.running.check import check
from rota.running.summary import Stuck, Summary

AGGREGATED = (
    *("accuracy", "loss", "rounds", "seconds", "client_seconds", "bytes_up", "bytes_down"),
    *("server_bytes", "wall_seconds"),
)
"""The numbers of a summary that are given over the seeds."""


class Variant(NamedTuple):
    """One run of a comparison: what is varied by key, its seed, and its whole configuration."""

    setting: dict[str, Any]
    seed: int
    config: Config


def play(
    names: Sequence[str], train: Callable[[str], Summary], stuck: Callable[[str, Stuck], None]
) -> list[Summary]:
    """Train the runs of a comparison, one after the other: the summaries of those that ended.

    `train` makes the run of this name. A run that no longer learns is left out, and `stuck` is
    told; the others are not affected.
    """
    results: list[Summary] = []
    for name in names:
        try:
            with at(f"the run '{name}'"):  # the check saw the data of each setting's first seed
                results.append({"run": name, **train(name)})
        except Stuck as end:
            stuck(name, end)
    return results


def variants(config: Config, vary: list[str], seeds: int) -> dict[str, Variant]:
    """Folder name -> what is run there, for every combination of the varied values and seeds.

    An item of `vary` is "key=value,value,..." or "key+key=value+value,...". The seeds count up from
    the config's own. They vary fastest, and are the same for all values.
    """
    if seeds < 1:
        raise BadInput(f"--seeds is {seeds}: it must be at least 1")
    axes = [parse(each) for each in vary]
    _refuse_twice([key for keys, _ in axes for key in keys], seeds)
    out: dict[str, Variant] = {}
    for combination in itertools.product(*(values for _, values in axes)):
        changed, names, setting = config, [], dict[str, Any]()
        for (keys, _), values in zip(axes, combination, strict=True):
            for key, value in zip(keys, values, strict=True):
                changed, setting[key] = recipe.assign(changed, key, value), value
            names.append("_".join(map(slug, values)))
        first = convert("seed", int, changed.get("seed", 0))
        for seed in range(first, first + seeds):
            name = "-".join([*names, f"seed{seed}"])
            if name in out:
                raise BadInput(f"--vary gives the run '{name}' twice: leave one of the values out")
            out[name] = Variant(setting, seed, {**changed, "seed": seed})
    return out


def _refuse_twice(keys: list[str], seeds: int) -> None:
    """Each key may vary once."""
    for key, times in Counter(keys).items():
        if times > 1:
            once = f"give all its values at once, as in --vary {key}=A,B"
            raise BadInput(f"--vary names '{key}' twice: {once}")
    if seeds > 1 and "seed" in keys:
        raise BadInput("--vary seed=... and --seeds both set the seeds: leave one of them out")


def parse(vary: str) -> tuple[list[str], list[list[Any]]]:
    """The keys, and for each run the values of these keys.

    "sampler=full,uniform" gives ["sampler"] and [["full"], ["uniform"]]; "a+b=1+2,3+4" gives
    ["a", "b"] and [[1, 2], [3, 4]]. Commas inside brackets do not separate values.
    """
    key, equals, text = vary.partition("=")
    keys = key.split("+")
    parts = [part for part in re.split(r",(?![^\[{(]*[\]})])", text) if part]
    values = [part.split("+") if len(keys) > 1 else [part] for part in parts]
    if not equals or not all(keys) or not values:
        example = "for example --vary sampler=full,uniform"
        raise BadInput(f"--vary takes key=value,value,..., {example}, but got '{vary}'")
    for each in values:
        if len(each) != len(keys):
            takes = f"--vary {key} takes {len(keys)} values joined by '+'"
            raise BadInput(f"{takes}, but got '{'+'.join(each)}'")
    return keys, [[recipe.value_of(part) for part in each] for each in values]


def check_all(runs: dict[str, Variant]) -> None:
    """Raise BadInput for the first run that cannot begin or that repeats another one.

    Of several seeds only the first is built and checked.
    """
    seen: dict[str, dict[int, str]] = {}
    loaded: tuple[str, list[Task]] = "", []
    for name, variant in runs.items():
        config = recipe.resolve(variant.config)
        setting = _text({**config, "seed": 0})
        tasks = _text(config["task"])
        known = seen.setdefault(setting, {})
        if other := known.get(config["seed"]):
            hint = "leave out a value that one of them does not use"
            raise BadInput(f"the runs '{other}' and '{name}' are the same: {hint}")
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


def told(runs: dict[str, Variant], results: list[Summary]) -> list[dict[str, Any]]:
    """Each run's summary with its setting, its seed, and its setting's numbers `over_seeds`."""
    settings: dict[str, list[Summary]] = {}
    for result in results:
        settings.setdefault(_text(runs[result["run"]].setting), []).append(result)
    out = []
    for result in results:
        setting, seed, _ = runs[result["run"]]
        alike = settings[_text(setting)]
        over = {key: _over_seeds([each.get(key) for each in alike]) for key in AGGREGATED}
        out.append({"setting": setting, "seed": seed, **result, "over_seeds": over})
    return out


def _over_seeds(values: list[float | None]) -> dict[str, Any]:
    """The values, their mean, and with three or more its 95 % interval."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return {"values": values, "mean": None, "low": None, "high": None}
    middle = sum(known) / len(known)
    half = half_width(known) if len(known) > 2 else None
    low, high = (None, None) if half is None else (middle - half, middle + half)
    return {"values": values, "mean": middle, "low": low, "high": high}


def _text(config: Any) -> str:
    return json.dumps(config, sort_keys=True, default=str)


def slug(value: Any) -> str:
    """A value as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", shown(value)).strip("_")


def made_biased(runs: dict[str, Variant]) -> str:
    """Which unbiased samplers a biased estimator makes biased, in a sentence; empty if none.

    FedAvg's mean with uniform sampling is the usual choice, so no sentence warns of it.
    """
    found: dict[str, dict[str, None]] = {}
    for variant in runs.values():
        config = recipe.resolve(variant.config)
        sampler, estimator = config["sampler"]["name"], config["estimator"]["name"]
        plain = sampler in ("uniform", "full")
        if not plain and _unbiased("samplers", sampler) and not _unbiased("estimators", estimator):
            found.setdefault(estimator, {})[f"'{sampler}'"] = None
    said = [f"{' and '.join(names)} with '{estimator}'" for estimator, names in found.items()]
    if not said:
        return ""
    return (
        f"these samplers are unbiased, but the estimator makes them biased: {', '.join(said)}; "
        "compare them with estimator=unbiased"
    )


def _unbiased(kind: str, name: str) -> bool:
    return bool(getattr(registry.find(kind, name), "unbiased", False))
