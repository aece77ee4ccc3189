"""rota ui."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rota.cli.output import print_line
from rota.errors import BadInput


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A folder of runs; default: runs.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8765,
    host: Annotated[
        str,
        typer.Option(help="The address to listen on; any but 127.0.0.1 needs --token."),
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="A secret that the page is opened with: /?token=...")
    ] = None,
) -> None:
    """Show a folder of runs as a live page in the browser. It only reads.

    \b
    Examples:
      rota ui
      rota ui runs/sweep --port 9000
    """
    import socket

    try:
        from rota.ui import serve
    except ImportError as error:
        raise BadInput(f"the live page needs {error.name}: pip install 'rota[ui]'") from error
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder: name one that holds runs")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot listen on {host}:{port} ({error}): choose another") from error
        port = trial.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    secret = f"?token={token}" if token else ""

    def ready() -> None:
        print_line(f"{folder} is shown at http://{shown}:{port}/{secret} (Ctrl-C ends it)")

    serve(folder, host, port, token, ready)
