"""Makes decode_vectors.npz: random blocks of every block format and what other implementations decode them to.

    pip install gguf==0.19.0 libggml-python==0.20.2.post1 numpy
    python make_vectors.py

Both oracles decode each type they know; where both know it they must agree bit for bit, else nothing is written.
Arrays, T being a type name such as q4_K: ``blocks/T`` uint8 [N_BLOCKS, bytes per block], ``values/T`` float32
[N_BLOCKS, values per block].
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

SEED = 20261001
N_BLOCKS = 6
OUTPUT = Path(__file__).with_name("decode_vectors.npz")

# Type name: (values per block, bytes per block, byte offsets of f16 fields). Those fields get finite numbers: the
# payload that a NaN decodes to differs between machines.
FORMATS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "q4_0": (32, 18, (0,)),
    "q4_1": (32, 20, (0, 2)),
    "q5_0": (32, 22, (0,)),
    "q5_1": (32, 24, (0, 2)),
    "q8_0": (32, 34, (0,)),
    "q2_K": (256, 84, (80, 82)),
    "q3_K": (256, 110, (108,)),
    "q4_K": (256, 144, (0, 2)),
    "q5_K": (256, 176, (0, 2)),
    "q6_K": (256, 210, (208,)),
    "iq2_xxs": (256, 66, (0,)),
    "iq2_xs": (256, 74, (0,)),
    "iq3_xxs": (256, 98, (0,)),
    "iq1_s": (256, 50, (0,)),
    "iq4_nl": (32, 18, (0,)),
    "iq3_s": (256, 110, (0,)),
    "iq2_s": (256, 82, (0,)),
    "iq4_xs": (256, 136, (0,)),
    "iq1_m": (256, 56, ()),
    "tq1_0": (256, 54, (52,)),
    "tq2_0": (256, 66, (64,)),
    "mxfp4": (32, 17, ()),
    "nvfp4": (64, 36, ()),
    "q1_0": (128, 18, (0,)),
    "q2_0": (64, 18, (0,)),
}


def random_blocks(rng: np.random.Generator, name: str) -> NDArray[np.uint8]:
    """Any bits, but finite scales; the first block's f16 fields are subnormal, the last one's zero."""
    _, block_bytes, half_offsets = FORMATS[name]
    blocks = rng.integers(0, 256, (N_BLOCKS, block_bytes), dtype=np.uint8)
    for offset in half_offsets:
        halves = (rng.normal(0, 1, N_BLOCKS) * 2.0 ** rng.integers(-14, 4, N_BLOCKS)).astype(np.float16)
        halves[0], halves[-1] = 3e-7, -0.0
        blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(N_BLOCKS, 2)
    if name == "iq1_m":  # the top nibble of the last byte holds the sign and the upper exponent bits of its scale
        blocks[:, 55] = blocks[:, 55] & 0x0F | rng.choice([0x00, 0x10, 0x30, 0x80, 0xB0], N_BLOCKS).astype(np.uint8)
    if name == "mxfp4":
        blocks[:, 0] = [0, 1, 2, 118, 127, 251]
    if name == "nvfp4":  # bit 7 of a scale is unused; oracles disagree on what it does
        blocks[:, :4] &= 0x7F
        blocks[0, :4] = [0x00, 0x01, 0x7E, 0x7F]
    return blocks


def decode_with_gguf(name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32] | None:
    quant_type = gguf.GGMLQuantizationType.__members__.get(name.upper())
    if quant_type is None:
        return None
    try:
        return gguf.quants.dequantize(blocks, quant_type).reshape(N_BLOCKS, -1)
    except NotImplementedError:
        return None


def load_libggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("needs the package libggml-python")
    return ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).rglob("libggml-base.so"))))


def decode_with_libggml(library: ctypes.CDLL, name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = np.zeros((N_BLOCKS, FORMATS[name][0]), np.float32)
    function = getattr(library, f"dequantize_row_{name}")
    function.restype = None
    function(
        blocks.ctypes.data_as(ctypes.c_void_p), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.size)
    )
    return values


def main() -> None:
    library = load_libggml()
    arrays = {}
    for index, name in enumerate(FORMATS):
        blocks = random_blocks(np.random.default_rng([SEED, index]), name)
        values = decode_with_libggml(library, name, blocks)
        second_opinion = decode_with_gguf(name, blocks)
        if second_opinion is not None and not np.array_equal(values.view(np.uint32), second_opinion.view(np.uint32)):
            raise SystemExit(f"{name}: the two oracles decode differently")
        arrays[f"blocks/{name}"], arrays[f"values/{name}"] = blocks, values
        print(f"{name:8} {'both oracles agree' if second_opinion is not None else 'one oracle'}")
    np.savez_compressed(OUTPUT, **arrays)
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
