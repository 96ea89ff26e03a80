"""The HTTP layer around the routes, outermost first: headers and CORS, OPTIONS, readiness, API key, body limit, errors.

Plain ASGI callables; each is one check of the order that llama-server documents.
"""

from __future__ import annotations

import hmac
import logging

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyllama.errors import PyllamaError
from pyllama.server.connection import IS_LAST_REQUEST, KEEP_ALIVE_SECONDS, MAX_REQUESTS
from pyllama.server.errors import RequestError, TooLarge, Unauthorized, Unavailable
from pyllama.server.origins import OriginPolicy
from pyllama.server.responses import error_response
from pyllama.server.settings import ServerSettings
from pyllama.server.state import ServerState

log = logging.getLogger("pyllama.server.srv")

# Key of the scope under which a stream finds the way around the layers below, which look at a response's start only:
# each of them costs every token a coroutine.
DIRECT_SEND = "pyllama.direct_send"
CLOSES = (b"connection", b"close")
STAYS_OPEN = (b"keep-alive", b"timeout=%d, max=%d" % (KEEP_ALIVE_SECONDS, MAX_REQUESTS))
MAX_BODY_BYTES = 100 * 1024 * 1024
# Without a key: health, and where a browser looks for the web interface (404 as long as there is none).
PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/", "/index.html", "/sw.js"})


def header(scope: Scope, name: bytes) -> bytes:
    """First value of a request header, or empty. `name` in lower case."""
    return next((value for key, value in scope["headers"] if key == name), b"")


class CorsMiddleware:
    """Response headers that every answer carries, and the answer to OPTIONS. Who is let in: `OriginPolicy`."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._policy = OriginPolicy(settings)
        self._methods = settings.cors_methods.encode("latin-1", "replace")
        self._headers = settings.cors_headers.encode("latin-1", "replace")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        extra = [(b"server", b"llama.cpp")]
        allowed = self._policy.allowed(header(scope, b"origin"))
        if allowed is not None:
            extra.append((b"access-control-allow-origin", allowed))
        if self._policy.depends_on_origin:
            extra.append((b"vary", b"Origin"))

        scope[DIRECT_SEND] = send

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                closes = message["status"] >= 400 or scope.get(IS_LAST_REQUEST, False)
                last = CLOSES if closes else STAYS_OPEN
                message["headers"] = [*message.get("headers", ()), *extra, last]
            await send(message)

        if scope["method"] == "OPTIONS":
            extra.append(
                (b"access-control-allow-credentials", b"true" if self._policy.allows_credentials else b"false")
            )
            extra.append((b"access-control-allow-methods", self._methods))
            extra.append((b"access-control-allow-headers", self._headers))
            await Response(b"", headers={"Content-Type": "text/html"})(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


class ReadinessMiddleware:
    """503 for every path until the model is loaded."""

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._state.is_ready:
            await error_response(Unavailable("Loading model"))(scope, receive, send)
            return
        await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """401 unless one of the keys is given. Few paths are public; behind a prefix none of them is."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._keys = [key.encode() for key in settings.api_keys]
        vertex = settings.vertex
        self._public = PUBLIC_PATHS | {vertex.health} if vertex and vertex.health else PUBLIC_PATHS

    def _accepts(self, scope: Scope) -> bool:
        given = header(scope, b"authorization") or header(scope, b"x-api-key")
        given = given.removeprefix(b"Bearer ")
        # Every key is compared, each in constant time, so that the time tells nothing about them.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in self._public and not self._accepts(scope):
            await error_response(Unauthorized())(scope, receive, send)
            return
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """413 for bodies beyond the limit, declared or not."""

    def __init__(self, app: ASGIApp, *, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = TooLarge(f"the request body is larger than {self._max_bytes} bytes")
        declared = header(scope, b"content-length")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await error_response(error)(scope, receive, send)
            return
        n_bytes = 0

        async def receive_counted() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._max_bytes:
                raise error
            return message

        await self._app(scope, receive_counted, send)


class ErrorMiddleware:
    """Turns exceptions of handlers into error bodies. A fault of our own is logged with its traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except ClientDisconnect:  # before its body was complete: nobody reads an answer
            log.debug("%s %s: the client left", scope.get("method"), scope.get("path"))
        except Exception as error:
            if not isinstance(error, (RequestError, PyllamaError)):
                log.exception("%s %s failed", scope.get("method"), scope.get("path"))
            if started or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)
