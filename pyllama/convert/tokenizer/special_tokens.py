"""Ids of special tokens, and whether BOS and EOS are added to a text, as `tokenizer.ggml.*` keys."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from pyllama.errors import TokenizerError
from pyllama.gguf import KeyValue
from pyllama.vocabulary import DETECTED_TEXTS, PREFIX, SPECIAL_ID_KEYS, TokenType

from ..json_files import as_list, as_object
from .files import TokenizerFiles, token_text
from .vocabulary import Tokens

logger = logging.getLogger(__name__)

_PROCESSOR = "tokenizer.json: post_processor"
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def special_token_keys(files: TokenizerFiles, tokens: Tokens) -> list[KeyValue]:
    ids = _special_ids(files, tokens)
    keys = [KeyValue(PREFIX + SPECIAL_ID_KEYS[name], "u32", token) for name, token in ids.items()]
    for name in ("bos", "eos"):
        added = _is_added(files, tokens, name, ids.get(name))
        if added is not None:
            keys.append(KeyValue(f"{PREFIX}add_{name}_token", "bool", added))
    return keys


def _special_ids(files: TokenizerFiles, tokens: Tokens) -> dict[str, int]:
    """The tokenizer's own files speak first, by text; then the configurations, by id; then the vocabulary."""
    by_text: dict[str, int] = {}
    for token, text in enumerate(tokens.texts):
        by_text.setdefault(text, token)
    ids: dict[str, int] = {}
    for name in _NAMED:
        for source in (files.tokenizer_config, files.special_tokens_map):
            wanted = token_text(source.get(f"{name}_token"))
            if wanted in by_text:
                ids.setdefault(name, by_text[wanted])
            elif wanted is not None and name in ("bos", "eos"):
                raise TokenizerError(f"the {name} token {wanted!r} is not in the vocabulary")
            elif wanted is not None:
                logger.warning("the %s token %r is not in the vocabulary and is left out", name, wanted)
        for value in (files.config.get(f"{name}_token_id"), files.generation_config.get(f"{name}_token_id")):
            first = value[0] if isinstance(value, list) and value else value
            if type(first) is int and 0 <= first < len(tokens.texts):
                ids.setdefault(name, first)
    for name, token in tokens.special.items():
        ids.setdefault(name, token)
    for name, candidates in DETECTED_TEXTS.items():
        found = [by_text[text] for text in candidates if text in by_text]
        found = [token for token in found if tokens.types[token] == TokenType.CONTROL]
        if found:
            ids.setdefault(name, found[0])
    return ids


def _is_added(files: TokenizerFiles, tokens: Tokens, name: str, token: int | None) -> bool | None:
    """Whether the tokenizer puts the token before (bos) or after (eos) a text; None where no file says so."""
    steps = list(_steps(files.tokenizer.get("post_processor")))
    if steps:
        templates = [step.get("single") for step in steps if step.get("type") == "TemplateProcessing"]
        template = as_list(templates[0] if templates else None, f"{_PROCESSOR}: single")
        edge = as_object(template[0 if name == "bos" else -1] if template else None, f"{_PROCESSOR}: a step")
        special = as_object(edge.get("SpecialToken"), f"{_PROCESSOR}: SpecialToken").get("id")
        return token is not None and special == tokens.texts[token]
    value = files.tokenizer_config.get(f"add_{name}_token")
    return value if isinstance(value, bool) else None


def _steps(description: Any) -> Iterator[Mapping[str, Any]]:
    """The processors of a post-processor, sequences flattened; none for null."""
    processor = as_object(description, _PROCESSOR)
    if processor.get("type") == "Sequence":
        for part in as_list(processor.get("processors"), f"{_PROCESSOR}: processors"):
            yield from _steps(part)
    elif processor:
        yield processor
