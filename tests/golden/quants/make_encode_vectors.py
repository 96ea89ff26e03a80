"""Makes encode_vectors.npz: rows of many kinds and the blocks that the reference quantisers make of them.

    pip install libggml-python==0.20.2.post1 numpy
    python make_encode_vectors.py

Arrays, T being a type name such as q4_K: ``rows`` float32 [rows, COLUMNS], ``importance`` float32 [COLUMNS],
``plain/T`` uint8 [rows, bytes per row] without importance weights (where the type can do without), ``weighted/T`` with.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from make_vectors import FORMATS, load_libggml
from numpy.typing import NDArray

SEED = 20261129
COLUMNS = 512
OUTPUT = Path(__file__).with_name("encode_vectors.npz")

TYPE_IDS = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_K": 10, "q3_K": 11, "q4_K": 12, "q5_K": 13, "q6_K": 14,
    "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20, "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23,
    "iq1_m": 29, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40, "q1_0": 41, "q2_0": 42,
}  # fmt: skip


def make_rows(rng: np.random.Generator) -> NDArray[np.float32]:
    """Each row is another kind of data; the last ones are the edges of the searches."""
    normal, index = rng.normal(0, 1, COLUMNS), np.arange(COLUMNS)
    rows = (
        normal * 0.02,
        rng.standard_t(2, COLUMNS),
        -rng.uniform(0, 1, COLUMNS) - 3,
        np.where(index == 77, 40.0, normal * 0.01),
        normal * np.exp(rng.normal(0, 2, COLUMNS)),
        np.where(rng.random(COLUMNS) < 0.95, 0, normal),
        rng.choice([-0.5, 0.0, 0.5], COLUMNS),
        np.linspace(-1, 1, COLUMNS),
        np.where(index < 256, -0.0, 0.75),
        normal * 1e-7,
    )
    return np.array(rows, np.float32)


def encode(
    library: ctypes.CDLL, name: str, rows: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    """Blocks of `rows`, by the C library."""
    values, block_bytes, _ = FORMATS[name]
    blocks = np.zeros((rows.shape[0], rows.shape[1] // values * block_bytes), np.uint8)
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    weights = None if importance is None else importance.ctypes.data
    written = function(TYPE_IDS[name], rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, weights)
    if written != blocks.size:
        raise SystemExit(f"{name}: {written} bytes written, expected {blocks.size}")
    return blocks


def main() -> None:
    library = load_libggml()
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    rng = np.random.default_rng(SEED)
    rows, importance = make_rows(rng), rng.gamma(0.7, 1, COLUMNS).astype(np.float32)
    arrays: dict[str, NDArray[np.generic]] = {"rows": rows, "importance": importance}
    for name, type_id in TYPE_IDS.items():
        if not library.ggml_quantize_requires_imatrix(type_id):
            arrays[f"plain/{name}"] = encode(library, name, rows, None)
        arrays[f"weighted/{name}"] = encode(library, name, rows, importance)
    np.savez_compressed(OUTPUT, **arrays)
    print(f"{OUTPUT.name}: {len(arrays)} arrays, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
