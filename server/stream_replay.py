"""Streams that outlive their connection: a request with `X-Conversation-Id` writes its events into a buffer, which its
own client and any later one read.

A buffer keeps the newest bytes only, and the store of all buffers has a bound as well. Offsets count bytes from the
beginning of the stream, so a reader may stop and go on anywhere, also in the middle of a character: the pieces together
are the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from pyllama.server.errors import InvalidRequest

CONVERSATION_HEADER = "x-conversation-id"
BYTES_PER_STREAM = 4 << 20
BYTES_OF_FINISHED = 256 << 20  # of all streams that have ended; the oldest are forgotten first
BYTES_BESIDE = 2048  # what a stream takes beside its bytes, about
SECONDS_AFTER_END = 300.0
MAX_ID = 512  # characters
SUFFIX = "::"  # a conversation `c` is also found as the streams `c::...`


class OffsetLost(InvalidRequest):
    """The bytes that a reader asks for were overwritten already."""

    def __init__(self) -> None:
        super().__init__("Stream offset lost, please restart")


class ReplayBuffer:
    """The newest `max_bytes` bytes of a stream. Lives on the event loop's thread. Times are Unix seconds."""

    def __init__(self, max_bytes: int = BYTES_PER_STREAM) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._waiting: set[asyncio.Future[None]] = set()
        self.n_total = 0
        self.started_at = int(time.time())
        self.completed_at = 0

    @property
    def is_done(self) -> bool:
        return self.completed_at > 0

    @property
    def n_kept(self) -> int:
        return len(self._kept)

    def append(self, data: bytes) -> None:
        self._kept += data
        self.n_total += len(data)
        if len(self._kept) > self._max_bytes:
            del self._kept[: len(self._kept) - self._max_bytes]
        self._wake()

    def finish(self) -> None:
        if not self.is_done:
            self.completed_at = int(time.time())
            self._wake()

    def read(self, start: int) -> bytes:
        """All bytes from offset `start` on; empty where there are none yet. Raises `OffsetLost`."""
        first = self.n_total - len(self._kept)
        if start < first:
            raise OffsetLost
        return bytes(self._kept[start - first :])

    def change(self) -> asyncio.Future[None]:
        """Done when bytes come, or the end. Cancel it when it is not wanted any more."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _wake(self) -> None:
        for future in list(self._waiting):
            if not future.done():
                future.set_result(None)


class KeptStream:
    """A buffer and the generation that fills it. `stop`: ends the generation, wherever it is."""

    def __init__(self, conversation: str, stop: Callable[[], None], max_bytes: int = BYTES_PER_STREAM) -> None:
        self.conversation = conversation
        self.buffer = ReplayBuffer(max_bytes)
        self.stop = stop
        self._task: asyncio.Task[None] | None = None

    def fill_from(self, response: ASGIApp) -> None:
        """Run a streaming response whose client is the buffer."""

        async def into_buffer(message: Message) -> None:
            if body := message.get("body"):
                self.buffer.append(body)

        async def run() -> None:
            try:
                await response({}, _no_messages, into_buffer)
            finally:
                self.buffer.finish()

        self._task = asyncio.get_running_loop().create_task(run())

    @property
    def n_bytes(self) -> int:
        """About what it takes in memory."""
        return self.buffer.n_kept + len(self.conversation) + BYTES_BESIDE

    def json(self) -> dict[str, Any]:
        buffer = self.buffer
        return {
            "conversation_id": self.conversation,
            "is_done": buffer.is_done,
            "total_bytes": buffer.n_total,
            "started_at": buffer.started_at,
            "completed_at": buffer.completed_at,
        }


async def _no_messages() -> Message:
    raise RuntimeError("a kept stream has no client")


def conversations_of(stream: str) -> list[str]:
    """The conversations under which a stream is found: its own id, and what stands before each `::` in it."""
    parts = stream.split(SUFFIX)
    return [SUFFIX.join(parts[:n]) for n in range(len(parts), 0, -1)]


def conversation_id(headers: Mapping[str, str]) -> str | None:
    """What `X-Conversation-Id` says, if it says anything. Raises `InvalidRequest` for one that is too long."""
    conversation = headers.get(CONVERSATION_HEADER)
    if conversation and len(conversation) > MAX_ID:
        raise InvalidRequest(f"X-Conversation-Id: longer than {MAX_ID} characters")
    return conversation or None


class StreamStore:
    """The kept streams by conversation. A finished one is forgotten after `seconds_after_end`, or for want of room."""

    def __init__(
        self, *, seconds_after_end: float = SECONDS_AFTER_END, bytes_of_finished: int = BYTES_OF_FINISHED
    ) -> None:
        self._streams: dict[str, KeptStream] = {}
        self._finished: dict[str, asyncio.TimerHandle] = {}  # the oldest first; when each is forgotten
        self._n_finished_bytes = 0
        self._seconds_after_end = seconds_after_end
        self._bytes_of_finished = bytes_of_finished

    def open(self, conversation: str, stop: Callable[[], None]) -> KeptStream:
        """A new stream. One that the conversation had before ends."""
        self.end(conversation)
        stream = self._streams[conversation] = KeptStream(conversation, stop)
        return stream

    def find(self, conversation: str) -> KeptStream | None:
        return self._streams.get(conversation)

    def end(self, conversation: str) -> None:
        """Stop a stream and forget it. Without effect when it is not known."""
        if (stream := self._forget(conversation)) is not None:
            stream.stop()

    def has_ended(self, stream: KeptStream) -> None:
        """A stream got its last byte, or will never get any."""
        stream.buffer.finish()
        name = stream.conversation
        if self._streams.get(name) is not stream or name in self._finished:
            return
        if not stream.buffer.n_total:
            del self._streams[name]
            return
        self._finished[name] = asyncio.get_running_loop().call_later(self._seconds_after_end, self._forget, name)
        self._n_finished_bytes += stream.n_bytes
        while self._n_finished_bytes > self._bytes_of_finished:
            self._forget(next(iter(self._finished)))

    def close(self) -> None:
        """End all streams."""
        for conversation in list(self._streams):
            self.end(conversation)

    def matching(self, conversations: Iterable[str]) -> list[KeptStream]:
        """The streams of these conversations, each once, in the order in which they began."""
        asked = set(conversations)
        return [stream for name, stream in self._streams.items() if not asked.isdisjoint(conversations_of(name))]

    def _forget(self, conversation: str) -> KeptStream | None:
        stream = self._streams.pop(conversation, None)
        if stream is not None and (timer := self._finished.pop(conversation, None)) is not None:
            timer.cancel()
            self._n_finished_bytes -= stream.n_bytes
        return stream
