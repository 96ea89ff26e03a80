"""The shapes a `prompt` may have -> lists of token ids."""

from __future__ import annotations

from typing import Any, Protocol

from pyllama.server.errors import InvalidRequest
from pyllama.server.json_codec import type_name

SHAPES = "a string, an array of token ids and strings, an object with 'prompt_string', or an array of these"


class Encoder(Protocol):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


def read_prompts(value: Any, tokenizer: Encoder, n_vocab: int) -> list[list[int]]:
    """All prompts of a request, in order. Raises `InvalidRequest`.

    An array with at least one integer is one prompt; any other array is a list of prompts.
    """
    if isinstance(value, list) and not any(_is_integer(item) for item in value):
        if not value:
            raise InvalidRequest('"prompt" must not be empty')
        return [read_prompt(item, tokenizer, n_vocab) for item in value]
    return [read_prompt(value, tokenizer, n_vocab)]


def read_prompt(
    value: Any, tokenizer: Encoder, n_vocab: int, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """One prompt. A string gets BOS where the vocabulary asks for it; in an array only one in first place does."""
    if isinstance(value, str):
        return tokenizer.encode(value, add_special=add_special, parse_special=parse_special)
    if isinstance(value, dict):
        return _read_prompt_object(value, tokenizer)
    if not isinstance(value, list):
        raise InvalidRequest(f'"prompt" must be {SHAPES}, but is {type_name(value)}')
    tokens: list[int] = []
    for position, item in enumerate(value):
        if _is_integer(item):
            if not 0 <= item < n_vocab:
                shown = item if abs(item) < 10**20 else "a huge number"
                raise InvalidRequest(
                    f"Prompt contains invalid tokens: {shown} at position {position} is outside the vocabulary "
                    f"of {n_vocab} tokens"
                )
            tokens.append(item)
        elif isinstance(item, str):
            is_first = position == 0
            tokens += tokenizer.encode(item, add_special=add_special and is_first, parse_special=parse_special)
        else:
            raise InvalidRequest(f'"prompt": a token array holds integers and strings, but found {type_name(item)}')
    return tokens


def _read_prompt_object(value: dict[str, Any], tokenizer: Encoder) -> list[int]:
    text = value.get("prompt_string")
    if not isinstance(text, str):
        raise InvalidRequest(f"\"prompt\" must be {SHAPES}, but the object has no text 'prompt_string'")
    if value.get("multimodal_data") is not None:
        raise InvalidRequest("Multimodal data provided, but model does not support multimodal requests.")
    return tokenizer.encode(text, add_special=True, parse_special=True)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
