"""Text completion: the native routes and `/v1/completions`."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.generate import in_thread_if_long, request_params, respond
from pyllama.server.api.results import (
    complete_text,
    finish_reason,
    kept_records,
    native_partial,
    native_progress,
    native_result,
    probabilities_json,
    prompt_progress,
    select_fields,
    usage,
)
from pyllama.server.errors import InvalidRequest, NotSupported
from pyllama.server.generation import Event, Finished, Generation, ProbabilityRecord, Progress, TokenText
from pyllama.server.prompts import read_prompts
from pyllama.server.request_fields import read_flag, wrong_type
from pyllama.server.responses import read_object
from pyllama.server.state import ServerState, server_state

_ID_CHARACTERS = string.digits + string.ascii_letters


def completion_id() -> str:
    return "chatcmpl-" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(32))


class NativeFormat:
    """llama-server's own shapes."""

    ends_with_done = False

    def __init__(self, state: ServerState) -> None:
        self._vocabulary = state.loaded.vocabulary
        self._model = state.settings.model_name

    def chunks(self, event: Event) -> Iterable[Any]:
        if isinstance(event, TokenText):
            if event.shows:
                yield native_partial(event, self._vocabulary)
        elif isinstance(event, Progress):
            yield native_progress(event)
        elif isinstance(event, Finished):
            generation = event.generation
            result = native_result(generation, self._vocabulary, self._model, in_stream=True)
            yield select_fields(result, generation.params.response_fields)

    def whole(self, generations: list[Generation]) -> Any:
        results = [
            select_fields(native_result(g, self._vocabulary, self._model, in_stream=False), g.params.response_fields)
            for g in generations
        ]
        return results[0] if len(results) == 1 else results


def _shows_prompt_only(generation: Generation) -> bool:
    """A prompt that is echoed with a budget of 0 is scored and not continued, as OpenAI does it."""
    return generation.params.echo and generation.params.n_predict == 0


def _usage(generation: Generation) -> dict[str, Any]:
    counts = usage(generation)
    if _shows_prompt_only(generation):
        counts.update(completion_tokens=0, total_tokens=counts["prompt_tokens"])
    return counts


class OpenAICompletionFormat:
    """`/v1/completions`. `logprobs` holds the records in `content` and, beside them, OpenAI's four arrays."""

    ends_with_done = True

    def __init__(self, state: ServerState) -> None:
        self._vocabulary = state.loaded.vocabulary
        self._model = state.settings.model_name
        self._fingerprint = state.build_info
        self._id = completion_id()
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}  # characters sent, per choice
        self._pending: dict[int, list[ProbabilityRecord]] = {}  # records of tokens whose text was not complete yet
        self._has_echoed: set[int] = set()

    def _result(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "object": "text_completion",
        }

    def chunks(self, event: Event) -> Iterable[Any]:
        generation = event.generation
        if generation.params.echo and isinstance(event, (TokenText, Finished)) and self._is_first(generation):
            chunk = self._result([self._choice(generation, self._prompt_text(generation), None, [])])
            if generation.params.scores_prompt and generation.n_prompt > 0:
                chunk["choices"][0]["logprobs"] = self._logprobs(generation, [], echoes=True)
            chunk["id"] = self._id
            yield chunk
        if isinstance(event, TokenText):
            if _shows_prompt_only(generation):
                return
            if event.record is not None:
                self._pending.setdefault(generation.index, []).append(event.record)
            if event.shows:
                chunk = self._result(
                    [self._choice(generation, event.text, None, self._pending.pop(generation.index, []))]
                )
                chunk["id"] = self._id
                if generation.params.verbose:
                    chunk["__verbose"] = native_partial(event, self._vocabulary)
                if event.timings is not None:
                    chunk["timings"] = event.timings
                yield chunk
        elif isinstance(event, Progress):
            chunk = self._result([self._choice(generation, "", None, [])])
            chunk["id"] = self._id
            if generation.params.verbose:
                chunk["__verbose"] = native_progress(event)
            if event.timings is not None:
                chunk["timings"] = event.timings
            chunk["prompt_progress"] = prompt_progress(event)
            yield chunk
        elif isinstance(event, Finished):
            chunk = self._result([self._choice(generation, "", finish_reason(generation), [])])
            chunk["usage"] = _usage(generation)
            chunk["id"] = self._id
            self._add_verbose(chunk, generation, in_stream=True)
            chunk["timings"] = generation.timings()
            yield chunk

    def _choice(
        self, generation: Generation, text: str, reason: str | None, records: Iterable[ProbabilityRecord]
    ) -> dict[str, Any]:
        records = list(records)
        logprobs = self._logprobs(generation, records) if records else None
        return {"text": text, "index": generation.index, "logprobs": logprobs, "finish_reason": reason}

    def _is_first(self, generation: Generation) -> bool:
        """Whether this is the first call for a choice."""
        is_first = generation.index not in self._has_echoed
        self._has_echoed.add(generation.index)
        return is_first

    def _prompt_text(self, generation: Generation) -> str:
        return b"".join(map(self._vocabulary.piece, generation.prompt)).decode("utf-8", "replace")

    def _logprobs(
        self, generation: Generation, records: list[ProbabilityRecord], *, echoes: bool = False
    ) -> dict[str, Any]:
        """`echoes`: the prompt's records come first; nothing precedes its first token, which has no probability."""
        content = probabilities_json(generation, records, self._vocabulary)
        if echoes:
            parent = generation.parent or generation
            piece = self._vocabulary.piece(generation.tokens[0])
            first = {"id": generation.tokens[0], "token": complete_text(piece), "bytes": list(piece)}
            first.update(logprob=None, top_logprobs=[])
            content = [first, *probabilities_json(generation, parent.prompt_records, self._vocabulary), *content]
        logprobs: dict[str, Any] = {"content": content}
        if generation.params.post_sampling_probs:
            return logprobs
        offset = self._offsets.get(generation.index, 0)
        offsets = []
        for record in content:
            offsets.append(offset)
            offset += len(record["token"])
        self._offsets[generation.index] = offset
        logprobs["tokens"] = [record["token"] for record in content]
        logprobs["token_logprobs"] = [record["logprob"] for record in content]
        logprobs["top_logprobs"] = [
            {top["token"]: top["logprob"] for top in record["top_logprobs"]} for record in content
        ]
        logprobs["text_offset"] = offsets
        return logprobs

    def _add_verbose(self, result: dict[str, Any], generation: Generation, *, in_stream: bool) -> None:
        if generation.params.verbose:
            result["__verbose"] = native_result(generation, self._vocabulary, self._model, in_stream=in_stream)

    def _whole_choice(self, generation: Generation) -> dict[str, Any]:
        params = generation.params
        shows_answer = not _shows_prompt_only(generation)
        text = (self._prompt_text(generation) if params.echo else "") + (generation.content if shows_answer else "")
        records = kept_records(generation, self._vocabulary) if params.n_probs > 0 and shows_answer else []
        choice = self._choice(generation, text, finish_reason(generation), [])
        echoes = params.scores_prompt and generation.n_prompt > 0
        if records or echoes:
            choice["logprobs"] = self._logprobs(generation, list(records), echoes=echoes)
        return choice

    def whole(self, generations: list[Generation]) -> Any:
        result = self._result([self._whole_choice(generation) for generation in generations])
        first = generations[0]
        result["usage"] = _usage(first)
        result["id"] = self._id
        self._add_verbose(result, first, in_stream=False)
        result["timings"] = first.timings()
        return result


async def native_completion(http: Request) -> Response:
    return await _complete(http, NativeFormat(server_state(http)))


async def openai_completion(http: Request) -> Response:
    return await _complete(http, OpenAICompletionFormat(server_state(http)), is_openai=True)


async def _complete(
    http: Request, results: NativeFormat | OpenAICompletionFormat, *, is_openai: bool = False
) -> Response:
    body = await read_object(http)
    echo = read_flag(body.pop("echo", None), "echo", False) if is_openai else False
    if is_openai:
        _refuse_unsupported(body)
    loaded = server_state(http).loaded
    if body.get("prompt") is None:
        raise InvalidRequest("key 'prompt' not found")
    n_bytes = len(await http.body())
    params = await in_thread_if_long(n_bytes, request_params, body, loaded)
    if echo:
        params = replace(params, echo=True, scores_prompt=params.n_probs > 0 and not params.post_sampling_probs)
    prompts = await in_thread_if_long(
        n_bytes, read_prompts, body["prompt"], loaded.tokenizer, loaded.vocabulary.n_vocab
    )
    return await respond(http, prompts, params, results)


def _refuse_unsupported(body: dict[str, Any]) -> None:
    """Fields of OpenAI's that would change the answer."""
    suffix, best_of = body.get("suffix"), body.get("best_of")
    if suffix is not None and not isinstance(suffix, str):
        raise wrong_type("suffix", "string", suffix)
    if suffix:
        raise NotSupported("Field 'suffix': this route continues the prompt; /infill takes what comes after the gap")
    if best_of is not None and (isinstance(best_of, bool) or not isinstance(best_of, int)):
        raise wrong_type("best_of", "integer", best_of)
    if best_of is not None and best_of > 1 and best_of != body.get("n"):
        raise NotSupported("Field 'best_of': all choices are answered, none is left out; use 'n'")
