"""Server-sent events: their byte format, and the response that streams a request's events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyllama.server.generation import Event, Failed, Finished
from pyllama.server.json_codec import dump_json
from pyllama.server.middleware import DIRECT_SEND
from pyllama.server.requests import ActiveRequest

log = logging.getLogger("pyllama.server.srv")

PING = b":\n\n"
DONE = b"data: [DONE]\n\n"


class NamedEvent(NamedTuple):
    """An event with a name beside its JSON value."""

    name: str
    data: dict[str, Any]


def sse_event(value: Any) -> bytes:
    """One event with a JSON value, or a `NamedEvent`."""
    if isinstance(value, NamedEvent):
        return b"event: " + value.name.encode() + b"\ndata: " + dump_json(value.data) + b"\n\n"
    return b"data: " + dump_json(value) + b"\n\n"


class EventStream(Response):
    """Streams the results of `request`. `first`: events that were read already.

    to_chunks: event -> JSON values to send; to_error: failure -> the value to send.
    ends_with_done: `[DONE]` after the last event; not after an error.
    ping_interval: seconds of silence before a comment line; <= 0 never.
    on_end: called once, with True when all results were delivered.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: ActiveRequest,
        first: list[Event],
        *,
        to_chunks: Callable[[Event], Iterable[Any]],
        to_error: Callable[[BaseException], Any],
        ends_with_done: bool,
        ping_interval: int,
        on_end: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._request = request
        self._first = first
        self._to_chunks = to_chunks
        self._to_error = to_error
        self._ends_with_done = ends_with_done
        self._ping_interval = ping_interval
        self._on_end = on_end
        self._n_left = len(request.generations)
        self._failed = False
        self._wants_ping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = False
        timer = _PingTimer(self._ping_interval, self._ping)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            send = scope.get(DIRECT_SEND, send)
            events = self._first
            mailbox = self._request.mailbox
            while True:
                body = self._body(events)
                if body:
                    timer.touch()
                elif self._wants_ping:
                    body = PING
                self._wants_ping = False
                is_last = self._failed or self._n_left == 0
                if body or is_last:
                    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                if is_last:
                    is_complete = self._n_left == 0
                    return
                events = await mailbox.get()
                if mailbox.is_closed:
                    return
        finally:
            timer.cancel()
            self._on_end(is_complete)

    def _ping(self) -> None:
        self._wants_ping = True
        self._request.mailbox.wake()

    def _body(self, events: list[Event]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            if isinstance(event, Failed):
                self._failed = True
                parts.append(sse_event(self._to_error(event.error)))
                break
            try:
                parts += [sse_event(chunk) for chunk in self._to_chunks(event)]
            except Exception as error:
                log.exception("a result could not be written")
                self._failed = True
                parts.append(sse_event(self._to_error(error)))
                break
            if isinstance(event, Finished):
                self._n_left -= 1
        if self._n_left == 0 and not self._failed and self._ends_with_done:
            parts.append(DONE)
        return b"".join(parts)


STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]


class _PingTimer:
    """Calls `on_silence` when `interval` seconds passed since the last `touch`. One timer per stream, not per token."""

    def __init__(self, interval: int, on_silence: Callable[[], None]) -> None:
        self._interval = min(interval, 10**6)
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._handle: asyncio.TimerHandle | None = None
        if interval > 0:
            self._handle = self._loop.call_later(self._interval, self._check)

    def touch(self) -> None:
        self._last = self._loop.time()

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _check(self) -> None:
        silence = self._loop.time() - self._last
        if silence >= self._interval:
            self._on_silence()
            self.touch()
            silence = 0.0
        self._handle = self._loop.call_later(self._interval - silence, self._check)
