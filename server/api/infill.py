"""`/infill`: the text between a prefix and a suffix. Results have the native shape."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.completions import NativeFormat
from pyllama.server.api.generate import in_thread_if_long, request_params, respond
from pyllama.server.infill_prompt import check_infill_tokens, infill_prompt, read_infill
from pyllama.server.responses import read_object
from pyllama.server.state import server_state


async def infill(http: Request) -> Response:
    state = server_state(http)
    loaded = state.loaded
    check_infill_tokens(loaded.tokenizer)
    body = await read_object(http)
    text = read_infill(body)
    params = await in_thread_if_long(len(await http.body()), request_params, body, loaded)

    def tokens() -> list[int]:
        return infill_prompt(
            text,
            loaded.tokenizer,
            n_batch=state.settings.n_batch,
            n_ctx=loaded.n_ctx_slot,
            n_predict=params.n_predict,
            suffix_first=state.settings.spm_infill,
        )

    prompt = await in_thread_if_long(len(await http.body()), tokens)
    return await respond(http, [prompt], params, NativeFormat(state))
