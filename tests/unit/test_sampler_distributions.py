"""What every sampler draws, against the probabilities that its formula gives on a tiny vocabulary: chi-square tests.

Each draw is the first of a sampler with a seed of its own, so that samplers which remember (mirostat, adaptive-p) stand
at their beginning, and those with a generator of their own (XTC) use a new number. `infill` has its test beside its
rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from unit import steering_oracle as oracle
from unit.steering_oracle import Numbers, softmax

from pyllama._engine import Sampler

N_DRAWS = 6000
PROBABILITIES = np.array([0.02, 0.27, 0.08, 0.22, 0.11, 0.18, 0.07, 0.05])
LOGITS = np.log(PROBABILITIES).astype(np.float32).astype(np.float64)
HISTORY = [3, 1, 4, 1, 5, 2, 3, 1]


def kept(*tokens: int) -> Numbers:
    return softmax(np.where(np.isin(np.arange(8), tokens), LOGITS, -np.inf))


def penalised() -> Numbers:
    logits = LOGITS.copy()
    for token in set(HISTORY):
        logits[token] = logits[token] * 1.3 if logits[token] < 0 else logits[token] / 1.3
        logits[token] -= 0.2 * HISTORY.count(token) + 0.4
    return softmax(logits)


def dried() -> Numbers:
    logits = LOGITS.copy()
    for token, penalty in oracle.dry_penalties(HISTORY, 64, 0.8, 1.75, 1, []).items():
        logits[token] -= penalty
    return softmax(logits)


def mixed_by_xtc() -> Numbers:
    return 0.4 * softmax(oracle.xtc(LOGITS, 0.1, 0)) + 0.6 * softmax(LOGITS)


def spread_by_entropy() -> Numbers:
    return softmax(LOGITS / oracle.dynamic_temperature(LOGITS, 1.0, 0.7, 1.4))


def by_mirostat(version: int) -> Numbers:
    _, tokens, _ = oracle.Mirostat(version, 8, 1.2, 0.1).step(LOGITS, 0.5)
    return kept(*tokens)


def by_adaptive_p() -> Numbers:
    _, after, _ = oracle.AdaptiveP(0.2, 0.9).step(LOGITS, 0.5)
    return after


CASES: dict[str, tuple[dict[str, Any], Callable[[], Numbers]]] = {
    "plain draw": ({"samplers": ()}, lambda: softmax(LOGITS)),
    "penalties": (
        {"samplers": ("penalties",), "repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4},
        penalised,
    ),
    "dry": ({"samplers": ("dry",), "dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_penalty_last_n": 64}, dried),
    "top_n_sigma": (
        {"samplers": ("top_n_sigma",), "top_n_sigma": 1.0},
        lambda: softmax(oracle.top_n_sigma(LOGITS, 1.0)),
    ),
    "top_k": ({"samplers": ("top_k",), "top_k": 3}, lambda: kept(1, 3, 5)),
    "typical": (
        {"samplers": ("typ_p",), "typical_p": 0.6},
        lambda: softmax(oracle.typical(LOGITS, 0.6, 0)),
    ),
    "top_p": ({"samplers": ("top_p",), "top_p": 0.7}, lambda: kept(1, 3, 5, 4)),
    "min_p": ({"samplers": ("min_p",), "min_p": 0.35}, lambda: kept(1, 3, 5, 4)),
    "xtc": ({"samplers": ("xtc",), "xtc_probability": 0.4, "xtc_threshold": 0.1}, mixed_by_xtc),
    "temperature": ({"samplers": ("temperature",), "temperature": 1.6}, lambda: softmax(LOGITS / 1.6)),
    "dynamic temperature": (
        {"samplers": ("temperature",), "temperature": 1.0, "dynatemp_range": 0.7, "dynatemp_exponent": 1.4},
        spread_by_entropy,
    ),
    "mirostat 1": ({"mirostat": 1, "mirostat_tau": 1.2}, lambda: by_mirostat(1)),
    "mirostat 2": ({"mirostat": 2, "mirostat_tau": 1.2}, lambda: by_mirostat(2)),
    "adaptive_p": ({"samplers": ("adaptive_p",), "adaptive_target": 0.2, "adaptive_decay": 0.9}, by_adaptive_p),
    "logit bias": (
        {"samplers": (), "logit_bias": ((2, 1.5), (1, -math.inf))},
        lambda: softmax(np.where(np.arange(8) == 1, -np.inf, LOGITS + 1.5 * (np.arange(8) == 2))),
    ),
}


def draws(options: dict[str, Any]) -> Numbers:
    row = LOGITS.astype(np.float32)
    counts = np.zeros(8)
    for seed in range(N_DRAWS):
        sampler = Sampler(8, seed=seed, **({"temperature": 1.0} | options))
        sampler.accept(HISTORY)
        counts[sampler.sample(row)] += 1
    return counts


def deviation(counts: Numbers, expected: Numbers) -> float:
    """Chi-square in standard deviations of its distribution, by the cube root of Wilson and Hilferty (1931)."""
    possible = expected > 1e-9
    degrees = possible.sum() - 1
    statistic = ((counts - N_DRAWS * expected)[possible] ** 2 / (N_DRAWS * expected[possible])).sum()
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


@pytest.mark.parametrize("case", CASES)
def test_what_is_drawn_has_the_probabilities_of_the_formula(case: str) -> None:
    options, formula = CASES[case]
    expected = formula()
    counts = draws(options)
    assert not counts[expected < 1e-9].any()
    assert deviation(counts, expected) < 3.7  # a right sampler is beyond it once in 10,000 cases
    if case != "plain draw":
        assert not np.allclose(expected, PROBABILITIES, atol=0.01), "the case does not show its sampler"


def test_the_bound_sees_a_shift_of_one_part_in_forty() -> None:
    counts = draws({"samplers": ()})
    shifted = PROBABILITIES.copy()
    shifted[[1, 3]] += (0.025, -0.025)
    assert deviation(counts, shifted) > 3.7
