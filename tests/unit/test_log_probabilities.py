"""Log probabilities of raw logits against numpy in f64, through native/log_probabilities_driver.cpp."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from unit.native_build import build_driver

LOWEST = np.finfo(np.float32).min


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = ["sampling/log_probabilities.cpp", "sampling/row_scan.cpp"]
    return build_driver("log_probabilities_driver", sources, tmp_path_factory.mktemp("log_probabilities"))


def run(driver: Path, row: NDArray[np.float32], token: int, n_top: int) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([driver, str(token), str(n_top)], input=row.astype("<f4").tobytes(), capture_output=True)


def log_probabilities(
    driver: Path, row: NDArray[np.float32], token: int, n_top: int
) -> tuple[float, list[tuple[int, float]]]:
    result = run(driver, row, token, n_top)
    assert result.returncode == 0, result.stderr.decode()
    first, *rest = result.stdout.decode().splitlines()
    return float(first.split()[1]), [(int(t), float(v)) for t, v in (line.split() for line in rest)]


def expected_of(row: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = row.astype(np.float64) - float(row.max())
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("center", [0.0, 440.0, -440.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("n_vocab", [1, 3, 17, 4099, 50021])
def test_values_equal_numpy_f64(driver: Path, n_vocab: int, spread: float, center: float) -> None:
    rng = np.random.default_rng(n_vocab)
    row = (rng.normal(0, 1, n_vocab) * spread + center).astype(np.float32)
    expected = expected_of(row)
    token = int(rng.integers(0, n_vocab))
    chosen, top = log_probabilities(driver, row, token, 7)
    assert chosen == pytest.approx(expected[token], abs=1e-5, rel=2e-7)
    order = np.lexsort((np.arange(n_vocab), -row))[:7]
    assert [t for t, _ in top] == [int(t) for t in order]
    assert [v for _, v in top] == pytest.approx(list(expected[order]), abs=1e-5, rel=2e-7)


@pytest.mark.parametrize("n_top", [0, 1, 40, 999, 1000, 5000])
def test_the_most_likely_tokens_come_first_and_equal_ones_by_id(driver: Path, n_top: int) -> None:
    rng = np.random.default_rng(3)
    row = np.round(rng.normal(0, 2, 1000) * 2).astype(np.float32) / 2
    for order in (row, np.sort(row), np.sort(row)[::-1]):
        _, top = log_probabilities(driver, order, 0, n_top)
        assert [t for t, _ in top] == [int(t) for t in np.lexsort((np.arange(1000), -order))[:n_top]]


def test_a_banned_token_has_the_most_negative_finite_value(driver: Path) -> None:
    row = np.array([1.0, -np.inf, 0.0, -np.inf], dtype=np.float32)
    chosen, top = log_probabilities(driver, row, 3, 4)
    assert np.float32(chosen) == LOWEST
    assert [t for t, _ in top] == [0, 2, 1, 3]
    assert [np.float32(v) for _, v in top[2:]] == [LOWEST, LOWEST]


@pytest.mark.parametrize(
    ("row", "token", "n_top", "message"),
    [
        ([0.0, 1.0], 2, 0, "InvalidArgument: .*token 2"),
        ([0.0, 1.0], -1, 0, "InvalidArgument: .*token -1"),
        ([0.0, 1.0], 0, -1, "InvalidArgument: .*-1"),
        ([], 0, 0, "InvalidArgument: .*token 0"),
        ([-np.inf, -np.inf], 0, 1, "InvalidArgument: .*all -inf"),
        ([0.0, np.nan], 0, 1, "Error: NaN logits: token 1"),
        ([np.inf, 0.0], 0, 1, r"Error: \+inf logits: token 0"),
    ],
)
def test_bad_input_is_a_typed_error(driver: Path, row: list[float], token: int, n_top: int, message: str) -> None:
    result = run(driver, np.array(row, dtype=np.float32), token, n_top)
    assert result.returncode == 1
    assert re.match(message, result.stderr.decode())
