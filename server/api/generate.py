"""From prompts and parameters to a response: queue the generations, wait or stream, cancel when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from pyllama.grammar import Constraint, GrammarError
from pyllama.server.errors import ExceedsContext, InvalidRequest, error_body
from pyllama.server.generation import Event, Failed, Finished, Generation
from pyllama.server.generation_params import GenerationParams
from pyllama.server.loaded_model import LoadedModel
from pyllama.server.logit_bias import read_logit_bias
from pyllama.server.request_fields import read_params
from pyllama.server.requests import ActiveRequest
from pyllama.server.responses import json_response
from pyllama.server.sampling_params import SamplerParts, banned_tokens, make_sampler, uses_dry, uses_infill
from pyllama.server.sse import EventStream
from pyllama.server.state import server_state

# Texts longer than this are tokenised on another thread, so that other clients' streams do not wait.
LONG_TEXT = 20_000


class ResultFormat(Protocol):
    """One API family's view of results. An instance serves one request."""

    ends_with_done: bool

    def chunks(self, event: Event) -> Iterable[Any]:
        """JSON values that a stream sends for an event."""

    def whole(self, generations: list[Generation]) -> Any:
        """The JSON value of a plain answer."""


async def in_thread_if_long(n_characters: int, function: Callable[..., Any], *args: Any) -> Any:
    if n_characters > LONG_TEXT:
        return await asyncio.to_thread(function, *args)
    return function(*args)


def request_params(body: dict[str, Any], loaded: LoadedModel) -> GenerationParams:
    """The body's sampling and generation fields over the server's defaults. Raises `InvalidRequest`, `NotSupported`."""
    params = read_params(
        body,
        loaded.defaults,
        n_slots=loaded.n_slots,
        logit_bias=lambda value: read_logit_bias(value, loaded.tokenizer, loaded.vocabulary.n_vocab),
        ban_end_tokens=loaded.ban_end_tokens,
    )
    if params.n_cache_reuse > 0 and not loaded.can_shift:
        raise InvalidRequest("Field 'n_cache_reuse': the tokens of this model cannot be moved to other positions")
    return params


def compile_constraint(params: GenerationParams, loaded: LoadedModel) -> Constraint | None:
    """What the answers must keep to, at its beginning. Raises `InvalidRequest` when it cannot be honoured."""
    source = params.grammar_source
    if source is None:
        return None
    try:
        return loaded.vocabulary.grammars.compile(source)
    except GrammarError as error:
        if source.kind == "gbnf":
            raise InvalidRequest(f"Failed to initialize samplers: failed to parse grammar: {error}") from error
        raise InvalidRequest(f"Field 'json_schema': \"json_schema\": {error}") from error


async def prepare(params: GenerationParams, loaded: LoadedModel) -> tuple[Constraint | None, SamplerParts]:
    """What is made of the vocabulary for a request, on another thread where it may take its time.

    Raises `InvalidRequest`.
    """
    constraint = None
    if params.grammar_source is not None:
        constraint = await asyncio.to_thread(compile_constraint, params, loaded)
    if uses_dry(params.sampling) or uses_infill(params.sampling):
        return constraint, await asyncio.to_thread(loaded.sampler_parts, params.sampling)
    return constraint, SamplerParts()


def build_request(
    prompts: list[list[int]],
    params: GenerationParams,
    loaded: LoadedModel,
    n_predict_limit: int,
    constraint: Constraint | None,
    parts: SamplerParts,
) -> ActiveRequest:
    """Generations prompt by prompt, choice by choice. Raises `ExceedsContext`, `InvalidRequest`."""
    for prompt in prompts:
        if len(prompt) >= loaded.n_ctx_slot:
            raise ExceedsContext(len(prompt), loaded.n_ctx_slot)
    request = ActiveRequest(id_slot=params.id_slot)
    index = 0
    for prompt in prompts:
        group: list[Generation] = []
        for choice in range(params.n_cmpl):
            sampling = loaded.with_suppressed_tokens(params.sampling.for_choice(choice))
            generation = Generation(
                request,
                index,
                prompt=prompt,
                params=params,
                sampler=make_sampler(sampling, loaded.vocabulary.n_vocab, loaded.sampler_factory, parts),
                vocabulary=loaded.vocabulary,
                n_ctx=loaded.n_ctx_slot,
                n_predict_limit=n_predict_limit,
                parent=group[0] if group else None,
                shifts_context=loaded.shifts_context,
                constraint=constraint.copy(banned_tokens(sampling)) if constraint is not None else None,
            )
            group.append(generation)
            index += 1
        group[0].children = group[1:]
        request.groups.append(group)
    return request


async def respond(
    http: Request,
    prompts: list[list[int]],
    params: GenerationParams,
    results: ResultFormat,
    *,
    stream_error: Callable[[BaseException], Any] = error_body,
) -> Response:
    """Run the generations of one HTTP request. The first failure before any result is an ordinary HTTP error.

    stream_error: what a stream that has begun sends for a failure.
    """
    state = server_state(http)
    loaded = state.loaded
    constraint, parts = await prepare(params, loaded)
    request = build_request(prompts, params, loaded, state.settings.n_predict, constraint, parts)
    engine_loop = loaded.engine_loop
    mailbox = request.mailbox
    engine_loop.submit(request)
    watcher = asyncio.create_task(close_on_disconnect(http, request))

    def end(is_complete: bool) -> None:
        watcher.cancel()
        if not is_complete:
            engine_loop.cancel(request)

    handed_over = is_complete = False
    try:
        if params.stream:
            events = await mailbox.get()
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
            if mailbox.is_closed:
                return Response(status_code=CLIENT_CLOSED)
            handed_over = True
            return EventStream(
                request,
                events,
                to_chunks=results.chunks,
                to_error=stream_error,
                ends_with_done=results.ends_with_done,
                ping_interval=params.sse_ping_interval,
                on_end=end,
            )
        n_left = len(request.generations)
        while n_left:
            for event in await mailbox.get():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    n_left -= 1
            if mailbox.is_closed:
                return Response(status_code=CLIENT_CLOSED)
        is_complete = True
        return json_response(results.whole(request.generations))
    finally:
        if not handed_over:
            end(is_complete)


CLIENT_CLOSED = 499  # nobody reads this response; the number is what proxies log for it


async def close_on_disconnect(http: Request, request: ActiveRequest) -> None:
    """Close the request's mailbox when the client is gone. Runs until cancelled."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    request.mailbox.close()
