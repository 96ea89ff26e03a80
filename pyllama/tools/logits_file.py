"""Files of log-probabilities: what one model says about a text, kept to compare others with it.

Layout, little-endian: `_logits_`; i32 tokens per chunk, vocabulary, chunks; i32 tokens [chunks, n_ctx]; then a row for
each scored position of each chunk: f32 scale, f32 minimum, u16 codes [vocabulary, made even]. A code q stands for
ln p = scale * q + minimum. Values more than 16 below the largest are raised to that.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import GgufError, InvalidArgument
from pyllama.replaced_file import replaced_file

MAGIC = b"_logits_"
DEPTH = 16.0  # nats below the largest logit that are told apart
LEVELS = 65535


def row_type(n_vocab: int) -> np.dtype[np.void]:
    return np.dtype([("scale", "<f4"), ("minimum", "<f4"), ("codes", "<u2", n_vocab + n_vocab % 2)])


def encode_rows(logits: NDArray[np.float32], log_sums: NDArray[np.float64]) -> NDArray[np.void]:
    """Rows of a file from logits [rows, n_vocab] with their `log_sum_exp`."""
    n_rows, n_vocab = logits.shape
    largest = logits.max(axis=1)
    lowest = np.maximum(logits.min(axis=1), largest - np.float32(DEPTH))
    scale = (largest - lowest) / np.float32(LEVELS)
    per_code = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    rows = np.zeros(n_rows, row_type(n_vocab))
    rows["scale"], rows["minimum"] = scale, lowest - log_sums
    for row, values in enumerate(logits):  # row by row: the temporaries stay in the cache
        codes = np.rint((values - lowest[row]) * per_code[row])
        rows["codes"][row, :n_vocab] = np.clip(codes, 0, LEVELS)
    return rows


def decode_rows(rows: NDArray[np.void], n_vocab: int) -> NDArray[np.float32]:
    """ln p [rows, n_vocab]."""
    codes = rows["codes"][:, :n_vocab].astype(np.float32)
    decoded: NDArray[np.float32] = codes * rows["scale"][:, None] + rows["minimum"][:, None]
    return decoded


class LogitsHeader(NamedTuple):
    n_vocab: int
    chunks: NDArray[np.int32]  # [chunks, n_ctx]

    @property
    def n_ctx(self) -> int:
        return int(self.chunks.shape[1])

    @property
    def rows_per_chunk(self) -> int:
        return self.n_ctx - 1 - self.n_ctx // 2


@contextmanager
def saved_rows(path: Path | str, header: LogitsHeader) -> Iterator[Callable[[NDArray[np.void]], object]]:
    """The function given writes further rows; the file appears when the context ends normally."""
    with replaced_file(path) as file:
        file.write(MAGIC + struct.pack("<3i", header.n_ctx, header.n_vocab, len(header.chunks)))
        file.write(header.chunks.astype("<i4").tobytes())
        yield lambda rows: file.write(rows.tobytes())


class LogitsReader:
    """Rows are read as they are asked for, in file order. Raises `GgufError` for a file that is not whole."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file = self._path.open("rb")
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise
        self._row_type = row_type(self.header.n_vocab)

    def _read_header(self) -> LogitsHeader:
        size = os.fstat(self._file.fileno()).st_size
        start = self._file.read(len(MAGIC) + 12)
        if len(start) < len(MAGIC) + 12 or start[: len(MAGIC)] != MAGIC:
            raise GgufError(f"{self._path}: not a file of log-probabilities")
        n_ctx, n_vocab, n_chunks = struct.unpack("<3i", start[len(MAGIC) :])
        if n_ctx < 3 or n_vocab < 1 or n_chunks < 1:
            raise GgufError(f"{self._path}: {n_chunks} chunks of {n_ctx} tokens, vocabulary of {n_vocab}")
        n_rows = n_chunks * (n_ctx - 1 - n_ctx // 2)
        expected = len(start) + 4 * n_chunks * n_ctx + n_rows * (8 + 2 * (n_vocab + n_vocab % 2))
        if size < expected:
            raise GgufError(f"{self._path}: {size} bytes, expected {expected}: the file was not written to its end")
        tokens = np.frombuffer(self._file.read(4 * n_chunks * n_ctx), "<i4").astype(np.int32)
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise GgufError(f"{self._path}: holds tokens outside its vocabulary of {n_vocab}")
        return LogitsHeader(n_vocab, tokens.reshape(n_chunks, n_ctx))

    def read(self, n_rows: int) -> NDArray[np.void]:
        return np.frombuffer(self._file.read(n_rows * self._row_type.itemsize), self._row_type)

    def __enter__(self) -> "LogitsReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def check_vocabulary(header: LogitsHeader, n_vocab: int) -> None:
    if header.n_vocab != n_vocab:
        raise InvalidArgument(f"the saved log-probabilities are of {header.n_vocab} tokens, the model has {n_vocab}")
