"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.chat.answer import AnswerParser, AnswerShape, Delta
from pyllama.errors import PyllamaError
from pyllama.server.anthropic_request import chat_body
from pyllama.server.api.chat import read_chat, read_prompt_tokens
from pyllama.server.api.generate import respond
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


class Block:
    """One block of the answer, as it grows. `kind`: thinking, text or tool_use."""

    __slots__ = ("kind", "name", "parts", "tool_id")

    def __init__(self, kind: str, *, tool_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.tool_id = tool_id
        self.name = name
        self.parts: list[str] = []

    def json(self) -> dict[str, Any]:
        text = "".join(self.parts)
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        if self.kind == "text":
            return {"type": "text", "text": text}
        # The reader of tool calls has checked that this is the text of an object.
        return {"type": "tool_use", "id": self.tool_id, "name": self.name, "input": json.loads(text or "{}")}

    def delta(self, text: str) -> dict[str, str]:
        if self.kind == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.kind}_delta", self.kind: text}


class MessageFormat:
    """One answer: a message with blocks of thoughts, text and tool calls, as far as there are any."""

    ends_with_done = False

    def __init__(self, state: ServerState, shape: AnswerShape) -> None:
        self._model = state.settings.model_name
        self._id = f"msg_{secrets.token_hex(16)}"
        self._parser = AnswerParser(shape)
        self._has_started = False
        self._blocks: list[Block] = []  # in a stream the last one is open

    def _message(self, generation: Generation, *, is_done: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [block.json() for block in self._blocks] if is_done else [],
            "model": self._model,
            "stop_reason": self._stop_reason(generation) if is_done else None,
            "stop_sequence": _stop_sequence(generation) if is_done else None,
            "usage": _usage(generation, generation.n_decoded if is_done else 0),
        }

    def _stop_reason(self, generation: Generation) -> str:
        reason = stop_reason(generation)
        return "tool_use" if reason == "end_turn" and self._parser.has_calls else reason

    def chunks(self, event: Event) -> Iterable[Any]:
        if isinstance(event, TokenText):
            return [*self._start(event.generation), *self._deltas(self._parser.push(event.text))]
        if isinstance(event, Finished) and isinstance(event.generation, Generation):
            return [*self._start(event.generation), *self._end(event.generation)]
        return ()

    def _start(self, generation: Generation) -> Iterable[NamedEvent]:
        if not self._has_started:
            self._has_started = True
            yield _event("message_start", message=self._message(generation, is_done=False))

    def _deltas(self, deltas: list[Delta]) -> Iterable[NamedEvent]:
        for delta in deltas:
            ((name, value),) = delta.items()
            if name != "tool_calls":
                kind = "thinking" if name == "reasoning_content" else "text"
                if not self._blocks or self._blocks[-1].kind != kind:
                    yield from self._begin(Block(kind))
                yield from self._add(value)
                continue
            for call in value:
                function = call["function"]
                if "name" in function:
                    yield from self._begin(Block("tool_use", tool_id=call["id"], name=function["name"]))
                yield from self._add(function["arguments"])

    def _begin(self, block: Block) -> Iterable[NamedEvent]:
        yield from self._close_block()
        self._blocks.append(block)
        yield _event("content_block_start", index=self._index, content_block=block.json())

    def _add(self, text: str) -> Iterable[NamedEvent]:
        if text:
            block = self._blocks[-1]
            block.parts.append(text)
            yield _event("content_block_delta", index=self._index, delta=block.delta(text))

    def _close_block(self) -> Iterable[NamedEvent]:
        if not self._blocks:
            return
        if self._blocks[-1].kind == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=self._index, delta=delta)
        yield _event("content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _end(self, generation: Generation) -> Iterable[NamedEvent]:
        yield from self._deltas(self._parser.finish())
        yield from self._close_block()
        yield _event(
            "message_delta",
            delta={"stop_reason": self._stop_reason(generation), "stop_sequence": _stop_sequence(generation)},
            usage={"output_tokens": generation.n_decoded},
        )
        yield _event("message_stop")

    def whole(self, generations: list[Generation]) -> Any:
        # The blocks are those of a stream that sent the whole text at once.
        for _ in self._deltas(self._parser.push(generations[0].content) + self._parser.finish()):
            pass
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
    task = await read_chat(http, body)
    return await respond(http, [task.tokens], task.params, MessageFormat(state, task.shape), stream_error=stream_error)


@with_anthropic_errors
async def count_tokens(http: Request) -> Response:
    _, tokens = await read_prompt_tokens(http, chat_body(await read_object(http)))
    return json_response({"input_tokens": len(tokens)})
