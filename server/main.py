"""The `llama-server` program: options, listening, loading in the background, signals, exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from pyllama.download.model_options import ChosenModel, PresetRepository, choose_draft_model, choose_model
from pyllama.errors import PyllamaError
from pyllama.options.version import build_label, cuda_kernels
from pyllama.server.api.info import models_json
from pyllama.server.app import ROUTE_PATHS, create_app
from pyllama.server.http_server import HttpServer, announce, run_loop, warn_of_open_doors
from pyllama.server.listeners import BindError, Listener, open_listeners
from pyllama.server.loaded_model import LoadedModel, load_model
from pyllama.server.log_setup import configure_logging
from pyllama.server.router.child import Parent
from pyllama.server.settings import ServerSettings, SettingsError, settings_from_options
from pyllama.server.state import ServerState
from pyllama.server.vertex import with_vertex

log = logging.getLogger("pyllama.server.srv")

# A thread that wants the interpreter gets it after this many seconds at most (Python's default: 5 ms). The engine
# thread needs it for some microseconds between two steps, while the event loop may be parsing a large body.
SWITCH_INTERVAL = 0.0005


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until a signal ends it. Exit code 0 after SIGINT or SIGTERM, 1 for every failure to start."""
    from pyllama.options import parse_options

    argv = sys.argv[1:] if argv is None else argv
    options = parse_options("llama-server", argv, os.environ)
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
            as_json=options.log_jsonl,
        )
        if not (options.model or options.model_url or options.hf_repo or options.hf_file):
            from pyllama.server.router.serve import serve_router

            return serve_router(options, argv, os.environ)
        try:
            chosen = choose_model(options, os.environ, log.warning)
        except PresetRepository as found:
            from pyllama.server.router.serve import serve_router

            log.info("%s has presets: %s", options.hf_repo, found.path)
            return serve_router(options, argv, os.environ, found.path)
        for option in ("models_dir", "models_preset"):
            if options.given(option):
                log.warning("--%s has no effect: a model is given", option.replace("_", "-"))
        draft = choose_draft_model(options, os.environ, log.warning)
        draft_path = draft.path if draft is not None else ""
        settings = with_vertex(settings_from_options(options, chosen.path, draft_path), os.environ, ROUTE_PATHS)
    except (OSError, PyllamaError, SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return serve(settings, chosen.and_also(draft) if draft is not None else chosen, Parent(os.environ))


def run() -> int:
    """The console script."""
    return main()


def serve(settings: ServerSettings, chosen: ChosenModel, parent: Parent) -> int:
    """Listen, download what is missing, load, serve. Returns the exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        listeners = open_listeners(
            settings.hosts, settings.port, reuse_port=settings.reuse_port, scheme=settings.scheme
        )
    except BindError as error:
        log.error("%s", error)
        return 1
    warn_of_open_doors(settings)
    log.info("CUDA kernels: %s", cuda_kernels())
    parent.obey()
    parent.tell("downloading" if chosen.jobs else "loading", port=listeners[0].port)
    state = ServerState(settings, build_info=build_label())
    code = run_loop(_serve(settings, chosen, listeners, state, parent))
    if state.is_ready and state.loaded.engine_loop.is_running:
        # A long step is still computing. Nothing waits for it, and an interpreter must not end under a running thread.
        logging.shutdown()
        os._exit(code)
    return code


async def _serve(
    settings: ServerSettings, chosen: ChosenModel, listeners: list[Listener], state: ServerState, parent: Parent
) -> int:
    http = HttpServer(create_app(state), settings)
    serving = asyncio.create_task(http.serve(sockets=[listener.socket for listener in listeners]))
    loading = asyncio.create_task(asyncio.to_thread(_fetch_and_load, settings, chosen, state, parent))
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
    # What is in flight ends now instead of holding up the exit. Off the event loop: a step may take a moment.
    end_engine = threading.Thread(target=loaded.engine_loop.stop, daemon=True)
    http.end_on_signals(asyncio.get_running_loop(), end_engine.start)
    state.set_loaded(loaded)
    loaded.engine_loop.on_sleep = lambda is_sleeping: parent.tell("sleeping" if is_sleeping else "loaded")
    parent.tell("loaded", model=models_json(state, int(time.time()))["data"][0])
    log.info("model loaded")
    announce(settings, listeners)
    await serving
    log.info("the server has ended")
    return 0


def _fetch_and_load(settings: ServerSettings, chosen: ChosenModel, state: ServerState, parent: Parent) -> LoadedModel:
    chosen.fetch(log.info)
    if chosen.jobs:
        parent.tell("loading")
    return load_model(settings, state.deliver)


if __name__ == "__main__":
    sys.exit(main())
