"""What the shell completes: python -m rota_lab.words > src/rota/cli/words.json.

The file has the keys of recipes with the values that they take, where these are few.
So completion need not load torch.
"""

from __future__ import annotations

import json
import types
import typing
from typing import Any

from rota.policies import KINDS
from rota.recipe import config, registry
from rota_lab import bench, reproduce


def words() -> dict[str, Any]:
    """Keys, members of kinds with their options, and names that commands take."""
    members: dict[str, dict[str, dict[str, list[str]]]] = {}
    keys = {key: values(hint) for key, (hint, _) in config.TOP.items()}
    keys |= {f"task.{key}": values(hint) for key, (hint, _) in config.TASK.items()}
    places = {registry.listed(key): key for key in KINDS}
    places |= {kind: f"task.{key}" for key, kind in registry.FIELDS.items()}
    for kind, place in places.items():
        found = {
            name: {option: values(hint) for option, (hint, _) in each.items()}
            for name, member in registry.members(kind).items()
            for each in [registry.options(kind, member)]
        }
        if place in KINDS and KINDS[place].single:
            (options,) = found.values()
            keys |= {f"{place}.{option}": known for option, known in options.items()}
        else:
            members[place] = found
    return {
        "keys": keys,
        "members": members,
        "defaults": {key: kind.default for key, kind in KINDS.items() if not kind.single},
        "kinds": ["recipes", *registry.kinds()],
        "reproductions": list(reproduce.REPRODUCTIONS),
        "works": list(bench.names()),
    }


def values(hint: Any) -> list[str]:
    """The values that a type hint names."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return [str(value) for value in typing.get_args(hint)]
    if origin in (typing.Union, types.UnionType):
        return [value for each in typing.get_args(hint) for value in values(each)]
    return ["true", "false"] if hint is bool else []


def page() -> str:
    """The file's text."""
    return json.dumps(words(), indent=1) + "\n"


if __name__ == "__main__":
    print(page(), end="")
