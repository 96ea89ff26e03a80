"""What the application knows: settings, the loaded model once there is one, and the event loop to deliver to."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import replace
from typing import Any

from pyllama.server.errors import Unavailable
from pyllama.server.generation import Event
from pyllama.server.loaded_model import LoadedModel
from pyllama.server.metrics import Snapshot, Totals
from pyllama.server.requests import ActiveRequest, dispatch
from pyllama.server.settings import ServerSettings
from pyllama.server.stream_replay import StreamStore


class ServerState:
    """One per application; lives on the event loop's thread except for `deliver`."""

    def __init__(self, settings: ServerSettings, *, build_info: str = "b0-unknown") -> None:
        self.settings = settings
        self.build_info = build_info
        self.media_marker = os.environ.get("LLAMA_MEDIA_MARKER") or f"<__media_{secrets.token_hex(16)}__>"
        self.running: dict[str, ActiveRequest] = {}  # requests being answered, by the id that their clients know
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.streams = StreamStore()
        self._loaded: LoadedModel | None = None
        self._scraped = Totals()

    @property
    def is_ready(self) -> bool:
        return self._loaded is not None

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise Unavailable("Loading model")
        return self._loaded

    def set_loaded(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def deliver(self, events: list[Event]) -> None:
        """Called by the engine thread once per step."""
        loop = self.event_loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(dispatch, events)
            except RuntimeError:  # the loop closed in between: the process is ending and nobody waits for the events
                if not loop.is_closed():
                    raise

    def scrape(self) -> Snapshot:
        """Metrics now; the next scrape's rates count from here."""
        engine_loop = self.loaded.engine_loop
        totals = replace(engine_loop.totals)
        snapshot = Snapshot(totals, self._scraped, engine_loop.n_busy, engine_loop.n_deferred, engine_loop.memory.usage)
        self._scraped = totals
        return snapshot


def server_state(request: Any) -> ServerState:
    """The state of the application that a starlette request belongs to."""
    return request.app.state.server
