"""Makes encode_iq_vectors.npz: rows of many kinds and what ggml's quantisers make of them, for the codebook types.

    pip install libggml-python==0.20.2.post1 numpy
    python make_encode_iq_vectors.py

Arrays: ``rows`` float32 [N, COLUMNS]; ``importance/W`` float32 [COLUMNS]; ``blocks/T/W`` uint8 [N, bytes per row] of
type T under importance W, ``none`` being no importance. Takes minutes: the oracle prepares its IQ1 tables slowly.

Two faults of the oracle are avoided: IQ3_S misplaces the bytes that follow a sub-block of zeros, and a quotient of more
than 2^22 rounds to anything, which happens where importance is zero at all values of a sub-block but zeros.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SEED = 20261003
COLUMNS = 512
OUTPUT = Path(__file__).with_name("encode_iq_vectors.npz")

# Type name: (type id, bytes per 256 values, whether it needs importance).
FORMATS = {
    "iq1_s": (19, 50, True),
    "iq1_m": (29, 56, False),
    "iq2_xxs": (16, 66, True),
    "iq2_xs": (17, 74, True),
    "iq2_s": (22, 82, False),
    "iq3_xxs": (18, 98, False),
    "iq3_s": (21, 110, False),
}


def make_rows(rng: np.random.Generator) -> NDArray[np.float32]:
    def normal() -> NDArray[np.float64]:
        return rng.normal(0, 1, COLUMNS)

    sparse = np.where(rng.random(COLUMNS) < 0.1, normal(), 0)
    sparse[::8] = rng.normal(0, 0.1, COLUMNS // 8)
    rows = [
        *(normal() * scale for scale in (1, 1, 0.02, 0.02, 1e-4, 1e-7, 1e-10, 1e-14, 1e4)),
        *(rng.laplace(0, 0.02, COLUMNS) for _ in range(3)),
        *(rng.standard_t(2, COLUMNS) for _ in range(3)),
        *(normal() * np.exp(rng.normal(0, sigma, COLUMNS)) for sigma in (1, 2)),
        rng.uniform(0, 1, COLUMNS),
        -rng.uniform(0, 1, COLUMNS) - 3,
        sparse,
        np.zeros(COLUMNS),
        np.full(COLUMNS, 0.75),
        np.full(COLUMNS, -0.3),
        np.linspace(-1, 1, COLUMNS),
        np.tile([0.5, -0.5], COLUMNS // 2),
        rng.integers(-3, 4, COLUMNS) * 0.25,
        np.where(np.arange(COLUMNS) == 77, 40.0, normal() * 0.01),
        np.where(np.arange(COLUMNS) < 256, 0, normal()),
    ]
    return np.array(rows, np.float32)


def load_libggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("needs the package libggml-python")
    library = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).rglob("libggml-base.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return library


def quantize(
    library: ctypes.CDLL, name: str, rows: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    type_id, block_bytes, _ = FORMATS[name]
    blocks = np.zeros((len(rows), COLUMNS // 256 * block_bytes), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    size = library.ggml_quantize_chunk(type_id, rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, weights)
    if size != blocks.size:
        raise SystemExit(f"{name}: the oracle wrote {size} bytes, expected {blocks.size}")
    return blocks


def main() -> None:
    library = load_libggml()
    rng = np.random.default_rng(SEED)
    rows = make_rows(rng)
    importance = {
        "positive": rng.gamma(0.7, 1, COLUMNS).astype(np.float32),
        "some_zero": np.where(rng.random(COLUMNS) < 0.2, 0, rng.gamma(0.7, 1, COLUMNS)).astype(np.float32),
    }
    arrays = {"rows": rows, **{f"importance/{kind}": weights for kind, weights in importance.items()}}
    for name, (_, _, needs_importance) in FORMATS.items():
        for kind, weights in importance.items():
            arrays[f"blocks/{name}/{kind}"] = quantize(library, name, rows, weights)
        if not needs_importance:
            arrays[f"blocks/{name}/none"] = quantize(library, name, rows, None)
    np.savez_compressed(OUTPUT, **arrays)
    print(f"{OUTPUT.name}: {len(arrays)} arrays, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
