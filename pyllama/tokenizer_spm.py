"""SentencePiece-style encoding: merges by token score, bytes for what the vocabulary lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pyllama.errors import TokenizerError
from pyllama.tokenizer_merging import merge_adjacent
from pyllama.vocabulary import SPM_SPACE, Vocabulary

CACHED_WORDS = 1 << 16
CACHED_WORD_LENGTH = 64


class SentencePieceEncoder:
    """Merges inside words, where a word ends before a space that no token can reach across."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._scores = vocabulary.scores
        self._add_space_prefix = vocabulary.add_space_prefix
        self._split = _word_splitter(vocabulary)
        self._words: dict[str, Sequence[int]] = {}

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """`after_special`: the text begins the prompt or follows a special token, where the prefix space belongs."""
        if after_special and self._add_space_prefix:
            text = " " + text
        tokens: list[int] = []
        for word in self._split(text.replace(" ", SPM_SPACE)):
            ids = self._words.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(word) <= CACHED_WORD_LENGTH:
                    if len(self._words) >= CACHED_WORDS:
                        self._words.clear()
                    self._words[word] = ids
            tokens.extend(ids)
        return tokens

    def _encode_word(self, word: str) -> Sequence[int]:
        tokens: list[int] = []
        for symbol in merge_adjacent(word, self._priority):
            token = self._ids.get(symbol)
            if token is not None:
                tokens.append(token)
            else:
                tokens.extend(map(self._byte_token, symbol.encode("utf-8", "surrogateescape")))
        return tuple(tokens)

    def _priority(self, left: str, right: str) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]

    def _byte_token(self, byte: int) -> int:
        token = self._ids.get(f"<0x{byte:02X}>")
        if token is None:
            token = self._ids.get(bytes([byte]).decode("utf-8", "surrogateescape"))
        if token is None:
            raise TokenizerError(f"the vocabulary has no token for byte 0x{byte:02X}, which the text contains")
        return token


def _word_splitter(vocabulary: Vocabulary) -> Callable[[str], list[str]]:
    """Cut before every space that no token holds together with the character before it.

    Exact, since no merge crosses such a cut.
    """
    joined = {SPM_SPACE}  # runs of spaces stay together
    for text in vocabulary.texts:
        at = text.find(SPM_SPACE, 1)
        while at > 0:
            joined.add(text[at - 1])
            at = text.find(SPM_SPACE, at + 1)
    inside = "".join(map(re.escape, sorted(joined)))
    return re.compile(f"(?<=[^{inside}])(?={SPM_SPACE})").split
