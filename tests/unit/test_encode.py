"""Encoding of quantised blocks: the bytes of the reference quantisers, whatever the threads and the vector width.

Compared with: stored blocks of the C library (golden/quants/encode_vectors.npz) and, where the package libggml-python
is installed, the library itself on fresh rows. The searches of each instruction set: cpu_kernels/encoder_searches.cpp.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import (
    convert_rows,
    count_non_finite,
    dequantize,
    encoding_needs_importance,
    quantize,
    type_names,
)
from pyllama.errors import InvalidArgument

Rows = NDArray[np.float32]
Blocks = NDArray[np.uint8]

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "quants"
VECTORS = np.load(GOLDEN / "encode_vectors.npz")
ROWS, IMPORTANCE = VECTORS["rows"], VECTORS["importance"]

# Type: id, values per block, largest error of a row of normal values in units of their standard deviation.
TYPES = {
    "q4_0": (2, 32, 0.35), "q4_1": (3, 32, 0.3), "q5_0": (6, 32, 0.17), "q5_1": (7, 32, 0.13), "q8_0": (8, 32, 0.02),
    "q2_K": (10, 256, 1.6), "q3_K": (11, 256, 0.8), "q4_K": (12, 256, 0.4), "q5_K": (13, 256, 0.2),
    "q6_K": (14, 256, 0.13), "iq4_nl": (20, 32, 0.5), "iq4_xs": (23, 256, 0.5), "tq1_0": (34, 256, 2.5),
    "tq2_0": (35, 256, 2.5), "mxfp4": (39, 32, 1.1), "nvfp4": (40, 64, 0.7), "q1_0": (41, 128, 4.0),
    "q2_0": (42, 64, 2.0),
}  # fmt: skip
USE_IMPORTANCE = ("q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs")


def assert_same_blocks(found: Blocks, expected: Blocks) -> None:
    rows = np.flatnonzero((found.reshape(expected.shape) != expected).any(axis=1))
    assert rows.size == 0, f"{np.count_nonzero(found.reshape(expected.shape) != expected)} bytes differ, in rows {rows}"


def decoded(name: str, blocks: Blocks, shape: tuple[int, ...]) -> Rows:
    return dequantize(name, blocks, int(np.prod(shape))).reshape(shape)


@pytest.fixture(scope="module")
def reference() -> Callable[[str, Rows, Rows | None, int], Blocks]:
    """encode(type, rows, importance, bytes) of the C library."""
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package libggml-python")
    library = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).rglob("libggml-base.so"))))
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def encode(name: str, rows: Rows, importance: Rows | None, n_bytes: int) -> Blocks:
        blocks = np.zeros(n_bytes, np.uint8)
        weights = None if importance is None else importance.ctypes.data
        assert function(TYPES[name][0], rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, weights) == n_bytes
        return blocks

    return encode


@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_those_of_the_reference(name: str) -> None:
    assert_same_blocks(quantize(name, ROWS), VECTORS[f"plain/{name}"])


@pytest.mark.parametrize("name", TYPES)
def test_weighted_blocks_are_those_of_the_reference(name: str) -> None:
    found = quantize(name, ROWS, IMPORTANCE)
    assert_same_blocks(found, VECTORS[f"weighted/{name}"])
    assert np.array_equal(found, quantize(name, ROWS)) == (name not in USE_IMPORTANCE)


def edge_rows(rng: np.random.Generator, n: int) -> Rows:
    normal, index = rng.normal(0, 1, n), np.arange(n)
    rows = [normal * scale for scale in (1, 0.02, 1e-12, 1e-16, 1e-25, 1e3)]
    rows += [np.full(n, value) for value in (0.0, -0.0, 0.75, -3.0, 1e-30)]
    rows += [
        np.linspace(-1, 1, n),
        -1.0 * index,
        np.where(index % 3 == 0, -0.0, 0.0),
        np.where(index % 2 == 0, 1.0, -1.0),
    ]
    rows += [np.where(index < n // 2, 0, normal), 0.75 + normal * 1e-7, 1000 + normal, -1000 + normal]
    rows += [
        2.0 ** rng.integers(-12, 12, n),
        np.nextafter(2.0 ** rng.integers(-5, 5, n), 0),
        rng.integers(-127, 128, n),
    ]
    rows += [normal * np.exp(rng.normal(0, 2, n)), rng.standard_t(2, n), -rng.uniform(0, 1, n)]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("n_columns", [256, 1280, 2304])
@pytest.mark.parametrize("name", TYPES)
def test_fresh_rows_encode_as_in_the_c_library(
    reference: Callable[[str, Rows, Rows | None, int], Blocks], name: str, n_columns: int
) -> None:
    rng = np.random.default_rng([n_columns, TYPES[name][0]])
    rows = edge_rows(rng, n_columns)
    gamma = rng.gamma(0.7, 1, n_columns).astype(np.float32)
    some_zero = np.where(rng.random(n_columns) < 0.5, 0, gamma).astype(np.float32)
    for importance in (None, gamma, some_zero, gamma * np.float32(1e6)):
        found = quantize(name, rows, importance)
        assert_same_blocks(found, reference(name, rows, importance, found.size).reshape(len(rows), -1))


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs", "mxfp4"])
def test_values_beyond_any_scale_encode_as_in_the_c_library(
    reference: Callable[[str, Rows, Rows | None, int], Blocks], name: str
) -> None:
    """Without importance also where sums overflow and scales become infinite, to be found by the count below."""
    rows = (np.random.default_rng(5).normal(0, 1, (1, 512)) * np.array([[1e6], [1e15], [1e37]])).astype(np.float32)
    found = quantize(name, rows)
    assert_same_blocks(found, reference(name, rows, None, found.size).reshape(len(rows), -1))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_threads_and_splits_of_rows_do_not_change_bytes(name: str, weighted: bool) -> None:
    rng = np.random.default_rng(6)
    rows = rng.standard_t(3, (150, 768)).astype(np.float32)
    importance = rng.gamma(0.7, 1, 768).astype(np.float32) if weighted else None
    whole = quantize(name, rows, importance, n_threads=1)
    assert np.array_equal(quantize(name, rows, importance, n_threads=3), whole)
    parts = [quantize(name, part, importance, n_threads=2) for part in np.array_split(rows, [1, 4, 77])]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", TYPES)
def test_round_trip_error_is_bounded(name: str) -> None:
    rows = np.random.default_rng(7).normal(0, 1, (20, 1024)).astype(np.float32)
    for importance in (None, np.ones(1024, np.float32)):
        error = np.abs(decoded(name, quantize(name, rows, importance), rows.shape) - rows).max()
        assert error < TYPES[name][2]


@pytest.mark.parametrize("name", USE_IMPORTANCE)
def test_importance_makes_errors_of_important_columns_smaller(name: str) -> None:
    rng = np.random.default_rng(8)
    rows = rng.normal(0, 1, (64, 1024)).astype(np.float32)
    importance = np.where(np.arange(1024) % 8 == 0, 100, 1).astype(np.float32)
    plain, weighted = (decoded(name, quantize(name, rows, w), rows.shape) - rows for w in (None, importance))
    assert (weighted[:, ::8] ** 2).sum() < 0.9 * (plain[:, ::8] ** 2).sum()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", [0.0, np.nan, -1.0, np.inf, 3e38])
def test_importance_without_a_weight_or_with_a_faulty_one_counts_as_none(name: str, value: float) -> None:
    rows = np.random.default_rng(9).normal(0, 1, (3, 512)).astype(np.float32)
    plain = quantize(name, rows)
    assert np.array_equal(quantize(name, rows, np.full(512, value, np.float32)), plain)
    if value != 0:
        one = IMPORTANCE.copy()
        one[300] = value
        assert np.array_equal(quantize(name, rows, one), plain)


@pytest.mark.parametrize("name", USE_IMPORTANCE)
def test_weights_that_vanish_where_the_values_are_do_not_spoil_the_block(name: str) -> None:
    rows = np.random.default_rng(10).normal(0, 1, (3, 1024)).astype(np.float32)
    importance = np.ones(1024, np.float32)
    rows[:, 256:288], importance[288:512] = 0, 0  # one super-block: weights for zeros only
    importance[512:768] = 0  # another: no weights at all
    blocks = quantize(name, rows, importance)
    assert count_non_finite(name, blocks, rows.size) == 0
    error = np.abs(decoded(name, blocks, rows.shape) - rows)
    assert np.isfinite(error).all()
    assert error[:, importance > 0].max() < TYPES[name][2]
    if name in ("q2_K", "q4_K", "q5_K"):  # those super-blocks' scales would be 0 / 0
        blocks, plain = (b.reshape(3, 4, -1)[:, 1:3] for b in (blocks, quantize(name, rows)))
        assert np.array_equal(blocks, plain)


def test_plain_floats_are_rounded_to_nearest_even() -> None:
    edges = [0.0, -0.0, 1, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65519.996, 65520, 3.4e38, 2**-14, 2**-24, 2**-25, 1e-45]
    values = np.array([*edges, *(-v for v in edges), 1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf], np.float32)
    with np.errstate(over="ignore"):
        assert np.array_equal(quantize("f16", values[None]).view(np.float16), values.astype(np.float16), equal_nan=True)
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(quantize("bf16", values[None]).view(np.uint16), nearest)
    assert np.array_equal(quantize("f64", values[None]).view(np.float64), values.astype(np.float64))
    assert np.array_equal(quantize("f32", values[None]).view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("source", ["f16", "bf16", "q8_0", "q4_K"])
def test_other_sources_are_decoded_first(source: str) -> None:
    values = np.random.default_rng(11).normal(0, 1, (5, 512)).astype(np.float32)
    data = quantize(source, values)
    expected = quantize("q5_K", decoded(source, data, values.shape))
    assert np.array_equal(convert_rows(source, data, "q5_K", 512, n_threads=2), expected)


@pytest.mark.parametrize(
    ("name", "row_bytes"), [("q4_K", 144), ("q8_K", 292), ("i32", 1024), ("iq1_s", 50), ("f16", 512)]
)
def test_equal_types_are_copied(name: str, row_bytes: int) -> None:
    data = np.random.default_rng(12).integers(0, 256, 700 * row_bytes, dtype=np.uint8)
    assert np.array_equal(convert_rows(name, data, name, 256, n_threads=2), data)


def test_overflow_to_half_is_counted() -> None:
    values = np.full((4, 64), 1.0, np.float32)
    values[1, 3], values[2, 5], values[3, 63] = 1e6, -7e4, 65504
    halves = convert_rows("bf16", quantize("bf16", values), "f16", 64)
    assert count_non_finite("f16", halves, values.size) == 3  # 65504 rounds up to 65536 in bf16
    assert count_non_finite("bf16", quantize("bf16", values), values.size) == 0
    assert count_non_finite("q8_0", quantize("q8_0", values * 1e3), values.size) == 3  # blocks, by their scales
    assert count_non_finite("q8_0", quantize("q8_0", values), values.size) == 0


def test_only_the_smallest_codebook_types_need_importance() -> None:
    assert [n for n in type_names if n and encoding_needs_importance(n)] == ["iq2_xxs", "iq2_xs", "iq1_s"]


def test_invalid_arguments_are_refused_with_their_numbers() -> None:
    values = np.zeros((2, 256), np.float32)
    with pytest.raises(InvalidArgument, match="nothing is encoded to q8_K"):
        quantize("q8_K", values)
    with pytest.raises(InvalidArgument, match="'q4_k_m' is not a tensor type"):
        quantize("q4_k_m", values)
    with pytest.raises(InvalidArgument, match="rows of 40 values, expected a multiple of 1 and 32"):
        quantize("q8_0", np.zeros((1, 40), np.float32))
    with pytest.raises(InvalidArgument, match="3 importance weights for rows of 256 values"):
        quantize("q4_K", values, np.ones(3, np.float32))
    with pytest.raises(InvalidArgument, match="1 dimensions, expected 2"):
        quantize("q4_K", values[0])
    with pytest.raises(InvalidArgument, match="1001 bytes are not a multiple of the 512 bytes of a row of 256 f16"):
        convert_rows("f16", bytes(1001), "q4_K", 256)
    with pytest.raises(InvalidArgument, match="i32 holds integers"):
        convert_rows("i32", values, "q8_0", 256)
    with pytest.raises(InvalidArgument, match="rows of 0 values"):
        convert_rows("f32", b"", "q8_0", 0)
    with pytest.raises(InvalidArgument, match="not C-contiguous"):
        convert_rows("f32", values[:, ::2], "q8_0", 128)
    with pytest.raises(InvalidArgument, match="number of threads is -1"):
        quantize("q4_K", values, n_threads=-1)
    assert convert_rows("f16", b"", "q4_K", 256).size == 0
