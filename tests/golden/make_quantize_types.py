"""Writes quantize_types.npz: the types that llama.cpp's quantiser chooses for models of many shapes.

python tests/golden/make_quantize_types.py LLAMA_QUANTIZE    # build b11434 made the stored file
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pyllama._engine import type_names
from pyllama.quantize.file_types import FILE_TYPES
from pyllama.quantize.imatrix import Importance, ImportanceMatrix, write_imatrix
from support.quantize_shapes import ModelShape, all_shapes, tensors_of, write_model

REFUSED = 255  # in the place of every type, for a file type that the model's rows do not fit

_LINE = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) .* type = +(\S+), size = [^(\n]*(?:\((\S+)\))?$", re.MULTILINE)
TARGET = Path(__file__).with_name("quantize_types.npz")


def chosen_types(program: str, model: Path, file_type: str, imatrix: Path | None) -> list[str]:
    """Type of each tensor in the order of processing; empty where the quantiser refuses."""
    arguments = ["--imatrix", str(imatrix)] if imatrix else []
    done = subprocess.run([program, "--dry-run", *arguments, str(model), file_type], capture_output=True, text=True)
    if done.returncode and "no tensor type fallback" not in done.stderr:
        raise RuntimeError(done.stderr)
    return [] if done.returncode else [target or source for _, source, target in _LINE.findall(done.stderr)]


def table_of(program: str, shape: ModelShape, folder: Path) -> np.ndarray:
    """[file type, without and with imatrix, tensor] indices into `type_names`."""
    model, imatrix = folder / f"{shape.key}.gguf", folder / "imatrix.gguf"
    write_model(model, shape)

    def rows() -> Iterator[list[int]]:
        for file_type in FILE_TYPES:
            for used in (None, imatrix):
                types = [type_names.index(name) for name in chosen_types(program, model, file_type.name, used)]
                yield types or [REFUSED] * len(tensors_of(shape))

    try:
        return np.asarray(list(rows()), np.uint8).reshape(len(FILE_TYPES), 2, -1)
    finally:
        model.unlink()


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        some = Importance(np.ones((1, 32), np.float32), np.ones(1, np.float32))
        write_imatrix(folder / "imatrix.gguf", ImportanceMatrix({"unused.weight": some}, ["none"], 1, 512))
        shapes = all_shapes()
        tables = list(pool.map(lambda shape: table_of(sys.argv[1], shape, folder), shapes))
    np.savez_compressed(TARGET, **{shape.key: table for shape, table in zip(shapes, tables, strict=True)})


if __name__ == "__main__":
    main()
