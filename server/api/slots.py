"""`GET /slots`: what each slot is doing."""

from __future__ import annotations

import os
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import NotSupported, Unavailable
from pyllama.server.generation_params import settings_json
from pyllama.server.loaded_model import LoadedModel
from pyllama.server.responses import json_response
from pyllama.server.slots import Slot
from pyllama.server.state import server_state


def slot_json(slot: Slot, loaded: LoadedModel, *, shows_text: bool) -> dict[str, Any]:
    """Read without a lock while the engine thread works: each value is whole, two of them may be one token apart."""
    generation = slot.generation
    result: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": loaded.n_ctx_slot,
        "speculative": False,
        "is_processing": generation is not None,
    }
    last = generation or slot.last_generation
    if last is None:
        return result
    result["id_task"] = last.age
    result["n_prompt_tokens"] = last.n_prompt
    result["n_prompt_tokens_processed"] = last.n_prompt_done - last.n_cached
    result["n_prompt_tokens_cache"] = last.n_cached
    result["params"] = settings_json(last.params, full=False)
    result["next_token"] = [
        {
            "has_next_token": generation is not None,
            "has_new_line": last.has_new_line,
            "n_remain": -1 if generation is None else generation.n_remain,
            "n_decoded": 0 if generation is None else generation.n_decoded,
        }
    ]
    if shows_text:
        result["prompt"] = loaded.vocabulary.text(last.prompt)
        result["generated"] = last.content
    return result


async def slots(http: Request) -> Response:
    state = server_state(http)
    if not state.settings.has_slots:
        raise NotSupported("This server does not support slots endpoint. Start it with `--slots`")
    loaded = state.loaded
    all_slots = loaded.engine_loop.slots
    if http.query_params.get("fail_on_no_slot") and all(slot.generation is not None for slot in all_slots):
        raise Unavailable("no slot available")
    debug = os.environ.get("LLAMA_SERVER_SLOTS_DEBUG", "")
    shows_text = debug.lstrip("+-").isdigit() and int(debug) != 0
    return json_response([slot_json(slot, loaded, shows_text=shows_text) for slot in all_slots])
