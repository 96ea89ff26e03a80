"""Facts about the server: health, properties, models, metrics."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import NotSupported
from pyllama.server.generation_params import settings_json
from pyllama.server.metrics import render
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import ServerState, server_state

_STARTED_US = time.time_ns() // 1000


async def health(http: Request) -> Response:
    return json_response({"status": "ok"})


def props_json(state: ServerState) -> dict[str, Any]:
    settings, loaded = state.settings, state.loaded
    tokenizer, template = loaded.tokenizer, loaded.chat_template
    result: dict[str, Any] = {
        "default_generation_settings": {
            "params": settings_json(loaded.defaults, full=False),
            "n_ctx": loaded.n_ctx_slot,
        },
        "total_slots": loaded.n_slots,
        "model_alias": settings.model_name,
        "model_ftype": loaded.facts["ftype"],
        "model_path": settings.model,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": state.media_marker,
        "endpoint_slots": settings.has_slots,
        "endpoint_props": settings.has_props,
        "endpoint_metrics": settings.has_metrics,
        "ui": False,
        "ui_settings": {},
        "chat_template": template.source if template is not None else "",
        "chat_template_caps": template.capabilities() if template is not None else {},
        "bos_token": _token_text(loaded.vocabulary, tokenizer.bos_id),
        "eos_token": _token_text(loaded.vocabulary, tokenizer.eos_id),
        "build_info": state.build_info,
        "is_sleeping": loaded.engine_loop.is_sleeping,
        "cors_proxy_enabled": settings.has_cors_proxy,
    }
    if template is not None and template.tool_use is not None:
        result["chat_template_tool_use"] = template.tool_use.source
    return result


def _token_text(vocabulary: Any, token: int | None) -> str:
    return "" if token is None else vocabulary.text([token])


async def props(http: Request) -> Response:
    return json_response(props_json(server_state(http)))


async def change_props(http: Request) -> Response:
    """Accepted and without effect, as there is nothing to change."""
    if not server_state(http).settings.has_props:
        raise NotSupported("This server does not support changing global properties. Start it with `--props`")
    await read_object(http)
    return json_response({"success": True})


def models_json(state: ServerState, now: int) -> dict[str, Any]:
    settings, loaded = state.settings, state.loaded
    name = settings.model_name
    facts = loaded.facts
    return {
        "models": [
            {
                "name": name,
                "model": name,
                "modified_at": "",
                "size": "",
                "digest": "",
                "type": "model",
                "description": "",
                "tags": [""],
                "capabilities": ["completion"],
                "parameters": "",
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": "",
                    "families": [""],
                    "parameter_size": "",
                    "quantization_level": "",
                },
            }
        ],
        "object": "list",
        "data": [
            {
                "id": name,
                "aliases": sorted(settings.aliases) or [name],
                "tags": list(settings.tags),
                "object": "model",
                "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
                "created": now,
                "owned_by": "llamacpp",
                "meta": {
                    "vocab_type": facts["vocab_type"],
                    "n_vocab": facts["n_vocab"],
                    "n_ctx": loaded.n_ctx_slot,
                    "n_ctx_train": facts["n_ctx_train"],
                    "n_embd": facts["n_embd"],
                    "n_params": facts["n_params"],
                    "size": facts["size"],
                    "ftype": facts["ftype"],
                },
            }
        ],
    }


async def models(http: Request) -> Response:
    return json_response(models_json(server_state(http), int(time.time())))


async def metrics(http: Request) -> Response:
    state = server_state(http)
    if not state.settings.has_metrics:
        raise NotSupported("This server does not support metrics endpoint. Start it with `--metrics`")
    headers = {"Process-Start-Time-Unix": str(_STARTED_US), "Content-Type": "text/plain; version=0.0.4"}
    return Response(render(state.scrape()), headers=headers)
