"""Speculation for the one sequence of a `Llama` object: where its drafts come from.

`LlamaDraftModel` and `LlamaPromptLookupDecoding` are what users of llama-cpp-python pass as `draft_model`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyllama import _engine
from pyllama.errors import InvalidArgument
from pyllama.speculation import MOST_ROWS, Speculation, SpeculationOptions, open_speculation


class LlamaDraftModel(abc.ABC):
    """Guesses how a text goes on."""

    @abc.abstractmethod
    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """input_ids: all tokens so far, `[n]`. Returns the tokens that may follow, `[m]`, perhaps none."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """What followed the last tokens where they occurred first, of the longest n-gram that occurred before."""

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        if max_ngram_size < 1 or num_pred_tokens < 1:
            raise InvalidArgument("max_ngram_size and num_pred_tokens must be 1 or more")
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        n_tokens = len(input_ids)
        for size in range(min(self.max_ngram_size, n_tokens - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(input_ids, size)[:-1]  # not the end itself
            (found,) = np.nonzero((windows == input_ids[-size:]).all(axis=1))
            if len(found):
                begin = int(found[0]) + size
                return input_ids[begin : begin + self.num_pred_tokens]
        return np.empty(0, np.intc)


class SequenceDrafts(Protocol):
    """Drafts for sequence 0. longest: tokens of a draft at most. ends: tokens behind which nothing stands."""

    longest: int
    ends: tuple[int, ...]

    def begin(self) -> None:
        """The prompt is computed and the first token drawn."""

    def draft(self, tokens: Sequence[int], last: int, most: int, temperature: float, seed: int) -> _engine.Draft:
        """What may follow `last`, which comes after `tokens`; at most `most` tokens."""

    def on_verified(self, n_drafted: int, n_accepted: int) -> None: ...

    def close(self) -> None: ...


class SpeculatedDrafts:
    """From the engine's drafters."""

    def __init__(self, speculation: Speculation, ends: Iterable[int], n_ubatch: int) -> None:
        self._speculation = speculation
        self.longest = min(speculation.longest, MOST_ROWS - 1, n_ubatch - 1)
        self.ends = tuple(sorted(ends))

    def begin(self) -> None:
        self._speculation.speculator.begin(0)

    def draft(self, tokens: Sequence[int], last: int, most: int, temperature: float, seed: int) -> _engine.Draft:
        (draft,) = self._speculation.speculator.draft([_engine.DraftOrder(0, last, most, temperature, seed)])
        return draft

    def on_verified(self, n_drafted: int, n_accepted: int) -> None:
        self._speculation.speculator.accept(0, n_drafted, n_accepted)

    def close(self) -> None:
        self._speculation.close()


class CalledDrafts:
    """From a callable of the user. Tokens outside the vocabulary end a draft."""

    def __init__(self, model: Any, ends: Iterable[int], n_vocab: int, n_ubatch: int) -> None:
        self._model = model
        self._n_vocab = n_vocab
        self.longest = min(MOST_ROWS, n_ubatch) - 1
        self.ends = tuple(sorted(ends))

    def begin(self) -> None:
        pass

    def draft(self, tokens: Sequence[int], last: int, most: int, temperature: float, seed: int) -> _engine.Draft:
        guess = np.asarray(self._model(np.array([*tokens, last], np.intc))).reshape(-1)[:most]
        if guess.size and not np.issubdtype(guess.dtype, np.integer):
            raise InvalidArgument(f"draft_model returned {guess.dtype}, expected token ids")
        known = (guess >= 0) & (guess < self._n_vocab)
        return _engine.Draft([int(token) for token in guess[: len(guess) if known.all() else int(known.argmin())]])

    def on_verified(self, n_drafted: int, n_accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


def read_draft_model(draft_model: object) -> SpeculationOptions | None:
    """How the `draft_model` of a `Llama` is meant: None for a callable, or for nothing.

    A path is a draft model, or what its file says (a block of multi-token prediction, say). Raises `InvalidArgument`.
    """
    if draft_model is None or isinstance(draft_model, SpeculationOptions):
        return draft_model
    if isinstance(draft_model, str) or hasattr(draft_model, "__fspath__"):
        path = str(draft_model)
        options = SpeculationOptions(draft_model=path, infers_type=True).resolved()
        return options if options.is_on else SpeculationOptions(types=("draft-simple",), draft_model=path)
    if callable(draft_model):
        return None
    raise InvalidArgument(
        f"draft_model is a {type(draft_model).__name__}, expected a path, SpeculationOptions or a callable"
    )


def open_drafts(
    draft_model: object,
    speculation: SpeculationOptions | None,
    engine: _engine.Engine,
    metadata: Mapping[str, Any],
    engine_arguments: Mapping[str, Any],
    ends: Iterable[int],
) -> SequenceDrafts | None:
    """Of a `draft_model` that `read_draft_model` has read. Raises `PyllamaError` or `OSError`."""
    if speculation is not None:
        opened = open_speculation(speculation, engine, metadata, engine_arguments=engine_arguments)
        return None if opened is None else SpeculatedDrafts(opened, ends, engine.n_ubatch)
    if draft_model is None:
        return None
    n_vocab = len(metadata.get("tokenizer.ggml.tokens") or ())
    return CalledDrafts(draft_model, ends, n_vocab, engine.n_ubatch)
