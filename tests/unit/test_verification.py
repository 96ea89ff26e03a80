"""Verification keeps the distribution: the first three tokens of many texts, through native/verification_driver.cpp.

Their joint distribution is compared with the product of the sampler's own distributions by a chi-square test; a test
that cannot tell a wrong distribution would be no test, so one is planted.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from unit.native_build import build_driver

SAMPLES = 200_000
CASES = ("plain", "cold", "typical", "dynamic", "bias", "all")  # all: top-k, top-p, min-p and penalties


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ("candidates", "dry", "infill", "penalties", "row_scan", "sampler", "steered_draw", "verification")
    sources = [f"sampling/{name}.cpp" for name in names]
    return build_driver("verification_driver", sources, tmp_path_factory.mktemp("verification"), is_long=True)


def run(
    driver: Path, mode: str, case: str, draft: str, seed: int = 5, samples: int = SAMPLES
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(counts, probabilities) of all triples."""
    command = [driver, str(samples), mode, case, draft, str(seed)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = [line.split() for line in lines]
    return np.array([int(count) for count, _ in pairs]), np.array([float(value) for _, value in pairs])


def p_value(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Of the chi-square test, rare triples put together (Wilson-Hilferty's normal approximation)."""
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    n_rare = int(np.searchsorted(np.cumsum(expected), 10)) + 1
    counts = np.array([counts[:n_rare].sum(), *counts[n_rare:]])
    expected = np.array([expected[:n_rare].sum(), *expected[n_rare:]])
    chi_square, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    spread = 2 / (9 * freedom)
    z = ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


@pytest.mark.parametrize("case", CASES)
def test_rejection_sampling_gives_the_samplers_joint_distribution(driver: Path, case: str) -> None:
    counts, probabilities = run(driver, "reject", case, "near" if case == "cold" else "far")
    assert counts[probabilities == 0].sum() == 0
    assert p_value(counts, probabilities * SAMPLES) > 0.01
    if case == "plain":  # a distribution that is a little off is seen
        planted = probabilities * np.where(np.arange(len(probabilities)) % 2, 1.03, 0.97)
        assert p_value(counts, planted / planted.sum() * SAMPLES) < 1e-4


@pytest.mark.parametrize("draft", ["equal", "narrow"])
def test_proposals_that_are_the_model_or_lack_most_of_it_change_nothing(driver: Path, draft: str) -> None:
    counts, probabilities = run(driver, "reject", "all", draft)
    assert p_value(counts, probabilities * SAMPLES) > 0.01


def test_matching_gives_the_very_texts_of_an_undrafted_run(driver: Path) -> None:
    for case in ("plain", "penalties", "xtc"):
        drafted, plain = (run(driver, mode, case, "far", samples=20_000)[0] for mode in ("match", "none"))
        np.testing.assert_array_equal(drafted, plain)


def test_a_chain_that_draws_itself_keeps_its_distribution(driver: Path) -> None:
    """XTC acts by chance; what it gives with drafts is compared with what it gives without."""
    drafted, plain = run(driver, "reject", "xtc", "far")[0], run(driver, "none", "xtc", "far", seed=900_000)[0]
    both = drafted + plain
    # Two samples of one distribution: the chi-square of one against half of both is half that of the two together.
    halves = np.concatenate([drafted, plain])
    expected = np.concatenate([both / 2, both / 2])
    kept = expected > 5
    chi_square, freedom = float(((halves - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) // 2 - 1
    spread = 2 / (9 * freedom)
    z = ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert math.erfc(z / math.sqrt(2)) / 2 > 0.01
