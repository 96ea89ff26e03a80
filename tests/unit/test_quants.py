"""Block formats: what their bytes decode to, bit for bit.

Compared with: stored vectors of two other implementations (golden/quants), the `gguf` package on fresh random blocks,
and plain formulas for the formats that neither knows. Decoding of hostile bytes under sanitizers:
tests/security/test_gguf_hostile.py.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import Model, dequantize, type_names
from pyllama.errors import InvalidArgument
from support.tiny_llama import write_tiny_llama

VECTORS = np.load(Path(__file__).resolve().parents[1] / "golden" / "quants" / "decode_vectors.npz")
VECTOR_TYPES = sorted(name.removeprefix("blocks/") for name in VECTORS.files if name.startswith("blocks/"))

# In the order of their ids: name, values per block, bytes per block.
FORMATS = (
    ("f32", 1, 4), ("f16", 1, 2), ("q4_0", 32, 18), ("q4_1", 32, 20), ("q5_0", 32, 22), ("q5_1", 32, 24),
    ("q8_0", 32, 34), ("q8_1", 32, 36), ("q2_K", 256, 84), ("q3_K", 256, 110), ("q4_K", 256, 144), ("q5_K", 256, 176),
    ("q6_K", 256, 210), ("q8_K", 256, 292), ("iq2_xxs", 256, 66), ("iq2_xs", 256, 74), ("iq3_xxs", 256, 98),
    ("iq1_s", 256, 50), ("iq4_nl", 32, 18), ("iq3_s", 256, 110), ("iq2_s", 256, 82), ("iq4_xs", 256, 136),
    ("i8", 1, 1), ("i16", 1, 2), ("i32", 1, 4), ("i64", 1, 8), ("f64", 1, 8), ("iq1_m", 256, 56), ("bf16", 1, 2),
    ("tq1_0", 256, 54), ("tq2_0", 256, 66), ("mxfp4", 32, 17), ("nvfp4", 64, 36), ("q1_0", 128, 18), ("q2_0", 64, 18),
)  # fmt: skip
INTEGER_TYPES = ("i8", "i16", "i32", "i64")


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def assert_same_bits(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    wrong = np.flatnonzero(bits(found.ravel()) != bits(expected.ravel()))
    assert wrong.size == 0, (
        f"{wrong.size} of {found.size} values differ, first at {wrong[0]}: "
        f"{found.ravel()[wrong[0]]!r}, expected {expected.ravel()[wrong[0]]!r}"
    )


def test_types_are_those_of_the_format_in_the_order_of_their_ids() -> None:
    assert [name for name in type_names if name] == [name for name, _, _ in FORMATS]


@pytest.mark.parametrize(("name", "block_values", "block_bytes"), FORMATS)
def test_block_has_the_size_of_the_format(name: str, block_values: int, block_bytes: int) -> None:
    if name in INTEGER_TYPES:
        with pytest.raises(InvalidArgument, match=f"{name} holds integers"):
            dequantize(name, bytes(block_bytes), block_values)
        return
    assert dequantize(name, bytes(3 * block_bytes), 3 * block_values).shape == (3 * block_values,)
    for n_bytes in (3 * block_bytes - 1, 3 * block_bytes + 1, 0):
        with pytest.raises(InvalidArgument):
            dequantize(name, bytes(n_bytes), 3 * block_values)


@pytest.mark.parametrize("name", VECTOR_TYPES)
def test_blocks_decode_as_in_the_stored_vectors(name: str) -> None:
    blocks, values = VECTORS[f"blocks/{name}"], VECTORS[f"values/{name}"]
    assert_same_bits(dequantize(name, blocks.tobytes(), values.size), values)


def test_stored_vectors_cover_every_block_format() -> None:
    without_oracle = {"q8_1", "q8_K"}  # activation formats: formulas below
    assert set(VECTOR_TYPES) | without_oracle == {name for name, block_values, _ in FORMATS if block_values > 1}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in VECTOR_TYPES if name not in ("q1_0", "q2_0")])
def test_random_blocks_decode_as_in_the_gguf_package(name: str, seed: int) -> None:
    quant_type = gguf.GGMLQuantizationType[name.upper()]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
    rng = np.random.default_rng([seed, quant_type])
    blocks = rng.integers(0, 256, (200, block_bytes), dtype=np.uint8)
    if name == "nvfp4":
        blocks[:, :4] &= 0x7F  # bit 7 of a scale is unused
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(blocks, quant_type)
    # Any 16 bits may be a scale: blocks with infinite or NaN scales are left out, NaN payloads are not specified.
    finite = np.isfinite(values).all(axis=1)
    assert finite.sum() > 100
    assert_same_bits(dequantize(name, blocks[finite].tobytes(), int(finite.sum()) * block_values), values[finite])


def test_q8_1_decodes_by_its_formula() -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (8, 36), dtype=np.uint8)
    scale = rng.normal(0, 1, 8).astype(np.float16)
    blocks[:, :2] = scale.view(np.uint8).reshape(8, 2)
    expected = blocks[:, 4:].view(np.int8).astype(np.float32) * scale.astype(np.float32)[:, None]
    assert_same_bits(dequantize("q8_1", blocks.tobytes(), 8 * 32), expected)


def test_q8_k_decodes_by_its_formula() -> None:
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (8, 292), dtype=np.uint8)
    scale = rng.normal(0, 1, 8).astype(np.float32)
    blocks[:, :4] = scale.view(np.uint8).reshape(8, 4)
    expected = scale[:, None] * blocks[:, 4:260].view(np.int8).astype(np.float32)
    assert_same_bits(dequantize("q8_K", blocks.tobytes(), 8 * 256), expected)


def test_every_f16_decodes_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    found = dequantize("f16", halves.tobytes(), halves.size)
    expected = halves.view(np.float16).astype(np.float32)
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert_same_bits(found[~is_nan], expected[~is_nan])


def test_every_bf16_decodes_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    assert_same_bits(
        dequantize("bf16", halves.tobytes(), halves.size), (halves.astype(np.uint32) << 16).view(np.float32)
    )


def test_f32_and_f64_decode_to_the_nearest_f32() -> None:
    wide = np.array([0.0, -0.0, 1 / 3, 1e-45, 1e-310, -3.4e38, 2.0**24 + 1, np.inf], np.float64)
    assert_same_bits(dequantize("f64", wide.tobytes(), wide.size), wide.astype(np.float32))
    narrow = wide.astype(np.float32)
    assert_same_bits(dequantize("f32", narrow.tobytes(), narrow.size), narrow)


# Codebook type: rows, digit values, check sums (sum, exclusive or, last) of the codes, as published with the format.
CODEBOOKS = {
    "iq2_xxs": (256, (8, 25, 43), 3697703, 973, 43268),
    "iq2_xs": (512, (8, 25, 43), 8004683, 317, 43690),
    "iq2_s": (1024, (8, 25, 43), 16519059, 40703, 43690),
    "iq3_xxs": (256, (4, 12, 20, 28, 36, 44, 52, 62), 391138, 628, 3992),
    "iq3_s": (512, (1, 3, 5, 7, 9, 11, 13, 15), 777331, 3087, 4032),
    "iq1_s": (2048, (-1, 0, 1), 44428132, 31226, 43690),
    "iq1_m": (2048, (-1, 0, 1), 44428132, 31226, 43690),
}


def codebook_block(name: str, first_row: int) -> bytes:
    """A block with positive signs and the least scale whose groups select consecutive rows from `first_row`."""
    one = np.float16(1).tobytes()
    n_groups = 64 if name.startswith("iq3") else 32
    rows = np.arange(first_row, first_row + n_groups)
    low, high = (rows & 255).astype(np.uint8), rows >> 8
    if name == "iq2_xxs":
        return one + b"".join(low[4 * b : 4 * b + 4].tobytes() + bytes(4) for b in range(8))
    if name == "iq2_xs":
        return one + rows.astype("<u2").tobytes() + bytes(8)
    if name == "iq2_s":
        return one + low.tobytes() + bytes(32) + np.packbits(_bits(high, 2), bitorder="little").tobytes() + bytes(8)
    if name == "iq3_xxs":
        return one + low.tobytes() + bytes(32)
    if name == "iq3_s":
        return one + low.tobytes() + np.packbits(_bits(high, 1), bitorder="little").tobytes() + bytes(36)
    if name == "iq1_s":
        words = (high.reshape(8, 4) << np.array([0, 3, 6, 9])).sum(axis=1)
        return one + low.tobytes() + words.astype("<u2").tobytes()
    nibbles = np.packbits(_bits(high, 4), bitorder="little").tobytes()
    return low.tobytes() + nibbles + np.array([0, 0, 0xC000, 0x3000], "<u2").tobytes()  # scale 0x3C00 = 1


def _bits(values: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    return (values[:, None] >> np.arange(width) & 1).astype(np.uint8).ravel()


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebook_has_its_published_check_sums(name: str) -> None:
    n_rows, levels, code_sum, code_xor, last_code = CODEBOOKS[name]
    row_values = 4 if name.startswith("iq3") else 8
    rows_per_block = 256 // row_values
    blocks = b"".join(codebook_block(name, row) for row in range(0, n_rows, rows_per_block))
    values = dequantize(name, blocks, n_rows * row_values).astype(np.float64)
    scale = {"iq2": 0.125, "iq3_xxs": 0.25}.get(name if name == "iq3_xxs" else name[:3], 1.0)
    shift = 0.125 if name.startswith("iq1") else 0.0
    digits = np.searchsorted(levels, values / scale - shift).reshape(n_rows, row_values)
    assert np.array_equal(np.asarray(levels)[digits] * scale + shift * scale, values.reshape(n_rows, row_values))
    codes = (digits << np.arange(row_values) * (3 if row_values == 4 else 2)).sum(axis=1)
    assert np.all(np.diff(codes) > 0)
    assert (int(codes.sum()), int(np.bitwise_xor.reduce(codes)), int(codes[-1])) == (code_sum, code_xor, last_code)


@pytest.mark.parametrize("name", ["Q4_K", "q4_k", "Q4_k"])
def test_type_names_are_matched_in_any_case(name: str) -> None:
    blocks, values = VECTORS["blocks/q4_K"], VECTORS["values/q4_K"]
    assert_same_bits(dequantize(name, blocks.tobytes(), values.size), values)


@pytest.mark.parametrize("name", ["", "q4", "q4_2", "q4_K_M", "q4_0 "])
def test_unknown_type_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        dequantize(name, b"", 0)


@pytest.mark.parametrize("n_values", [-32, 1, 31, 33])
def test_part_of_a_block_is_refused(n_values: int) -> None:
    with pytest.raises(InvalidArgument):
        dequantize("q8_0", bytes(34), n_values)


FILE_TYPE_LABELS = {
    0: "all F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K - Medium",
    11: "Q3_K - Small", 12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium",
    16: "Q5_K - Small", 17: "Q5_K - Medium", 18: "Q6_K", 19: "IQ2_XXS - 2.0625 bpw", 20: "IQ2_XS - 2.3125 bpw",
    21: "Q2_K - Small", 22: "IQ3_XS - 3.3 bpw", 23: "IQ3_XXS - 3.0625 bpw", 24: "IQ1_S - 1.5625 bpw",
    25: "IQ4_NL - 4.5 bpw", 26: "IQ3_S - 3.4375 bpw", 27: "IQ3_S mix - 3.66 bpw", 28: "IQ2_S - 2.5 bpw",
    29: "IQ2_M - 2.7 bpw", 30: "IQ4_XS - 4.25 bpw", 31: "IQ1_M - 1.75 bpw", 32: "BF16", 36: "TQ1_0 - 1.69 bpw ternary",
    37: "TQ2_0 - 2.06 bpw ternary", 38: "MXFP4 MoE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0", 4: "unknown, may not work",
    33: "unknown, may not work", 9999: "unknown, may not work",
}  # fmt: skip


def label_of(path: Path) -> str:
    model = Model(path)
    try:
        return model.ftype_label
    finally:
        model.close()


@pytest.mark.parametrize("file_type", FILE_TYPE_LABELS)
def test_file_type_has_its_label(tmp_path: Path, file_type: int) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", n_layer=1, metadata={"general.file_type": file_type})
    assert label_of(path) == FILE_TYPE_LABELS[file_type]


@pytest.mark.parametrize(
    ("weight_type", "label"), [("f32", "all F32"), ("f16", "F16"), ("q4_0", "Q4_0"), ("q5_1", "Q5_1")]
)
def test_missing_file_type_is_guessed_from_the_most_frequent_type(tmp_path: Path, weight_type: str, label: str) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", weight_type=weight_type)
    path.write_bytes(path.read_bytes().replace(b"general.file_type", b"general.other_key"))
    assert label_of(path) == f"(guessed) {label}"
