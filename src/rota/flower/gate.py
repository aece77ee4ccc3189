"""A gate before a SuperLink: it passes on requests to the fleet interface, and nothing else.

    python -m rota.flower.gate HOST PORT SUPERLINK [KEYS]

With the folder of keys the gate speaks TLS on both sides.
"""

from __future__ import annotations

import re
import ssl
import sys
from base64 import b64encode
from collections.abc import Set
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rota.flower import keys
from rota.flower.superlink import ends_with_parent

FLEET = re.compile(r"/v1/fleet/[a-z-]+")
"""The paths that nodes use."""
KEY = "flwr-public-key"
"""The header in which a node says whose its signature is."""
LARGEST = 2 << 30
"""The most bytes of a request."""
OWN = ("host", "connection", "transfer-encoding", "date", "server")
"""Headers that belong to one side of the gate alone."""


def build(address: str, root: Path | None, known: Set[str] | None) -> Starlette:
    """The gate as an application, for nodes with these public keys; None: for all nodes.

    What comes is passed on piece by piece, so its size costs the gate no memory.
    """
    verify = ssl.create_default_context(cafile=str(root)) if root else True
    scheme = "https" if root else "http"
    client = httpx.AsyncClient(
        base_url=f"{scheme}://{address}",
        verify=verify,
        timeout=httpx.Timeout(120.0),
        limits=httpx.Limits(max_connections=200, max_keepalive_connections=50),
        trust_env=False,
    )

    async def forward(request: Request) -> Response:
        path = request.scope["path"]
        if not FLEET.fullmatch(path):
            return PlainTextResponse("not here", status_code=404)
        if known is not None and request.headers.get(KEY) not in known:
            return PlainTextResponse("the server does not know this key", status_code=403)
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > LARGEST:
            return PlainTextResponse("too large, or of unknown length", status_code=413)
        headers = [(k, v) for k, v in request.headers.items() if k not in OWN]
        try:
            passed = client.build_request("POST", path, content=request.stream(), headers=headers)
            reply = await client.send(passed, stream=True)
        except (httpx.TransportError, ClientDisconnect):
            return PlainTextResponse("the SuperLink is away", status_code=503)
        kept = {key: value for key, value in reply.headers.items() if key not in OWN}
        end = BackgroundTask(reply.aclose)
        return StreamingResponse(reply.aiter_raw(), reply.status_code, kept, background=end)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


def main() -> None:
    """Serve until the process that started this one ends."""
    host, port, address = sys.argv[1:4]
    folder = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    ends_with_parent()
    known = None if folder is None else {b64encode(key).decode() for key in keys.known(folder)}
    uvicorn.run(
        build(address, folder / "ca.crt" if folder else None, known),
        host=host,
        port=int(port),
        log_level="warning",
        ssl_certfile=str(folder / "server.crt") if folder else None,
        ssl_keyfile=str(folder / "server.key") if folder else None,
        server_header=False,
    )


if __name__ == "__main__":
    main()
