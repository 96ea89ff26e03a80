"""`/cors-proxy`: fetches a URL for a web page that may not do it itself. Off unless `--ui-mcp-proxy` is given.

It reaches whatever this host reaches, so only pages of an allowed origin may use it, and nothing of the request goes on
but its body and what the page says in headers with the prefix: no keys, no cookies. `/tools`, which llama-server guards
the same way, does not exist here and is always off.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyllama.server.errors import FeatureDisabled, InvalidRequest, ServerFault
from pyllama.server.followed_stream import until_disconnect
from pyllama.server.middleware import header
from pyllama.server.origins import OriginPolicy
from pyllama.server.settings import ServerSettings

log = logging.getLogger("pyllama.server.srv")

PREFIX = b"x-llama-server-proxy-header-"
SECONDS = 600.0
CONNECT_SECONDS = 30.0
MAX_ANSWER_BYTES = 100 << 20
MAX_URL = 8192  # characters
# Facts about one connection, and what proves who somebody is towards this server.
REQUEST_HEADERS_KEPT_BACK = frozenset({
    *(b"host", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"content-length"),
    *(b"transfer-encoding", b"proxy-authorization", b"proxy-connection", b"cookie"),
})  # fmt: skip
RESPONSE_HEADERS_KEPT_BACK = frozenset({
    *(b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"server", b"date", b"trailer"),
    *(b"set-cookie", b"set-cookie2", b"proxy-authenticate", b"content-security-policy"),
})  # fmt: skip
# A fetched page that a browser shows must not act as a page of this server.
HARMLESS = ((b"content-security-policy", b"sandbox"), (b"x-content-type-options", b"nosniff"))


async def disabled(http: Request) -> Response:
    raise FeatureDisabled


def target_of(http: Request) -> httpx.URL:
    """Raises `InvalidRequest`."""
    text = http.query_params.get("url", "")
    if not text:
        raise InvalidRequest("the URL is missing: give it as ?url=URL")
    if len(text) > MAX_URL:
        raise InvalidRequest(f"the URL is longer than {MAX_URL} characters")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"the URL cannot be read: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidRequest("the URL must begin with http:// or https:// and name a host")
    if not 0 < (url.port or 80) < 65536:
        raise InvalidRequest(f"the URL names the port {url.port}, which cannot be")
    if url.userinfo:
        raise InvalidRequest("a URL with a user or a password is not fetched")
    return url.copy_with(fragment=None)


def headers_for(http: Request) -> list[tuple[bytes, bytes]]:
    """What the page wants to send, and nothing else."""
    named = [(key[len(PREFIX) :], value) for key, value in http.headers.raw if key.startswith(PREFIX)]
    return [(key, value) for key, value in named if key and key not in REQUEST_HEADERS_KEPT_BACK]


async def cors_proxy(http: Request) -> Any:
    """Of the server and of the router. It follows no redirects and uses no proxy of the environment."""
    settings: ServerSettings = http.app.state.server.settings
    if not settings.has_cors_proxy:
        raise FeatureDisabled
    origin = header(http.scope, b"origin")
    is_foreign = header(http.scope, b"sec-fetch-site") == b"cross-site" and not origin
    if is_foreign or (origin and not OriginPolicy(settings).admits(origin)):
        raise FeatureDisabled("pages of this origin may not use the proxy; see --cors-origins")
    url, body = target_of(http), await http.body()
    request = httpx.Request(http.method, url, headers=headers_for(http), content=body or None)
    timeout = httpx.Timeout(SECONDS, connect=CONNECT_SECONDS)
    request.extensions["timeout"] = timeout.as_dict()

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        fetching = asyncio.create_task(_fetch(request, send))
        leaving = asyncio.create_task(until_disconnect(receive))
        try:
            done, _ = await asyncio.wait({fetching, leaving}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if fetching in done:
                fetching.result()
            elif not done:  # its bytes may come one by one, so that no single wait was too long
                raise ServerFault(f"the answer of {url.host} took longer than {SECONDS:g} seconds")
        finally:
            leaving.cancel()
            fetching.cancel()

    return call


async def _fetch(request: httpx.Request, send: Send) -> None:
    async with httpx.AsyncHTTPTransport() as transport:
        try:
            response = await transport.handle_async_request(request)
        except httpx.TransportError as error:
            raise ServerFault(f"{request.url.host} did not answer: {error or type(error).__name__}") from None
        try:
            await _pass_on(response, request.url.host, send)
        except httpx.TransportError as error:  # the status is sent: the connection breaks off, which tells the client
            raise ServerFault(f"the answer of {request.url.host} broke off: {error or type(error).__name__}") from None
        finally:
            await response.aclose()


async def _pass_on(response: httpx.Response, host: str, send: Send) -> None:
    headers = [
        (key.lower(), value)
        for key, value in response.headers.raw
        if key.lower() not in RESPONSE_HEADERS_KEPT_BACK and not key.lower().startswith(b"access-control-")
    ]
    headers += HARMLESS
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    n_bytes = 0
    async for part in response.aiter_raw():
        n_bytes += len(part)
        if n_bytes > MAX_ANSWER_BYTES:
            raise ServerFault(f"the answer of {host} is larger than {MAX_ANSWER_BYTES} bytes")
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
