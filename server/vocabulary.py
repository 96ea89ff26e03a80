"""The vocabulary as the server needs it per token: bytes of a token without asking the tokenizer twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Vocabulary:
    """A tokenizer plus two lazily filled tables. `shows_special`: control tokens are part of the text (`--special`)."""

    def __init__(self, tokenizer: Any, n_vocab: int, *, shows_special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.n_vocab = n_vocab
        self.shows_special = shows_special
        self.eog_ids: frozenset[int] = frozenset(tokenizer.eog_ids)
        self._pieces: list[bytes | None] = [None] * n_vocab

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text."""
        piece = self._pieces[token]
        if piece is None:
            # A model may have more rows than its tokenizer has tokens (padding): they have no text.
            known = token < self.tokenizer.n_vocab
            piece = self._pieces[token] = self.tokenizer.piece(token, special=self.shows_special) if known else b""
        return piece

    def special_piece(self, token: int) -> bytes:
        """The bytes of a token with special tokens shown."""
        return self.tokenizer.piece(token, special=True) if token < self.tokenizer.n_vocab else b""

    def end_piece(self, token: int) -> bytes:
        """The same for an end-of-generation token, which is not part of the text, whatever its type in the file."""
        return self.piece(token) if self.shows_special else b""

    def hidden_markers(self, markers: Iterable[str]) -> frozenset[int]:
        """Those of `markers` that are control tokens, whose text an answer would not hold otherwise."""
        found: set[int] = set()
        for marker in markers:
            tokens = self.tokenizer.encode(marker, add_special=False, parse_special=True)
            if len(tokens) == 1 and tokens[0] not in self.eog_ids and not self.piece(tokens[0]):
                found.add(tokens[0])
        return frozenset(found)

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text with special tokens shown and bad UTF-8 replaced."""
        known = [token for token in tokens if token < self.tokenizer.n_vocab]
        return self.tokenizer.decode(known, special=True).decode("utf-8", "replace")
