"""What the commands' arguments and options take, and how a shell completes them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer


class EngineName(StrEnum):
    auto = "auto"
    sequential = "sequential"
    batched = "batched"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class PrecisionName(StrEnum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


def one_of(choices: type[StrEnum]) -> dict[str, Any]:
    """An option that takes one of a few words, with a "did you mean" for any other that is nearly one of them."""

    def parse(word: str) -> StrEnum:
        if word not in list(choices):
            near = difflib.get_close_matches(
                word, choices, n=1, cutoff=0.8
            )  # 'gpu' does not mean 'cpu'
            raise typer.BadParameter(
                f"'{word}' is not one of {', '.join(choices)}"
                + (f"; did you mean '{near[0]}'?" if near else "")
            )
        return choices(word)

    return {
        "parser": parse,
        "metavar": "|".join(choices),
        "autocompletion": starting(lambda: list(choices)),
    }


def starting(words: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Shell completion from a list that is made when it is needed."""
    return lambda incomplete: [word for word in words() if word.startswith(incomplete)]


def recipes() -> list[str]:
    from rota import recipe

    return recipe.names()


def kinds() -> list[str]:
    from rota.recipe import registry

    return ["recipes", *registry.kinds()]


def reproductions() -> list[str]:
    from rota_lab import reproduce

    return list(reproduce.REPRODUCTIONS)


def works() -> list[str]:
    from rota_lab import bench

    return list(bench.names())


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A ready recipe (see `rota list recipes`) or a .toml file.",
        autocompletion=starting(recipes),
    ),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe (KEY= unsets it); may be given many times.",
    ),
]
Engine = Annotated[EngineName, typer.Option(help="What trains the clients.", **one_of(EngineName))]
Device = Annotated[DeviceName, typer.Option(help="Where.", **one_of(DeviceName))]
Precision = Annotated[
    PrecisionName,
    typer.Option(help="Of products; tf32 and bf16 are for a GPU.", **one_of(PrecisionName)),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
