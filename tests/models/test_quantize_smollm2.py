"""A real model quantised: the types that llama.cpp chooses for it, and in each tensor the bytes of the C library.

Rows are independent, so a few rows of each tensor stand for all of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import type_traits
from pyllama.gguf import GgufFile, TensorInfo, TensorReader
from pyllama.quantize.pipeline import quantize_file

ROWS_PER_TENSOR = 6
N_LAYER = 30
MORE_BITS = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29}  # of V and the down projection in Q4_K_M

# Type of a block's tensors by name; token_embd is Q8_0 throughout: it doubles as output, and 576 is no multiple of 256.
Layers = Callable[[str, int], str]
EXPECTED: dict[str, Layers] = {
    "Q8_0": lambda name, layer: "q8_0",
    "Q4_0": lambda name, layer: "q4_0",
    "Q6_K": lambda name, layer: "q6_K" if name == "ffn_down" else "q8_0",
    "Q4_K_M": lambda name, layer: {
        "ffn_down": "q6_K" if layer in MORE_BITS else "q4_K",
        "attn_v": "q8_0" if layer in MORE_BITS else "q5_0",
    }.get(name, "q5_0"),
    "IQ4_XS": lambda name, layer: {"ffn_down": "q5_K" if layer < N_LAYER // 8 else "iq4_xs"}.get(name, "iq4_nl"),
}


@pytest.fixture(scope="module")
def reference() -> Callable[[str, NDArray[np.float32]], bytes]:
    """Encodes rows with the C library."""
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package libggml-python")
    library = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).rglob("libggml-base.so"))))
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def encode(type_name: str, rows: NDArray[np.float32]) -> bytes:
        blocks = np.zeros(rows.nbytes, np.uint8)
        size = function(type_traits[type_name].id, rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, None)
        return blocks[:size].tobytes()

    return encode


def expected_type(info: TensorInfo, file_type: str) -> str:
    if len(info.shape) == 1:
        return "f32"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", info.name)
    return EXPECTED[file_type](match[2], int(match[1])) if match else "q8_0"


@pytest.mark.parametrize(
    "file_type", ["Q8_0", "Q4_0", "Q4_K_M", "Q6_K", pytest.param("IQ4_XS", marks=pytest.mark.slow)]
)
def test_types_and_bytes_are_those_of_llama_cpp(
    smollm2_f16_path: Path, reference: Callable[[str, NDArray[np.float32]], bytes], file_type: str, tmp_path: Path
) -> None:
    target = tmp_path / "out.gguf"
    quantize_file(smollm2_f16_path, target, file_type)
    found = GgufFile(target)
    assert {info.name: info.type_name for info in found.tensors} == {
        info.name: expected_type(info, file_type) for info in found.tensors
    }
    rng = np.random.default_rng(5)
    with TensorReader(smollm2_f16_path) as source, TensorReader(target) as result:
        infos = {info.name: info for info in result.tensors}
        assert infos.keys() == {info.name for info in source.tensors}
        for original in source.tensors:
            info = infos[original.name]
            if len(original.shape) == 1:
                assert result.read(info, 0, info.n_bytes) == source.read(original, 0, original.n_bytes)
                continue
            columns, n_rows = original.shape
            row_bytes = info.n_bytes // n_rows
            for row in {0, n_rows - 1, *rng.integers(0, n_rows, ROWS_PER_TENSOR).tolist()}:
                values = np.frombuffer(source.read(original, row * columns * 2, columns * 2), "<f2")
                expected = reference(info.type_name, values.astype(np.float32).reshape(1, -1))
                assert result.read(info, row * row_bytes, row_bytes) == expected, f"{info.name}, row {row}"
