"""What a `Llama` object remembers besides its KV memory: kept rows of logits, and saved states."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class LlamaState:
    """A sequence that `Llama.load_state` can go on with. Its size follows the tokens in use.

    Holds no logits: the row of the last token is computed again when it is asked for. May be pickled.
    """

    input_ids: tuple[int, ...]
    llama_state: bytes = field(repr=False)
    """KV memory of the tokens; only a `Llama` object of the same model and cache types can load it."""
    seed: int

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def llama_state_size(self) -> int:
        """Bytes of `llama_state`."""
        return len(self.llama_state)


class LogitsRows:
    """Raw logits by token position: `scores[i]` is the row `[n_vocab]` (f32) that follows token `i` of the sequence.

    Behaves like an array `[n_tokens, n_vocab]` of which only some rows exist: the ones that `eval` kept (all with
    ``logits_all=True``, else the last one). Reading another row raises `InvalidArgument`. Negative indices count from
    the last token.
    """

    __slots__ = ("_rows", "n_tokens", "n_vocab")

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self.n_tokens = 0
        self._rows: dict[int, NDArray[np.float32]] = {}

    @property
    def shape(self) -> tuple[int, int]:
        return (self.n_tokens, self.n_vocab)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that exist."""
        return sum(row.nbytes for row in self._rows.values())

    def __len__(self) -> int:
        return self.n_tokens

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return self[key[0]][(slice(None), *key[1:]) if isinstance(key[0], slice) else key[1:]]
        if isinstance(key, slice):
            rows = [self._row(position) for position in range(*key.indices(self.n_tokens))]
            return np.stack(rows) if rows else np.empty((0, self.n_vocab), np.float32)
        position = operator.index(key)
        return self._row(position + self.n_tokens if position < 0 else position)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        rows = self[:]
        return rows if dtype is None else rows.astype(dtype)

    def _row(self, position: int) -> NDArray[np.float32]:
        if not 0 <= position < self.n_tokens:
            raise IndexError(f"scores: row {position} of a sequence of {self.n_tokens} tokens")
        row = self._rows.get(position)
        if row is None:
            raise InvalidArgument(
                f"scores: the logits of token {position} were not kept; logits_all=True keeps those of every token"
            )
        return row

    def extend(self, n_tokens: int, kept: dict[int, NDArray[np.float32]], *, keep_others: bool) -> None:
        """The sequence grew to `n_tokens`; `kept` maps positions to new rows. `keep_others`: older rows stay."""
        if not keep_others:
            self._rows.clear()
        self._rows.update(kept)
        self.n_tokens = n_tokens

    def truncate(self, n_tokens: int) -> None:
        """The sequence was cut to its first `n_tokens` tokens."""
        if n_tokens < self.n_tokens:
            self._rows = {position: row for position, row in self._rows.items() if position < n_tokens}
        self.n_tokens = n_tokens
