"""The router's application: its own routes, and everything else forwarded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from pyllama.download.model_options import ModelSource
from pyllama.server.api import cors_proxy
from pyllama.server.api.info import health
from pyllama.server.app import ROUTE_PATHS, ROUTES, disabled_routes, framed
from pyllama.server.errors import InvalidRequest, NotFound, ServerFault
from pyllama.server.generation_params import settings_json
from pyllama.server.responses import json_response, read_object
from pyllama.server.router import streams
from pyllama.server.router.catalog import Sources, upper_quant
from pyllama.server.router.downloads import Downloads
from pyllama.server.router.forward import Forwarder
from pyllama.server.router.pool import Entry, MakeInstance, Pool
from pyllama.server.router.presets import CatalogError
from pyllama.server.settings import ServerSettings
from pyllama.server.sse import STREAM_HEADERS, sse_event
from pyllama.server.static_pages import PagesFirst, StaticPages, service_worker
from pyllama.server.vertex import vertex_routes

log = logging.getLogger("pyllama.server.srv")

NO_MODEL_YET = {"input_modalities": ["text"], "output_modalities": ["text"]}


class Events:
    """What happens to the models, for everybody who listens at `/models/sse`."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes | None]] = set()

    def publish(self, model: str, event: str, data: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener.put_nowait(sse_event({"model": model, "event": event, "data": data}))

    def close(self) -> None:
        """End the streams of all who listen."""
        for listener in self._listeners:
            listener.put_nowait(None)

    async def listen(self, first: list[bytes]) -> AsyncIterator[bytes]:
        listener: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._listeners.add(listener)
        try:
            for event in first:
                yield event
            while (event := await listener.get()) is not None:
                yield event
        finally:
            self._listeners.remove(listener)


class RouterState:
    """The router as a value: `settings` of its HTTP side, the sources and what they gave, who runs."""

    def __init__(
        self,
        settings: ServerSettings,
        sources: Sources,
        make_instance: MakeInstance,
        *,
        max_models: int,
        autoload: bool,
        token: str | None = None,
        offline: bool = False,
        delay: float = 0.0,
        build_info: str = "b0-unknown",
    ) -> None:
        """Raises `CatalogError`. delay: seconds that loads and requests are held up, for tests."""
        self.settings = settings
        self.max_models = max_models
        self.autoload = autoload
        self.build_info = build_info
        self.events = Events()
        self.pool = Pool(sources.read(), max_models, make_instance, self.events.publish, delay)
        source = ModelSource(sources.environ, token, offline, log.warning)
        self.downloads = Downloads(source, self.events.publish, self.rescan)
        self.forwarder = Forwarder(
            self.pool,
            prefix=settings.api_prefix,
            autoload=autoload,
            timeout=settings.timeout,
            request_delay=delay,
        )
        self._sources = sources

    def rescan(self) -> None:
        """Read the sources again. Raises `ServerFault` and changes nothing when they are wrong now."""
        try:
            models = self._sources.read()
        except CatalogError as error:
            raise ServerFault(str(error)) from None
        self.pool.replace_models(models)
        self.events.publish("*", "models_reload", {})

    async def close(self) -> None:
        """End the children, and with them what they serve."""
        self.events.close()
        await self.pool.close()
        await self.forwarder.close()

    def load_on_startup(self) -> None:
        for name, entry in self.pool.entries.items():
            if entry.model.loads_on_startup:
                self.pool.load(name)


def router_state(http: Request) -> RouterState:
    state: RouterState = http.app.state.server
    return state


async def props(http: Request) -> Any:
    """Of the router; with a model in the query, of that model's server."""
    state = router_state(http)
    if http.query_params.get("model"):
        return state.forwarder
    facts = {
        "role": "router",
        "max_instances": state.max_models,
        "models_autoload": state.autoload,
        "model_alias": "llama-server",
        "model_path": "none",
        "default_generation_settings": {"params": settings_json(state.settings.defaults, full=False), "n_ctx": 0},
        "ui_settings": {},
        "build_info": state.build_info,
        "cors_proxy_enabled": state.settings.has_cors_proxy,
    }
    return json_response(facts)


def entry_json(entry: Entry, now: int) -> dict[str, Any]:
    model, instance = entry.model, entry.instance
    status: dict[str, Any] = {
        "value": entry.status,
        "args": list(model.arguments) if instance is None else instance.arguments,
    }
    if model.preset_text:
        status["preset"] = model.preset_text
    if entry.has_failed:
        status |= {"exit_code": entry.exit_code, "failed": True}
    known = {} if instance is None else instance.model
    result = {
        "id": model.name,
        "aliases": sorted(model.aliases),
        "tags": known.get("tags", []),
        "object": "model",
        "owned_by": "llamacpp",
        "created": now,
        "status": status,
        "architecture": known.get("architecture", NO_MODEL_YET),
        "source": model.source,
        "can_remove": model.source == "cache" and "/" in model.name,
    }
    return result | ({"meta": known["meta"]} if "meta" in known else {})


def _downloading_json(name: str, now: int) -> dict[str, Any]:
    return {
        "id": name,
        "aliases": [],
        "tags": [],
        "object": "model",
        "owned_by": "llamacpp",
        "created": now,
        "status": {"value": "downloading", "args": []},
        "architecture": NO_MODEL_YET,
        "source": "cache",
        "can_remove": False,
    }


async def models(http: Request) -> Response:
    state = router_state(http)
    if http.query_params.get("reload") in ("1", "true"):
        state.rescan()
    now = int(time.time())
    data = [entry_json(entry, now) for entry in state.pool.entries.values() if not entry.model.is_hidden]
    data += [_downloading_json(name, now) for name in sorted(state.downloads.names)]
    return json_response({"data": data, "object": "list"})


async def _asked_model(http: Request) -> str:
    name = (await read_object(http)).get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("model name is missing from the request")
    return name


async def load(http: Request) -> Response:
    router_state(http).pool.load(await _asked_model(http))
    return json_response({"success": True})


async def unload(http: Request) -> Response:
    router_state(http).pool.unload(await _asked_model(http))
    return json_response({"success": True})


async def download(http: Request) -> Response:
    state, name = router_state(http), await _asked_model(http)
    if state.pool.find(name) is not None:
        raise InvalidRequest(f"model '{name}' exists already")
    await state.downloads.start(upper_quant(name))
    return json_response({"success": True})


async def remove(http: Request) -> Response:
    state, name = router_state(http), http.query_params.get("model")
    if not name:
        raise InvalidRequest("model name is missing from the request")
    entry = state.pool.find(name)
    if entry is None or entry.model.source != "cache":
        raise ServerFault(f"model '{name}' is not a model of the cache")
    await state.downloads.remove(entry.model.name)
    return json_response({"success": True})


async def model_events(http: Request) -> Response:
    state = router_state(http)
    first = [
        sse_event({"model": name, "event": "model_status", "data": {"status": entry.status}})
        for name, entry in state.pool.entries.items()
    ]
    headers = {key.decode(): value.decode() for key, value in STREAM_HEADERS}
    return StreamingResponse(state.events.listen(first), headers=headers)


async def no_page(http: Request) -> Response:
    raise NotFound


# What the router answers itself; everything else is forwarded.
OWN_ROUTES = (
    ("GET", "/health", health),
    ("GET", "/v1/health", health),
    ("GET", "/props", props),
    ("GET", "/models", models),
    ("GET", "/v1/models", models),
    ("POST", "/models", download),
    ("DELETE", "/models", remove),
    ("POST", "/models/load", load),
    ("POST", "/models/unload", unload),
    ("GET", "/models/sse", model_events),
    ("GET", "/v1/stream", streams.read_stream),
    ("DELETE", "/v1/stream", streams.stop_stream),
    ("POST", "/v1/streams/lookup", streams.lookup_streams),
    ("GET", "/sw.js", service_worker),
    ("GET", "/cors-proxy", cors_proxy.cors_proxy),
    ("POST", "/cors-proxy", cors_proxy.cors_proxy),
)

ROUTER_PATHS = ROUTE_PATHS | {path for _, path, _ in OWN_ROUTES}


def create_router_app(state: RouterState) -> Starlette:
    settings = state.settings

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.load_on_startup()
        yield
        await state.close()

    prefix = settings.api_prefix
    routes: list[BaseRoute] = [Route(prefix + path, handler, methods=[method]) for method, path, handler in OWN_ROUTES]
    routes += [*disabled_routes(settings), *vertex_routes(settings, ROUTES)]
    if settings.static_path:
        routes.append(Mount(prefix, PagesFirst(StaticPages(settings.static_path), state.forwarder)))
    else:
        routes += [Route(prefix + "/", no_page), Route(prefix + "/{path:path}", state.forwarder)]
    app = framed(settings, routes, lifespan)
    app.state.server = state
    return app
