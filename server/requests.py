"""A request in flight: its generations, and the mailbox through which the engine thread's events reach its handler."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama.server.generation import Event, Generation

_request_ids = itertools.count()


class Mailbox:
    """Events for one reader. `put`, `close` and `get` belong to the event loop's thread."""

    __slots__ = ("_events", "_waiter", "is_closed")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self.wake()

    def close(self) -> None:
        """The client is gone: the reader wakes up and sees `is_closed`."""
        self.is_closed = True
        self.wake()

    def wake(self) -> None:
        """Let a waiting `get` return, with whatever is there."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[Event]:
        """All events so far, in order; waits for the first. Empty after `wake` or `close`."""
        if not self._events and not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events


class ActiveRequest:
    """One HTTP request's generations. `groups`: per prompt the generations of its choices, the parent first."""

    __slots__ = ("groups", "id", "id_slot", "is_cancelled", "mailbox")

    def __init__(self, *, id_slot: int = -1) -> None:
        self.id = next(_request_ids)
        self.id_slot = id_slot
        self.groups: list[list[Generation]] = []
        self.mailbox = Mailbox()
        self.is_cancelled = False

    @property
    def generations(self) -> list[Generation]:
        return [generation for group in self.groups for generation in group]


def dispatch(events: Iterable[Event]) -> None:
    """Put the events of one step into the mailboxes of their requests. Runs on the event loop's thread."""
    for event in events:
        request = event.generation.request
        if not request.is_cancelled:
            request.mailbox.put(event)
