"""`/v1/chat/completions/control`: ends the thinking block of a chat while it is being answered."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import InvalidRequest
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import server_state


async def control(http: Request) -> Response:
    body = await read_object(http)
    completion_id, action = body.get("id"), body.get("action")
    if not isinstance(completion_id, str) or not completion_id:
        raise InvalidRequest("missing completion id")
    if action != "reasoning_end":
        raise InvalidRequest("unknown control action")
    request = server_state(http).running.get(completion_id)
    if request is None:
        return json_response({"success": False, "message": "no active completion for this id"})
    if not all(generation.params.reasoning_control for generation in request.generations):
        return json_response({"success": False, "message": "reasoning control not enabled for this completion"})
    for generation in request.generations:
        if generation.constraint is not None:  # without one its template knows no thinking tags: nothing to end
            generation.constraint.end_thinking()
    return json_response({"success": True})
