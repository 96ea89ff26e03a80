"""Log-probabilities of given tokens from rows of raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyllama.server.generation import ProbabilityRecord


def score_rows(logits: NDArray[np.float32], tokens: Sequence[int], n_top: int) -> list[ProbabilityRecord]:
    """`tokens[i]` follows the row `logits[i]` ([rows, vocabulary]). Natural logarithms of the plain softmax."""
    n_top = min(n_top, logits.shape[1])
    records = []
    for row, token in zip(logits, tokens, strict=True):
        peak = row.max()
        log_sum = float(peak) + float(np.log(np.exp(row - peak, dtype=np.float64).sum()))
        best = np.argpartition(row, -n_top)[-n_top:]
        best = best[np.lexsort((best, -row[best]))]  # falling, ties by id
        top = [(int(i), float(row[i]) - log_sum) for i in best]
        records.append(ProbabilityRecord(token, float(row[token]) - log_sum, top))
    return records
