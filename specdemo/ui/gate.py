"""What stands before Gradio's own routes: who may ask for what, how large it may be, and how the answer is labelled.

Gradio serves more than a page needs: files, uploads, proxies, dashboards. In public mode only the routes in ROUTES are
reached, any other is 404 without being looked at. `GET /healthz` is answered here, with or without a login.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..limits import Limits
from .access import AccessLog

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Health = Callable[[], dict[str, Any]]

HEALTH = "/healthz"

QUIET_ROUTES = ("/assets/", "/static/", "/svelte/", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json")
"""Files of the page: not worth a line in the log."""

ROUTES = (
    *QUIET_ROUTES,
    "/",
    "/config",
    "/login",
    "/logout",
    "/gradio_api/app_id",
    "/gradio_api/call/",
    "/gradio_api/api/",
    "/gradio_api/run/",
    "/gradio_api/cancel",
    "/gradio_api/heartbeat/",
    "/gradio_api/info",
    "/gradio_api/login_check",
    "/gradio_api/queue/data",
    "/gradio_api/queue/join",
    "/gradio_api/queue/status",
    "/gradio_api/reset",
    "/gradio_api/startup-events",
    "/gradio_api/theme.css",
    "/gradio_api/token",
    "/gradio_api/user",
)
"""What a visitor may ask for; one that ends in a slash stands for all below it."""

_HUB = "https://huggingface.co https://*.huggingface.co"

HEADERS: tuple[tuple[bytes, bytes], ...] = tuple(
    (name.encode(), value.encode())
    for name, value in {
        # Gradio's own page is made of inline scripts and compiles templates, which no stricter policy lets it do; what
        # is left shut: scripts, frames, objects and requests of any other origin, and being framed by any but the Hub.
        "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
        "worker-src 'self' blob:; object-src 'none'; frame-src 'none'; base-uri 'self'; form-action 'self'; "
        f"frame-ancestors 'self' {_HUB}",
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
        "permissions-policy": "camera=(), microphone=(), geolocation=()",
    }.items()
)
"""Those of every answer in public mode."""


class Gate:
    """Middleware in ASGI's sense. `health` tells the state of things for `/healthz`; "broken" is an error there. Where
    `public` is false, only that is added and the size of a request limited."""

    def __init__(self, app: App, limits: Limits, health: Health, public: bool, log: AccessLog) -> None:
        self._app = app
        self._limits = limits
        self._health = health
        self._public = public
        self._log = log
        self._connections = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif not self._public:
            await self._app(scope, receive, send)

    async def _http(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        began, told, route = time.monotonic(), {"status": 0}, route_of(scope["path"])

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
                if self._public:
                    message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        self._connections += 1
        try:
            if scope["path"] == HEALTH:
                await _answer_health(self._health(), labelled)
            elif (refusal := self._refusal(scope, route)) is not None:
                await _answer(*refusal, labelled)
            else:
                await self._app(scope, receive, labelled)
        finally:
            self._connections -= 1
            if route not in QUIET_ROUTES and scope["path"] != HEALTH:
                took = time.monotonic() - began
                self._log.write(
                    "request",
                    method=scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "OPTIONS") else "other",
                    route=route or "other",
                    status=told["status"],
                    seconds=took,
                    bytes=_length(scope) or 0,
                )

    def _refusal(self, scope: MutableMapping[str, Any], route: str | None) -> tuple[int, str] | None:
        if self._connections > self._limits.connections:
            return 503, "Too many connections at once: try again in a minute."
        if self._public and route is None:
            return 404, "There is nothing here."
        if scope["method"] == "POST":
            length = _length(scope)
            if length is None:
                return 411, "Say how long the request is."
            if length > self._limits.request_bytes:
                return 413, f"A request may have {self._limits.request_bytes:,} bytes and not {length:,}: shorten it."
        return None


def address_of(request: Any) -> str:
    """The network address that a `gr.Request` comes from, behind a trusted proxy the one that it tells."""
    client = request.client
    return client.host if client else ""


def route_of(path: str) -> str | None:
    """The entry of ROUTES that a path belongs to."""
    plain = path.rstrip("/") or "/"
    for route in ROUTES:
        if plain == route or (route.endswith("/") and route != "/" and path.startswith(route)):
            return route
    return None


def _length(scope: MutableMapping[str, Any]) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


async def _answer_health(health: dict[str, Any], send: Send) -> None:
    await _answer(503 if health["state"] == "broken" else 200, json.dumps(health), send, b"application/json")


async def _answer(status: int, text: str, send: Send, kind: bytes = b"text/plain; charset=utf-8") -> None:
    body = text.encode()
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
