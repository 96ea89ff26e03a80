"""`/lora-adapters`: the LoRA adapters, and the scales that requests without a `lora` field get."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import InvalidRequest
from pyllama.server.responses import json_response, read_json
from pyllama.server.state import server_state


async def adapters(http: Request) -> Response:
    return json_response(server_state(http).loaded.adapters.list_json())


async def set_scales(http: Request) -> Response:
    """Adapters that are not listed get scale 0. What runs already keeps its scales."""
    body = await read_json(http)
    if not isinstance(body, list):
        raise InvalidRequest("Request body must be an array")
    server_state(http).loaded.adapters.set_scales(body)
    return json_response({"success": True})
