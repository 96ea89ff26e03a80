"""The application: routes and middleware around one `ServerState`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from pyllama.server.api import (
    anthropic_messages,
    chat,
    chat_control,
    completions,
    cors_proxy,
    embeddings,
    infill,
    info,
    lora,
    no_such_model,
    openai_responses,
    rerank,
    slots,
    streams,
    tokens,
)
from pyllama.server.errors import NotFound
from pyllama.server.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    CorsMiddleware,
    ErrorMiddleware,
    ReadinessMiddleware,
)
from pyllama.server.responses import error_response
from pyllama.server.settings import ServerSettings
from pyllama.server.state import ServerState
from pyllama.server.static_pages import StaticPages, service_worker
from pyllama.server.vertex import vertex_routes

STOP_SECONDS = 1.0  # for the engine's last step; a long prompt chunk may take longer and is abandoned then

# One row per path. Everything else, also another method, is 404.
ROUTES = (
    ("GET", "/health", info.health),
    ("GET", "/v1/health", info.health),
    ("GET", "/props", info.props),
    ("POST", "/props", info.change_props),
    ("GET", "/models", info.models),
    ("GET", "/v1/models", info.models),
    ("GET", "/metrics", info.metrics),
    ("GET", "/slots", slots.slots),
    ("POST", "/slots/{id_slot}", slots.slot_action),
    ("POST", "/completion", completions.native_completion),
    ("POST", "/completions", completions.native_completion),
    ("POST", "/v1/completions", completions.openai_completion),
    ("POST", "/chat/completions", chat.chat_completion),
    ("POST", "/v1/chat/completions", chat.chat_completion),
    ("POST", "/chat/completions/input_tokens", chat.count_tokens),
    ("POST", "/v1/chat/completions/input_tokens", chat.count_tokens),
    ("POST", "/v1/chat/completions/control", chat_control.control),
    ("POST", "/responses", openai_responses.create_response),
    ("POST", "/v1/responses", openai_responses.create_response),
    ("POST", "/responses/input_tokens", openai_responses.count_tokens),
    ("POST", "/v1/responses/input_tokens", openai_responses.count_tokens),
    ("POST", "/v1/messages", anthropic_messages.create_message),
    ("POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens),
    ("POST", "/audio/transcriptions", no_such_model.transcribe),
    ("POST", "/v1/audio/transcriptions", no_such_model.transcribe),
    ("POST", "/v1/systemone", no_such_model.decide),
    ("POST", "/infill", infill.infill),
    ("POST", "/embedding", embeddings.native_embeddings),
    ("POST", "/embeddings", embeddings.native_embeddings),
    ("POST", "/v1/embeddings", embeddings.openai_embeddings),
    ("POST", "/rerank", rerank.rerank),
    ("POST", "/reranking", rerank.rerank),
    ("POST", "/v1/rerank", rerank.rerank),
    ("POST", "/v1/reranking", rerank.rerank),
    ("GET", "/lora-adapters", lora.adapters),
    ("POST", "/lora-adapters", lora.set_scales),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/apply-template", chat.apply_template),
    ("GET", "/v1/stream", streams.read_stream),
    ("DELETE", "/v1/stream", streams.stop_stream),
    ("POST", "/v1/streams/lookup", streams.lookup_streams),
    ("GET", "/sw.js", service_worker),
    ("GET", "/cors-proxy", cors_proxy.cors_proxy),
    ("POST", "/cors-proxy", cors_proxy.cors_proxy),
)

DISABLED_PATHS = ("/tools",)  # 403, as in a llama-server where they are off
ROUTE_PATHS = frozenset({*DISABLED_PATHS, *(path for _, path, _ in ROUTES)})


def disabled_routes(settings: ServerSettings) -> list[BaseRoute]:
    return [Route(settings.api_prefix + path, cors_proxy.disabled, methods=["GET", "POST"]) for path in DISABLED_PATHS]


async def _not_found(request: Request, error: Exception) -> Response:
    return error_response(NotFound())


def framed(
    settings: ServerSettings, routes: Sequence[BaseRoute], lifespan: Any, before_keys: Sequence[Middleware] = ()
) -> Starlette:
    """The application of a server or a router: what surrounds every route. before_keys: asked before keys are."""
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(CorsMiddleware, settings=settings),
            *before_keys,
            Middleware(ApiKeyMiddleware, settings=settings),
            Middleware(BodyLimitMiddleware),
            Middleware(ErrorMiddleware),
        ],
        exception_handlers={HTTPException: _not_found},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def create_app(state: ServerState) -> Starlette:
    settings = state.settings

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.event_loop = asyncio.get_running_loop()
        yield
        state.streams.close()
        if state.is_ready:
            await asyncio.to_thread(state.loaded.engine_loop.stop, STOP_SECONDS)

    prefix = settings.api_prefix
    routes: list[BaseRoute] = [Route(prefix + path, handler, methods=[method]) for method, path, handler in ROUTES]
    routes += [*disabled_routes(settings), *vertex_routes(settings, ROUTES)]
    if settings.static_path:
        routes.append(Mount(prefix, StaticPages(settings.static_path)))
    app = framed(settings, routes, lifespan, [Middleware(ReadinessMiddleware, state=state)])
    app.state.server = state
    return app
