"""Parts of results that all API families share: usage, probabilities, the native final object. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pyllama.server.generation import Generation, ProbabilityRecord, Progress, TokenText
from pyllama.server.generation_params import settings_json
from pyllama.server.vocabulary import Vocabulary

# What ln 0 is reported as: the most negative single-precision number.
LOG_ZERO = -3.4028234663852886e38


def usage(generation: Generation) -> dict[str, Any]:
    return {
        "completion_tokens": generation.n_decoded,
        "prompt_tokens": generation.n_prompt,
        "total_tokens": generation.n_decoded + generation.n_prompt,
        "prompt_tokens_details": {"cached_tokens": generation.n_cached},
    }


def finish_reason(generation: Generation) -> str:
    return "stop" if generation.stop_type in ("eos", "word") else "length"


def prompt_progress(event: Progress) -> dict[str, Any]:
    generation = event.generation
    return {
        "total": generation.n_prompt,
        "cache": generation.n_cached,
        "processed": event.processed,
        "time_ms": round(event.time_ms),
    }


def complete_text(piece: bytes) -> str:
    """A token's bytes as text, without an incomplete last character."""
    for cut in range(min(3, len(piece)) + 1):
        try:
            return piece[: len(piece) - cut].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                break
    return piece.decode("utf-8", "replace")


def _finite_log(value: float) -> float:
    return value if math.isfinite(value) else LOG_ZERO


def probability_json(
    record: ProbabilityRecord, vocabulary: Vocabulary, *, post_sampling: bool, n_top: int | None = None
) -> dict[str, Any]:
    """One token's record; keys `logprob`/`top_logprobs`, or `prob`/`top_probs` after the sampler chain."""
    name, top_name = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def entry(token: int, value: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        shown = value if post_sampling else _finite_log(value)
        return {"id": token, "token": complete_text(piece), "bytes": list(piece), name: shown}

    result = entry(record.token, record.value)
    result[top_name] = [entry(token, value) for token, value in record.top[:n_top]]
    return result


def kept_records(generation: Generation, vocabulary: Vocabulary) -> Sequence[ProbabilityRecord]:
    """Records of a plain answer. When a stop string ended it, those of the string's own tokens are left out."""
    records = generation.records
    if generation.stop_type == "word" and generation.stopping_word:
        n_tokens = len(vocabulary.tokenizer.encode(generation.stopping_word, add_special=False, parse_special=False))
        return records[: max(0, len(records) - n_tokens)]
    return records


def probabilities_json(
    generation: Generation, records: Iterable[ProbabilityRecord], vocabulary: Vocabulary
) -> list[Any]:
    post_sampling = generation.params.post_sampling_probs
    return [probability_json(record, vocabulary, post_sampling=post_sampling) for record in records]


def native_result(
    generation: Generation, vocabulary: Vocabulary, model_name: str, *, in_stream: bool
) -> dict[str, Any]:
    """The final native object. In a stream the text, tokens and probabilities were sent already."""
    params = generation.params
    result: dict[str, Any] = {
        "index": generation.index,
        "content": "" if in_stream else generation.content,
        "tokens": generation.generated if params.return_tokens and not in_stream else [],
        "id_slot": generation.slot_id,
        "stop": True,
        "model": model_name,
        "tokens_predicted": generation.n_decoded,
        "tokens_evaluated": generation.n_prompt,
        "generation_settings": settings_json(params),
        "prompt": vocabulary.text(generation.prompt),
        "has_new_line": generation.has_new_line,
        "truncated": generation.truncated,
        "stop_type": generation.stop_type,
        "stopping_word": generation.stopping_word,
        "tokens_cached": generation.tokens_held,
        "timings": generation.timings(),
    }
    if params.n_probs > 0 and not in_stream:
        result["completion_probabilities"] = probabilities_json(
            generation, kept_records(generation, vocabulary), vocabulary
        )
    return result


def native_partial(event: TokenText, vocabulary: Vocabulary) -> dict[str, Any]:
    """What a native stream sends for a token."""
    partial = _partial(event.generation, event.text, [event.token], event.n_decoded)
    if event.timings is not None:
        partial["timings"] = event.timings
    if event.record is not None:
        partial["completion_probabilities"] = probabilities_json(event.generation, [event.record], vocabulary)
    return partial


def native_progress(event: Progress) -> dict[str, Any]:
    """What a native stream sends for progress of the prompt."""
    partial = _partial(event.generation, "", [], 0)
    if event.timings is not None:
        partial["timings"] = event.timings
    partial["prompt_progress"] = prompt_progress(event)
    return partial


def _partial(generation: Generation, text: str, tokens: list[int], n_decoded: int) -> dict[str, Any]:
    return {
        "index": generation.index,
        "content": text,
        "tokens": tokens,
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": n_decoded,
        "tokens_evaluated": generation.n_prompt,
    }


def select_fields(result: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """`response_fields`: one key per path that exists, named like the path. No paths: everything."""
    if not paths:
        return result
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            selected[path] = value
    return selected
