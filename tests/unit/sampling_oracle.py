"""A slow, plain numpy version of the sampler chain: full sorts, no short cuts. The oracle of test_sampler.py.

Numbers are f32 where docs/sampling.md says so, and sums run in list order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of one chain, with the meaning of `pyllama._engine.Sampler`."""

    stages: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_keep: int
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """The first f64 numbers in [0, 1) of MT19937, two 32-bit outputs each, the first one low."""
    raw = np.random.RandomState(seed).randint(0, 1 << 32, size=2 * count, dtype=np.uint32).astype(np.float64)
    return (raw[0::2] + raw[1::2] * 2.0**32) / 2.0**64


def weights(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """e^(logit - largest), rounded once to f32: closest to what C libraries give."""
    return np.exp((logits - logits.max()).astype(np.float64)).astype(np.float32)


def in_order(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Positions by falling logit, equal logits by rising id."""
    return np.lexsort((ids, -logits))


def run_chain(
    logits: NDArray[np.float32], history: Sequence[int], settings: Settings, uniform: float
) -> tuple[int, list[tuple[int, float]]]:
    """(chosen token, candidates by falling probability without zeros) of one draw with the number `uniform`."""
    x = logits.astype(np.float32).copy()
    for token, bias in settings.logit_bias:
        x[token] += np.float32(bias)
    ids = np.arange(len(x))
    is_sorted = False
    for stage in settings.stages:
        if stage == "penalties":
            x, changed = _penalties(ids, x, history, settings)
            is_sorted = is_sorted and not changed
        elif stage == "top_k" and settings.top_k > 0:
            keep = np.arange(len(x)) if is_sorted else in_order(ids, x)
            ids, x, is_sorted = ids[keep[: settings.top_k]], x[keep[: settings.top_k]], True
        elif stage == "top_p" and settings.top_p < 1:
            ids, x = _top_p(ids, x, is_sorted, settings)
            is_sorted = True
        elif stage == "min_p" and settings.min_p > 0:
            ids, x, is_sorted = _min_p(ids, x, is_sorted, settings)
        elif stage == "temperature" and settings.temperature != 1:
            if settings.temperature <= 0:
                first = in_order(ids, x)[:1]
                ids, x = ids[first], x[first]
            else:
                x = x / np.float32(settings.temperature)
    w = weights(x)
    cumulative = np.cumsum(w.astype(np.float64))
    position = int(np.argmax((cumulative >= uniform * cumulative[-1]) & (w > 0)))
    p = (w.astype(np.float64) / cumulative[-1]).astype(np.float32)
    order = np.lexsort((ids, -p))
    return int(ids[position]), [(int(ids[i]), float(p[i])) for i in order if p[i] > 0]


def _penalties(
    ids: NDArray[np.int64], x: NDArray[np.float32], history: Sequence[int], settings: Settings
) -> tuple[NDArray[np.float32], bool]:
    repeat, frequency, presence = map(
        np.float32, (settings.repeat_penalty, settings.frequency_penalty, settings.presence_penalty)
    )
    if settings.repeat_last_n == 0 or (repeat == 1 and frequency == 0 and presence == 0):
        return x, False
    x = x.copy()
    for token, count in Counter(history[-settings.repeat_last_n :]).items():
        for i in np.flatnonzero(ids == token):
            x[i] = x[i] * repeat if x[i] <= 0 else x[i] / repeat
            x[i] -= np.float32(count) * frequency + presence
    return x, True


def _top_p(
    ids: NDArray[np.int64], x: NDArray[np.float32], is_sorted: bool, settings: Settings
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    total = np.cumsum(weights(x))[-1]
    if not is_sorted:
        order = in_order(ids, x)
        ids, x = ids[order], x[order]
    reached = np.cumsum(weights(x) / total) >= np.float32(settings.top_p)
    reached[: max(settings.min_keep - 1, 0)] = False
    kept = int(np.argmax(reached)) + 1 if reached.any() else len(x)
    return ids[:kept], x[:kept]


def _min_p(
    ids: NDArray[np.int64], x: NDArray[np.float32], is_sorted: bool, settings: Settings
) -> tuple[NDArray[np.int64], NDArray[np.float32], bool]:
    passes = x >= x.max() + np.log(np.float32(settings.min_p))
    if not is_sorted and passes.sum() >= max(settings.min_keep, 1):
        return ids[passes], x[passes], False
    if not is_sorted:
        order = in_order(ids, x)
        ids, x = ids[order], x[order]
    kept = max(int(passes.sum()), settings.min_keep, 1)
    return ids[:kept], x[:kept], True
