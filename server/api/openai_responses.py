"""OpenAI's Responses API: `/v1/responses` and `/v1/responses/input_tokens`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.chat.answer import AnswerParser, Delta
from pyllama.server.api.chat import ChatTask, input_token_count, read_chat
from pyllama.server.api.generate import respond
from pyllama.server.api.message_logprobs import MessageLogprobs
from pyllama.server.api.results import finish_reason, kept_records, prompt_progress
from pyllama.server.generation import Event, Finished, Generation, Progress, Started, TokenText
from pyllama.server.openai_responses_request import chat_body
from pyllama.server.responses import json_response, read_object
from pyllama.server.sse import NamedEvent
from pyllama.server.state import ServerState, server_state


class Item:
    """One item of the output, as it grows. `kind`: reasoning, message or function_call."""

    __slots__ = ("call_id", "id", "index", "kind", "logprobs", "name", "parts")

    def __init__(self, kind: str, index: int, *, call_id: str = "", name: str = "") -> None:
        self.id = f"{ID_PREFIXES[kind]}_{secrets.token_hex(16)}"
        self.kind = kind
        self.index = index
        self.call_id = call_id
        self.name = name
        self.parts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []  # of a message, where they were asked for

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def json(self, status: str) -> dict[str, Any]:
        text = self.text
        if self.kind == "reasoning":
            return {
                "id": self.id, "summary": [], "type": "reasoning",
                "content": [{"text": text, "type": "reasoning_text"}] if text else [],
                "encrypted_content": "", "status": status,
            }  # fmt: skip
        if self.kind == "message":
            content = [_text_part(text, self.logprobs)] if text else []
            return {"content": content, "id": self.id, "role": "assistant", "status": status, "type": "message"}
        return {
            "id": self.id, "type": "function_call", "status": status,
            "arguments": text, "call_id": self.call_id, "name": self.name,
        }  # fmt: skip


ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


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
    """One answer: a response with an item of thoughts, a message and function calls, as far as there are any.

    asked: the request's body, of which a response repeats a few fields. Every lifecycle event carries the whole
    response and every event a rising number, because typed clients need them; they are what llama-server's events
    have, and more.
    """

    ends_with_done = False

    def __init__(self, state: ServerState, asked: dict[str, Any], task: ChatTask) -> None:
        self._model = state.settings.model_name
        self._tokenizer = state.loaded.tokenizer
        self._vocabulary = state.loaded.vocabulary
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._asked = asked
        self._params = task.params
        self._parser = AnswerParser(task.shape)
        self._n_events = 0
        self._has_started = False
        self._items: list[Item] = []
        self._logprobs = MessageLogprobs(state.loaded.vocabulary, task.n_top) if task.params.n_probs > 0 else None

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
            "output": [] if generation is None else [item.json(status) for item in self._items],
            "status": status,
        }
        if generation is not None:
            response["usage"] = _usage(generation, self._n_thoughts())
        return response | {
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": self._asked.get("instructions"),
            "max_output_tokens": self._params.n_predict if self._params.n_predict >= 0 else None,
            "metadata": self._asked.get("metadata"),
            "parallel_tool_calls": self._asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "temperature": self._params.sampling.temperature,
            "tool_choice": self._asked.get("tool_choice") or "auto",
            "tools": self._asked.get("tools") or [],
            "top_p": self._params.sampling.top_p,
        }

    def _n_thoughts(self) -> int:
        texts = [item.text for item in self._items if item.kind == "reasoning"]
        return sum(len(self._tokenizer.encode(text, add_special=False, parse_special=False)) for text in texts)

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
            if self._logprobs is not None:
                self._logprobs.extend(event.generation.records[: event.n_decoded])
            deltas = self._deltas(self._parser.push(event.text), event.generation)
            return _with_timings([*self._start(), *deltas], event.timings)
        if isinstance(event, Finished) and isinstance(event.generation, Generation):
            return _with_timings([*self._start(), *self._end(event.generation)], event.generation.timings())
        return ()

    def _start(self) -> Iterable[NamedEvent]:
        if not self._has_started:
            self._has_started = True
            yield self._event("response.created", response=self._response(None))
            yield self._event("response.in_progress", response=self._response(None))

    def _deltas(self, deltas: list[Delta], generation: Generation) -> Iterable[NamedEvent]:
        for delta in deltas:
            ((name, value),) = delta.items()
            if name != "tool_calls":
                kind = "reasoning" if name == "reasoning_content" else "message"
                item = next((item for item in self._items if item.kind == kind), None)
                if item is None:
                    item = Item(kind, len(self._items))
                    yield from self._begin(item)
                yield from self._add(item, value, self._logprobs_of(item, value, generation))
                continue
            for call in value:
                function = call["function"]
                if "name" in function:
                    call_id = f"call_{call['id']}"
                    item = Item("function_call", len(self._items), call_id=call_id, name=function["name"])
                    yield from self._begin(item)
                yield from self._add(self._items[-1], function["arguments"])

    def _begin(self, item: Item) -> Iterable[NamedEvent]:
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=item.index, item=item.json("in_progress"))
        if item.kind == "message":
            yield self._event("response.content_part.added", **_place(item), part=_text_part(""))

    def _logprobs_of(self, item: Item, text: str, generation: Generation) -> list[dict[str, Any]]:
        if self._logprobs is None:
            return []
        if item.kind == "message":
            return self._logprobs.take(text, generation)
        self._logprobs.skip(text)
        return []

    def _add(self, item: Item, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterable[NamedEvent]:
        if not text:
            return
        item.logprobs += logprobs
        item.parts.append(text)
        if item.kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **_place(item), delta=text)
        elif item.kind == "message":
            yield self._event("response.output_text.delta", **_place(item), delta=text, logprobs=list(logprobs))
        else:
            place = {"item_id": item.id, "output_index": item.index}
            yield self._event("response.function_call_arguments.delta", **place, delta=text)

    def _end(self, generation: Generation) -> Iterable[NamedEvent]:
        if self._logprobs is not None:
            self._logprobs.extend(kept_records(generation, self._vocabulary))
        yield from self._deltas(self._parser.finish(), generation)
        response = self._response(generation)
        for item, shown in zip(self._items, response["output"], strict=True):
            if item.kind == "message":
                yield self._event("response.output_text.done", **_place(item), text=item.text, logprobs=item.logprobs)
                yield self._event("response.content_part.done", **_place(item), part=shown["content"][0])
            yield self._event("response.output_item.done", output_index=item.index, item=shown)
        # Also for an answer that met its limit: clients of llama-server wait for this name; the status tells.
        yield self._event("response.completed", response=response)

    def whole(self, generations: list[Generation]) -> Any:
        # The items are those of a stream that sent the whole text at once.
        (generation,) = generations
        if self._logprobs is not None:
            self._logprobs.extend(kept_records(generation, self._vocabulary))
        for _ in self._deltas(self._parser.push(generation.content) + self._parser.finish(), generation):
            pass
        return self._response(generation)


def _place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": list(logprobs), "text": text}


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
