"""Passes a request on to the child that serves its model, and the answer back as it comes.

The whole way, waiting for the model included, ends when the client goes away, unless the answer is a resumable stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pyllama.server.api.generate import in_thread_if_long
from pyllama.server.errors import InvalidRequest, RequestTimeout, ServerFault, error_body
from pyllama.server.followed_stream import until_disconnect
from pyllama.server.json_codec import parse_json, parse_object
from pyllama.server.router.instance import Instance
from pyllama.server.router.pool import Pool
from pyllama.server.router.streams import StreamOwner, StreamOwners, cancelled_while_waiting
from pyllama.server.sse import sse_event
from pyllama.server.stream_replay import conversation_id

log = logging.getLogger("pyllama.server.srv")

# Facts about one connection, which the next has of its own; the router's key, which the child does not know.
REQUEST_HEADERS_KEPT_BACK = frozenset({
    *(b"host", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"proxy-authorization"),
    *(b"proxy-connection", b"transfer-encoding", b"content-length", b"authorization", b"x-api-key", b"cookie"),
})  # fmt: skip
RESPONSE_HEADERS_KEPT_BACK = frozenset({
    *(b"server", b"date", b"connection", b"keep-alive", b"transfer-encoding", b"content-length"),
})  # fmt: skip
CORS = b"access-control-"
ASK_SECONDS = 10.0  # for a child to answer a question that costs it nothing


class Forwarder:
    """An ASGI application. request_delay: seconds that each request waits, counted as running, for tests.

    owners: of the resumable streams that went through here.
    """

    def __init__(self, pool: Pool, *, prefix: str, autoload: bool, timeout: int, request_delay: float = 0.0) -> None:
        self._pool = pool
        self._prefix = prefix.encode()
        self._autoload = autoload
        self._timeout = timeout
        self._request_delay = request_delay
        self.owners = StreamOwners()
        # A connection per request: a kept one may be closed by the child just when a request is written to it.
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    async def close(self) -> None:
        await self._transport.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await asyncio.wait_for(request.body(), self._timeout)
        except ClientDisconnect:
            return
        except asyncio.TimeoutError:
            raise RequestTimeout(f"the request body did not arrive within {self._timeout} seconds") from None
        target = await in_thread_if_long(len(body), read_target, request.method, request.query_params, body)
        autoload = request.query_params.get("autoload")
        loads = self._autoload if autoload is None else autoload in ("1", "true")
        conversation = conversation_id(request.headers) if target.streams else None
        if conversation:
            await self._pass_on_kept(request, target.model, loads, body, send, conversation)
        else:
            await self._pass_on_while_wanted(receive, self._pass_on(request, target.model, loads, body, send))

    def to_model(self, name: str) -> ASGIApp:
        """Passes requests on to a model that runs, whatever they say themselves. For reading only: no body."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            passing = self._pass_on(Request(scope, receive), name, False, b"", send)
            await self._pass_on_while_wanted(receive, passing)

        return call

    async def _pass_on_while_wanted(self, receive: Receive, passing_on: Coroutine[Any, Any, None]) -> None:
        passing = asyncio.create_task(passing_on)
        leaving = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            passing.cancel()  # without effect once it is done
        with contextlib.suppress(asyncio.CancelledError):  # the client has gone: nobody reads an answer
            await passing

    async def _pass_on_kept(
        self, request: Request, name: str, autoload: bool, body: bytes, send: Send, conversation: str
    ) -> None:
        """A stream that outlives its client: it is passed on to its end, whoever listens."""
        owner, before = self.owners.open(conversation, name)
        if before is not None:
            await self.stop_stream(before)
        passing = asyncio.create_task(self._pass_on(request, name, autoload, body, send, owner))
        owner.passing = passing
        try:
            await asyncio.shield(passing)
        except asyncio.CancelledError:
            if not owner.is_stopped:  # the router ends
                passing.cancel()
                raise
            raise cancelled_while_waiting() from None
        finally:
            self.owners.has_ended(owner)

    async def stop_stream(self, owner: StreamOwner) -> None:
        """End a stream wherever it is: in the queue for its model, or in the child. Its answer ends with it."""
        owner.is_stopped = True
        self.owners.forget(owner)
        if owner.child is None:
            if owner.passing is not None:
                owner.passing.cancel()
        else:
            await self._stop_in_child(owner)

    async def _stop_in_child(self, owner: StreamOwner) -> None:
        if owner.child is not None:
            await self.ask(owner.child, "DELETE", "/v1/stream?conv_id=" + quote(owner.conversation, safe=""))

    async def ask(self, child: Instance, method: str, path: str, body: bytes = b"") -> Any:
        """A question of the router's own to a child: its JSON, or None without an answer."""
        headers = {"authorization": "Bearer " + child.api_key}
        url = f"http://127.0.0.1:{child.port}{path}"
        request = httpx.Request(method, url, headers=headers, content=body or None)
        request.extensions["timeout"] = httpx.Timeout(ASK_SECONDS).as_dict()
        try:
            response = await self._transport.handle_async_request(request)
            content = await response.aread()
            await response.aclose()
        except httpx.TransportError as error:
            log.warning("%s %s: no answer of the child: %s", method, path, error or type(error).__name__)
            return None
        return parse_json(content) if response.status_code == 200 else None

    async def _pass_on(
        self,
        request: Request,
        name: str,
        autoload: bool,
        body: bytes,
        send: Send,
        owner: StreamOwner | None = None,
    ) -> None:
        async with self._pool.use(name, autoload=autoload) as child:
            await asyncio.sleep(self._request_delay)
            if owner is not None:
                owner.child = child
            try:
                response = await self._transport.handle_async_request(self._child_request(request, child, body))
            except httpx.TransportError as error:
                raise ServerFault(f"the process of model '{name}' did not answer: {error or type(error)}") from None
            try:
                if owner is not None:
                    owner.is_answered = response.status_code == 200
                    if owner.is_stopped:  # the word to stop may have come to the child before the request
                        await self._stop_in_child(owner)
                await self._send_on(response, name, send)
            finally:
                await response.aclose()

    async def _send_on(self, response: httpx.Response, name: str, send: Send) -> None:
        headers = [
            (key.lower(), value)
            for key, value in response.headers.raw
            if key.lower() not in RESPONSE_HEADERS_KEPT_BACK and not key.lower().startswith(CORS)
        ]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        try:
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.TransportError:
            fault = ServerFault(f"the process of model '{name}' ended before its answer did")
            log.error("%s", fault)
            if response.headers.get("content-type") != "text/event-stream":
                return  # the connection breaks off, which tells the client
            await send({"type": "http.response.body", "body": sse_event(error_body(fault)), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _child_request(self, request: Request, child: Instance, body: bytes) -> httpx.Request:
        headers = [(key, value) for key, value in request.headers.raw if key not in REQUEST_HEADERS_KEPT_BACK]
        headers.append((b"authorization", b"Bearer " + child.api_key.encode()))
        path = request.scope["raw_path"].removeprefix(self._prefix)
        query = request.scope["query_string"]
        url = httpx.URL(f"http://127.0.0.1:{child.port}", raw_path=path + b"?" + query if query else path)
        return httpx.Request(request.method, url, headers=headers, content=body or None)


class Target(NamedTuple):
    """What a request is for. streams: whether its answer is asked for as a stream."""

    model: str
    streams: bool


def read_target(method: str, query: Mapping[str, str], body: bytes) -> Target:
    """`model` of a JSON body, else of the query. Raises `InvalidRequest`."""
    fields: dict[str, Any] = {}
    if method == "POST" and body:
        try:
            fields = parse_object(body)
        except InvalidRequest:  # a form, perhaps: its model is in the query, and the child judges the body
            if "model" not in query:
                raise
    name = fields.get("model") or query.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("model name is missing from the request")
    return Target(name, fields.get("stream") is True)
