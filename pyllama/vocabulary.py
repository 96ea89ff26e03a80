"""The vocabulary of a GGUF file: reads `tokenizer.ggml.*`, validates it and works out special tokens and defaults.

No text is split or merged here: see `tokenizer.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from pyllama.errors import TokenizerError

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
SPM_SPACE = "\u2581"
"""SentencePiece vocabularies write a space as this character."""


class TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreDefaults:
    """What a pre-tokenizer name implies besides its regular expressions."""

    clean_spaces: bool = True
    ignore_merges: bool = False
    add_bos: bool = False


PRE_DEFAULTS: Mapping[str, PreDefaults] = {
    "default": PreDefaults(),
    "gpt-2": PreDefaults(),
    "starcoder": PreDefaults(),
    "refact": PreDefaults(),
    "command-r": PreDefaults(clean_spaces=False),
    "smollm": PreDefaults(clean_spaces=False),
    "qwen2": PreDefaults(clean_spaces=False),
    "deepseek-r1-qwen": PreDefaults(clean_spaces=False),
    "qwen35": PreDefaults(clean_spaces=False),
    "llama-bpe": PreDefaults(ignore_merges=True, add_bos=True),
    "llama3": PreDefaults(ignore_merges=True, add_bos=True),
    "llama-v3": PreDefaults(ignore_merges=True, add_bos=True),
    "falcon3": PreDefaults(ignore_merges=True, add_bos=True),
    "pixtral": PreDefaults(ignore_merges=True, add_bos=True),
    "tekken": PreDefaults(clean_spaces=False, ignore_merges=True, add_bos=True),
}
"""Every pre-tokenizer name we know. The regular expressions are in `pretokenizers.py`."""

SPECIAL_ID_KEYS: Mapping[str, str] = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # the format spells it this way
    "pad": "padding_token_id",
    "mask": "mask_token_id",
    "cls": "cls_token_id",
    "fim_pre": "fim_pre_token_id",
    "fim_suf": "fim_suf_token_id",
    "fim_mid": "fim_mid_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}

DETECTED_TEXTS: Mapping[str, tuple[str, ...]] = {
    "eot": (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
        "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
        "<|code_middle|>", "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
"""Texts by which a special token is recognised when the file gives no id for it."""

END_OF_GENERATION_TEXTS: tuple[str, ...] = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Validated content of `tokenizer.ggml.*`. Texts have undecodable bytes as surrogate escapes; index = id."""

    model: str
    pre: str
    texts: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    ids: Mapping[str, int]
    """Text to id. Where a text occurs more than once the lowest id stands for it."""
    special: Mapping[str, int]
    """Ids of special tokens by the names of `SPECIAL_ID_KEYS`; absent tokens are left out."""
    eog_ids: frozenset[int]
    suppress_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    clean_spaces: bool
    ignore_merges: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Raises `TokenizerError` naming the key, what was found and what was expected."""
        model = _require(metadata, "model", str)
        if model not in ("gpt2", "llama"):
            raise TokenizerError(
                f"{PREFIX}model: {model!r} is not supported; supported are 'gpt2' (byte-level BPE) and "
                "'llama' (SentencePiece)"
            )
        texts = _read_texts(metadata)
        types = _read_types(metadata, len(texts))
        _check_byte_tokens(texts, types)
        pre = _read_pre(metadata) if model == "gpt2" else "default"
        defaults = PRE_DEFAULTS[pre] if model == "gpt2" else PreDefaults(clean_spaces=False, add_bos=True)

        ids: dict[str, int] = {}
        for token, text in enumerate(texts):
            ids.setdefault(text, token)
        if len(ids) < len(texts):
            logger.warning("%stokens: %d repeated texts; the lowest id is used", PREFIX, len(texts) - len(ids))

        special = _read_special_ids(metadata, model, len(texts))
        _detect_special(special, ids, types)
        eog_ids = _end_of_generation(special, ids, types)
        add_bos = _optional_bool(metadata, "add_bos_token", defaults.add_bos)
        add_eos = _optional_bool(metadata, "add_eos_token", False)
        for name, wanted in (("bos", add_bos), ("eos", add_eos)):
            if wanted and name not in special:
                logger.warning(
                    "%sadd_%s_token is set but there is no valid %s token: none is added", PREFIX, name, name
                )
        return cls(
            model=model,
            pre=pre,
            texts=texts,
            types=types,
            scores=_read_scores(metadata, len(texts)) if model == "llama" else (),
            merges=_read_merges(metadata) if model == "gpt2" else (),
            ids=ids,
            special=special,
            eog_ids=eog_ids,
            suppress_ids=_read_suppressed(metadata, len(texts)),
            add_bos=add_bos and "bos" in special,
            add_eos=add_eos and "eos" in special,
            add_space_prefix=_optional_bool(metadata, "add_space_prefix", model == "llama"),
            clean_spaces=defaults.clean_spaces,
            ignore_merges=defaults.ignore_merges,
        )


def byte_of_token(text: str) -> int | None:
    """Value of a byte token `<0xHH>`, exactly two hexadecimal digits; None for any other text."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


def _require(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    if PREFIX + key not in metadata:
        raise TokenizerError(f"{PREFIX}{key} is missing; the file holds no usable vocabulary")
    value = metadata[PREFIX + key]
    if not isinstance(value, kind):
        raise TokenizerError(f"{PREFIX}{key}: found {type(value).__name__}, expected {kind.__name__}")
    return value


def _optional_bool(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(PREFIX + key, default)
    if not isinstance(value, (bool, np.bool_)):
        raise TokenizerError(f"{PREFIX}{key}: found {type(value).__name__} {value!r}, expected a bool")
    return bool(value)


def _read_pre(metadata: Mapping[str, Any]) -> str:
    if PREFIX + "pre" not in metadata:
        logger.warning(
            "%spre is missing: the 'default' pre-tokenizer is used, which may split text unlike the model's own", PREFIX
        )
        return "default"
    pre: str = _require(metadata, "pre", str)
    if pre not in PRE_DEFAULTS:
        raise TokenizerError(f"{PREFIX}pre: unknown pre-tokenizer {pre!r}; known are {', '.join(PRE_DEFAULTS)}")
    return pre


def _sequence(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata[PREFIX + key]
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise TokenizerError(f"{PREFIX}{key}: found {type(value).__name__}, expected an array")
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise TokenizerError(f"{PREFIX}{key}: found an array of {value.ndim} dimensions, expected 1")
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = list(_sequence(metadata, key))
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise TokenizerError(f"{PREFIX}{key}[{i}]: found {type(value).__name__}, expected a string")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, kinds: str, expected: str, count: int | None) -> list[Any]:
    """Array of 4-byte (numpy) or Python numbers. kinds: numpy kind letters. count: required length, the token count."""
    value = _sequence(metadata, key)
    if isinstance(value, np.ndarray):
        # Narrower elements mean that the writer and we disagree about the format: refuse rather than guess.
        if value.size and (value.dtype.kind not in kinds or value.dtype.itemsize < 4):
            raise TokenizerError(f"{PREFIX}{key}: elements are {value.dtype}, expected {expected}")
        numbers: list[Any] = value.tolist()
    else:
        allowed = (float, int, np.floating, np.integer) if "f" in kinds else (int, np.integer)
        numbers = list(value)
        for i, number in enumerate(numbers):
            if isinstance(number, (bool, np.bool_)) or not isinstance(number, allowed):
                raise TokenizerError(f"{PREFIX}{key}[{i}]: found {type(number).__name__}, expected {expected}")
            if isinstance(number, np.generic) and number.dtype.itemsize < 4:
                raise TokenizerError(f"{PREFIX}{key}[{i}]: found {number.dtype}, expected {expected}")
    if count is not None and len(numbers) != count:
        raise TokenizerError(f"{PREFIX}{key}: {len(numbers)} elements for {count} tokens")
    return numbers


def _read_texts(metadata: Mapping[str, Any]) -> list[str]:
    if PREFIX + "tokens" not in metadata:
        raise TokenizerError(f"{PREFIX}tokens is missing; the file holds no usable vocabulary")
    texts = _strings(metadata, "tokens")
    if not texts:
        raise TokenizerError(f"{PREFIX}tokens: 0 elements, expected at least 1")
    return [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]


def _read_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    if PREFIX + "token_type" not in metadata:
        return [int(TokenType.NORMAL)] * count
    types = _numbers(metadata, "token_type", "iu", "32-bit integers", count)
    known = range(TokenType.UNDEFINED, TokenType.BYTE + 1)
    return [int(kind) if kind in known else int(TokenType.UNDEFINED) for kind in types]


def _check_byte_tokens(texts: Sequence[str], types: Sequence[int]) -> None:
    for token, kind in enumerate(types):
        if kind == TokenType.BYTE and byte_of_token(texts[token]) is None:
            raise TokenizerError(
                f"{PREFIX}tokens[{token}]: byte token with text {texts[token]!r}, expected '<0xHH>' with "
                "two hexadecimal digits"
            )


def _read_scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    if PREFIX + "scores" not in metadata:
        logger.warning("%sscores is missing: every token has score 0, merges go from left to right", PREFIX)
        return [0.0] * count
    scores = [float(score) for score in _numbers(metadata, "scores", "fi", "32-bit floats", count)]
    for token, score in enumerate(scores):
        if score != score:
            raise TokenizerError(f"{PREFIX}scores[{token}]: not a number; merges cannot be ordered by it")
    return scores


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    if PREFIX + "merges" not in metadata:
        raise TokenizerError(f"{PREFIX}merges is missing; a byte-level BPE vocabulary needs it")
    merges = []
    for rank, merge in enumerate(_strings(metadata, "merges")):
        space = merge.find(" ", 1)  # a left part may itself begin with a space
        if space < 0:
            raise TokenizerError(f"{PREFIX}merges[{rank}]: {merge!r}, expected two parts with a space between")
        merges.append((merge[:space], merge[space + 1 :]))
    return merges


def _read_suppressed(metadata: Mapping[str, Any], count: int) -> frozenset[int]:
    if PREFIX + "suppress_tokens" not in metadata:
        return frozenset()
    suppressed = _numbers(metadata, "suppress_tokens", "iu", "32-bit integers", None)
    outside = [token for token in suppressed if not 0 <= token < count]
    if outside:
        logger.warning("%ssuppress_tokens: %d ids outside 0..%d are ignored", PREFIX, len(outside), count - 1)
    return frozenset(token for token in suppressed if 0 <= token < count)


def _read_special_ids(metadata: Mapping[str, Any], model: str, count: int) -> dict[str, int]:
    defaults = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {"bos": 11, "eos": 11}
    special = {name: token for name, token in defaults.items() if token < count}
    for name, key in SPECIAL_ID_KEYS.items():
        if PREFIX + key not in metadata:
            continue
        token = metadata[PREFIX + key]
        if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
            raise TokenizerError(f"{PREFIX}{key}: found {type(token).__name__}, expected an integer")
        if 0 <= token < count:
            special[name] = int(token)
        else:
            logger.warning("%s%s: id %d is outside 0..%d and is ignored", PREFIX, key, token, count - 1)
    return special


def _detect_special(special: dict[str, int], ids: Mapping[str, int], types: list[int]) -> None:
    """Fill in end-of-turn and fill-in-the-middle tokens by their text; what is found so counts as a control token."""
    for name, candidates in DETECTED_TEXTS.items():
        if name in special:
            continue
        for text in candidates:
            if text in ids:
                special[name] = ids[text]
                types[ids[text]] = int(TokenType.CONTROL)
                break


def _end_of_generation(special: Mapping[str, int], ids: Mapping[str, int], types: list[int]) -> frozenset[int]:
    eog = {special[name] for name in ("fim_pad", "fim_rep", "fim_sep") if name in special}
    for text in END_OF_GENERATION_TEXTS:
        if text in ids:
            eog.add(ids[text])
            types[ids[text]] = int(TokenType.CONTROL)
    eog.update(special[name] for name in ("eos", "eot", "eom") if name in special)
    # Channel formats end a *message* with <|end|>: when the whole family is there, it must not end the answer.
    present = {text for text in END_OF_GENERATION_TEXTS if ids.get(text) in eog}
    if {"<|return|>", "<|call|>", "<|end|>"} <= present or {"<|calls|>", "<|flush|>", "<|end|>"} <= present:
        eog.discard(ids["<|end|>"])
    if "<|tool_response>" in present and "</s>" in present:
        eog.discard(ids["</s>"])
    return frozenset(eog)
