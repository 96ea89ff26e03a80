"""`GET /slots`: what each slot is doing. `POST /slots/{id}`: a slot into a file, out of a file, or emptied."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.errors import PyllamaError
from pyllama.server.errors import InvalidRequest, NotSupported, ServerFault, Unavailable
from pyllama.server.generation_params import settings_json
from pyllama.server.loaded_model import LoadedModel
from pyllama.server.responses import json_response, read_object
from pyllama.server.slot_files import SlotFile, SlotFileError, decoded, is_plain_name, read_file, write_file
from pyllama.server.slots import Slot
from pyllama.server.state import ServerState, server_state

log = logging.getLogger("pyllama.server.slot")


def slot_json(slot: Slot, loaded: LoadedModel, *, shows_text: bool) -> dict[str, Any]:
    """Read without a lock while the engine thread works: each value is whole, two of them may be one token apart."""
    generation = slot.generation
    result: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": loaded.n_ctx_slot,
        "speculative": loaded.defaults.speculative_types != "none",
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
    if (reuse := last.reuse) is not None:
        result["prefix_reuse"] = {
            "n_known": reuse.matched,
            "source": reuse.source,
            "checkpoint": reuse.checkpoint,
            "limit": reuse.limit,
        }
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


async def slot_action(http: Request) -> Response:
    """`POST /slots/{id}?action=save|restore|erase`. A busy slot delays the action until it is free."""
    state = server_state(http)
    if not state.settings.slot_save_path:
        raise NotSupported("This server does not support slots action. Start it with `--slot-save-path`")
    text = http.path_params["id_slot"]
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise InvalidRequest("Invalid slot ID")
    id_slot = int(text) % state.loaded.n_slots
    action = SLOT_ACTIONS.get(http.query_params.get("action", ""))
    if action is None:
        raise InvalidRequest("Invalid action")
    return json_response({"id_slot": id_slot, **await action(http, state, id_slot)})


async def _save(http: Request, state: ServerState, id_slot: int) -> dict[str, Any]:
    path = await _slot_file_path(http, state)
    started = time.perf_counter()
    engine_loop = state.loaded.engine_loop
    tokens, content = await asyncio.wrap_future(engine_loop.on_idle_slot(id_slot, engine_loop.memory.save))
    file = SlotFile(tokens, content, _computed_by(state))
    try:
        n_written = await asyncio.to_thread(write_file, path, file.parts())
    except OSError as error:
        log.error("%s: %s", path, error.strerror)
        raise ServerFault("Unable to save slot") from None
    save_ms = (time.perf_counter() - started) * 1e3
    return {"filename": path.name, "n_saved": len(tokens), "n_written": n_written, "timings": {"save_ms": save_ms}}


async def _restore(http: Request, state: ServerState, id_slot: int) -> dict[str, Any]:
    path = await _slot_file_path(http, state)
    started = time.perf_counter()
    engine_loop = state.loaded.engine_loop
    try:
        file, n_read = await asyncio.to_thread(_read_slot_file, path, state)
        tokens, content = file.tokens, file.state
        await asyncio.wrap_future(
            engine_loop.on_idle_slot(id_slot, lambda slot: engine_loop.memory.restore(slot, tokens, content))
        )
    except (OSError, PyllamaError) as error:
        await asyncio.wrap_future(engine_loop.on_idle_slot(id_slot, engine_loop.memory.erase))
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"Unable to restore slot: {reason}") from None
    restore_ms = (time.perf_counter() - started) * 1e3
    return {
        "filename": path.name,
        "n_restored": len(tokens),
        "n_read": n_read,
        "timings": {"restore_ms": restore_ms},
    }


async def _erase(http: Request, state: ServerState, id_slot: int) -> dict[str, Any]:
    engine_loop = state.loaded.engine_loop
    return {"n_erased": await asyncio.wrap_future(engine_loop.on_idle_slot(id_slot, engine_loop.memory.erase))}


SLOT_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}


async def _slot_file_path(http: Request, state: ServerState) -> Path:
    name = (await read_object(http)).get("filename")
    path = Path(state.settings.slot_save_path) / name if is_plain_name(name) else None
    if path is None or path.is_symlink():
        raise InvalidRequest("Invalid filename")
    return path


def _read_slot_file(path: Path, state: ServerState) -> tuple[SlotFile, int]:
    data = read_file(path)
    file = decoded(data, _computed_by(state))
    loaded = state.loaded
    if len(file.tokens) > loaded.n_ctx_slot:
        raise SlotFileError(f"its {len(file.tokens)} tokens do not fit the slot's context of {loaded.n_ctx_slot}")
    if any(not 0 <= token < loaded.vocabulary.n_vocab for token in file.tokens):
        raise SlotFileError("it holds invalid tokens")
    return file, len(data)


def _computed_by(state: ServerState) -> dict[str, Any]:
    """What a state depends on beside what it says itself (model, quantisation, instruction set, KV types)."""
    settings = state.settings
    return {
        "build": state.build_info,
        "--override-kv": dict(settings.kv_overrides),
        "RoPE setting": {**settings.rope, "exceeds_original_context": state.loaded.exceeds_original_context},
    }
