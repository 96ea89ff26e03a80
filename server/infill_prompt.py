"""Prompts for filling in the middle: how prefix, suffix and other files are laid out between their special tokens.

Models of this kind were trained on

    REP project SEP name text SEP name text ... PRE prefix SUF suffix MID

and go on with the middle. REP and SEP exist only in models that saw whole repositories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyllama.server.errors import InvalidRequest, NotSupported
from pyllama.server.request_fields import wrong_type

PROJECT_LINE = "myproject\n"
CURRENT_FILE_LINE = "filename\n"
DEFAULT_EXTRA_NAME = "tmp"
# Between other texts where the vocabulary has no token for the start of a file.
SNIPPET_LINE = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class InfillText:
    """What a request gives. `typed`: what the user has typed after the prefix. `extras`: (name, text)."""

    prefix: str
    suffix: str
    typed: str = ""
    extras: tuple[tuple[str, str], ...] = ()


def read_infill(body: dict[str, Any]) -> InfillText:
    """Raises `InvalidRequest`."""
    for name in ("input_prefix", "input_suffix"):
        if body.get(name) is None:
            raise InvalidRequest(f'"{name}" is required')
        if not isinstance(body[name], str):
            raise wrong_type(name, "string", body[name])
    typed = body.get("prompt")
    if typed is not None and not isinstance(typed, str):
        raise wrong_type("prompt", "string", typed)
    extras = body.get("input_extra")
    if extras is not None and not isinstance(extras, list):
        raise wrong_type("input_extra", "array", extras)
    return InfillText(
        body["input_prefix"],
        body["input_suffix"],
        typed or "",
        tuple(_read_extra(extra, f"input_extra[{index}]") for index, extra in enumerate(extras or ())),
    )


def _read_extra(extra: Any, where: str) -> tuple[str, str]:
    if not isinstance(extra, dict):
        raise wrong_type(where, "object", extra)
    text, name = extra.get("text"), extra.get("filename")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.text", "string", text)
    if name is not None and not isinstance(name, str):
        raise wrong_type(f"{where}.filename", "string", name)
    return DEFAULT_EXTRA_NAME if name is None else name, text


def check_infill_tokens(tokenizer: Any) -> None:
    """Raises `NotSupported` with the tokens that the vocabulary lacks."""
    tokens = (("prefix", tokenizer.fim_pre_id), ("suffix", tokenizer.fim_suf_id), ("middle", tokenizer.fim_mid_id))
    missing = "".join(f"{name} token is missing. " for name, token in tokens if token is None)
    if missing:
        raise NotSupported(f"Infill is not supported by this model: {missing}")


def infill_prompt(
    text: InfillText, tokenizer: Any, *, n_batch: int, n_ctx: int, n_predict: int, suffix_first: bool
) -> list[int]:
    """The tokens. What stands near the gap counts most, so each part is cut on the side that is away from it.

    Three quarters of `n_batch` are the prefix's, one is the suffix's and the typed text's; what the context has
    beyond a batch and twice the answer is for other files, as far as they leave room for one token of an answer.
    n_predict: -1 if the answer has no limit.
    """

    def encode(part: str, *, parse_special: bool = False) -> list[int]:
        return tokenizer.encode(part, add_special=False, parse_special=parse_special)

    typed = encode(text.typed, parse_special=True)
    prefix = _last(encode(text.prefix), 3 * (n_batch // 4)) + typed
    suffix = encode(text.suffix)[: max(0, n_batch // 4 - 2 - len(typed))]
    begin, end = [tokenizer.fim_pre_id, *prefix], [tokenizer.fim_suf_id, *suffix]
    if suffix_first:
        begin, end = end, begin
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    gap = [*bos, *begin, *end, tokenizer.fim_mid_id]
    room = min(n_ctx - n_batch - 2 * max(0, n_predict), n_ctx - 1 - len(gap))
    return _last(_extra_tokens(text.extras, tokenizer, encode), max(0, room)) + gap


def _last(tokens: list[int], n: int) -> list[int]:
    return tokens[max(0, len(tokens) - n) :]


def _extra_tokens(extras: Sequence[tuple[str, str]], tokenizer: Any, encode: Any) -> list[int]:
    repository, separator = tokenizer.fim_rep_id, tokenizer.fim_sep_id
    tokens: list[int] = []
    if repository is not None:
        tokens += [repository, *encode(PROJECT_LINE)]
    for name, text in extras:
        tokens += encode(SNIPPET_LINE) if separator is None else [separator, *encode(f"{name}\n")]
        tokens += encode(text)
    if separator is not None:
        tokens += [separator, *encode(CURRENT_FILE_LINE)]
    return tokens
