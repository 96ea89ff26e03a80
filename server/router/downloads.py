"""Fetching models into the cache while the router serves, and removing them again."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from pyllama.download.cache import model_cache
from pyllama.download.model_options import ChosenModel, ModelSource
from pyllama.errors import DownloadError
from pyllama.server.errors import InvalidRequest, ServerFault

log = logging.getLogger("pyllama.server.srv")

Publish = Callable[[str, str, dict[str, Any]], None]


class Downloads:
    """`names`: what is being fetched now. on_change: called when the cache has a model more."""

    def __init__(self, source: ModelSource, publish: Publish, on_change: Callable[[], None]) -> None:
        self.names: set[str] = set()
        self._source = source
        self._publish = publish
        self._on_change = on_change

    async def start(self, name: str) -> None:
        """Look the model up, then fetch it in the background. Raises `InvalidRequest`."""
        if name in self.names:
            raise InvalidRequest(f"model '{name}' is being downloaded already")
        self.names.add(name)
        try:
            chosen = await asyncio.to_thread(self._source.repository_model, name)
        except DownloadError as error:
            self.names.remove(name)
            raise InvalidRequest(str(error)) from None
        self._publish(name, "status_change", {"status": "downloading"})
        # A daemon, so that the router can end meanwhile. The next download goes on from what came so far.
        threading.Thread(target=self._fetch, args=(name, chosen, asyncio.get_running_loop()), daemon=True).start()

    def _fetch(self, name: str, chosen: ChosenModel, loop: asyncio.AbstractEventLoop) -> None:
        def progress(text: str) -> None:
            log.info("%s", text)
            loop.call_soon_threadsafe(self._publish, name, "download_progress", {"text": text})

        try:
            chosen.fetch(progress)
        except (DownloadError, OSError) as error:
            log.error("%s: %s", name, error)
            loop.call_soon_threadsafe(self._finish, name, error)
        else:
            loop.call_soon_threadsafe(self._finish, name, None)

    def _finish(self, name: str, error: Exception | None) -> None:
        self.names.remove(name)
        if error is not None:
            self._publish(name, "download_failed", {"error": str(error)})
            return
        self._publish(name, "status_change", {"status": "downloaded"})
        try:
            self._on_change()
        except ServerFault as fault:
            log.error("%s", fault)
        self._publish(name, "download_finished", {})

    async def remove(self, name: str) -> None:
        """Delete a model of the cache. Raises `ServerFault`."""
        try:
            await asyncio.to_thread(model_cache(self._source.environ).remove, name)
        except KeyError:
            raise ServerFault(f"model '{name}' is not in the cache of repositories") from None
        except OSError as error:
            raise ServerFault(f"model '{name}' cannot be removed: {error}") from None
        self._on_change()
