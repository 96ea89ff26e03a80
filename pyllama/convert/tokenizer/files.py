"""The files that describe a checkpoint's tokenizer, read once, and the tokens added to its vocabulary."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pyllama.errors import TokenizerError
from pyllama.vocabulary import SPM_SPACE

from ..config import Config
from ..json_files import as_list, as_object, read_json

logger = logging.getLogger(__name__)


class AddedToken(NamedTuple):
    text: str
    is_control: bool


@dataclass(frozen=True)
class TokenizerFiles:
    """Absent files read as empty objects."""

    folder: Path
    config: Config

    @cached_property
    def tokenizer(self) -> Mapping[str, Any]:
        return self._json("tokenizer.json")

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        return self._json("tokenizer_config.json")

    @cached_property
    def special_tokens_map(self) -> Mapping[str, Any]:
        return self._json("special_tokens_map.json")

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        return self._json("generation_config.json")

    @cached_property
    def added(self) -> Mapping[int, AddedToken]:
        """By id, from all three files that may list them, without those that the model has no embedding for."""
        tokens: dict[int, AddedToken] = {}
        for entry in as_list(self.tokenizer.get("added_tokens"), "tokenizer.json: added_tokens"):
            entry = as_object(entry, "tokenizer.json: an added token")
            _add(tokens, entry.get("id"), entry, "tokenizer.json")
        decoder = self.tokenizer_config.get("added_tokens_decoder")
        for number, entry in as_object(decoder, "tokenizer_config.json: added_tokens_decoder").items():
            entry = as_object(entry, "tokenizer_config.json: an added token")
            _add(tokens, int(number) if number.isdecimal() else None, entry, "tokenizer_config.json")
        listed = {token.text for token in tokens.values()}
        for text, number in self._json("added_tokens.json").items():
            if text not in listed:
                _add(tokens, number, {"content": text}, "added_tokens.json")
        rows = self.config.integer("vocab_size")
        for number in sorted(number for number in tokens if number >= rows):
            logger.warning(
                "token %d, %r, is beyond the model's vocab_size and is left out", number, tokens[number].text
            )
            del tokens[number]
        return tokens

    def path(self, name: str) -> Path:
        return self.folder / name

    def _json(self, name: str) -> Mapping[str, Any]:
        path = self.folder / name
        return read_json(path) if path.is_file() else {}


def token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object with that content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add(tokens: dict[int, AddedToken], number: Any, entry: Any, source: str) -> None:
    text = token_text(entry)
    if type(number) is not int or number < 0 or text is None:
        raise TokenizerError(f"{source}: added token {json.dumps(entry)[:100]} has no id or no content")
    if number in tokens and tokens[number].text != text:
        raise TokenizerError(f"{source}: token {number} is {text!r}, but {tokens[number].text!r} elsewhere")
    is_control = bool(entry.get("special")) or _looks_like_control(text)
    tokens.setdefault(number, AddedToken(text if is_control else text.replace(SPM_SPACE, " "), is_control))


def _looks_like_control(text: str) -> bool:
    """Many vocabularies forget to mark these as special."""
    return (
        text in ("<pad>", "<mask>")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )
