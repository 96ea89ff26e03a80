"""Logits of an engine at every position, greedy continuation, divergence from an oracle's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyllama._engine import Engine


def position_logits(
    engine: Engine, tokens: Sequence[int], *, chunk: int | None = None, seq_id: int = 0
) -> NDArray[np.float32]:
    """Logits after each token, `[len(tokens), n_vocab]`, fed in pieces of `chunk` (default: all). Clears first."""
    engine.clear(seq_id)
    size = chunk or len(tokens)
    rows = []
    for start in range(0, len(tokens), size):
        piece = list(tokens[start : start + size])
        engine.decode(piece, [seq_id] * len(piece), [True] * len(piece))
        rows.append(engine.logits())
    logits = np.concatenate(rows)
    assert len(logits) == len(tokens), f"{len(logits)} rows of logits for {len(tokens)} tokens"
    return logits


def greedy_tokens(engine: Engine, prompt: Sequence[int], n_tokens: int, *, seq_id: int = 0) -> list[int]:
    """The `n_tokens` most likely tokens after `prompt`, one at a time; end tokens do not stop it. Clears first."""
    engine.clear(seq_id)
    pending, answer = list(prompt), []
    while len(answer) < n_tokens:
        engine.decode(pending, [seq_id] * len(pending))
        answer.append(int(np.argmax(engine.logits()[-1])))
        pending = answer[-1:]
    return answer


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Over the last axis, in f64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(
    ids: NDArray[np.int64], logprobs: NDArray[np.float64], logits: NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """KL(oracle || ours) per position, in nats, over the oracle's listed tokens and one bucket for all others.

    ids, logprobs: `[positions, listed]` of the oracle. logits: `[positions, n_vocab]`, ours. The bucket makes it a
    lower bound of the divergence over the whole vocabulary; with every token listed it is that divergence.
    """
    ours = np.take_along_axis(log_softmax(logits), ids, axis=-1)
    listed = np.exp(logprobs)
    rest = np.clip(1.0 - listed.sum(axis=-1), 0.0, None)
    our_rest = np.clip(1.0 - np.exp(ours).sum(axis=-1), 1e-12, None)
    bucket = np.where(rest > 1e-6, rest * np.log(np.maximum(rest, 1e-12) / our_rest), 0.0)
    return (listed * (logprobs - ours)).sum(axis=-1) + bucket


def assert_same_bits(found: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
    """Fail unless both arrays hold the same bits, naming the first difference."""
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    different = found.view(np.uint32) != expected.view(np.uint32)
    if different.any():
        index = tuple(int(i) for i in np.argwhere(different)[0])
        share = different.mean()
        raise AssertionError(
            f"{what}: {share:.1%} of the values differ, first at {index}: "
            f"{found[index]!r}, expected {expected[index]!r}; "
            f"largest difference {np.abs(found - expected).max():.3e}"
        )
