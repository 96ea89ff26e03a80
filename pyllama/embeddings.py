"""Embeddings of texts: how they are pooled, and running several at a time through an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyllama import _engine
from pyllama.checkpoints import PAGE_TOKENS
from pyllama.errors import InvalidArgument
from pyllama.vector_norm import normalized

EMBEDDED_TOGETHER = 16
"""Texts that one pass through the model embeds at most."""


def read_pooling_type(value: Any, model: _engine.Model) -> str:
    """The name of a pooling type given by name or number; None, -1 and ``unspecified`` take the file's.

    Raises `InvalidArgument`, also for ``rank`` with a model that cannot rank.
    """
    if value is None or value == "unspecified" or (value == -1 and not isinstance(value, bool)):
        name = model.pooling_type
    elif isinstance(value, str):
        name = value.lower()
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(_engine.pooling_types):
        name = _engine.pooling_types[value]
    else:
        name = ""
    if name not in _engine.pooling_types:
        known = ", ".join(f"{number} ({label})" for number, label in enumerate(_engine.pooling_types))
        raise InvalidArgument(f"pooling_type={value!r} is not a pooling type; known: -1 (the file's), {known}")
    if name == "rank" and not model.n_labels:
        raise InvalidArgument(
            f"pooling_type='rank' needs a model with a classification head (cls.output.weight): {model.path} has none"
        )
    return name


class TextEmbedder:
    """Runs texts on sequences of an engine that nothing else uses. One thread at a time."""

    def __init__(self, engine: _engine.Engine, sequences: Sequence[int], pooling_type: str, n_embd: int) -> None:
        self._engine = engine
        self._sequences = list(sequences)
        self._n_embd = n_embd
        self._longest = min(engine.n_batch, engine.n_ctx)
        self.pooling_type = pooling_type

    def use_scales(self, scales: Sequence[float]) -> None:
        """Of the LoRA adapters, for the texts from here on."""
        for sequence in self._sequences:
            self._engine.clear(sequence)
            self._engine.set_adapters(sequence, scales)

    def read_texts(
        self, texts: Sequence[str], tokenize: Callable[[bytes], list[int]], *, truncate: bool
    ) -> list[list[int]]:
        """The tokens of each text, cut to what one pass takes. Raises `InvalidArgument`, and `TypeError` for no text.

        truncate: False refuses a text that would be cut.
        """
        tokens = []
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"embed takes texts, found {type(text).__name__} at position {index}")
            ids = tokenize(text.encode("utf-8", "replace"))
            if len(ids) > self._longest and not truncate:
                raise InvalidArgument(
                    f"text {index} has {len(ids)} tokens, more than the {self._longest} that n_batch and "
                    "n_ctx allow; truncate=True uses its beginning"
                )
            if not ids:
                raise InvalidArgument(f"text {index} has no tokens to embed")
            tokens.append(ids[: self._longest])
        return tokens

    def fits(self, n_tokens: int) -> bool:
        """Whether a text of that length can be embedded now."""
        return _pages(n_tokens) * PAGE_TOKENS <= self._engine.free_tokens()

    def embed(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """The embedding of each text, in order. Raises `InvalidArgument` for one without tokens, and `ContextFull`."""
        results: list[NDArray[np.float32]] = []
        while len(results) < len(texts):
            pools = []
            work = []
            n_rows, free = 0, self._engine.free_tokens()
            for seq_id, text in zip(self._sequences, texts[len(results) :], strict=False):
                free -= _pages(len(text)) * PAGE_TOKENS
                n_rows += len(text)
                if work and (free < 0 or n_rows > self._engine.n_batch):
                    break
                pools.append(_engine.HiddenPool(self.pooling_type, self._n_embd))
                work.append(_engine.EmbeddingWork(seq_id, text, pools[-1]))
            try:
                self._engine.embed(work)
            finally:
                for item in work:
                    self._engine.clear(item.seq_id)
            results += [pool.values() for pool in pools]
        return results


def as_lists(vectors: Sequence[NDArray[np.float32]], *, normalize: bool) -> list[Any]:
    """Each embedding as a list of floats, or as one such list per token; divided by their lengths if asked for."""
    if normalize:
        vectors = [np.apply_along_axis(normalized, -1, vector) for vector in vectors]
    return [vector.tolist() for vector in vectors]


def _pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)
