"""Which runs are one setting with several seeds, and what a setting is called."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rota.report.runs import Run
from rota.running.folder import flat

METHODS = ("sampler.name", "estimator.name", "server.name")


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: list[Run]


def group(runs: list[Run]) -> list[Group]:
    """The runs as groups, in the order given; a seed that comes twice with one configuration starts a group of its own."""
    together: dict[tuple[str, int], list[Run]] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        same = json.dumps(
            {key: value for key, value in run.config.items() if key != "seed"},
            sort_keys=True,
            default=str,
        )
        whole = f"{same} {run.config.get('seed')}"
        together.setdefault((same, seen[whole]), []).append(run)
        seen[whole] += 1
    members = list(together.values())
    return [Group(label, runs) for label, runs in zip(_labels(members), members, strict=True)]


def differing(groups: list[list[Run]]) -> dict[str, list[str | None]]:
    """The configuration keys that are not the same in all groups, with each group's value (None where it has no such key)."""
    configs = [
        {key: _text(value) for key, value in flat(members[0].config).items()} for members in groups
    ]
    keys = dict.fromkeys(key for config in configs for key in config if key != "seed")
    table = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def _text(value: Any) -> str:
    """A value in words; 5 and 5.0 are one."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return value if isinstance(value, str) else json.dumps(whole, default=str)


def _labels(groups: list[list[Run]]) -> list[str]:
    """Each group's name: its methods, where they differ, and as few other keys as tell the groups apart; folders' names where none does."""
    table = differing(groups)
    chosen = [key for key in METHODS if key in table]
    apart = max(1, len(set(zip(*(table[key] for key in chosen), strict=True))))
    # a method's own knobs are missing from the other methods: its name says more
    others = [key for key in table if key not in chosen]
    for key in sorted(others, key=lambda key: (None in table[key], not key.endswith("name"))):
        count = len(set(zip(*(table[name] for name in [*chosen, key]), strict=True)))
        if count > apart:
            chosen, apart = [*chosen, key], count
    labels = []
    for number, members in enumerate(groups):
        labels.append(
            ", ".join(_words(key, table[key][number]) for key in chosen) or _folder(members)
        )
    twice = Counter(labels)
    return [
        label if twice[label] == 1 else _alone(label, members)
        for label, members in zip(labels, groups, strict=True)
    ]


def _words(key: str, value: str | None) -> str:
    if value is None:
        return f"no {key}"
    return value if key in METHODS else f"{key}={value}"


def _folder(members: list[Run]) -> str:
    name = members[0].folder.name
    return name if len(members) == 1 else re.sub(r"[-_.]?seed[-_=]?\d+$", "", name) or name


def _alone(label: str, members: list[Run]) -> str:
    """A label made the group's own with its folder (and that one's parent, for runs copied side by side)."""
    folder = members[0].folder
    place = f"{folder.parent.name}/{folder.name}"
    return place if label == _folder(members) else f"{label} ({place})"
