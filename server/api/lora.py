"""The list of LoRA adapters. None can be loaded yet, so it is empty, as it is in a server without them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import InvalidRequest
from pyllama.server.responses import json_response, read_json


async def adapters(http: Request) -> Response:
    return json_response([])


async def set_scales(http: Request) -> Response:
    """Adapters that are not listed get scale 0, which holds for an empty list; one that is listed does not exist."""
    body = await read_json(http)
    if not isinstance(body, list):
        raise InvalidRequest("Request body must be an array")
    if body:
        raise InvalidRequest("no LoRA adapters are loaded, so none has a scale")
    return json_response({"success": True})
