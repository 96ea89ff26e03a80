"""`logit_bias` in all its spellings -> (token, bias) pairs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Protocol

from pyllama.server.errors import InvalidRequest
from pyllama.server.request_fields import wrong_type

_INTEGER = re.compile(r"[+-]?\d{1,18}\Z", re.ASCII)


class Encoder(Protocol):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


def read_logit_bias(value: Any, tokenizer: Encoder, n_vocab: int) -> tuple[tuple[int, float], ...]:
    """An array of `[token, bias]` pairs or an object token -> bias.

    A token is an id or a text, all of whose tokens get the bias; an object key that is an integer is an id. A bias is
    a number, or `false` to ban. Ids outside the vocabulary and malformed pairs are skipped, as clients expect.
    """
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, list):
        pairs = [(item[0], item[1]) for item in value if isinstance(item, list) and len(item) == 2]
    elif isinstance(value, dict):
        pairs = [(int(key) if _INTEGER.match(key) else key, bias) for key, bias in value.items()]
    else:
        raise wrong_type("logit_bias", "array or object", value)

    result: list[tuple[int, float]] = []
    for token, bias in pairs:
        if bias is False:
            number = -math.inf
        elif isinstance(bias, (int, float)) and not isinstance(bias, bool):
            number = _bias_number(bias)
        else:
            continue
        if isinstance(token, int) and not isinstance(token, bool):
            if 0 <= token < n_vocab:
                result.append((token, number))
        elif isinstance(token, str):
            result.extend((t, number) for t in tokenizer.encode(token, add_special=False, parse_special=False))
        if len(result) > n_vocab:
            raise InvalidRequest(f"Field 'logit_bias': more biases than the vocabulary has tokens ({n_vocab})")
    return tuple(result)


def _bias_number(bias: int | float) -> float:
    if bias < -3.4e38:
        return -math.inf
    if bias > 3.4e38:
        raise InvalidRequest("Field 'logit_bias': a bias must be a finite number or false")
    return float(bias)
