"""rota keys: certificates and keys for a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rota.cli.output import print_line
from rota.errors import BadInput


def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are kept.")],
    host: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="A name or address by which clients reach the server."),
    ] = [],  # noqa: B006
    client: Annotated[
        list[str], typer.Option(metavar="NAME", help="Make the key of a client.")
    ] = [],  # noqa: B006
) -> None:
    """Make a fleet's certificates, and the keys of its clients.

    \b
    Examples:
      rota keys keys --host fleet.example.org --client kitchen --client jetson
      rota keys keys --client phone
    """
    from rota.flower import keys as made
    from rota.flower import superlink

    superlink.installed()
    if not (folder / "ca.crt").exists():
        if not host:
            raise BadInput("--host is missing: give the name by which clients reach the server")
        made.certify(folder, host)
        print_line(f"{folder / 'ca.crt'}: give it to every client, for --root")
    elif host:
        raise BadInput(f"{folder / 'ca.crt'} exists already: choose another folder for new names")
    for name in client:
        if not name or Path(name).name != name or name.endswith(".pub"):
            raise BadInput(f"'{name}' is no name for a client: use letters and digits")
        file = folder / "nodes" / name
        if file.exists():
            raise BadInput(f"{file} exists already: choose another name")
        made.node_key(file)
        print_line(f"{file}: secret; give it to the client, for --key")
