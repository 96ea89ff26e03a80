"""One completion in four steps: prepare (validate), iterate (drawn tokens to text), collect, format (dictionaries).

Nothing here touches an engine: tokens come in as an iterator, so every step is tested without a model.
"""

from __future__ import annotations

import codecs
import math
import operator
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from pyllama.completion_types import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    Completion,
    CompletionChunk,
    CompletionLogprobs,
    FinishReason,
    Usage,
)
from pyllama.errors import InvalidArgument
from pyllama.sampling_values import ALL_SAMPLERS, SamplingValues
from pyllama.text_stream import TextStream

LOWEST_LOGPROB = -3.4028234663852886e38  # the most negative f32: what the logarithm of probability 0 is reported as


class TokenText(Protocol):
    """What completions need of a tokenizer."""

    def piece(self, token: int, *, special: bool = False) -> bytes: ...
    def is_eog(self, token: int) -> bool: ...


_PLAIN_NUMBERS = (
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_n_sigma",
    "dynatemp_range",
    "dynatemp_exponent",
    "dry_multiplier",
    "dry_base",
    "mirostat_tau",
    "mirostat_eta",
)


# -------------------------------------------------------------------------------- prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(SamplingValues):
    """What a caller of `Llama` asks for. Probabilities, temperature and counts are clamped."""

    def __post_init__(self) -> None:
        def limit(name: str, low: float, high: float) -> None:
            object.__setattr__(self, name, min(max(_finite(name, getattr(self, name)), low), high))

        limit("temperature", 0.0, math.inf)
        limit("top_p", 0.0, 1.0)
        limit("min_p", 0.0, 1.0)
        limit("typical_p", 0.0, 1.0)
        limit("xtc_probability", 0.0, 1.0)
        limit("xtc_threshold", 0.0, 1.0)
        limit("adaptive_target", -math.inf, 1.0)
        limit("adaptive_decay", 0.0, 0.99)
        for name in _PLAIN_NUMBERS:
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        if not self.repeat_penalty > 0 or math.isinf(1 / self.repeat_penalty):
            raise InvalidArgument(f"repeat_penalty must be > 0, found {self.repeat_penalty}")
        object.__setattr__(self, "top_k", max(_integer("top_k", self.top_k), 0))
        for name in ("repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_keep"):
            object.__setattr__(self, name, max(_integer(name, getattr(self, name)), 0))
        if isinstance(self.mirostat, bool) or _integer("mirostat_mode", self.mirostat) not in (0, 1, 2):
            raise InvalidArgument(f"mirostat_mode must be 0, 1 or 2, found {self.mirostat}")
        for name in ("samplers", "dry_sequence_breakers"):
            texts = getattr(self, name)
            if (
                isinstance(texts, str)
                or not isinstance(texts, Sequence)
                or not all(isinstance(text, str) for text in texts)
            ):
                raise TypeError(f"{name} must be a sequence of str, found {texts!r}")
            object.__setattr__(self, name, tuple(texts))
        for name in self.samplers:
            if name not in ALL_SAMPLERS:
                known = ", ".join(ALL_SAMPLERS)
                raise InvalidArgument(f"samplers: {name!r} is not one of {known}")


class MoreSampling(TypedDict, total=False):
    """Options of `SamplingOptions` that llama-cpp-python has no arguments for; `Llama` takes them by name."""

    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    adaptive_target: float
    adaptive_decay: float
    min_keep: int
    samplers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A validated request: nothing in it is optional or negative any more."""

    tokens: tuple[int, ...]
    prompt: str  # what `echo` repeats and text offsets count from
    max_tokens: int
    stops: tuple[str, ...]
    echo: bool
    n_probs: int | None  # number of alternatives per token; None: no probabilities
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4()}")
    created: int = field(default_factory=lambda: int(time.time()))


MOST_TOKENS = 2**31 - 1


def prepare(
    tokens: Sequence[int],
    prompt: str,
    *,
    n_ctx: int,
    max_tokens: int | None,
    stop: str | Sequence[str] | None,
    echo: bool,
    n_probs: int | None,
    model: str,
    is_endless: bool = False,
) -> CompletionRequest:
    """is_endless: an answer may be longer than the context.

    Raises `TypeError` for wrong types and `InvalidArgument` for values, or a prompt length, out of range.
    """
    if not tokens:
        raise InvalidArgument("the prompt has no tokens, and the vocabulary has no BOS token to begin with")
    if len(tokens) >= n_ctx:
        raise InvalidArgument(
            f"the prompt has {len(tokens)} tokens, but the context holds n_ctx={n_ctx}, one of them for the answer"
        )
    room = MOST_TOKENS if is_endless else n_ctx - len(tokens)
    wanted = 0 if max_tokens is None else _integer("max_tokens", max_tokens)
    if n_probs is not None and _integer("logprobs", n_probs) < 0:
        raise InvalidArgument(f"logprobs must be >= 0, found {n_probs}")
    stops: tuple[str, ...] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str):
            raise TypeError(f"stop must be a str or a sequence of str, found an element of type {type(text).__name__}")
    return CompletionRequest(
        tokens=tuple(tokens),
        prompt=prompt,
        max_tokens=min(wanted, room) if wanted > 0 else room,
        stops=stops,
        echo=bool(echo),
        n_probs=None if n_probs is None else int(n_probs),
        model=model,
    )


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "tfs_z": (1.0,),
    "grammar": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "penalize_nl": (True,),
}


def refuse_unsupported(options: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for an option that asks for something this package cannot do yet."""
    for name, value in options.items():
        neutral = _NEUTRAL[name]
        if not any(_is_same(value, choice) for choice in neutral):
            raise InvalidArgument(f"{name}={value!r} is not supported yet (only {' or '.join(map(repr, neutral))})")


def read_logit_bias(logit_bias: Mapping[Any, Any] | None) -> tuple[tuple[int, float], ...]:
    """Token id (an int, or its decimal digits as JSON clients write it) -> bias. False bans the token."""
    if logit_bias is None:
        return ()
    if not isinstance(logit_bias, Mapping):
        raise TypeError(f"logit_bias must be a mapping of token ids to numbers, found {type(logit_bias).__name__}")
    pairs = []
    for key, bias in logit_bias.items():
        try:
            token = int(key) if isinstance(key, str) else operator.index(key)
            value = -math.inf if bias is False else float(bias)
        except (TypeError, ValueError):
            raise InvalidArgument(f"logit_bias: {key!r}: {bias!r} is not a token id with a number") from None
        if math.isnan(value) or value == math.inf:
            raise InvalidArgument(f"logit_bias of token {token} must be a number or -inf, found {value}")
        pairs.append((token, value))
    return tuple(pairs)


def with_plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined by newlines, for templates that only take text.

    Raises `InvalidArgument` for other parts (images, say), `TypeError` for content that is neither text nor parts.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise TypeError(f"message content must be a str or a sequence of parts, found {type(content).__name__}")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidArgument(
                f"message content: parts of type {part.get('type')!r} are not supported yet (only text)"
            )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _is_same(value: Any, choice: Any) -> bool:
    """Equal and of one kind: 1 is 1.0, but True is not 1."""
    if isinstance(value, bool) or isinstance(choice, bool) or not isinstance(value, (int, float)):
        return type(value) is type(choice) and bool(value == choice)
    return isinstance(choice, (int, float)) and value == choice


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, found {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidArgument(f"{name} must be finite, found {number}")
    return number


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, found {type(value).__name__}") from None


# -------------------------------------------------------------------------------- iterate


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token with ln of its plain softmax probability and the most likely tokens (id, ln p), falling."""

    token: int
    logprob: float | None = None  # None: nothing comes before it (the first token of a prompt)
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of the shown text with its probabilities; `start` counts characters from the beginning of the prompt."""

    piece: bytes
    start: int
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became safe to show, the records of its tokens, and in the last one why the text ended."""

    text: str
    records: tuple[TokenRecord, ...] = ()
    finish_reason: FinishReason | None = None
    n_tokens: int = 0  # tokens drawn so far, end-of-generation token not counted


class _Records:
    """Probability records that wait until the text of their token is shown."""

    def __init__(self, tokenizer: TokenText, start: int) -> None:
        self._tokenizer = tokenizer
        self._position = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: list[TokenRecord] = []

    def add(self, drawn: DrawnToken, piece: bytes) -> None:
        top = tuple((self._tokenizer.piece(token, special=True), logprob) for token, logprob in drawn.top)
        self._waiting.append(TokenRecord(piece, self._position, drawn.logprob, top))
        self._position += len(self._decoder.decode(piece))

    def take_before(self, position: int) -> tuple[TokenRecord, ...]:
        count = next((i for i, record in enumerate(self._waiting) if record.start >= position), len(self._waiting))
        taken, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        return taken

    def take_all(self) -> tuple[TokenRecord, ...]:
        taken, self._waiting = tuple(self._waiting), []
        return taken


def iterate(
    request: CompletionRequest, drawn_tokens: Iterable[DrawnToken], tokenizer: TokenText
) -> Iterator[TextDelta]:
    """Turn drawn tokens into shown text until a stop string, an end-of-generation token or the limit.

    No token is taken from `drawn_tokens` beyond the last one needed. If they end by themselves, that is a "stop".
    """
    stream = TextStream(request.stops)
    records = None if request.n_probs is None else _Records(tokenizer, len(request.prompt))
    shown = len(request.prompt)
    finish_reason: FinishReason = "stop"
    n_tokens = 0
    text = ""
    for drawn in drawn_tokens:
        if tokenizer.is_eog(drawn.token):
            break
        n_tokens += 1
        piece = tokenizer.piece(drawn.token)
        if records is not None:
            records.add(drawn, piece)
        text = stream.push(piece)
        shown += len(text)
        if stream.matched is not None:
            break
        if n_tokens >= request.max_tokens:
            finish_reason = "length"
            break
        if text:
            yield TextDelta(text, records.take_before(shown) if records else (), None, n_tokens)
            text = ""
    rest = stream.finish()
    if stream.matched is not None:
        finish_reason = "stop"
    shown += len(rest)
    # After a stop string the records of the tokens that spelled it go; otherwise also tokens without text keep theirs.
    last = () if records is None else records.take_before(shown) if stream.matched is not None else records.take_all()
    yield TextDelta(text + rest, last, finish_reason, n_tokens)


def prompt_delta(
    request: CompletionRequest, scored: Sequence[DrawnToken], tokenizer: TokenText, bos: int | None
) -> TextDelta:
    """The echoed prompt as the first piece of the text, with the records of its tokens when they were scored.

    A BOS token that the tokenizer added has no text; special tokens that the prompt spelled out do.
    """
    records = _Records(tokenizer, 0)
    for index, drawn in enumerate(scored):
        piece = tokenizer.piece(drawn.token, special=True)
        if index == 0 and drawn.token == bos and not request.prompt.startswith(piece.decode("utf-8", "replace")):
            piece = b""
        records.add(drawn, piece)
    return TextDelta(request.prompt, records.take_all())


def log_softmax_top(row: NDArray[np.float32], token: int, n_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """ln softmax(row)[token] and the `n_top` most likely (id, ln p), falling, ties by smaller id. Computed in f64."""
    values = row.astype(np.float64)
    peak = values.max()
    values -= peak + math.log(np.exp(values - peak).sum())
    np.maximum(values, LOWEST_LOGPROB, out=values)
    n_top = min(n_top, len(values))
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        threshold = np.partition(values, len(values) - n_top)[len(values) - n_top]
        ids = np.flatnonzero(values >= threshold)
        ids = ids[np.lexsort((ids, -values[ids]))][:n_top]
        top = tuple((int(i), float(values[i])) for i in ids)
    return float(values[token]), top


# -------------------------------------------------------------------------------- collect


@dataclass(frozen=True, slots=True)
class Collected:
    text: str
    records: tuple[TokenRecord, ...]
    finish_reason: FinishReason
    n_tokens: int


def collect(deltas: Iterable[TextDelta]) -> Collected:
    """All deltas of one completion as one."""
    texts: list[str] = []
    records: list[TokenRecord] = []
    last = TextDelta("")
    for last in deltas:
        texts.append(last.text)
        records.extend(last.records)
    if last.finish_reason is None:
        raise AssertionError("a completion ends with a finish reason")
    return Collected("".join(texts), tuple(records), last.finish_reason, last.n_tokens)


# -------------------------------------------------------------------------------- format


def completion_response(request: CompletionRequest, collected: Collected) -> Completion:
    chunk = completion_chunk(request, collected.text, collected.records, collected.finish_reason)
    return Completion(**chunk, usage=usage_of(request, collected))


def completion_chunks(request: CompletionRequest, deltas: Iterable[TextDelta]) -> Iterator[CompletionChunk]:
    """Chunks with text, then one with the finish reason and no text."""
    for delta in deltas:
        if delta.text or delta.records:
            yield completion_chunk(request, delta.text, delta.records, None)
        if delta.finish_reason is not None:
            yield completion_chunk(request, "", (), delta.finish_reason)


def completion_chunk(
    request: CompletionRequest, text: str, records: Sequence[TokenRecord], finish_reason: FinishReason | None
) -> CompletionChunk:
    with_records = request.n_probs is not None and (records or finish_reason is not None)
    return CompletionChunk(
        id=request.id,
        object="text_completion",
        created=request.created,
        model=request.model,
        choices=[
            {
                "text": text,
                "index": 0,
                "logprobs": _completion_logprobs(records) if with_records else None,
                "finish_reason": finish_reason,
            }
        ],
    )


def chat_response(request: CompletionRequest, collected: Collected) -> ChatCompletion:
    message = {"role": "assistant", "content": collected.text}
    return response_of_message(request, collected, message, collected.finish_reason)


def response_of_message(
    request: CompletionRequest, collected: Collected, message: Any, finish_reason: ChatFinishReason
) -> ChatCompletion:
    return ChatCompletion(
        id="chat" + request.id,
        object="chat.completion",
        created=request.created,
        model=request.model,
        choices=[
            {
                "index": 0,
                "message": message,
                "logprobs": None if request.n_probs is None else chat_logprobs(collected.records),
                "finish_reason": finish_reason,
            }
        ],
        usage=usage_of(request, collected),
    )


def chat_chunks(request: CompletionRequest, deltas: Iterable[TextDelta]) -> Iterator[ChatCompletionChunk]:
    """A chunk with the role, chunks with content, a chunk with the finish reason and an empty delta."""
    yield chat_chunk(request, {"role": "assistant"}, (), None)
    for delta in deltas:
        if delta.text or delta.records:
            yield chat_chunk(request, {"content": delta.text}, delta.records, None)
        if delta.finish_reason is not None:
            yield chat_chunk(request, {}, (), delta.finish_reason)


def chat_chunk(
    request: CompletionRequest, delta: ChatDelta, records: Sequence[TokenRecord], finish_reason: ChatFinishReason | None
) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id="chat" + request.id,
        object="chat.completion.chunk",
        created=request.created,
        model=request.model,
        choices=[
            {
                "index": 0,
                "delta": delta,
                "logprobs": chat_logprobs(records) if records else None,
                "finish_reason": finish_reason,
            }
        ],
    )


def usage_of(request: CompletionRequest, collected: Collected) -> Usage:
    n_prompt = len(request.tokens)
    return Usage(
        prompt_tokens=n_prompt, completion_tokens=collected.n_tokens, total_tokens=n_prompt + collected.n_tokens
    )


def _completion_logprobs(records: Sequence[TokenRecord]) -> CompletionLogprobs:
    def alternatives(record: TokenRecord) -> dict[str, float] | None:
        if record.logprob is None:
            return None
        top = {_text(piece): logprob for piece, logprob in reversed(record.top)}  # equal texts: the likeliest wins
        top = dict(reversed(top.items()))
        top.setdefault(_text(record.piece), record.logprob)
        return top

    return CompletionLogprobs(
        text_offset=[record.start for record in records],
        token_logprobs=[record.logprob for record in records],
        tokens=[_text(record.piece) for record in records],
        top_logprobs=[alternatives(record) for record in records],
    )


def chat_logprobs(records: Sequence[TokenRecord]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            {
                "token": _text(record.piece),
                "logprob": LOWEST_LOGPROB if record.logprob is None else record.logprob,
                "bytes": list(record.piece),
                "top_logprobs": [
                    {"token": _text(piece), "logprob": logprob, "bytes": list(piece)} for piece, logprob in record.top
                ],
            }
            for record in records
        ],
        refusal=None,
    )


def _text(piece: bytes) -> str:
    """A token's text; the part of a character that the token only begins or ends is left out."""
    return piece.decode("utf-8", "ignore")
