"""OpenAI's Responses API: `/v1/responses` and `/v1/responses/input_tokens`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.chat import ChatTask, input_token_count, read_chat
from pyllama.server.api.generate import respond
from pyllama.server.api.results import finish_reason, prompt_progress
from pyllama.server.chat_answer import AnswerParser, Delta
from pyllama.server.generation import Event, Finished, Generation, Progress, Started, TokenText
from pyllama.server.openai_responses_request import chat_body
from pyllama.server.responses import json_response, read_object
from pyllama.server.sse import NamedEvent
from pyllama.server.state import ServerState, server_state

# Kinds of deltas, each of which makes an item of the output, in this order.
REASONING, CONTENT = "reasoning_content", "content"


def _usage(generation: Generation, n_thoughts: int) -> dict[str, Any]:
    return {
        "input_tokens": generation.n_prompt,
        "output_tokens": generation.n_decoded,
        "total_tokens": generation.n_prompt + generation.n_decoded,
        "input_tokens_details": {
            "cached_tokens": generation.n_cached,
            "cache_write_tokens": generation.n_prompt - generation.n_cached,
        },
        "output_tokens_details": {"reasoning_tokens": n_thoughts},
    }


class ResponseFormat:
    """One answer: a response with an item of thoughts and a message, as far as there are any.

    asked: the request's body, of which a response repeats a few fields. Every lifecycle event carries the whole
    response and every event a rising number, because typed clients need them; they are what llama-server's events
    have, and more.
    """

    ends_with_done = False

    def __init__(self, state: ServerState, asked: dict[str, Any], task: ChatTask) -> None:
        self._model = state.settings.model_name
        self._tokenizer = state.loaded.tokenizer
        self._id = f"resp_{secrets.token_hex(16)}"
        self._item_ids = {REASONING: f"rs_{secrets.token_hex(16)}", CONTENT: f"msg_{secrets.token_hex(16)}"}
        self._created = int(time.time())
        self._asked = asked
        self._params = task.params
        self._shape = task.shape
        self._parser = AnswerParser(task.shape)
        self._n_events = 0
        self._has_started = False
        self._begun: list[str] = []  # kinds of the items that a stream began

    # ---- objects

    def _response(self, generation: Generation | None) -> dict[str, Any]:
        """The response object. Without a generation: while it is being made."""
        is_cut = generation is not None and finish_reason(generation) == "length"
        status = "in_progress" if generation is None else "incomplete" if is_cut else "completed"
        response: dict[str, Any] = {}
        message: dict[str, Any] = {}
        if generation is not None:
            response["completed_at"] = int(time.time())
            parser = AnswerParser(self._shape)
            parser.push(generation.content)
            parser.finish()
            message = parser.message()
        response |= {
            "created_at": self._created,
            "id": self._id,
            "model": self._model,
            "object": "response",
            "output": [self._item(kind, status, message[kind]) for kind in (REASONING, CONTENT) if message.get(kind)],
            "status": status,
        }
        if generation is not None:
            response["usage"] = _usage(generation, self._n_thoughts(message))
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

    def _n_thoughts(self, message: dict[str, Any]) -> int:
        thoughts = message.get(REASONING, "")
        return len(self._tokenizer.encode(thoughts, add_special=False, parse_special=False)) if thoughts else 0

    def _item(self, kind: str, status: str, text: str) -> dict[str, Any]:
        """An item of the output; without text one that has just begun."""
        if kind == REASONING:
            return {
                "id": self._item_ids[kind],
                "summary": [],
                "type": "reasoning",
                "content": [{"text": text, "type": "reasoning_text"}] if text else [],
                "encrypted_content": "",
                "status": status,
            }
        content = [_text_part(text)] if text else []
        return {
            "content": content, "id": self._item_ids[kind], "role": "assistant", "status": status, "type": "message",
        }  # fmt: skip

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
            return _with_timings([*self._start(), *self._deltas(self._parser.push(event.text))], event.timings)
        if isinstance(event, Finished) and isinstance(event.generation, Generation):
            return _with_timings([*self._start(), *self._end(event.generation)], event.generation.timings())
        return ()

    def _start(self) -> Iterable[NamedEvent]:
        if not self._has_started:
            self._has_started = True
            yield self._event("response.created", response=self._response(None))
            yield self._event("response.in_progress", response=self._response(None))

    def _deltas(self, deltas: list[Delta]) -> Iterable[NamedEvent]:
        for delta in deltas:
            ((kind, text),) = delta.items()
            if kind not in self._begun:
                self._begun.append(kind)
                item = self._item(kind, "in_progress", "")
                yield self._event("response.output_item.added", output_index=len(self._begun) - 1, item=item)
                if kind == CONTENT:
                    yield self._event("response.content_part.added", **self._place(kind), part=_text_part(""))
            if kind == REASONING:
                yield self._event("response.reasoning_text.delta", **self._place(kind), delta=text)
            else:
                yield self._event("response.output_text.delta", **self._place(kind), delta=text, logprobs=[])

    def _end(self, generation: Generation) -> Iterable[NamedEvent]:
        yield from self._deltas(self._parser.finish())
        response = self._response(generation)
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                part = item["content"][0]
                yield self._event("response.output_text.done", **self._place(CONTENT), text=part["text"], logprobs=[])
                yield self._event("response.content_part.done", **self._place(CONTENT), part=part)
            yield self._event("response.output_item.done", output_index=index, item=item)
        # Also for an answer that met its limit: clients of llama-server wait for this name; the status tells.
        yield self._event("response.completed", response=response)

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._item_ids[kind], "output_index": self._begun.index(kind), "content_index": 0}

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
    task = await read_chat(http, chat_body(asked))
    return await respond(http, [task.tokens], task.params, ResponseFormat(state, asked, task))


async def count_tokens(http: Request) -> Response:
    return json_response(await input_token_count(http, chat_body(await read_object(http))))
