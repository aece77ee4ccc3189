"""The page's addresses. Every one of them reads; none writes, runs anything, or leaves the folder.

The page is served on this machine alone, unless another host and a token are given. A request must
name the host that the server listens on, so that no other web site can read through the browser.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rota.errors import BadInput
from rota.ui.runs import COLUMNS, Run, Runs, text_of

PAUSE = 0.5
"""Seconds between two looks at the folder, while a page is open."""
HERE = ("127.0.0.1", "localhost", "[::1]", "::1")
"""What this machine calls itself."""
MOST = 50
"""The most runs of one report."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(root: Path, host: str, port: int, token: str | None, ready: Callable[[], None]) -> None:
    """Serve the page until Ctrl-C; `ready` is called when it can be opened."""
    import uvicorn

    class Server(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            ready()

    app = build(root, host, token, lambda: server.should_exit)
    config = uvicorn.Config(
        app, host, port, log_level="warning", server_header=False, timeout_graceful_shutdown=5
    )
    server = Server(config)
    server.run()


def build(
    root: Path,
    host: str = HERE[0],
    token: str | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The page as an application; once it has `ended`, pages that listen are let go."""
    if host not in HERE and not token:
        raise BadInput(f"host {host} can be reached by others: give a --token, too")
    runs = Runs(root)
    runs.update()

    def page(request: Request) -> Response:
        html = _file("page.html").replace("{folder}", escape(text_of(str(runs.root))))
        return HTMLResponse(html, headers={"Content-Security-Policy": POLICY})

    def listed(request: Request) -> Response:
        """All runs, with the configuration keys that differ between them."""
        runs.update()
        keys = _differing(list(runs.runs.values()))
        return Told(
            {
                "columns": COLUMNS,
                "keys": keys,
                "common": _common(list(runs.runs.values()), keys),
                "runs": [
                    {**run.told(name), "config": {k: run.config.get(k) for k in keys}}
                    | {"seed": run.config.get("seed")}
                    for name, run in runs.runs.items()
                ],
            }
        )

    def rows(request: Request) -> Response:
        """A run's tested rounds from the `after`-th on."""
        run = _run(runs, request)
        if run is None:
            return _missing()
        after = request.query_params.get("after", "0")
        start = int(after) if after.isdigit() and len(after) < 10 else 0
        runs.update()
        return Told({"models": run.models, "start": start, "rows": run.rows[start:]})

    def details(request: Request) -> Response:
        """A run's configuration, whom it sampled, and what failed."""
        run = _run(runs, request)
        if run is None:
            return _missing()
        drawn = [i for c in run.sampled.values() for i in c if type(i) is int]
        clients = max(drawn, default=-1) + 1
        sampled = {
            model: [counts[i] for i in range(min(clients, 2000))]
            for model, counts in run.sampled.items()
        }
        return Told(
            {
                "text": run.text,
                "config": run.config,
                "sampled": sampled,
                "clients": clients,
                "failures": run.failures.most_common(50),
                "last_failures": run.last_failures,
                "costs": run.costs,
                "log": run.log,
            }
        )

    def report(request: Request) -> Response:
        """The self-contained report of some runs."""
        from rota.report import write

        names = request.query_params.getlist("run")
        known = [runs.runs[name].folder for name in names[:MOST] if name in runs.runs]
        if not known or len(known) < len(names):
            return _missing()
        try:
            with tempfile.TemporaryDirectory() as aside:
                made = write(known, Path(aside) / "report.html")
                return HTMLResponse(made.read_text(encoding="utf-8"))
        except BadInput as mistake:
            return PlainTextResponse(str(mistake), status_code=409)

    async def events(request: Request) -> Response:
        """The runs that change, as server-sent events."""

        async def stream() -> AsyncIterator[str]:
            sent = {name: _mark(run) for name, run in runs.runs.items()}
            yield "retry: 1000\n\n"
            while not ended() and not await request.is_disconnected():
                await asyncio.to_thread(runs.update)
                now = {name: _mark(run) for name, run in runs.runs.items()}
                if now != sent:
                    changed = [name for name in now if now[name] != sent.get(name)]
                    news = {
                        "runs": [runs.runs[name].told(name) for name in changed],
                        "gone": [name for name in sent if name not in now],
                        "new": [name for name in changed if name not in sent],
                    }
                    sent = now
                    yield f"data: {json.dumps(news)}\n\n"
                await asyncio.sleep(PAUSE)

        return StreamingResponse(stream(), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/", page),
            Route("/page.js", _static("page.js", "text/javascript")),
            Route("/page.css", _static("page.css", "text/css")),
            Route("/plotly.js", _plotly_route),
            Route("/api/runs", listed),
            Route("/api/rows", rows),
            Route("/api/details", details),
            Route("/api/events", events),
            Route("/report", report),
        ],
        middleware=[Middleware(Guard, host=host, token=token)],
    )


class Told(JSONResponse):  # type: ignore[misc]
    """JSON in ASCII: a damaged file may have names of half a character, which UTF-8 cannot hold."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


class Guard:
    """Lets only requests pass that name our host, and have the token if there is one."""

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        self.app, self.host, self.token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        answer: ASGIApp = self.app
        if not _allowed(request, self.host, self.token):
            answer = PlainTextResponse("not here", status_code=403)
        elif self.token and request.url.path == "/" and "token" in request.query_params:
            moved = RedirectResponse("/", status_code=303)  # so that the address hides the token
            moved.set_cookie("rota", self.token, httponly=True, samesite="strict")
            answer = moved

        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await answer(scope, receive, sender)


def _allowed(request: Request, host: str, token: str | None) -> bool:
    """Whether a request names a host of ours, and has the token if there is one."""
    named = request.headers.get("host", "")
    name = named.rpartition(":")[0] if named.rpartition(":")[2].isdigit() else named
    if host in HERE and name not in HERE:
        return False
    if token is None:
        return True
    given = request.query_params.get("token") or request.cookies.get("rota") or ""
    return secrets.compare_digest(given.encode(), token.encode())


def _run(runs: Runs, request: Request) -> Run | None:
    return runs.runs.get(request.query_params.get("run", ""))


def _missing() -> Response:
    return PlainTextResponse("no such run", status_code=404)


def _mark(run: Run) -> tuple[Any, ...]:
    return run.state, run.read


def _differing(runs: list[Run]) -> list[str]:
    """The configuration keys that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]


def _common(runs: list[Run], differing: list[str]) -> dict[str, Any]:
    """What is the same in the configurations of all runs."""
    return {k: v for k, v in runs[0].config.items() if k not in differing} if runs else {}


def _file(name: str) -> str:
    return resources.files("rota.ui").joinpath(name).read_text(encoding="utf-8")


def _static(name: str, kind: str) -> Callable[[Request], Response]:
    return lambda request: Response(_file(name), media_type=kind)


@functools.cache
def _plotly() -> str:
    from rota.report.page import plotly

    return plotly()


def _plotly_route(request: Request) -> Response:
    kept = {"Cache-Control": "private, max-age=86400"}
    return Response(_plotly(), media_type="text/javascript", headers=kept)
