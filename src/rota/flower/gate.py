"""A gate before a SuperLink: it passes on requests to the fleet interface, and nothing else.

    python -m rota.flower.gate HOST PORT SUPERLINK [KEYS]

With the folder of keys the gate speaks TLS on both sides.
"""

from __future__ import annotations

import re
import ssl
import sys
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rota.flower.superlink import ends_with_parent

FLEET = re.compile(r"/v1/fleet/[a-z-]+")
"""The paths that nodes use."""
LARGEST = 2 << 30
"""The most bytes of a request."""


def build(address: str, root: Path | None) -> Starlette:
    """The gate as an application."""
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
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > LARGEST:
            return PlainTextResponse("too large, or of unknown length", status_code=413)
        headers = [
            (key, value)
            for key, value in request.headers.raw
            if key.decode().lower() not in ("host", "connection", "transfer-encoding")
        ]
        try:
            reply = await client.post(path, content=await request.body(), headers=headers)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink is away", status_code=503)
        kept = {
            key: value
            for key, value in reply.headers.items()
            if key.lower() not in ("content-encoding", "content-length", "transfer-encoding")
            and key.lower() not in ("connection", "date", "server")
        }
        return Response(reply.content, reply.status_code, kept)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


def main() -> None:
    """Serve until the process that started this one ends."""
    host, port, address = sys.argv[1:4]
    keys = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    ends_with_parent()
    uvicorn.run(
        build(address, keys / "ca.crt" if keys else None),
        host=host,
        port=int(port),
        log_level="warning",
        ssl_certfile=str(keys / "server.crt") if keys else None,
        ssl_keyfile=str(keys / "server.key") if keys else None,
        server_header=False,
    )


if __name__ == "__main__":
    main()
