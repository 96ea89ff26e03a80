"""From prompts and parameters to a response: queue the generations, wait or stream, cancel when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from pyllama.chat.tool_grammar import check_tools, tool_grammar
from pyllama.errors import InvalidArgument
from pyllama.grammar import GrammarError
from pyllama.grammar.guide import Guide, GuideSource, compile_guide
from pyllama.server.errors import ExceedsContext, InvalidRequest, error_body
from pyllama.server.followed_stream import FollowedStream, until_disconnect
from pyllama.server.generation import Event, Failed, Finished, Generation
from pyllama.server.generation_params import GenerationParams
from pyllama.server.guide_fields import with_guide_fields
from pyllama.server.loaded_model import LoadedModel
from pyllama.server.logit_bias import read_logit_bias
from pyllama.server.request_fields import read_params
from pyllama.server.requests import ActiveRequest
from pyllama.server.responses import json_response
from pyllama.server.sampling_params import SamplerParts, make_sampler
from pyllama.server.sse import EventStream
from pyllama.server.state import server_state
from pyllama.server.stream_replay import conversation_id

# Texts longer than this are tokenised on another thread, so that other clients' streams do not wait.
LONG_TEXT = 20_000

# As many as may wait in the queue at all; each costs memory and time before anything is computed.
MAX_PROMPTS = 1024


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
    params = with_guide_fields(params, body, loaded.vocabulary)
    return replace(params, adapter_scales=loaded.adapters.scales_of(body.get("lora")))


def compile_answer_guide(params: GenerationParams, loaded: LoadedModel) -> Guide:
    """What steers the answers, at their beginning. Raises `InvalidRequest` for what cannot be honoured."""
    vocabulary = loaded.vocabulary
    grammars, grammar, tools = vocabulary.grammars, params.grammar_source, params.tools
    try:
        if tools is not None:
            grammar = tool_grammar(tools, grammars.marker)
        source = GuideSource(
            grammar,
            params.grammar_triggers,
            params.thinking,
            params.budget,
            is_forgiving=tools is not None,
            given=params.given,
        )
        tags = [tag for rules in (params.thinking,) if rules is not None for tag in (rules.start, rules.end)]
        tags += [tag for rules in (params.budget,) if rules is not None for tag in (rules.start, *rules.ends)]
        shown = params.preserved_tokens | vocabulary.hidden_markers(tags)

        def piece(token: int) -> bytes:
            return vocabulary.special_piece(token) if token in shown else vocabulary.piece(token)

        def encode(text: str) -> list[int]:
            return list(vocabulary.tokenizer.encode(text, add_special=False, parse_special=True))

        try:
            return compile_guide(source, grammars, piece, encode)
        except GrammarError as error:
            if tools is not None:
                check_tools(tools, grammars, error)
            raise
    except GrammarError as error:
        if tools is not None:
            raise InvalidRequest(f"Field 'tools': {error}") from error
        if grammar is not None and grammar.kind == "gbnf":
            raise InvalidRequest(f"Failed to initialize samplers: failed to parse grammar: {error}") from error
        raise InvalidRequest(f"Field 'json_schema': \"json_schema\": {error}") from error
    except InvalidArgument as error:
        raise InvalidRequest(str(error)) from error


async def prepare(params: GenerationParams, loaded: LoadedModel) -> tuple[Guide | None, SamplerParts]:
    """What is made of the vocabulary for a request, on another thread where it may take its time.

    Raises `InvalidRequest`.
    """
    guide = None
    if params.steers:
        guide = await asyncio.to_thread(compile_answer_guide, params, loaded)
    if params.sampling.uses_dry or params.sampling.uses_infill:
        return guide, await asyncio.to_thread(loaded.sampler_parts, params.sampling)
    return guide, SamplerParts()


def build_request(
    prompts: list[list[int]],
    params: GenerationParams,
    loaded: LoadedModel,
    n_predict_limit: int,
    guide: Guide | None,
    parts: SamplerParts,
) -> ActiveRequest:
    """Generations prompt by prompt, choice by choice. Raises `ExceedsContext`, `InvalidRequest`."""
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f'"prompt": a request has at most {MAX_PROMPTS} prompts, but found {len(prompts)}')
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
                constraint=guide.copy(sampling.banned) if guide is not None else None,
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
    completion_id: str = "",
) -> Response:
    """Run the generations of one HTTP request. The first failure before any result is an ordinary HTTP error.

    stream_error: what a stream that has begun sends for a failure. completion_id: under which it can be controlled.
    """
    state = server_state(http)
    loaded = state.loaded
    guide, parts = await prepare(params, loaded)
    request = build_request(prompts, params, loaded, state.settings.n_predict, guide, parts)
    engine_loop = loaded.engine_loop
    mailbox = request.mailbox
    conversation = conversation_id(http.headers) if params.stream else None
    # A stream with a conversation goes on when its client leaves; only its own end or a word to stop it ends it.
    kept = state.streams.open(conversation, mailbox.close) if conversation else None
    watcher = None if kept is not None else asyncio.create_task(close_on_disconnect(http, request))

    if completion_id:
        state.running[completion_id] = request

    def end(is_complete: bool) -> None:
        state.running.pop(completion_id, None)
        if watcher is not None:
            watcher.cancel()
        if not is_complete:
            engine_loop.cancel(request)
        if kept is not None:
            state.streams.has_ended(kept)

    handed_over = is_complete = False
    try:
        engine_loop.submit(request)
        if params.stream:
            events = await mailbox.get()
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
            if mailbox.is_closed:
                if kept is not None:
                    raise InvalidRequest("the request was cancelled")
                return Response(status_code=CLIENT_CLOSED)
            handed_over = True
            stream = EventStream(
                request,
                events,
                to_chunks=results.chunks,
                to_error=stream_error,
                ends_with_done=results.ends_with_done,
                ping_interval=params.sse_ping_interval,
                on_end=end,
            )
            if kept is None:
                return stream
            kept.fill_from(stream)
            return FollowedStream(kept.buffer)
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
    await until_disconnect(http.receive)
    request.mailbox.close()
