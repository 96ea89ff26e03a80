"""Encoders of the codebook types IQ1, IQ2 and IQ3, compared with stored blocks of ggml's quantisers and by properties.

IQ1_M is compared by its error: where values tie, several choices of levels fit equally well in exact arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import dequantize, quantize

VECTORS = np.load(Path(__file__).resolve().parents[1] / "golden" / "quants" / "encode_iq_vectors.npz")
ROWS = VECTORS["rows"]
CASES = sorted(name.removeprefix("blocks/") for name in VECTORS.files if name.startswith("blocks/"))

# Type: bytes per block, offset of the f16 scale of the block, relative error of normal values (measured, rounded up).
FORMATS = {
    "iq1_s": (50, 0, 0.51),
    "iq1_m": (56, None, 0.48),
    "iq2_xxs": (66, 0, 0.36),
    "iq2_xs": (74, 0, 0.32),
    "iq2_s": (82, 0, 0.27),
    "iq3_xxs": (98, 0, 0.20),
    "iq3_s": (110, 0, 0.15),
}
BLOCK_VALUES = 256


def importance_of(kind: str) -> NDArray[np.float32] | None:
    return None if kind == "none" else VECTORS[f"importance/{kind}"]


def encode(name: str, rows: NDArray[np.float32], importance: NDArray[np.float32] | None) -> NDArray[np.uint8]:
    return quantize(name, rows, importance).reshape(len(rows), -1)


def decode(name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float64]:
    n_values = blocks.size // FORMATS[name][0] * BLOCK_VALUES
    return dequantize(name, blocks.tobytes(), n_values).reshape(len(blocks), -1).astype(np.float64)


def weighted_error(
    rows: NDArray[np.float32], decoded: NDArray[np.float64], importance: NDArray[np.float32] | None
) -> NDArray[np.float64]:
    """Root of the weighted mean square, per row."""
    return np.sqrt(np.average((rows - decoded) ** 2, axis=1, weights=importance))


def normal_rows(seed: int, n_rows: int, n_columns: int = 1024) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.03, (n_rows, n_columns)).astype(np.float32)


def gamma_weights(seed: int, n_columns: int = 1024) -> NDArray[np.float32]:
    return np.random.default_rng(seed).gamma(0.7, 1, n_columns).astype(np.float32)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("iq1_m")])
def test_rows_encode_as_in_the_stored_vectors(case: str) -> None:
    name, kind = case.split("/")
    found = encode(name, ROWS, importance_of(kind))
    wrong_rows = np.flatnonzero((found != VECTORS[f"blocks/{case}"]).any(axis=1))
    assert wrong_rows.size == 0, f"rows {wrong_rows} differ"


@pytest.mark.parametrize("kind", ["positive", "some_zero", "none"])
def test_iq1_m_is_as_accurate_as_in_the_stored_vectors(kind: str) -> None:
    importance = importance_of(kind)
    stored = VECTORS[f"blocks/iq1_m/{kind}"]
    expected = weighted_error(ROWS, decode("iq1_m", stored), importance)
    found = weighted_error(ROWS, decode("iq1_m", encode("iq1_m", ROWS, importance)), importance)
    # Without importance zeros have no weight: what they become is chance.
    is_settled = (ROWS != 0).mean(axis=1) > 0.25 if importance is None else np.full(len(ROWS), True)
    ratio = (found / np.maximum(expected, 1e-30))[is_settled]
    assert np.all(ratio <= 1.01), ratio.max()


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_rows_are_near(name: str) -> None:
    rows = normal_rows(1, 8)
    error = weighted_error(rows, decode(name, encode(name, rows, np.ones(1024, np.float32))), None)
    bound = FORMATS[name][2] * np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=1))
    assert np.all(error < bound), (error / bound).max()


@pytest.mark.parametrize("name", FORMATS)
def test_importance_moves_the_error_to_columns_without(name: str) -> None:
    rows, importance = normal_rows(2, 8), gamma_weights(3)
    with_importance = decode(name, encode(name, rows, importance))
    equal = decode(name, encode(name, rows, np.ones(1024, np.float32)))
    for weights, better, worse in ((importance, with_importance, equal), (None, equal, with_importance)):
        assert weighted_error(rows, better, weights).mean() < weighted_error(rows, worse, weights).mean()


@pytest.mark.parametrize("name", FORMATS)
def test_any_split_into_rows_and_blocks_gives_the_same_bytes(name: str) -> None:
    rows, importance = normal_rows(4, 6), gamma_weights(5)
    whole = encode(name, rows, importance)
    by_row = np.concatenate([encode(name, rows[i : i + 1], importance) for i in range(len(rows))])
    by_block = np.concatenate(
        [
            encode(name, np.ascontiguousarray(rows[:, at : at + 256]), importance[at : at + 256])
            for at in range(0, 1024, 256)
        ],
        axis=1,
    )
    assert np.array_equal(by_row, whole)
    assert np.array_equal(by_block, whole)
    assert np.array_equal(quantize(name, rows, importance, n_threads=3), whole.ravel())


@pytest.mark.parametrize("name", FORMATS)
def test_a_power_of_two_scales_the_result_and_leaves_the_choice_of_levels(name: str) -> None:
    rows, importance = normal_rows(6, 4), gamma_weights(7)
    blocks = encode(name, rows, importance)
    assert np.array_equal(encode(name, rows, 8 * importance), blocks)
    assert np.array_equal(decode(name, encode(name, 16 * rows, importance)), 16 * decode(name, blocks))


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("iq1")])
def test_negated_rows_decode_to_negated_values(name: str) -> None:
    rows, importance = normal_rows(8, 4), gamma_weights(9)
    assert np.array_equal(decode(name, encode(name, -rows, importance)), -decode(name, encode(name, rows, importance)))


@pytest.mark.parametrize("name", FORMATS)
def test_sub_blocks_of_zeros_leave_the_others_as_they_are(name: str) -> None:
    rows = normal_rows(10, 4)
    is_zero = np.repeat(np.random.default_rng(11).random((4, 32)) < 0.4, 32, axis=1)
    importance = np.ones(1024, np.float32)
    decoded = decode(name, encode(name, np.where(is_zero, 0, rows).astype(np.float32), importance))
    error = np.sqrt(np.mean((rows - decoded)[~is_zero] ** 2)) / np.sqrt(np.mean(rows[~is_zero].astype(np.float64) ** 2))
    assert error < 1.05 * FORMATS[name][2]


@pytest.mark.parametrize("name", FORMATS)
def test_sub_blocks_without_importance_decode_to_values_of_their_size(name: str) -> None:
    rows = normal_rows(12, 4)
    importance = gamma_weights(13)
    importance[np.repeat(np.arange(32) % 3 == 0, 32)] = 0
    decoded = decode(name, encode(name, rows, importance))
    assert np.abs(decoded).max() < 2 * np.abs(rows).max()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_encode_to_zero_bytes(name: str) -> None:
    assert not encode(name, np.zeros((2, 512), np.float32), np.ones(512, np.float32)).any()
