"""Writes importance matrices in the older binary form (`.dat`), which keeps no count per expert."""

import struct
from pathlib import Path

import numpy as np

from pyllama.errors import InvalidArgument
from pyllama.replaced_file import replaced_file

from .imatrix import ImportanceMatrix


def write_legacy_imatrix(path: Path | str, matrix: ImportanceMatrix) -> None:
    """The file appears when it is complete. A matrix that saw no token counts every column alike.

    Raises `InvalidArgument` without a chunk size, in which the form counts.
    """
    if matrix.chunk_size < 1:
        raise InvalidArgument("the dat form counts in chunks, whose size the given files do not tell")
    parts = [struct.pack("<i", len(matrix.entries))]
    for name, (in_sum2, counts) in sorted(matrix.entries.items()):
        n_calls = max(round(float(counts.max()) / matrix.chunk_size), 1)
        means = np.ones_like(in_sum2, np.float32)
        np.divide(in_sum2, counts[:, None], out=means, where=counts[:, None] > 0)
        data = name.encode("utf-8", "surrogateescape")
        parts += [struct.pack("<i", len(data)), data, struct.pack("<2i", n_calls, means.size)]
        parts.append((means * np.float32(n_calls)).astype("<f4").tobytes())
    dataset = (matrix.datasets[-1] if matrix.datasets else "").encode("utf-8", "surrogateescape")
    parts += [struct.pack("<2i", matrix.chunk_count, len(dataset)), dataset]
    with replaced_file(path) as file:
        file.write(b"".join(parts))
