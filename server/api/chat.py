"""Chat: `/v1/chat/completions` and `/apply-template`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

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
from pyllama.server.chat_messages import read_messages, split_prefill
from pyllama.server.errors import InvalidRequest, NotSupported, ServerFault
from pyllama.server.generation import Event, Finished, Generation, ProbabilityRecord, Progress, TokenText
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import read_flag, wrong_type
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import ServerState, server_state

DEFAULT_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`echo`: text that the answer repeats at its start."""

    text: str
    echo: str = ""


def template_variables(body: dict[str, Any], server_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the template sees besides the messages. Raises `InvalidRequest`."""
    variables: dict[str, Any] = {"preserve_reasoning": True, **server_kwargs}
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None:
        if not isinstance(kwargs, dict):
            raise wrong_type("chat_template_kwargs", "object", kwargs)
        variables.update(kwargs)
    thinking = variables.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise InvalidRequest(f'invalid type for "enable_thinking" (expected boolean, got {type_name(thinking)})')
    effort = body.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise wrong_type("reasoning_effort", "string", effort)
        if effort == "none":
            variables["enable_thinking"] = False
        else:
            variables["reasoning_effort"] = effort
    return variables


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Parts of a chat request that do not exist yet. Raises `InvalidRequest` (400) or `NotSupported` (501)."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise wrong_type("tools", "array", tools)
    if tools:
        raise NotSupported("Field 'tools': tool calls are not supported yet")
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise InvalidRequest(f"Field 'tool_choice': must be 'auto', 'none' or 'required', but is '{choice}'")


def answer_schema(body: dict[str, Any]) -> Any:
    """The JSON schema that `response_format` or `json_schema` ask for; None without one. Raises `InvalidRequest`."""
    schema = body.get("json_schema")
    response_format = body.get("response_format")
    if isinstance(response_format, dict):
        kind = response_format.get("type", "")
        if kind == "json_object":
            inner = response_format.get("schema")
            if inner is not None or schema is None:
                schema = _response_schema(inner)
        elif kind == "json_schema":
            holder = response_format.get("json_schema")
            if holder is not None and not isinstance(holder, dict):
                raise wrong_type("response_format.json_schema", "object", holder)
            schema = _response_schema((holder or {}).get("schema"))
        elif kind not in ("", "text"):
            shown = kind if isinstance(kind, str) else type_name(kind)
            raise InvalidRequest(f'response_format type must be one of "text" or "json_object", but got: {shown}')
    if schema is not None and body.get("grammar"):
        raise ServerFault("Cannot use both json_schema and grammar")
    return schema


def _response_schema(schema: Any) -> dict[str, Any]:
    """Without a schema any JSON object will do."""
    if schema is None:
        return {}
    if not isinstance(schema, dict):
        raise wrong_type("response_format.schema", "object", schema)
    return schema


def chat_prompt(body: dict[str, Any], state: ServerState) -> ChatPrompt:
    """Messages -> prompt text. Raises `InvalidRequest`, `NotSupported`, `TemplateError`."""
    refuse_unsupported(body)
    messages = read_messages(body)
    conversation = split_prefill(body, messages, prefill_enabled=state.settings.prefill_assistant)
    variables = template_variables(body, dict(state.settings.chat_template_kwargs))
    continues = conversation.prefill is not None
    add_generation_prompt = continues or read_flag(body.get("add_generation_prompt"), "add_generation_prompt", True)
    text = state.loaded.render_chat(
        conversation.messages, add_generation_prompt=add_generation_prompt, variables=variables
    )
    echo = read_flag(body.get("echo"), "echo", False)
    if conversation.prefill is None:
        return ChatPrompt(text)
    return ChatPrompt(text + conversation.prefill, conversation.prefill if echo else "")


def sampling_body(body: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The body for the completion layer, and how many alternatives to show per token (None: all)."""
    fields = {
        name: value for name, value in body.items() if name not in ("logprobs", "top_logprobs", "json_schema", "echo")
    }
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


class ChatFormat:
    """OpenAI's chat shapes."""

    ends_with_done = True

    def __init__(self, state: ServerState, *, echo: str = "", n_top: int | None = None) -> None:
        self._vocabulary = state.loaded.vocabulary
        self._model = state.settings.model_name
        self._fingerprint = state.build_info
        self._id = completion_id()
        self._created = int(time.time())
        self._echo = echo
        self._n_top = n_top
        self._has_role: set[int] = set()
        self._n_sent: dict[int, int] = {}  # per choice, records that chunks carried so far
        self._n_unfinished: int | None = None

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {
            "choices": [{"finish_reason": reason, "index": index, "delta": delta}],
            "created": self._created,
            "id": self._id,
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
        chunks: list[dict[str, Any]] = []
        text = event.text
        if index not in self._has_role:
            self._has_role.add(index)
            chunks.append(self._chunk(index, {"role": "assistant", "content": None}))
            text = self._echo + text
        if text:
            chunks.append(self._chunk(index, {"content": text}))
        if chunks:
            if text and event.record is not None:
                self._add_logprobs(chunks[-1], generation, generation.records[: event.n_decoded])
            if event.timings is not None:
                chunks[-1]["timings"] = event.timings
        return chunks

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
        chunks: list[dict[str, Any]] = []
        if index not in self._has_role:  # an answer without any token
            self._has_role.add(index)
            chunks.append(self._chunk(index, {"role": "assistant", "content": None}))
        chunks.append(self._chunk(index, {}, finish_reason(generation)))
        if generation.params.n_probs > 0:
            self._add_logprobs(chunks[-1], generation, kept_records(generation, self._vocabulary))
        if generation.params.verbose:
            chunks[0]["__verbose"] = native_result(generation, self._vocabulary, self._model, in_stream=True)
        if self._n_unfinished is None:
            self._n_unfinished = len(generation.request.generations)
        self._n_unfinished -= 1
        if generation.params.include_usage and self._n_unfinished == 0:
            chunk = self._chunk(index, {})
            chunk["choices"] = []
            chunk["usage"] = usage(generation.request.generations[0])
            chunks.append(chunk)
        chunks[-1]["timings"] = generation.timings()
        return chunks

    def whole(self, generations: list[Generation]) -> Any:
        choices = []
        for g in generations:
            choice: dict[str, Any] = {
                "finish_reason": finish_reason(g),
                "index": g.index,
                "message": {"role": "assistant", "content": self._echo + g.content},
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
            "id": self._id,
        }
        if first.params.verbose:
            result["__verbose"] = native_result(first, self._vocabulary, self._model, in_stream=False)
        result["timings"] = first.timings()
        return result


async def chat_completion(http: Request) -> Response:
    body = await read_object(http)
    state = server_state(http)
    loaded = state.loaded
    n_bytes = len(await http.body())
    prompt = await in_thread_if_long(n_bytes, chat_prompt, body, state)
    fields, n_top = sampling_body(body)
    params = request_params(fields, loaded)
    tokens = await in_thread_if_long(len(prompt.text), _encode, loaded.tokenizer, prompt.text)
    return await respond(http, [tokens], params, ChatFormat(state, echo=prompt.echo, n_top=n_top))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=True, parse_special=True)


async def apply_template(http: Request) -> Response:
    body = await read_object(http)
    prompt = await in_thread_if_long(len(await http.body()), chat_prompt, body, server_state(http))
    return json_response({"prompt": prompt.text})
