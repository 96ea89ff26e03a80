"""Chat: `/v1/chat/completions`, its token counts, and `/apply-template`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.chat.answer import AnswerParser, AnswerShape, Delta, whole_answer
from pyllama.chat.tool_grammar import tool_triggers
from pyllama.server.answer_format import answer_schema
from pyllama.server.api.completions import completion_id
from pyllama.server.api.generate import in_thread_if_long, request_params, respond
from pyllama.server.api.results import (
    finish_reason,
    kept_records,
    native_result,
    probability_json,
    prompt_progress,
    usage,
)
from pyllama.server.chat_prompt import ChatPrompt, chat_prompt
from pyllama.server.errors import InvalidRequest
from pyllama.server.generation import Event, Finished, Generation, ProbabilityRecord, Progress, TokenText
from pyllama.server.generation_params import GenerationParams
from pyllama.server.request_fields import read_flag, wrong_type
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import ServerState, server_state

DEFAULT_TOP_LOGPROBS = 20
CHAT_ONLY_FIELDS = ("logprobs", "top_logprobs", "json_schema", "echo", "reasoning_format", "parse_tool_calls")


def sampling_body(body: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The body for the completion layer, and how many alternatives to show per token (None: all)."""
    fields = {name: value for name, value in body.items() if name not in CHAT_ONLY_FIELDS}
    schema = answer_schema(body)
    if schema is not None:
        fields["json_schema"] = schema
        fields.pop("grammar", None)  # an empty one
    wants_logprobs = read_flag(body.get("logprobs"), "logprobs", False)
    top = body.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int)):
        raise wrong_type("top_logprobs", "integer", top)
    if top is not None and not 0 <= top <= 2**31 - 1:
        raise InvalidRequest("Field 'top_logprobs': Value must not be negative or beyond 32 bits")
    if not wants_logprobs:
        if top is not None:
            raise InvalidRequest("top_logprobs requires logprobs to be set to true")
        return fields, None
    n_top = DEFAULT_TOP_LOGPROBS if top is None else top
    # Even without alternatives the chosen token's own probability is asked for.
    fields["n_probs"] = max(1, n_top)
    return fields, n_top


def _finish_reason(generation: Generation, answer: AnswerParser) -> str:
    reason = finish_reason(generation)
    return "tool_calls" if reason == "stop" and answer.has_calls else reason


class ChatFormat:
    """OpenAI's chat shapes."""

    ends_with_done = True

    def __init__(self, state: ServerState, shape: AnswerShape, *, n_top: int | None = None) -> None:
        self._vocabulary = state.loaded.vocabulary
        self._model = state.settings.model_name
        self._fingerprint = state.build_info
        self.id = completion_id()
        self._created = int(time.time())
        self._shape = shape
        self._n_top = n_top
        self._parsers: dict[int, AnswerParser] = {}  # of choices whose role was sent
        self._n_sent: dict[int, int] = {}  # per choice, records that chunks carried so far
        self._n_unfinished: int | None = None

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {
            "choices": [{"finish_reason": reason, "index": index, "delta": delta}],
            "created": self._created,
            "id": self.id,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "object": "chat.completion.chunk",
        }

    def chunks(self, event: Event) -> Iterable[Any]:
        if isinstance(event, TokenText):
            return self._token_chunks(event)
        if isinstance(event, Progress):
            chunk = self._chunk(event.generation.index, {"role": "assistant", "content": None})
            if event.timings is not None:
                chunk["timings"] = event.timings
            chunk["prompt_progress"] = prompt_progress(event)
            return (chunk,)
        if isinstance(event, Finished):
            return self._final_chunks(event.generation)
        return ()

    def _token_chunks(self, event: TokenText) -> list[dict[str, Any]]:
        generation = event.generation
        index = generation.index
        chunks = self._role_chunk(index)
        deltas = self._parsers[index].push(event.text)
        chunks += [self._chunk(index, delta) for delta in deltas]
        if chunks:
            if deltas and event.record is not None:
                self._add_logprobs(chunks[-1], generation, generation.records[: event.n_decoded])
            if event.timings is not None:
                chunks[-1]["timings"] = event.timings
        return chunks

    def _role_chunk(self, index: int) -> list[dict[str, Any]]:
        """The chunk that begins a choice, if it has not begun."""
        if index in self._parsers:
            return []
        self._parsers[index] = AnswerParser(self._shape)
        delta: Delta = {"role": "assistant", "content": None}
        return [self._chunk(index, delta)]

    def _add_logprobs(
        self, chunk: dict[str, Any], generation: Generation, records: Sequence[ProbabilityRecord]
    ) -> None:
        """Add those of the choice's `records` so far that no chunk carried yet, also of tokens held back."""
        n_sent = self._n_sent.get(generation.index, 0)
        if len(records) > n_sent:
            self._n_sent[generation.index] = len(records)
            chunk["choices"][0]["logprobs"] = self._logprobs(generation, records[n_sent:])

    def _logprobs(self, generation: Generation, records: Iterable[ProbabilityRecord]) -> dict[str, Any]:
        post_sampling = generation.params.post_sampling_probs
        return {
            "content": [
                probability_json(record, self._vocabulary, post_sampling=post_sampling, n_top=self._n_top)
                for record in records
            ]
        }

    def _final_chunks(self, generation: Generation) -> list[dict[str, Any]]:
        index = generation.index
        chunks = self._role_chunk(index)
        chunks += [self._chunk(index, delta) for delta in self._parsers[index].finish()]
        chunks.append(self._chunk(index, {}, _finish_reason(generation, self._parsers[index])))
        if generation.params.n_probs > 0:
            self._add_logprobs(chunks[-1], generation, kept_records(generation, self._vocabulary))
        first = chunks[0]
        if self._n_unfinished is None:
            self._n_unfinished = len(generation.request.generations)
        self._n_unfinished -= 1
        if generation.params.include_usage and self._n_unfinished == 0:
            chunk = self._chunk(index, {})
            chunk["choices"] = []
            chunk["usage"] = usage(generation.request.generations[0])
            chunks.append(chunk)
        chunks[-1]["timings"] = generation.timings()
        if generation.params.verbose:
            first["__verbose"] = native_result(generation, self._vocabulary, self._model, in_stream=True)
        return chunks

    def whole(self, generations: list[Generation]) -> Any:
        choices = []
        for g in generations:
            answer = whole_answer(self._shape, g.content)
            choice: dict[str, Any] = {
                "finish_reason": _finish_reason(g, answer),
                "index": g.index,
                "message": answer.message(),
            }
            if g.params.n_probs > 0:
                choice["logprobs"] = self._logprobs(g, kept_records(g, self._vocabulary))
            choices.append(choice)
        first = generations[0]
        result: dict[str, Any] = {
            "choices": choices,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "object": "chat.completion",
            "usage": usage(first),
            "id": self.id,
        }
        if first.params.verbose:
            result["__verbose"] = native_result(first, self._vocabulary, self._model, in_stream=False)
        result["timings"] = first.timings()
        return result


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A chat request that is ready to run. n_top: alternatives to show per token (None: all)."""

    tokens: list[int]
    params: GenerationParams
    shape: AnswerShape
    n_top: int | None


async def read_prompt_tokens(http: Request, body: dict[str, Any]) -> tuple[ChatPrompt, list[int]]:
    """The prompt of a chat request, as text and tokens. Raises what `chat_prompt` raises."""
    state = server_state(http)
    # Only those who want the native result see the generation prompt.
    is_verbose = body.get("verbose") is True or state.loaded.defaults.verbose
    render = partial(chat_prompt, tells_generation_prompt=is_verbose)
    prompt = await in_thread_if_long(len(await http.body()), render, body, state)
    tokens = await in_thread_if_long(len(prompt.text), _encode, state.loaded.tokenizer, prompt.text)
    return prompt, tokens


async def read_chat(http: Request, body: dict[str, Any]) -> ChatTask:
    """From a chat request's body to what is run for it. Raises `InvalidRequest`, `NotSupported`, `TemplateError`."""
    loaded = server_state(http).loaded
    prompt, tokens = await read_prompt_tokens(http, body)
    fields, n_top = sampling_body(body)
    params = await in_thread_if_long(len(await http.body()), request_params, fields, loaded)
    thinking, budget = prompt.thinking, params.budget
    if thinking is not None:
        opened = f"{thinking.start}{thinking.so_far}" if thinking.is_open else ""
        budget = params.budget_rules(thinking.start, (thinking.end,), prompt=opened)
    if prompt.tools is not None and not prompt.tools.is_required:
        params = replace(params, grammar_lazy=True, grammar_triggers=tool_triggers(prompt.tools))
    waits = prompt.tools is not None or "json_schema" in fields or params.grammar_lazy
    params = replace(
        params,
        reasoning_format=prompt.reasoning_format,
        preserved_tokens=params.preserved_tokens | loaded.vocabulary.hidden_markers(prompt.markers),
        tools=prompt.tools,
        thinking=thinking if waits else None,
        given=prompt.given if waits else "",
        budget=budget,
        generation_prompt=params.generation_prompt or prompt.generation_prompt,
        chat_format="peg-native" if server_state(http).settings.parses_chat else "Content-only",
    )
    return ChatTask(tokens, params, prompt.shape, n_top)


async def input_token_count(http: Request, body: dict[str, Any]) -> dict[str, Any]:
    """How many tokens the prompt of a chat request has, as OpenAI's APIs say it."""
    _, tokens = await read_prompt_tokens(http, body)
    return {"input_tokens": len(tokens), "object": "response.input_tokens"}


async def chat_completion(http: Request) -> Response:
    task = await read_chat(http, await read_object(http))
    results = ChatFormat(server_state(http), task.shape, n_top=task.n_top)
    return await respond(http, [task.tokens], task.params, results, completion_id=results.id)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=True, parse_special=True)


async def count_tokens(http: Request) -> Response:
    return json_response(await input_token_count(http, await read_object(http)))


async def apply_template(http: Request) -> Response:
    body = await read_object(http)
    prompt = await in_thread_if_long(len(await http.body()), chat_prompt, body, server_state(http))
    return json_response({"prompt": prompt.text})
