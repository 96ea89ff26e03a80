"""What the sampler `infill` must know of a vocabulary: the texts of its tokens and where a generation ends."""

from __future__ import annotations

import threading
from typing import Protocol

from pyllama import _engine
from pyllama.errors import InvalidArgument


class EndingPieces(Protocol):
    """What is needed of a tokenizer."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eog_ids(self) -> frozenset[int]: ...
    @property
    def eot_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    def piece(self, token: int, *, special: bool = False) -> bytes: ...


class InfillTable:
    """Prepares the vocabulary at the first use. May be used from several threads.

    n_vocab: rows of the model's output; those that the tokenizer does not know have no text.
    """

    def __init__(self, tokenizer: EndingPieces, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._lock = threading.Lock()
        self._prepared: _engine.InfillVocabulary | None = None

    def prepare(self) -> _engine.InfillVocabulary:
        """Raises `InvalidArgument` for a vocabulary that has neither an end of turn nor an end of text."""
        with self._lock:
            if self._prepared is None:
                tokenizer = self._tokenizer
                end = tokenizer.eos_id if tokenizer.eot_id is None else tokenizer.eot_id
                if end is None or end >= self._n_vocab:
                    raise InvalidArgument("the sampler infill needs an end token, and this vocabulary has none")
                known = min(tokenizer.n_vocab, self._n_vocab)
                texts = [tokenizer.piece(token) for token in range(known)] + [b""] * (self._n_vocab - known)
                ends = [token for token in sorted(tokenizer.eog_ids) if token < self._n_vocab]
                self._prepared = _engine.InfillVocabulary(texts, ends, end)
            return self._prepared
