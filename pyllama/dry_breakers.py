"""Sequence breakers of the DRY sampler: from strings to the tokens that hold them, or begin them and are continued."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from pyllama import _engine
from pyllama.errors import InvalidArgument

# A breaker is cut to this many bytes, its continuation to this many tokens.
MOST_BYTES = 40
MOST_TAIL_TOKENS = 20
# Strings in one list. Each one is searched for in the whole vocabulary, so a longer list is a mistake or an attack.
MOST_BREAKERS = 64
# Prepared lists that a table remembers.
MOST_REMEMBERED = 8

_SEPARATOR = "\u0100"  # in no piece: bytes are characters up to U+00FF here


class Pieces(Protocol):
    """What is needed of a tokenizer."""

    @property
    def n_vocab(self) -> int: ...
    def piece(self, token: int, *, special: bool = False) -> bytes: ...
    def encode(self, text: str | bytes) -> list[int]: ...


class DryBreakerTable:
    """Prepares the breakers of one vocabulary and remembers them. May be used from several threads."""

    def __init__(self, tokenizer: Pieces) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._joined = ""  # all pieces, each behind a separator, and one at the end
        self._starts: list[int] = []  # where in `_joined` each piece begins
        self._backwards: list[tuple[str, int]] = []  # reversed pieces with their tokens, sorted: to look up endings
        self._prepared: OrderedDict[tuple[str, ...], _engine.DryBreakers] = OrderedDict()

    def prepare(self, breakers: Sequence[str]) -> _engine.DryBreakers:
        """Raises `InvalidArgument` for more than `MOST_BREAKERS` strings."""
        key = tuple(dict.fromkeys(breakers))
        if len(key) > MOST_BREAKERS:
            raise InvalidArgument(f"dry_sequence_breakers has {len(key)} strings, at most {MOST_BREAKERS} are allowed")
        with self._lock:
            if key not in self._prepared:
                self._prepared[key] = _engine.DryBreakers(self.tokens_of(key))
                if len(self._prepared) > MOST_REMEMBERED:
                    self._prepared.popitem(last=False)
            self._prepared.move_to_end(key)
            return self._prepared[key]

    def tokens_of(self, breakers: Sequence[str]) -> list[tuple[int, tuple[int, ...]]]:
        """Pairs (token that holds the end of what comes before and the breaker's beginning, tokens of its rest)."""
        if not self._starts:
            pieces = [self._tokenizer.piece(i, special=True).decode("latin-1") for i in range(self._tokenizer.n_vocab)]
            self._joined = _SEPARATOR + _SEPARATOR.join(pieces) + _SEPARATOR
            self._starts = list(accumulate((len(piece) + 1 for piece in pieces[:-1]), initial=1))
        found: dict[tuple[int, tuple[int, ...]], None] = {}
        for text in breakers:
            breaker = text.encode("utf-8", "surrogateescape")[:MOST_BYTES]
            if not breaker:
                continue
            characters = breaker.decode("latin-1")
            whole = set(self._tokens_with(characters))
            found.update(dict.fromkeys((token, ()) for token in sorted(whole)))
            for n in range(1, len(breaker)):
                heads = set(self._tokens_ending_with(characters[:n])) - whole
                if heads:
                    tail = tuple(self._tokenizer.encode(breaker[n:])[:MOST_TAIL_TOKENS])
                    found.update(dict.fromkeys((token, tail) for token in sorted(heads)))
        return list(found)

    def _tokens_with(self, text: str) -> Iterator[int]:
        position = self._joined.find(text)
        while position >= 0:
            yield bisect_right(self._starts, position) - 1
            position = self._joined.find(text, position + 1)

    def _tokens_ending_with(self, text: str) -> Iterator[int]:
        if not self._backwards:
            pieces = self._joined[1:-1].split(_SEPARATOR)
            self._backwards = sorted((piece[::-1], token) for token, piece in enumerate(pieces))
        ending = text[::-1]
        for i in range(bisect_left(self._backwards, (ending,)), len(self._backwards)):
            piece, token = self._backwards[i]
            if not piece.startswith(ending):
                return
            yield token
