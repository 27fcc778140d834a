"""Serves the dashboard to browsers on this machine, or to those who know a token.

It answers GET and HEAD only, and no route changes anything. Every answer carries a Content-Security-Policy with a fresh
nonce. Requests with a foreign Host header are refused, so that a web page cannot reach the server under a name of its own
(DNS rebinding). On any other address than a loopback one a token is required.

    GET /                    the page; `?token=...` is turned into a cookie
    GET /api/PATH            an answer as JSON, see `views`
    GET /api/events          server-sent events: `change` with {"revision": n, "paths": [...]}

See docs/decisions/103-who-may-see-a-dashboard.md.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from schedsearch.dashboard.answers import Answers, UnknownPathError, package_version
from schedsearch.dashboard.assets import content_security_policy, live_page
from schedsearch.errors import UsageError

POLL_S = 0.3
_PORTS_TRIED = 100
_KEEP_ALIVE_S = 15.0
_LISTENERS = 64
REQUEST_S = 10.0  # in which a request must arrive
_WAITING = 128  # connections without a request; a browser has up to six
_CHANGES_KEPT = 1000
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Changes:
    """What changed, for any number of listeners. `poll` looks into the databases at most every `POLL_S` seconds."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._polled_s = 0.0
        self._changes: list[tuple[int, list[str]]] = []
        self.listeners = 0

    def poll(self) -> None:
        with self._lock:
            if time.monotonic() - self._polled_s < POLL_S:
                return
            if paths := self._answers.refresh():
                self._changes = [*self._changes[-_CHANGES_KEPT:], (self._answers.revision, paths)]
            self._polled_s = time.monotonic()

    def since(self, revision: int) -> tuple[int, list[str]]:
        """The newest revision, and all paths that changed after an older one."""
        changes = [(number, paths) for number, paths in self._changes if number > revision]
        paths = dict.fromkeys(path for _, each in changes for path in each)
        return max((number for number, _ in changes), default=revision), list(paths)


def application(answers: Answers, *, host: str = "127.0.0.1", token: str = "", parent: int = 0) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        host: the address that it is bound to, which decides what Host headers are accepted.
        token: the secret that a client must know; "" asks for none.
        parent: id of the process that this one belongs to: when that has ended, this one ends. 0 for none.
    """
    changes = Changes(answers)

    async def page(request: Request) -> Response:
        if token and "token" in request.query_params:
            response: Response = RedirectResponse(request.url.path, status_code=303)
            response.set_cookie(_cookie(token), token, httponly=True, samesite="strict", max_age=30 * 24 * 3600, path="/")
            return response
        nonce = secrets.token_urlsafe(16)
        text = live_page(nonce, {"version": package_version(), "title": "schedsearch"})
        policy = content_security_policy(nonce, live=True) + "; frame-ancestors 'none'"
        return HTMLResponse(text, headers={"content-security-policy": policy, "cache-control": "no-store"})

    async def api(request: Request) -> Response:
        path, query = request.path_params["path"], dict(request.query_params)
        await run_in_threadpool(changes.poll)
        try:
            body = await run_in_threadpool(answers.body, path, query)
        except UnknownPathError as error:
            return JSONResponse({"error": str(error)}, status_code=404, headers={"cache-control": "no-store"})
        tag = f'"{sha256(body).hexdigest()[:32]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    async def events(request: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        return _Listener(changes, answers, headers)

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/api/events", events, methods=["GET"]),
        Route("/api/{path:path}", api, methods=["GET"]),
    ]
    app = Starlette(routes=routes, lifespan=_watching(parent))
    return _Guard(app, host=host, token=token)


class _Listener(StreamingResponse):
    """A stream of events. It counts from before its answer begins until it ends, however it ends."""

    def __init__(self, changes: Changes, answers: Answers, headers: dict[str, str]) -> None:
        super().__init__(_events(changes, answers), media_type="text/event-stream", headers=headers)
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._changes.listeners >= _LISTENERS:
            await JSONResponse({"error": "too many pages listen already"}, status_code=503)(scope, receive, send)
            return
        self._changes.listeners += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._changes.listeners -= 1


async def _events(changes: Changes, answers: Answers) -> AsyncIterator[str]:
    await run_in_threadpool(changes.poll)
    revision = answers.revision
    yield f"retry: 1000\nevent: hello\ndata: {json.dumps({'revision': revision})}\n\n"
    sent_s = time.monotonic()
    while True:
        await asyncio.sleep(max(POLL_S, min(5.0, 4 * answers.cost_s)))  # a large task must not take all the time
        await run_in_threadpool(changes.poll)
        newest, paths = changes.since(revision)
        if paths:
            revision, sent_s = newest, time.monotonic()
            yield f"event: change\nid: {revision}\ndata: {json.dumps({'revision': revision, 'paths': paths})}\n\n"
        elif time.monotonic() - sent_s > _KEEP_ALIVE_S:
            sent_s = time.monotonic()
            yield ": still here\n\n"


def _watching(parent: int) -> Callable[[Starlette], Any]:
    """Ends this process when its parent has ended, however that ended."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def watch() -> None:
            while os.getppid() == parent:
                await asyncio.sleep(0.5)
            os._exit(0)

        watcher = asyncio.create_task(watch()) if parent else None
        yield
        if watcher is not None:
            watcher.cancel()

    return lifespan


class _Guard:
    """Refuses what no page of ours sends, and adds the headers that every answer has."""

    def __init__(self, app: ASGIApp, *, host: str, token: str) -> None:
        self._app, self._host, self._token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send) if scope["type"] == "lifespan" else None
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                present = {name for name, _ in message["headers"]}
                if b"content-security-policy" not in present:
                    own.append((b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"))
                message["headers"] = [*message["headers"], *own]
            await send(message)

        request = Request(scope)
        if refusal := self._refusal(request):
            await refusal(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Callable[[Scope, Receive, Send], Awaitable[None]] | None:
        def refuse(status: int, why: str) -> JSONResponse:
            return JSONResponse({"error": why}, status_code=status, headers={"cache-control": "no-store"})

        if request.method not in ("GET", "HEAD"):
            return refuse(405, "the dashboard only reads: GET and HEAD")
        if not self._is_own_host(request.headers.get("host", "")):
            return refuse(421, "this Host is not the dashboard's; open the address that it printed")
        if request.headers.get("sec-fetch-site", "none") in ("cross-site", "same-site") and request.url.path != "/":
            return refuse(403, "another site asks for this")
        if self._token and not self._knows_token(request):
            return refuse(401, "a token is needed: open the address with ?token=... that the dashboard printed")
        return None

    def _is_own_host(self, header: str) -> bool:
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
        name = name.strip("[]").lower().rstrip(".")
        if name in ("localhost", "127.0.0.1", "::1", self._host.lower()):
            return True
        return bool(self._token) and bool(name)  # under a foreign name, the browser has no cookie with the token

    def _knows_token(self, request: Request) -> bool:
        given = [request.query_params.get("token", ""), request.cookies.get(_cookie(self._token), "")]
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        given.append(value if scheme.lower() == "bearer" else "")
        return any(hmac.compare_digest(each.encode(), self._token.encode()) for each in given)


def _cookie(token: str) -> str:
    """Cookies do not know ports: two dashboards on a host need different names."""
    return f"schedsearch-{sha256(token.encode()).hexdigest()[:8]}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on the first free port from `port` on; 0 lets the system choose.

    Raises:
        UsageError: the address is not one of this machine, no permission, or a hundred ports are in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + _PORTS_TRIED, 65535) if port else 0
    for number in range(port, last + 1):
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, number))
            found.listen(128)
            return found
        except OSError as error:
            found.close()
            if error.errno not in (98, 48):  # EADDRINUSE on Linux and macOS
                raise UsageError(
                    f"cannot listen on {host} port {number}: {error.strerror or error}; choose another"
                ) from None
    raise UsageError(f"all ports from {port} to {last} of {host} are in use; choose another: --port N")


class Connection(H11Protocol):
    """A connection that cannot be held without asking for anything.

    From its first byte a request has `REQUEST_S` seconds to arrive, body included; a new connection has them from its
    beginning. Of the connections without a request under way only the latest `_WAITING` stay. So nobody who lacks the
    token can keep others out: their answers are short.
    """

    waiting: ClassVar[dict[Connection, None]]  # those of a server, the one that waits longest first
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin()
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._begin()
        super().data_received(data)
        self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        self._arrived()
        super().connection_lost(exc)

    def _begin(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._end)

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _settle(self) -> None:
        """Looks whether the request has arrived, and whether its answer is under way."""
        partly = self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0])
        if not partly:
            self._arrived()
        if self.cycle is not None and not self.cycle.response_complete:
            self.waiting.pop(self, None)
        elif self in self.server_state.connections and not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        self.waiting.setdefault(self)
        while len(self.waiting) > _WAITING:
            next(iter(self.waiting))._end()

    def _end(self) -> None:
        """Ends the connection. A client that has not got an answer is told why."""
        self.waiting.pop(self, None)
        self._arrived()
        if self.transport.is_closing():
            return
        if self.cycle is None or (self.cycle.response_complete and self.conn.trailing_data[0]):
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


def server_of(app: ASGIApp) -> uvicorn.Server:
    """A server of an application, with limits on what clients may hold."""

    class OfThisServer(Connection):
        waiting: ClassVar[dict[Connection, None]] = {}

    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, lifespan="on", timeout_graceful_shutdown=1,
        limit_concurrency=256, h11_max_incomplete_event_size=16 << 10, ws="none", http=OfThisServer,
    )  # fmt: skip
    return uvicorn.Server(config)


def serve(answers: Answers, listening: socket.socket, *, host: str, token: str = "", parent: int = 0) -> None:
    """Serves until the process is interrupted. Then it returns."""
    server_of(application(answers, host=host, token=token, parent=parent)).run(sockets=[listening])
