"""Resumable streams: `/v1/stream` (read again, or stop) and `/v1/streams/lookup`."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import InvalidRequest, NotFound
from pyllama.server.followed_stream import FollowedStream
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import wrong_type
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import server_state

MAX_CONVERSATIONS = 1024  # of one lookup


def conversation_of(http: Request) -> str:
    """Raises `InvalidRequest`."""
    conversation = http.query_params.get("conv_id")
    if not conversation:
        raise InvalidRequest("Missing conversation id: give it as ?conv_id=ID")
    return conversation


def offset_of(http: Request) -> int:
    """Raises `InvalidRequest`."""
    text = http.query_params.get("from") or "0"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InvalidRequest("Invalid 'from' offset: it must be a number of bytes")
    return int(text)


def asked_conversations(body: dict[str, Any]) -> list[str]:
    """`conversation_ids` of a lookup. Raises `InvalidRequest`."""
    value = body.get("conversation_ids")
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("conversation_ids", "array", value)
    if len(value) > MAX_CONVERSATIONS:
        raise InvalidRequest(f"Field 'conversation_ids': at most {MAX_CONVERSATIONS} ids at once")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidRequest(f"Field 'conversation_ids[{index}]': must be a string, but is {type_name(item)}")
    return [item for item in value if item]


async def read_stream(http: Request) -> Response:
    conversation, start = conversation_of(http), offset_of(http)
    stream = server_state(http).streams.find(conversation)
    if stream is None:
        raise NotFound
    return FollowedStream(stream.buffer, start)


async def stop_stream(http: Request) -> Response:
    server_state(http).streams.end(conversation_of(http))
    return Response(status_code=204)


async def lookup_streams(http: Request) -> Response:
    conversations = asked_conversations(await read_object(http))
    return json_response([stream.json() for stream in server_state(http).streams.matching(conversations)])
