"""OpenAI's Responses API: `/v1/responses` and `/v1/responses/input_tokens`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.chat import input_token_count, read_prompt_tokens, sampling_body
from pyllama.server.api.generate import request_params, respond
from pyllama.server.api.results import finish_reason, prompt_progress
from pyllama.server.generation import Event, Finished, Generation, Progress, Started, TokenText
from pyllama.server.generation_params import GenerationParams
from pyllama.server.openai_responses_request import chat_body
from pyllama.server.responses import json_response, read_object
from pyllama.server.sse import NamedEvent
from pyllama.server.state import ServerState, server_state


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "input_tokens": generation.n_prompt,
        "output_tokens": generation.n_decoded,
        "total_tokens": generation.n_prompt + generation.n_decoded,
        "input_tokens_details": {
            "cached_tokens": generation.n_cached,
            "cache_write_tokens": generation.n_prompt - generation.n_cached,
        },
        "output_tokens_details": {"reasoning_tokens": 0},
    }


class ResponseFormat:
    """One answer: a response with one message, or with none if there is no text.

    asked: the request's body, of which a response repeats a few fields. echo: text that the answer repeats at its
    start. Every lifecycle event carries the whole response and every event a rising number, because typed clients
    need them; they are what llama-server's events have, and more.
    """

    ends_with_done = False

    def __init__(self, state: ServerState, asked: dict[str, Any], params: GenerationParams, *, echo: str = "") -> None:
        self._model = state.settings.model_name
        self._id = f"resp_{secrets.token_hex(16)}"
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._asked = asked
        self._params = params
        self._echo = echo
        self._n_events = 0
        self._has_started = False
        self._has_message = False

    # ---- objects

    def _response(self, generation: Generation | None) -> dict[str, Any]:
        """The response object. Without a generation: while it is being made."""
        is_cut = generation is not None and finish_reason(generation) == "length"
        status = "in_progress" if generation is None else "incomplete" if is_cut else "completed"
        response: dict[str, Any] = {}
        if generation is not None:
            response["completed_at"] = int(time.time())
        response |= {
            "created_at": self._created,
            "id": self._id,
            "model": self._model,
            "object": "response",
            "output": [] if generation is None else self._output(generation, status),
            "status": status,
        }
        if generation is not None:
            response["usage"] = _usage(generation)
        return response | {
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": self._asked.get("instructions"),
            "max_output_tokens": self._params.n_predict if self._params.n_predict >= 0 else None,
            "metadata": self._asked.get("metadata"),
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": self._params.sampling.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": self._params.sampling.top_p,
        }

    def _output(self, generation: Generation, status: str) -> list[dict[str, Any]]:
        text = self._echo + generation.content
        return [self._message(status, [_text_part(text)])] if text else []

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": content, "id": self._item_id, "role": "assistant", "status": status, "type": "message"}

    # ---- events

    def _event(self, kind: str, **fields: Any) -> NamedEvent:
        number = self._n_events
        self._n_events += 1
        return NamedEvent(kind, {"type": kind, "sequence_number": number, **fields})

    def chunks(self, event: Event) -> Iterable[Any]:
        if isinstance(event, Started):
            # With progress events the first of them opens the stream.
            return () if self._params.return_progress else list(self._start())
        if isinstance(event, Progress):
            chunks = list(self._start()) or [self._event("response.in_progress", response=self._response(None))]
            chunks[-1].data["prompt_progress"] = prompt_progress(event)
            return _with_timings(chunks, event.timings)
        if isinstance(event, TokenText):
            return _with_timings([*self._start(), *self._text(event.text)], event.timings)
        if isinstance(event, Finished) and isinstance(event.generation, Generation):
            return _with_timings([*self._start(), *self._end(event.generation)], event.generation.timings())
        return ()

    def _start(self) -> Iterable[NamedEvent]:
        if not self._has_started:
            self._has_started = True
            yield self._event("response.created", response=self._response(None))
            yield self._event("response.in_progress", response=self._response(None))

    def _text(self, text: str) -> Iterable[NamedEvent]:
        if not self._has_message:
            text = self._echo + text
            if not text:
                return
            self._has_message = True
            item = self._message("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._place(), part=_text_part(""))
        if text:
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _end(self, generation: Generation) -> Iterable[NamedEvent]:
        yield from self._text("")  # an answer without any token still repeats what was to be echoed
        response = self._response(generation)
        for index, item in enumerate(response["output"]):
            part = item["content"][0]
            yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=part)
            yield self._event("response.output_item.done", output_index=index, item=item)
        # Also for an answer that met its limit: clients of llama-server wait for this name; the status tells.
        yield self._event("response.completed", response=response)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def whole(self, generations: list[Generation]) -> Any:
        return self._response(generations[0])


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _with_timings(chunks: list[NamedEvent], timings: dict[str, Any] | None) -> list[NamedEvent]:
    """Timings sit on the last event of a group."""
    if chunks and timings is not None:
        chunks[-1].data["timings"] = timings
    return chunks


async def create_response(http: Request) -> Response:
    state = server_state(http)
    asked = await read_object(http)
    body = chat_body(asked)
    prompt, tokens = await read_prompt_tokens(http, body)
    fields, _ = sampling_body(body)
    params = request_params(fields, state.loaded)
    return await respond(http, [tokens], params, ResponseFormat(state, asked, params, echo=prompt.echo))


async def count_tokens(http: Request) -> Response:
    return json_response(await input_token_count(http, chat_body(await read_object(http))))
