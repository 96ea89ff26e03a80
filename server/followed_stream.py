"""The response that sends a replay buffer: what is there already, and what comes."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyllama.server.errors import error_body
from pyllama.server.middleware import DIRECT_SEND
from pyllama.server.sse import STREAM_HEADERS, sse_event
from pyllama.server.stream_replay import OffsetLost, ReplayBuffer


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class FollowedStream(Response):
    """Sends a buffer from the offset `start` on, and goes on with what comes, until its end or until the client goes.

    Raises `OffsetLost` when made for bytes that are gone; a reader that falls behind later gets it as the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, buffer: ReplayBuffer, start: int = 0) -> None:
        super().__init__()
        buffer.read(start)
        self._buffer = buffer
        self._position = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        send = scope.get(DIRECT_SEND, send)
        leaving = asyncio.create_task(until_disconnect(receive))
        try:
            while not leaving.done():
                is_last = self._buffer.is_done
                try:
                    data = self._buffer.read(self._position)
                except OffsetLost as error:
                    is_last, data = True, b"\n\n" + sse_event(error_body(error))
                self._position += len(data)
                if data or is_last:
                    await send({"type": "http.response.body", "body": data, "more_body": not is_last})
                if is_last:
                    return
                if not data:
                    change = self._buffer.change()
                    await asyncio.wait({change, leaving}, return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
        finally:
            leaving.cancel()
