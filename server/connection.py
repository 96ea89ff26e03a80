"""One client connection: how many requests it carries, and how long it may stand still."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("pyllama.server.srv")

MAX_REQUESTS = 100
KEEP_ALIVE_SECONDS = 5
# Key of the scope: True in the last request that the connection carries, whose answer says so.
IS_LAST_REQUEST = "pyllama.is_last_request"


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
    """uvicorn's connection with the time limits that it lacks.

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
