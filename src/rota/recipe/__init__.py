"""Recipes: what can be named in one, how one is read and built, and comparisons of several."""

from rota.recipe.config import (
    KEYS,
    TASK_KEYS,
    Config,
    assign,
    build,
    names,
    override,
    read,
    resolve,
    value_of,
)

__all__ = [
    "KEYS",
    "TASK_KEYS",
    "Config",
    "assign",
    "build",
    "names",
    "override",
    "read",
    "resolve",
    "value_of",
]
