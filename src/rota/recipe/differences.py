"""Two configurations compared, key by key, as `--set` names the keys."""

from __future__ import annotations

import json
from typing import Any

from rota.hints import MOST


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Which keys of two configurations differ, in words; empty if none does."""
    before, after = flat(old), flat(new)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    words = [f"{k} was {_word(before.get(k))} and is now {_word(after.get(k))}" for k in keys]
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration with dotted keys, as --set takes them: sampler.name, task.lr.

    Keys of several tasks have their numbers: task.0.lr, task.1.lr.
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                out |= flat(item, f"{prefix}{key}.{f'{number}.' if len(value) > 1 else ''}")
        else:
            out[prefix + key] = value
    return out


def _word(value: Any) -> str:
    """A value in a sentence; a long list, such as one number per client, is cut short."""
    text = "not set" if value is None else json.dumps(value, default=str)
    return text if len(text) <= MOST else f"{text[:MOST]}..."
