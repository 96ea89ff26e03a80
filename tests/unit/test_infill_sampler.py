"""The sampler `infill` against its definition, pair by pair, and hand-computed cases; what it draws, and how often."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pyllama._engine import InfillVocabulary, Sampler
from pyllama.errors import InvalidArgument

TEXTS = [b"a", b"ab", b"abc", b"b", b"bc", b"x", b"", b"<end>"]
END, EOT = 6, 7


def infill(texts: list[bytes], ends: tuple[int, ...], end: int, *stages: str, **options: Any) -> Any:
    vocabulary = InfillVocabulary(texts, ends, end)
    return Sampler(len(texts), samplers=stages or ("infill",), infill_vocabulary=vocabulary, **{"seed": 1, **options})


def after(sampler: Any, probabilities: list[float]) -> dict[int, float]:
    with np.errstate(divide="ignore"):
        sampler.sample(np.log(np.array(probabilities, np.float32)))
    return dict(sampler.candidates())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # 3 x 0.05 x 8 > 0.95: the text ends, with the shares that the end tokens had
        ([0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.04, 0.01], {6: 0.8, 7: 0.2}),
        # "a" takes "ab" and "abc" over, "bc" takes "b" over: 0.5, 0.35, and "x" is below 0.2. Both pass 1 / 3, with the
        # logits they had
        ([0.3, 0.15, 0.05, 0.1, 0.24, 0.149, 0.01, 0.001],
         {0: 0.3 / 0.551, 4: 0.24 / 0.551, 6: 0.01 / 0.551, 7: 0.001 / 0.551}),
        # after joining 0.75 and 0.2: the second is below 1 / 3
        ([0.75, 0.0, 0.0, 0.2, 0.0, 0.05, 0.0, 0.0], {0: 1.0}),
        # three texts of about a third each: all are above 1 / 4
        ([0.19, 0.0, 0.0, 0.18, 0.0, 0.19, 0.0, 0.0], {0: 0.19 / 0.56, 3: 0.18 / 0.56, 5: 0.19 / 0.56}),
    ],
)  # fmt: skip
def test_the_rule_by_hand(given: list[float], expected: dict[int, float]) -> None:
    found = after(infill(TEXTS, (END, EOT), EOT), given)
    assert found == pytest.approx(expected, abs=1e-5)


def test_where_no_text_is_likely_the_end_token_is_left() -> None:
    texts = [bytes([65 + i]) for i in range(9)] + [b""]
    assert after(infill(texts, (), 9), [1 / 9] * 9 + [0.0]) == {9: 1.0}


def by_definition(texts: list[bytes], ends: set[int], end: int, logits: np.ndarray) -> dict[int, float]:
    """Every pair compared, in f32 like the sampler."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    w = np.array([0 if x < -104 else np.float32(math.exp(x)) for x in logits[order] - logits.max()], np.float32)
    p = (w / np.cumsum(w)[-1]).astype(np.float32)
    alive = [bool(np.isfinite(logits[t])) for t in order]
    end_sum = text_sum = np.float32(0)
    for i, token in enumerate(order):
        if token in ends:
            end_sum += p[i]
        else:
            text_sum += p[i]
    if np.float32(3) * end_sum * np.float32(len(order)) > text_sum:
        kept = [i for i, token in enumerate(order) if token in ends]
    else:
        for i, first in enumerate(order):
            for j, second in enumerate(order):
                if i == j or not alive[i] or not alive[j] or not texts[first]:
                    continue
                if texts[second].startswith(texts[first]):
                    winner, loser = (j, i) if p[j] > p[i] else (i, j)
                    p[winner] += p[loser]
                    p[loser], alive[loser] = 0, False
        kept = [i for i, token in enumerate(order) if p[i] >= np.float32(0.2) or token in ends]
        n_texts = sum(order[i] not in ends for i in kept)
        if n_texts == 0:
            return {end: 1.0}
        total = np.cumsum(p[kept])[-1]
        kept = [i for i in kept if p[i] / total >= np.float32(1) / np.float32(n_texts + 1) or order[i] in ends]
    left = {int(order[i]): float(logits[order[i]]) for i in kept if alive[i]}
    largest = max(left.values())
    weights = {token: math.exp(x - largest) for token, x in left.items()}
    return {token: w / sum(weights.values()) for token, w in weights.items() if w > 1e-30}


@pytest.mark.parametrize("seed", range(6))
def test_candidates_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    joined = 0
    for case in range(120):
        n = int(rng.integers(2, 30))
        texts = [bytes(rng.choice(list(b"ab"), int(rng.integers(0, 4)))) for _ in range(n)]
        ends = {int(t) for t in rng.integers(0, n, int(rng.integers(0, 3)))}
        logits = rng.normal(0, rng.choice([0.3, 2.0, 6.0]), n).astype(np.float32)
        for token in ends:
            logits[token] -= np.float32(rng.choice([0, 6, 12]))
        logits[rng.random(n) < 0.1] = -np.inf
        if not np.isfinite(logits).any():
            continue
        end = int(rng.integers(n))
        sampler = infill(texts, tuple(ends), end)
        sampler.sample(logits)
        expected = by_definition(texts, ends, end, logits)
        joined += len(expected) > 1
        assert dict(sampler.candidates()) == pytest.approx(expected, abs=1e-5), (seed, case, texts, ends, logits)
    assert joined > 10


def test_what_is_drawn_has_the_distribution_of_the_candidates() -> None:
    """Pearson's chi-square with a fixed seed; a right sampler exceeds the bound with probability 1e-4."""
    draws = 20_000
    sampler = infill(TEXTS, (END,), END, "infill", "temperature", temperature=1.5, seed=2024)
    logits = np.log(np.array([0.3, 0.15, 0.05, 0.1, 0.25, 0.14, 0.01, 1e-9], np.float32))
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=8)
    shares = {0: 0.3 ** (2 / 3), 4: 0.25 ** (2 / 3), 6: 0.01 ** (2 / 3)}
    expected = {token: share / sum(shares.values()) for token, share in shares.items()}
    assert {int(t) for t in np.flatnonzero(counts)} == set(expected)
    assert sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items()) < 18.42


def test_a_whole_vocabulary_of_prefixes_takes_no_quadratic_time() -> None:
    """Comparing all pairs of 60,000 texts takes minutes; the limit is that of the test run."""
    rng = np.random.default_rng(1)
    texts = [bytes(rng.choice(list(b"abcdefgh"), int(rng.integers(1, 9)))) for _ in range(60_000)]
    sampler = infill(texts, (5,), 5)
    logits = rng.normal(0, 0.1, 60_000).astype(np.float32)
    logits[5] = -30
    assert 0 <= sampler.sample(logits) < 60_000


def test_the_stage_without_its_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="infill needs the texts"):
        Sampler(4, samplers=("infill",))
    with pytest.raises(InvalidArgument, match="infill vocabulary"):
        Sampler(4, samplers=("infill",), infill_vocabulary=InfillVocabulary([b"a"], (), 0))
    for ends, end in (((3,), 0), ((), 3), ((), -1)):
        with pytest.raises(InvalidArgument, match="end token"):
            InfillVocabulary([b"a", b"b", b"c"], ends, end)
    assert Sampler(4, samplers=("infill",), mirostat=2).sample(np.zeros(4, np.float32)) < 4
