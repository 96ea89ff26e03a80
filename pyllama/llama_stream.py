"""Calls on one `Llama` object queue up; a stream keeps its place in front until it is exhausted or closed."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

from pyllama.errors import PyllamaError

Item = TypeVar("Item")


class CallQueue:
    """A lock for whole calls. A stream may be advanced from changing threads, so any thread may release it.

    Waiting for oneself would hang for ever. It raises `PyllamaError` instead where that is certain: in a thread that is
    inside a call of the same object (from a callback), and in the main thread while it is the reader of an open stream.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: int | None = None  # thread that is inside a call or advances the stream right now
        # Weak, so that a stream that its reader dropped is deleted, which closes it.
        self._stream: weakref.ref[LockedStream[Any]] | None = None
        self._stream_thread: int | None = None  # thread that advanced the open stream last

    @property
    def open_stream(self) -> LockedStream[Any] | None:
        return self._stream() if self._stream is not None else None

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Hold the queue for the body."""
        self._acquire()
        self._running = threading.get_ident()
        try:
            yield
        finally:
            self._running = None
            self._lock.release()

    def begin_stream(self, stream: LockedStream[Any]) -> None:
        self._acquire()
        self._stream = weakref.ref(stream)

    @contextlib.contextmanager
    def advance_stream(self) -> Iterator[None]:
        self._running = self._stream_thread = threading.get_ident()
        try:
            yield
        finally:
            self._running = None

    def end_stream(self) -> None:
        self._stream = self._stream_thread = None
        self._lock.release()

    def _acquire(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        me = threading.get_ident()
        if self._running == me:
            raise PyllamaError(
                "this Llama object is busy in this very thread: a callback must not start another call on it"
            )
        if (
            self._stream_thread == me
            and threading.current_thread() is threading.main_thread()
            and self._running is None
        ):
            raise PyllamaError(
                "a stream of this Llama object is still open in this thread: exhaust it or close() it first"
            )
        self._lock.acquire()


class LockedStream(Generic[Item]):
    """An iterator that takes its place in the queue at the first item, until it is exhausted, closed or deleted.

    Also a context manager that closes itself. Safe to advance from several threads, one item at a time.
    """

    def __init__(self, queue: CallQueue, items: Generator[Item, Any, None]) -> None:
        self._queue = queue
        self._items = items
        self._mutex = (
            threading.RLock()
        )  # re-entered when a callback closes the stream that runs it: an error, not a hang
        self._holds_queue = False
        self._is_over = False
        self._error: Exception | None = None

    def __iter__(self) -> LockedStream[Item]:
        return self

    def __next__(self) -> Item:
        return self.send(None)

    def send(self, value: Any) -> Item:
        """As `next`; `value` is what the generator's ``yield`` gives (`Llama.generate` takes tokens to append)."""
        with self._mutex:
            if self._is_over:
                raise self._error or StopIteration
            if not self._holds_queue:
                self._queue.begin_stream(self)
                self._holds_queue = True
            try:
                with self._queue.advance_stream():
                    return self._items.send(value)
            except BaseException:
                self._end()
                raise

    def close(self, error: Exception | None = None) -> None:
        """End the stream and let the next call run. Idempotent. `error` is raised at later attempts to read on."""
        with self._mutex:
            if not self._is_over:
                self._items.close()
                self._error = error
                self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._holds_queue:
            self._holds_queue = False
            self._queue.end_stream()

    def __enter__(self) -> LockedStream[Item]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
