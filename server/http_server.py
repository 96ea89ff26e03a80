"""uvicorn as this server runs it, the signals that end it, and what it says about itself at the start."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from pyllama.server.connection import KEEP_ALIVE_SECONDS, Connection
from pyllama.server.listeners import Listener
from pyllama.server.settings import ServerSettings

log = logging.getLogger("pyllama.server.srv")

SHUTDOWN_SECONDS = 3


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        tls = settings.tls
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(Connection, timeout=settings.timeout),  # type: ignore[arg-type]
                ssl_keyfile=tls.key if tls else None,
                ssl_certfile=tls.certificate if tls else None,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                lifespan="on",
                backlog=512,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end_on_signals(self, loop: asyncio.AbstractEventLoop, on_first: Callable[[], None]) -> None:
        """First SIGINT or SIGTERM: call `on_first` and end gracefully. Second: at once, exit code 1."""

        def on_signal() -> None:
            if self.should_exit:
                os.write(2, b"Received second interrupt, terminating immediately.\n")
                os._exit(1)
            log.info("cleaning up before exit...")
            self.should_exit = True
            on_first()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)


def run_loop(serving: Coroutine[Any, Any, int]) -> int:
    """On uvloop where it is installed: a streamed token then costs the event loop a quarter less."""
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        return asyncio.run(serving)
    return uvloop.run(serving)


def warn_of_open_doors(settings: ServerSettings) -> None:
    if settings.cors_origins == "*" and not settings.api_keys:
        log.warning(
            "no API key is set and any web page may read the answers of this server; see --api-key and --cors-origins"
        )
    if settings.has_cors_proxy:
        log.warning(
            "experimental: /cors-proxy sends requests of clients on from this host, for web pages of these origins: %s",
            settings.cors_origins,
        )


def announce(settings: ServerSettings, listeners: list[Listener]) -> None:
    """The lines that say where the server can be reached."""
    for listener in listeners:
        log.info("listening on %s", listener.url)
    if settings.port == 8080:
        log.info("notice: the default port of llama-server will move from 8080 to 9931; set --port to be sure")
