"""JSON responses and the reading of JSON bodies."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import RequestTimeout, error_body, error_headers, error_status
from pyllama.server.json_codec import dump_json, parse_json, parse_object


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(value), status, headers, media_type="application/json; charset=utf-8")


def error_response(error: BaseException) -> Response:
    status, _ = error_status(error)
    return json_response(error_body(error), status, error_headers(error))


async def _read_body(request: Request) -> bytes:
    seconds = request.app.state.server.settings.timeout
    try:
        return await asyncio.wait_for(request.body(), seconds)
    except asyncio.TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {seconds} seconds") from None


async def read_object(request: Request) -> dict[str, Any]:
    """The body, whatever its declared type, as a JSON object. Raises `InvalidRequest`, `RequestTimeout`."""
    return parse_object(await _read_body(request))


async def read_json(request: Request) -> Any:
    """As `read_object`, for bodies that may be any JSON value."""
    return parse_json(await _read_body(request))
