"""One client connection: how many requests it carries, how long it may stand still, how large a head may be."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pyllama.server.json_codec import dump_json

log = logging.getLogger("pyllama.server.srv")

MAX_REQUESTS = 100
MAX_HEAD_BYTES = 1 << 20  # the request line and a hundred headers of 8 KiB
KEEP_ALIVE_SECONDS = 5
# Key of the scope: True in the last request that the connection carries, whose answer says so.
IS_LAST_REQUEST = "pyllama.is_last_request"


def _head_too_large() -> bytes:
    message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
    body = dump_json({"error": {"code": 431, "message": message, "type": "invalid_request_error"}})
    head = (
        "HTTP/1.1 431 Request Header Fields Too Large\r\nserver: llama.cpp\r\nconnection: close\r\n"
        f"content-type: application/json; charset=utf-8\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def counts_requests(app: ASGIApp) -> ASGIApp:
    """The application as one connection sees it."""
    n_requests = 0

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal n_requests
        n_requests += 1
        scope[IS_LAST_REQUEST] = n_requests >= MAX_REQUESTS
        await app(scope, receive, send)

    return call


class Connection(HttpToolsProtocol):
    """uvicorn's connection with the limits that it lacks.

    timeout: seconds without a byte from a client that owes a request, or without a byte taken by one that is owed an
    answer; then the connection is closed. A request that computes is owed by the server and has no limit. Bodies have
    a limit of their own (408).
    """

    def __init__(self, *arguments: Any, timeout: float, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.app = counts_requests(self.app)
        self._timeout = timeout
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._n_unsent = 0
        self._is_in_head = False
        self._n_head = 0  # bytes that came for a head without completing it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._await_bytes()
        super().data_received(data)
        if self._is_in_head:  # the parser gathers what it cannot hand on yet
            self._n_head += len(data)
            if self._n_head > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_head_too_large())
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._n_head = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_progress()

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _await_bytes(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(self._timeout, self._on_silence)

    def _on_silence(self) -> None:
        self._reading = None
        owes_request = self.cycle is None or self.cycle.response_complete
        if owes_request and not self.transport.is_closing():
            self.transport.close()

    def _await_progress(self) -> None:
        self._n_unsent = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._timeout, self._on_standstill)

    def _on_standstill(self) -> None:
        if self.transport.get_write_buffer_size() < self._n_unsent:
            self._await_progress()
            return
        self._writing = None
        log.warning("a client took no byte of its answer for %g seconds: its connection is closed", self._timeout)
        self.transport.abort()
