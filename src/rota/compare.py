"""Comparisons: the same recipe run for every combination of some settings and seeds, each in its own run folder."""

from __future__ import annotations

import itertools
import re
from typing import Any

from rota import recipe, registry
from rota.errors import BadInput
from rota.recipe import Config


def variants(config: Config, vary: list[str], seeds: int) -> dict[str, Config]:
    """Folder name -> config, for every combination of the varied values and `seeds` seeds from the config's own on.

    One of `vary` is "key=value,value,...". Seeds come last, so that all values see the same seeds.
    """
    if seeds < 1:
        raise BadInput(f"--seeds is {seeds}: it must be at least 1")
    axes = [[(key, value) for value in values] for key, values in map(parse, vary)]
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


def parse(vary: str) -> tuple[str, list[Any]]:
    """ "sampler=full,uniform" as ("sampler", ["full", "uniform"]); commas inside brackets do not divide."""
    key, equals, text = vary.partition("=")
    values = [recipe.value_of(part) for part in re.split(r",(?![^\[{(]*[\]})])", text) if part]
    if not equals or not key or not values:
        raise BadInput(f"--vary takes key=value,value,..., for example --vary sampler=full,uniform, and got '{vary}'")
    return key, values


def _slug(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", str(value)).strip("_")
