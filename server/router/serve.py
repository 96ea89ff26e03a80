"""`llama-server` without a model: listen, then serve whatever model a request names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pyllama.options import Options
from pyllama.options.version import build_label
from pyllama.server.http_server import HttpServer, announce, run_loop, warn_of_open_doors
from pyllama.server.listeners import BindError, Listener, open_listeners
from pyllama.server.router.app import ROUTER_PATHS, RouterState, create_router_app
from pyllama.server.router.catalog import Sources
from pyllama.server.router.instance import Instance
from pyllama.server.router.presets import CatalogError, command_line
from pyllama.server.settings import settings_from_options
from pyllama.server.vertex import with_vertex

log = logging.getLogger("pyllama.server.srv")

FAKE_TIMING = "LLAMA_SERVER_DEBUG_FAKE_TIMING"
FAKE_SECONDS = 2.0


def serve_router(
    options: Options, argv: Sequence[str], environ: Mapping[str, str], hub_preset: Path | None = None
) -> int:
    """Until a signal ends it. hub_preset: the presets of the repository that `--hf-repo` names.

    Returns the exit code; raises `SettingsError` or `CatalogError`.
    """
    if hub_preset is not None and options.models_preset:
        raise CatalogError(f"{options.hf_repo} has presets, and --models-preset names others; use one of them")
    if options.given("alias"):
        log.warning("--alias has no effect without a model; a preset file gives aliases")
    settings = with_vertex(settings_from_options(options, "none"), environ, ROUTER_PATHS)
    given = command_line(argv)
    if hub_preset is not None:
        given = tuple(assignment for assignment in given if assignment.option.dest != "hf_repo")
    preset = options.models_preset if hub_preset is None else str(hub_preset)
    sources = Sources(environ, options.models_dir, preset, given, preset_from_hub=hub_preset is not None)
    try:
        listeners = open_listeners(
            settings.hosts, settings.port, reuse_port=settings.reuse_port, scheme=settings.scheme
        )
    except BindError as error:
        log.error("%s", error)
        return 1

    def make_instance(arguments: list[str], on_state: Callable[[Instance], None]) -> Instance:
        return Instance(arguments, environ, listeners[0].port, on_state)

    state = RouterState(
        settings,
        sources,
        make_instance,
        max_models=options.models_max,
        autoload=options.models_autoload,
        token=options.hf_token,
        offline=options.offline,
        delay=FAKE_SECONDS if FAKE_TIMING in environ else 0.0,
        build_info=build_label(),
    )
    warn_of_open_doors(settings)
    return run_loop(_serve(state, listeners))


async def _serve(state: RouterState, listeners: list[Listener]) -> int:
    http = HttpServer(create_router_app(state), state.settings)
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []
    http.end_on_signals(loop, lambda: ending.append(loop.create_task(state.close())))
    log.info("no model is given: serving the %d models that are known here", len(state.pool.entries))
    announce(state.settings, listeners)
    await http.serve(sockets=[listener.socket for listener in listeners])
    log.info("the server has ended")
    return 0
