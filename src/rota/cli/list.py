"""rota list."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rota.cli import loading
from rota.cli.options import Json, kinds, starting
from rota.cli.output import print_json, print_line
from rota.errors import BadInput, did_you_mean


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="What to list, such as recipes, samplers or models; default: everything.",
            autocompletion=starting(kinds),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the names that a recipe can use.

    \b
    Examples:
      rota list
      rota list samplers
      rota list models --json
    """
    with loading():
        from rota import recipe
        from rota.recipe import registry

    known = kinds()
    if kind is not None and kind not in known:
        raise BadInput(f"unknown kind '{kind}': {did_you_mean(kind, known)}")
    tables: dict[str, list[dict[str, Any]]] = {}
    for each in [kind] if kind else known:
        if each == "recipes":
            tables[each] = [
                {"name": name, "summary": recipe.read(name).get("summary", "")}
                for name in recipe.names()
            ]
        else:
            tables[each] = registry.table(each)
    if as_json:
        print_json(tables[kind] if kind else tables)
        return
    for each, entries in tables.items():
        print_line(each)
        width = max(len(entry["name"]) for entry in entries)
        for entry in entries:
            print_line(f"  {entry['name']:{width}}  {entry['summary']}")
            if kind and "needs" in entry:
                bias = "unbiased" if entry["unbiased"] else "biased"
                facts = f"{bias}; needs {entry['needs']}; cost: {entry['costs']}"
                print_line(f"  {'':{width}}    {facts}")
