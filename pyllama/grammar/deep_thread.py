"""Calls on a thread with a large stack and a time limit, for native code that recurses as deep as its input is nested
and cannot be interrupted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 256 << 20
"""Address space; memory is only taken where the stack is used."""
MAX_CALLS = 2
"""At a time, those included that were given up and still run."""

_places = threading.BoundedSemaphore(MAX_CALLS)
_lock = threading.Lock()  # the size counts for threads of everybody that start meanwhile


def call_deep(function: Callable[[], T], seconds: float) -> T:
    """The function's result or exception. After `seconds`, which include the wait for others, `TimeoutError`: the call
    then runs on unheard. `MemoryError` where no thread with such a stack can be made.
    """
    deadline = time.monotonic() + seconds
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            _places.release()

    if not _places.acquire(timeout=seconds):
        raise TimeoutError
    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            _places.release()
            raise MemoryError(f"no thread with a stack of {STACK_BYTES} bytes: {error}") from None
        finally:
            threading.stack_size(before)
    thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive():
        raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]
