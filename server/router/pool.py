"""Which models run. Loads start in the order in which they were asked for. When the limit is reached, the least
recently used model without requests makes room; a model with requests never does.

All of it lives on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from pyllama.server.errors import InvalidRequest, NotFound, ServerFault, Unavailable
from pyllama.server.router.catalog import CatalogModel, list_item, upper_quant
from pyllama.server.router.instance import Instance

log = logging.getLogger("pyllama.server.srv")

MakeInstance = Callable[[list[str], Callable[[Instance], None]], Instance]


class Entry:
    """A model of the catalog and, while it runs, its process.

    n_users: requests that it serves, or that wait for it. is_asked: to be loaded although nobody waits.
    outcome: of the load that is queued or going on; whoever waits for it awaits this.
    """

    def __init__(self, model: CatalogModel) -> None:
        self.model = model
        self.instance: Instance | None = None
        self.n_users = 0
        self.is_asked = False
        self.is_queued = False
        self.last_used = 0
        self.outcome: asyncio.Future[None] | None = None
        self.exit_code: int | None = None
        self.has_failed = False

    @property
    def is_loaded(self) -> bool:
        return self.instance is not None and self.instance.is_loaded

    @property
    def is_stopping(self) -> bool:
        return self.instance is not None and self.instance.is_stopping

    @property
    def status(self) -> str:
        """As `/models` calls it. A model that ends still holds its memory and counts as what it was."""
        if self.instance is not None:
            return "loading" if self.instance.state == "starting" else self.instance.state
        return "loading" if self.is_queued else "unloaded"

    def settle(self, error: Exception | None = None) -> None:
        """Tell those who wait that the load has succeeded or failed."""
        outcome, self.outcome = self.outcome, None
        if outcome is None or outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)
            outcome.exception()  # nobody may be waiting


class Pool:
    """`make_instance(arguments, on_state)`: a process that was not started yet. max_models: 0 is no limit.

    publish: gets (model, event, data) of what happens. load_delay: seconds before each load, for tests.
    """

    def __init__(
        self,
        models: Mapping[str, CatalogModel],
        max_models: int,
        make_instance: MakeInstance,
        publish: Callable[[str, str, dict[str, Any]], None] = lambda *_: None,
        load_delay: float = 0.0,
    ) -> None:
        self.entries = {name: Entry(model) for name, model in models.items()}
        self._max_models = max_models
        self._make_instance = make_instance
        self._publish = publish
        self._load_delay = load_delay
        self._queue: deque[Entry] = deque()
        self._clock = itertools.count(1)
        self._is_closing = False
        self._running: set[asyncio.Task[None]] = set()

    def find(self, name: str) -> Entry | None:
        """By name (the quant in any case) or alias."""
        if (entry := self.entries.get(name) or self.entries.get(upper_quant(name))) is not None:
            return entry
        return next((entry for entry in self.entries.values() if name in entry.model.aliases), None)

    def replace_models(self, models: Mapping[str, CatalogModel]) -> None:
        """After a rescan. Models that are gone end; what changed counts from the next load on."""
        for name in set(self.entries) - set(models):
            entry = self.entries.pop(name)
            self._end(entry)
            self._publish(name, "model_remove", {})
        for name, model in models.items():
            if (entry := self.entries.get(name)) is not None:
                entry.model = model
        self.entries = {name: self.entries.get(name) or Entry(model) for name, model in models.items()}

    @contextlib.asynccontextmanager
    async def use(self, name: str, *, autoload: bool) -> AsyncIterator[Instance]:
        """The running instance of a model, loaded first if need be. It is not unloaded meanwhile.

        Raises `InvalidRequest`, `ServerFault` when the load fails, `Unavailable` at the end of the router.
        """
        entry = self.find(name)
        if entry is None:
            raise InvalidRequest(f"model '{name}' not found")
        entry.n_users += 1
        try:
            while not entry.is_loaded:
                if not autoload:
                    raise InvalidRequest("model is not loaded")
                await asyncio.shield(self._load(entry))
            assert entry.instance is not None
            yield entry.instance
        finally:
            entry.n_users -= 1
            entry.last_used = next(self._clock)
            self._pump()

    def load(self, name: str) -> None:
        """Begin to load, unasked by a request. Raises `NotFound`, `InvalidRequest`."""
        entry = self.find(name)
        if entry is None:
            raise NotFound
        if entry.is_queued or (entry.instance is not None and not entry.is_stopping):
            raise InvalidRequest("model is already running")
        entry.is_asked = True
        self._load(entry)

    def unload(self, name: str) -> None:
        """Begin to unload, also while requests run. Raises `InvalidRequest`."""
        entry = self.find(name)
        if entry is None:
            raise InvalidRequest(f"model '{name}' not found")
        if not entry.is_queued and (entry.instance is None or entry.is_stopping):
            raise InvalidRequest("model is not running")
        self._end(entry)

    async def close(self) -> None:
        """End all children."""
        self._is_closing = True
        for entry in self.entries.values():
            self._end(entry)
        await asyncio.gather(*self._running)

    def _load(self, entry: Entry) -> asyncio.Future[None]:
        if self._is_closing:
            raise Unavailable("the server is shutting down")
        outcome = entry.outcome
        if outcome is None:
            outcome = entry.outcome = asyncio.get_running_loop().create_future()
            entry.is_queued = True
            self._queue.append(entry)
            self._tell(entry)
            self._pump()
        return outcome

    def _end(self, entry: Entry) -> None:
        entry.is_asked = False
        if entry.is_queued:
            self._dequeue(entry)
        if self._is_closing:
            entry.settle(Unavailable("the server is shutting down"))
        else:
            entry.settle(ServerFault(f"model '{entry.model.name}' was unloaded"))
        if entry.instance is not None:
            entry.instance.stop(entry.model.stop_timeout)

    def _dequeue(self, entry: Entry) -> None:
        self._queue.remove(entry)
        entry.is_queued = False
        self._tell(entry)

    def _pump(self) -> None:
        """Start what is first in the queue if there is room, or make room for it."""
        while self._queue:
            entry = self._queue[0]
            if not entry.n_users and not entry.is_asked:  # whoever wanted it has gone
                entry.outcome = None
                self._dequeue(entry)
                continue
            if entry.is_stopping:
                return
            if self._max_models and not self._has_room():
                return
            self._queue.popleft()
            entry.is_queued = False
            self._start(entry)

    def _has_room(self) -> bool:
        alive = [entry for entry in self.entries.values() if entry.instance is not None]
        if len(alive) < self._max_models:
            return True
        idle = [entry for entry in alive if entry.is_loaded and entry.n_users == 0]
        if idle and not any(entry.is_stopping for entry in alive):
            victim = min(idle, key=lambda entry: entry.last_used)
            log.info("unloading %s to make room", victim.model.name)
            self._end(victim)
        return False

    def _start(self, entry: Entry) -> None:
        entry.exit_code, entry.has_failed = None, False
        arguments = [*entry.model.arguments, "--alias", list_item(entry.model.name)]
        entry.instance = self._make_instance(arguments, lambda instance: self._on_state(entry, instance))
        task = asyncio.create_task(self._run(entry, entry.instance))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _on_state(self, entry: Entry, instance: Instance) -> None:
        if instance.is_loaded and entry.outcome is not None:  # a child that slept was loaded before
            entry.is_asked = False
            entry.last_used = next(self._clock)
            log.info("%s is loaded, port %d", entry.model.name, instance.port)
            entry.settle()
            self._pump()
        self._tell(entry)

    async def _run(self, entry: Entry, instance: Instance) -> None:
        name = entry.model.name
        try:
            await asyncio.sleep(self._load_delay)
            log.info("loading %s: %s", name, " ".join(instance.arguments))
            entry.exit_code = await instance.run()
            entry.has_failed = not instance.is_stopping
        except OSError as error:
            log.error("%s: its process cannot be started: %s", name, error)
            entry.has_failed = True
        finally:
            entry.instance = None
            entry.is_asked = entry.is_asked and entry.is_queued
            if entry.has_failed:
                log.error("%s: its process ended with exit code %s", name, entry.exit_code)
            if not entry.is_queued:
                entry.settle(ServerFault(f"model '{name}' failed to load, exit code {entry.exit_code}"))
            self._tell(entry)
            self._pump()

    def _tell(self, entry: Entry) -> None:
        self._publish(entry.model.name, "status_change", {"status": entry.status})
