"""Recipes: what can be named in one, how one is read and built, and comparisons of several."""

from rota.recipe.config import (
    TASK_KEYS,
    Config,
    assign,
    build,
    names,
    override,
    read,
    resolve,
    task_of,
    text,
    top_keys,
    value_of,
)

__all__ = [
    "TASK_KEYS",
    "Config",
    "assign",
    "build",
    "names",
    "override",
    "read",
    "resolve",
    "task_of",
    "text",
    "top_keys",
    "value_of",
]
