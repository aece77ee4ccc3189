"""What the commands' arguments and options accept, and how a shell completes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from rota.cli.complete import recipes, setting, starting
from rota.running.choices import DEVICES, ENGINES, PRECISIONS
from rota.track import TRACKERS


def one_of(names: Iterable[str], *more: str, like: str = "") -> dict[str, Any]:
    """An option that takes one of a few names, with a "did you mean" for a name that is close.

    `like` is a pattern of further words that it takes.
    """

    def known() -> list[str]:
        return [*more, *names]

    def parse(word: str) -> str:
        if word in known() or (like and re.fullmatch(like, word)):
            return word
        near = difflib.get_close_matches(word, known(), n=1, cutoff=0.8)  # 'gpu' is not 'cpu'
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise typer.BadParameter(f"'{word}' is not one of {', '.join(known())}{hint}")

    return {"parser": parse, "metavar": "|".join(known()), "autocompletion": starting(known)}


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
        help="Change a key of the recipe; KEY= removes it. May be given many times.",
        autocompletion=setting,
    ),
]
Allow = Annotated[
    list[str],
    typer.Option(
        "--allow",
        metavar="MODULE",
        help="Let the recipe's file run code from this module, although it does not lie beside the"
        " file. May be given many times.",
    ),
]
Engine = Annotated[str, typer.Option(help="What trains the clients.", **one_of(ENGINES, "auto"))]
Device = Annotated[
    str,
    typer.Option(
        help="Device to train on; cuda:1 is the second GPU.",
        **one_of(DEVICES, "auto", like=r"cuda:\d+"),
    ),
]
Precision = Annotated[
    str,
    typer.Option(help="Precision of products; tf32 and bf16 are for GPUs.", **one_of(PRECISIONS)),
]
Track = Annotated[
    list[str],
    typer.Option(
        "--track",
        help="Also write the rounds for this tool. May be given many times.",
        **one_of(TRACKERS),
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
