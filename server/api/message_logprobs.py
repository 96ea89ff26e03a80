"""Which tokens a piece of the visible text is made of, so that their log-probabilities can stand beside it.

Thoughts, tags, calls and dropped white space have tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyllama.server.api.results import probability_json
from pyllama.server.generation import Generation, ProbabilityRecord
from pyllama.server.vocabulary import Vocabulary


class MessageLogprobs:
    """Follows one answer from its beginning. n_top: alternatives to show per token (None: all)."""

    def __init__(self, vocabulary: Vocabulary, n_top: int | None) -> None:
        self._vocabulary = vocabulary
        self._n_top = n_top
        self._text = bytearray()  # of all tokens so far
        self._spans: list[tuple[int, int, ProbabilityRecord]] = []
        self._position = 0  # behind the last piece that was shown
        self._n_given = 0

    def extend(self, records: Sequence[ProbabilityRecord]) -> None:
        """records: of all tokens so far."""
        for record in records[len(self._spans) :]:
            start = len(self._text)
            self._text += self._vocabulary.piece(record.token)
            self._spans.append((start, len(self._text), record))

    def skip(self, text: str) -> None:
        """A piece that is shown elsewhere."""
        self._pass(text)

    def take(self, text: str, generation: Generation) -> list[dict[str, Any]]:
        """The records of the tokens of a piece of the message, those excepted that an earlier piece had."""
        start, end = self._pass(text)
        post_sampling = generation.params.post_sampling_probs
        found = []
        for index in range(self._n_given, len(self._spans)):
            first, last, record = self._spans[index]
            if first >= end:
                break
            self._n_given = index + 1
            if last > max(first, start):  # hidden tokens have no text
                shown = probability_json(record, self._vocabulary, post_sampling=post_sampling, n_top=self._n_top)
                found.append(shown)
        return found

    def _pass(self, text: str) -> tuple[int, int]:
        """Where a piece is in the text of the tokens, as bytes; the next one is looked for behind it."""
        piece = text.encode("utf-8", "replace")
        start = self._text.find(piece, self._position)
        if start < 0:  # bytes that are no text are shown as replacement characters
            start = self._position
        self._position = min(start + len(piece), len(self._text))
        return start, self._position
