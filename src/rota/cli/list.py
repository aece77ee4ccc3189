"""rota list."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rota.cli import loading
from rota.cli.complete import members, starting
from rota.cli.options import Json
from rota.cli.output import print_json, print_line
from rota.errors import BadInput, did_you_mean


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND | NAME]",
            help="What to list, such as recipes, samplers or models, or one member such as kvib; "
            "default: everything.",
            autocompletion=starting(members),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List what a recipe can name, or show what one name means.

    \b
    Examples:
      rota list
      rota list samplers
      rota list kvib
      rota list models --json
    """
    with loading():
        from rota import recipe
        from rota.recipe import registry

    known = ["recipes", *registry.kinds()]
    if kind is not None and kind not in known:
        named = [*recipe.names(), *(name for table in registry.kinds().values() for name in table)]
        if kind not in named:
            raise BadInput(f"unknown kind or name '{kind}': {did_you_mean(kind, [*known, *named])}")
        _show(kind, as_json)
        return
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


def _show(name: str, as_json: bool) -> None:
    """All members of this name: what they mean, and their options."""
    from rota import recipe
    from rota.recipe import registry

    having = [kind for kind, known in registry.kinds().items() if name in known]
    found = [registry.entry(kind, name) for kind in having]
    if name in recipe.names():
        found.append({"kind": "recipes", "name": name, "text": recipe.text(name), "options": []})
    if as_json:
        print_json(found)
        return
    for each in found:
        print_line(f"{each['name']} ({each['kind']})")
        for line in each["text"].rstrip().splitlines():
            print_line(f"  {line}".rstrip())
        if "needs" in each:
            bias = "unbiased" if each["unbiased"] else "biased"
            print_line(f"\n  {bias}; needs {each['needs']}; cost: {each['costs']}")
        if not each["options"]:
            continue
        print_line("\n  options")
        width = max(len(option["name"]) for option in each["options"])
        for option in each["options"]:
            if option["required"]:
                default = "required"
            elif option["instead_of"]:
                default = f"instead of {option['instead_of']}"
            elif option["default"] is None:
                default = "not set by default"
            else:
                default = f"default {json.dumps(option['default'])}"
            print_line(f"    {option['name']:{width}}  {default}; takes {option['takes']}")
