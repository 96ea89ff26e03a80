"""Random weights in every block format: all codes occur, scales stay finite."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

# Where the f16 scales of a block are: (byte, least, most).
HALVES: dict[str, tuple[tuple[int, float, float], ...]] = {
    "Q8_0": ((0, -0.02, 0.02),),
    "Q4_0": ((0, -0.1, 0.1),),
    "Q4_1": ((0, 0.01, 0.1), (2, -0.7, 0.1)),
    "Q5_0": ((0, -0.1, 0.1),),
    "Q5_1": ((0, 0.01, 0.05), (2, -0.7, 0.1)),
    "Q2_K": ((80, 0.01, 0.1), (82, 0.01, 0.1)),
    "Q3_K": ((108, -0.01, 0.01),),
    "Q4_K": ((0, 0.0005, 0.005), (2, 0.001, 0.02)),
    "Q5_K": ((0, 0.0005, 0.003), (2, 0.001, 0.02)),
    "Q6_K": ((208, -0.001, 0.001),),
    "IQ4_NL": ((0, -0.01, 0.01),),
    "IQ4_XS": ((0, -0.001, 0.001),),
    "MXFP4": (),
    "F16": (),
}
TYPES = tuple(HALVES)


def block_size(type_name: str) -> tuple[int, int]:
    """(values, bytes) of a block."""
    return (32, 64) if type_name == "F16" else GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]


def random_rows(
    type_name: str, rows: int, features: int, source: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """A matrix [rows, features] as the file holds it, [rows, bytes], and decoded."""
    values, size = block_size(type_name)
    if type_name == "F16":
        halves = (source.standard_normal((rows, features)) * 0.05).astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float64)
    blocks = source.integers(0, 256, (rows * features // values, size), dtype=np.uint8)
    for at, least, most in HALVES[type_name]:
        scales = source.uniform(least, most, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = source.integers(117, 125, len(blocks))
    packed = blocks.reshape(rows, -1)
    return packed, dequantize(packed, GGMLQuantizationType[type_name]).astype(np.float64)
