"""The `llama-server` program: options, listening, loading in the background, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

from pyllama.download.model_options import ChosenModel, choose_model
from pyllama.errors import PyllamaError
from pyllama.server.app import create_app
from pyllama.server.listeners import BindError, Listener, open_listeners
from pyllama.server.loaded_model import LoadedModel, load_model
from pyllama.server.log_setup import configure_logging
from pyllama.server.settings import ServerSettings, SettingsError, settings_from_options
from pyllama.server.state import ServerState

log = logging.getLogger("pyllama.server.srv")

# A thread that wants the interpreter gets it after this many seconds at most (Python's default: 5 ms). The engine
# thread needs it for some microseconds between two steps, while the event loop may be parsing a large body.
SWITCH_INTERVAL = 0.0005

SHUTDOWN_SECONDS = 3


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: `main` decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(argv: list[str] | None = None) -> int:
    """Run the server until a signal ends it. Exit code 0 after SIGINT or SIGTERM, 1 for every failure to start."""
    from pyllama.options import parse_options

    options = parse_options("llama-server", sys.argv[1:] if argv is None else argv, os.environ)
    # Until the model is ready a signal has its default action: loading cannot stop halfway, the process just ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        configure_logging(
            verbosity=options.verbosity,
            path=options.log_file,
            prefix=options.log_prefix,
            timestamps=options.log_timestamps,
            colors=options.log_colors,
            disabled=options.log_disable,
        )
        chosen = choose_model(options, os.environ, log.warning)
        settings = settings_from_options(options, chosen.path)
    except (OSError, PyllamaError, SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return serve(settings, chosen)


def run() -> int:
    """The console script."""
    return main()


def serve(settings: ServerSettings, chosen: ChosenModel) -> int:
    """Listen, download what is missing, load, serve. Returns the exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        listeners = open_listeners(settings.hosts, settings.port, reuse_port=settings.reuse_port)
    except BindError as error:
        log.error("%s", error)
        return 1
    if settings.cors_origins == "*" and not settings.api_keys:
        log.warning(
            "no API key is set and any web page may read the answers of this server; see --api-key and --cors-origins"
        )
    state = ServerState(settings, build_info=_build_info())
    code = _run(_serve(settings, chosen, listeners, state))
    if state.is_ready and state.loaded.engine_loop.is_running:
        # A long step is still computing. Nothing waits for it, and an interpreter must not end under a running thread.
        logging.shutdown()
        os._exit(code)
    return code


def _run(serving: Coroutine[Any, Any, int]) -> int:
    """On uvloop where it is installed: a streamed token then costs the event loop a quarter less."""
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        return asyncio.run(serving)
    return uvloop.run(serving)


async def _serve(settings: ServerSettings, chosen: ChosenModel, listeners: list[Listener], state: ServerState) -> int:
    http = _HttpServer(
        uvicorn.Config(
            create_app(state),
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            lifespan="on",
            backlog=512,
        )
    )
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(http.serve(sockets=[listener.socket for listener in listeners]))
    loading = asyncio.create_task(asyncio.to_thread(_fetch_and_load, settings, chosen, state))
    await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.error("the HTTP server ended before the model was loaded")
        os._exit(1)
    try:
        loaded = loading.result()
    except (PyllamaError, OSError, ImportError) as error:
        log.error("%s", error)
        log.error("exiting due to model loading error")
        http.should_exit = True
        await serving
        return 1
    # The vocabulary is a million objects that never become garbage: without this, each full collection would visit them
    # all between two tokens.
    gc.collect()
    gc.freeze()
    _handle_signals(loop, http, state)
    state.set_loaded(loaded)
    log.info("model loaded")
    for listener in listeners:
        log.info("listening on %s", listener.url)
    if settings.port == 8080:
        log.info("notice: the default port of llama-server will move from 8080 to 9931; set --port to be sure")
    await serving
    log.info("the server has ended")
    return 0


def _fetch_and_load(settings: ServerSettings, chosen: ChosenModel, state: ServerState) -> LoadedModel:
    chosen.fetch(log.info)
    return load_model(settings, state.deliver)


def _handle_signals(loop: asyncio.AbstractEventLoop, http: uvicorn.Server, state: ServerState) -> None:
    """First SIGINT or SIGTERM: end gracefully. Second: at once, exit code 1."""

    def on_signal() -> None:
        if http.should_exit:
            os.write(2, b"Received second interrupt, terminating immediately.\n")
            os._exit(1)
        log.info("cleaning up before exit...")
        http.should_exit = True
        # What is in flight ends now instead of holding up the exit. Off the event loop: a step may take a moment.
        threading.Thread(target=state.loaded.engine_loop.stop, daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def _build_info() -> str:
    from pyllama.options.version import build_info

    number, commit = build_info()
    return f"b{number}-{commit}"


if __name__ == "__main__":
    sys.exit(main())
