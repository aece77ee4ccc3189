"""Which runs are one setting with several seeds, and what the settings are called."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rota.policies import KINDS
from rota.recipe.differences import flat
from rota.report.history import History


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: list[History]


def methods() -> list[str]:
    """The keys that name a run's methods: sampler.name and so on."""
    return [f"{name}.name" for name, kind in KINDS.items() if not kind.single]


def group(runs: list[History]) -> list[Group]:
    """The runs as groups, in the given order.

    If a seed occurs twice with one configuration, the second run starts a group of its own.
    """
    together: dict[tuple[str, int], list[History]] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        rest = {key: value for key, value in run.config.items() if key != "seed"}
        same = json.dumps(rest, sort_keys=True, default=str)
        whole = f"{same} {run.config.get('seed')}"
        together.setdefault((same, seen[whole]), []).append(run)
        seen[whole] += 1
    groups = list(together.values())
    return [Group(label, runs) for label, runs in zip(_labels(groups), groups, strict=True)]


def differing(groups: list[list[History]]) -> dict[str, list[str | None]]:
    """The configuration keys that differ between the groups, with each group's value.

    The value is None where a group does not have the key.
    """
    configs = []
    for runs in groups:
        configs.append({key: _text(value) for key, value in flat(runs[0].config).items()})
    keys = dict.fromkeys(key for config in configs for key in config if key != "seed")
    table = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def _text(value: Any) -> str:
    """A value in words; 5 and 5.0 are the same."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return value if isinstance(value, str) else json.dumps(whole, default=str)


def _labels(groups: list[list[History]]) -> list[str]:
    """Each group's name: its methods, where they differ, and as few other keys as it takes.

    Folders give the names where no key does.
    """
    table = differing(groups)
    named = methods()
    chosen = [key for key in named if key in table]
    apart = _different(table, chosen)
    # an option of one method is missing from the others: the method's name says more
    others = [key for key in table if key not in chosen]
    for key in sorted(others, key=lambda key: (None in table[key], not key.endswith("name"))):
        count = _different(table, [*chosen, key])
        if count > apart:
            chosen, apart = [*chosen, key], count
    labels = []
    for number, runs in enumerate(groups):
        words = [_words(key, table[key][number], key in named) for key in chosen]
        labels.append(", ".join(words) or _folder(runs))
    times = Counter(labels)
    for number, runs in enumerate(groups):
        if times[labels[number]] > 1:
            labels[number] = _with_folder(labels[number], runs)
    return labels


def _different(table: dict[str, list[str | None]], keys: list[str]) -> int:
    """How many groups these keys tell apart."""
    return max(1, len(set(zip(*(table[key] for key in keys), strict=True))))


def _words(key: str, value: str | None, method: bool) -> str:
    if value is None:
        return f"no {key}"
    return value if method else f"{key}={value}"


def _folder(runs: list[History]) -> str:
    name = runs[0].folder.name
    return name if len(runs) == 1 else re.sub(r"[-_.]?seed[-_=]?\d+$", "", name) or name


def _with_folder(label: str, runs: list[History]) -> str:
    """A label with the folder and its parent, so that it is the group's own."""
    folder = runs[0].folder
    place = f"{folder.parent.name}/{folder.name}"
    return place if label == _folder(runs) else f"{label} ({place})"
