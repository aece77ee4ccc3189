"""rota client: a machine that trains on its own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rota.errors import BadInput


def client(
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder with the client's .npz files.")
    ],
    server: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the server is.")
    ] = "127.0.0.1:9092",
    root: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The ca.crt that signed the server's certificate."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This client's secret key.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Plain text, also to other machines.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="What the client remembers; default: DATA/.rota."),
    ] = None,
    allow: Annotated[
        list[str],
        typer.Option(metavar="MODULE", help="Train networks of this module, too."),
    ] = [],  # noqa: B006
    threads: Annotated[int, typer.Option(help="torch's threads; 0: torch decides.")] = 0,
    memory: Annotated[
        float, typer.Option(metavar="MB", help="The most memory for training; 0: all.")
    ] = 0,
    hours: Annotated[
        str | None, typer.Option(metavar="22-6", help="Work only in these hours.")
    ] = None,
    battery: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Work only above this charge.")
    ] = None,
    daily: Annotated[
        float | None, typer.Option(metavar="MB", help="The most traffic per day.")
    ] = None,
    slow: Annotated[float, typer.Option(help="Play a device that is so many times slower.")] = 1.0,
    idle: Annotated[
        float, typer.Option(metavar="SECONDS", help="The longest pause between two looks for work.")
    ] = 1.0,
) -> None:
    """Train on this machine's own data for a server, until Ctrl-C.

    \b
    Examples:
      rota client --data my-data
      rota client --data mine --server example.org:9092 --root ca.crt --key me
    """
    import logging
    import math

    from rota.flower import node, superlink
    from rota.flower.limits import Limits

    superlink.quiet()
    superlink.ends_with_parent()
    superlink.installed()
    host, _ = superlink.split(server)
    if root is None and host not in superlink.LOOPBACK and not insecure:
        raise BadInput(
            f"{server} is another machine: give --root, the server's ca.crt, or --insecure to send "
            "models as plain text"
        )
    for file, word in ((root, "--root"), (key, "--key")):
        if file is not None and not file.is_file():
            raise BadInput(f"{word} {file} is not a file")
    if not data.is_dir():
        raise BadInput(f"{data} is not a folder: give the folder with the client's .npz files")
    bounds = {
        "--threads": (threads, 0, math.inf),
        "--memory": (memory, 0, math.inf),
        "--battery": (battery, 0, 100),
        "--daily": (daily, 0, math.inf),
        "--slow": (slow, 1, 1000),
        "--idle": (idle, 0.01, 3600),
    }
    for word, (value, low, high) in bounds.items():
        if value is not None and not low <= value <= high:
            upto = f" and at most {high}" if high < math.inf else ""
            raise BadInput(f"{word} is {value:g}: it must be at least {low:g}{upto}")
    state = (state or data / ".rota").absolute()
    traffic = None if daily is None else daily * 1e6
    settings = node.Settings(
        server=server,
        data=data.absolute(),
        state=state,
        root=None if root is None else root.read_bytes(),
        key=None if key is None else key.read_bytes(),
        allow=tuple(allow),
        threads=threads,
        memory=memory * 1e6,
        limits=Limits(hours, battery, traffic, file=state / "traffic.json"),
        slow=slow,
        idle=idle,
    )
    logging.getLogger("rota").setLevel(logging.INFO)
    node.Transport(settings).run()
