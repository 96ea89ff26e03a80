"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.errors import PyllamaError
from pyllama.server.anthropic_request import chat_body
from pyllama.server.api.chat import read_prompt_tokens
from pyllama.server.api.generate import request_params, respond
from pyllama.server.errors import RequestError, error_body, error_headers, error_status
from pyllama.server.generation import Event, Finished, Generation, TokenText
from pyllama.server.responses import json_response, read_object
from pyllama.server.sse import NamedEvent
from pyllama.server.state import ServerState, server_state

log = logging.getLogger("pyllama.server.srv")


def stop_reason(generation: Generation) -> str:
    if generation.stop_type == "word":
        return "stop_sequence"
    return "end_turn" if generation.stop_type == "eos" else "max_tokens"


def _stop_sequence(generation: Generation) -> str | None:
    return generation.stopping_word or None


def _usage(generation: Generation, n_output: int) -> dict[str, int]:
    return {
        "cache_read_input_tokens": generation.n_cached,
        "input_tokens": generation.n_prompt - generation.n_cached,
        "output_tokens": n_output,
    }


def _event(kind: str, **fields: Any) -> NamedEvent:
    return NamedEvent(kind, {"type": kind, **fields})


def anthropic_error(error: BaseException) -> dict[str, Any]:
    """The usual error object in Anthropic's envelope."""
    return {"type": "error", **error_body(error)}


def stream_error(error: BaseException) -> NamedEvent:
    return NamedEvent("error", anthropic_error(error))


class MessageFormat:
    """One answer: a message with one text block, or with none if there is no text."""

    ends_with_done = False

    def __init__(self, state: ServerState) -> None:
        self._model = state.settings.model_name
        self._id = f"msg_{secrets.token_hex(16)}"
        self._has_started = False
        self._has_block = False

    def _message(self, generation: Generation, *, is_done: bool) -> dict[str, Any]:
        text = generation.content if is_done else ""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}] if text else [],
            "model": self._model,
            "stop_reason": stop_reason(generation) if is_done else None,
            "stop_sequence": _stop_sequence(generation) if is_done else None,
            "usage": _usage(generation, generation.n_decoded if is_done else 0),
        }

    def chunks(self, event: Event) -> Iterable[Any]:
        if isinstance(event, TokenText):
            return [*self._start(event.generation), *self._text(event.text)]
        if isinstance(event, Finished) and isinstance(event.generation, Generation):
            return [*self._start(event.generation), *self._end(event.generation)]
        return ()

    def _start(self, generation: Generation) -> Iterable[NamedEvent]:
        if not self._has_started:
            self._has_started = True
            yield _event("message_start", message=self._message(generation, is_done=False))

    def _text(self, text: str) -> Iterable[NamedEvent]:
        if not text:
            return
        if not self._has_block:
            self._has_block = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def _end(self, generation: Generation) -> Iterable[NamedEvent]:
        if self._has_block:
            yield _event("content_block_stop", index=0)
        yield _event(
            "message_delta",
            delta={"stop_reason": stop_reason(generation), "stop_sequence": _stop_sequence(generation)},
            usage={"output_tokens": generation.n_decoded},
        )
        yield _event("message_stop")

    def whole(self, generations: list[Generation]) -> Any:
        return self._message(generations[0], is_done=True)


Handler = Callable[[Request], Awaitable[Response]]


def with_anthropic_errors(handler: Handler) -> Handler:
    """The handler with this API's error bodies."""

    @wraps(handler)
    async def handle(http: Request) -> Response:
        try:
            return await handler(http)
        except Exception as error:
            if not isinstance(error, (RequestError, PyllamaError)):
                log.exception("%s %s failed", http.method, http.url.path)
            status, _ = error_status(error)
            return json_response(anthropic_error(error), status, error_headers(error))

    return handle


@with_anthropic_errors
async def create_message(http: Request) -> Response:
    state = server_state(http)
    body = chat_body(await read_object(http))
    _, tokens = await read_prompt_tokens(http, body)
    params = request_params(body, state.loaded)
    return await respond(http, [tokens], params, MessageFormat(state), stream_error=stream_error)


@with_anthropic_errors
async def count_tokens(http: Request) -> Response:
    _, tokens = await read_prompt_tokens(http, chat_body(await read_object(http)))
    return json_response({"input_tokens": len(tokens)})
