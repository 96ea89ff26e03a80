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
# Types whose codecs are tested with fewer sizes: the kernels are the same.
RARE_HALVES: dict[str, tuple[tuple[int, float, float], ...]] = {
    "IQ2_XXS": ((0, -0.001, 0.001),),
    "IQ2_XS": ((0, -0.001, 0.001),),
    "IQ2_S": ((0, -0.001, 0.001),),
    "IQ3_XXS": ((0, -0.0003, 0.0003),),
    "IQ3_S": ((0, -0.0003, 0.0003),),
    "IQ1_S": ((0, -0.01, 0.01),),
    "IQ1_M": (),
    "NVFP4": (),
    "Q1_0": ((0, -0.1, 0.1),),
    "Q2_0": ((0, -0.1, 0.1),),
    "TQ2_0": ((64, -0.1, 0.1),),
}
RARE_TYPES = tuple(RARE_HALVES)
OWN_SIZES = {
    "F16": (32, 64),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
}  # values and bytes of blocks that `gguf` does not have


def block_size(type_name: str) -> tuple[int, int]:
    """(values, bytes) of a block."""
    return OWN_SIZES.get(type_name) or GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]


def _bits(blocks: NDArray[np.uint8], width: int) -> NDArray[np.float64]:
    """Codes of `width` bits, the lowest first, in order."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (blocks[:, :, None] >> shifts & (1 << width) - 1).reshape(len(blocks), -1).astype(np.float64)


def _decode(type_name: str, packed: NDArray[np.uint8]) -> NDArray[np.float64]:
    if type_name not in ("Q1_0", "Q2_0"):
        return dequantize(packed, GGMLQuantizationType[type_name]).astype(np.float64)
    blocks = packed.reshape(-1, 18)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    codes = _bits(blocks[:, 2:], 1) * 2 - 1 if type_name == "Q1_0" else _bits(blocks[:, 2:], 2) - 1
    return (d * codes).reshape(len(packed), -1)


def random_rows(
    type_name: str, rows: int, features: int, source: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """A matrix [rows, features] as the file holds it, [rows, bytes], and decoded."""
    values, size = block_size(type_name)
    if type_name == "F16":
        halves = (source.standard_normal((rows, features)) * 0.05).astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float64)
    blocks = source.integers(0, 256, (rows * features // values, size), dtype=np.uint8)
    for at, least, most in (HALVES | RARE_HALVES)[type_name]:
        scales = source.uniform(least, most, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = source.integers(117, 125, len(blocks))
    if type_name == "NVFP4":
        blocks[:, :4] = source.integers(0, 128, (len(blocks), 4)) // 2  # scales up to 1
        blocks[::7, 0] = 127  # which is 0
    if type_name == "IQ1_M":  # a half of which each of four words has 4 bits, the upper ones
        words = blocks[:, 48:].view(np.uint16)
        bits = source.uniform(-0.01, 0.01, len(blocks)).astype(np.float16).view(np.uint16)
        words &= 0x0FFF
        words |= (bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12
    packed = blocks.reshape(rows, -1)
    return packed, _decode(type_name, packed)
