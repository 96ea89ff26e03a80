"""Importance matrices: per weight matrix, how strongly each input column is used. Both file forms are read, GGUF is
written.

For a weight applied as W x, the importance of column c is the mean of x_c² over the tokens seen.
"""

import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import GgufError, InvalidArgument
from pyllama.gguf import GgufFile, GgufWriter, KeyValue, TensorSpec

_IN_SUM2, _COUNTS = ".in_sum2", ".counts"


class Importance(NamedTuple):
    in_sum2: NDArray[np.float32]  # [n_mat, ne0] sums of x²; n_mat > 1 for stacks of experts
    counts: NDArray[np.float32]  # [n_mat] tokens seen


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    entries: dict[str, Importance]  # by the name of the weight
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    chunk_size: int = 0  # tokens per chunk

    def weights(self, name: str, ne0: int, ne2: int) -> NDArray[np.float32] | None:
        """[ne2, ne0] mean squares for a weight of `ne2` matrices; None when there is no entry for it.

        A matrix that saw no token counts every column alike. Raises `InvalidArgument` when the entry has another size.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        if entry.in_sum2.size != ne0 * ne2:
            raise InvalidArgument(
                f"imatrix entry '{name}' has {entry.in_sum2.size} values, the tensor needs {ne0 * ne2} ({ne0} x {ne2})"
            )
        counts = entry.counts[:, None]
        means = np.divide(entry.in_sum2, counts, out=np.ones_like(entry.in_sum2), where=counts > 0)
        return means.reshape(ne2, ne0)

    def filtered(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> "ImportanceMatrix":
        """Only the entries whose names contain one of `include` (where given) and none of `exclude`."""
        kept = {
            name: entry
            for name, entry in self.entries.items()
            if (not include or any(part in name for part in include)) and not any(part in name for part in exclude)
        }
        return replace(self, entries=kept)


def read_imatrix(path: Path | str) -> ImportanceMatrix:
    """Raises `GgufError` for a file that is neither form, or whose values are not finite or negative."""
    path = Path(path)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    matrix = _read_gguf(path) if is_gguf else _read_legacy(path)
    if not matrix.entries:
        raise GgufError(f"{path}: no importance data")
    for name, entry in matrix.entries.items():
        for values in entry:
            if not np.isfinite(values).all() or (values < 0).any():
                raise GgufError(f"{path}: entry '{name}' holds values that are not finite or are negative")
    return matrix


def write_imatrix(path: Path | str, matrix: ImportanceMatrix) -> None:
    """Write the GGUF form; the file appears when it is complete."""
    key_values = [
        KeyValue("general.type", "string", "imatrix"),
        KeyValue("imatrix.datasets", "string[]", matrix.datasets),
        KeyValue("imatrix.chunk_count", "u32", matrix.chunk_count),
        KeyValue("imatrix.chunk_size", "u32", matrix.chunk_size),
    ]
    specs: list[TensorSpec] = []
    arrays: list[NDArray[np.float32]] = []
    for name, entry in sorted(matrix.entries.items()):
        n_mat, ne0 = entry.in_sum2.shape
        specs += [TensorSpec(name + _IN_SUM2, "f32", (ne0, n_mat)), TensorSpec(name + _COUNTS, "f32", (1, n_mat))]
        arrays += entry
    with GgufWriter(path, key_values, specs) as writer:
        for array in arrays:
            writer.write(np.ascontiguousarray(array, dtype="<f4"))


def _read_gguf(path: Path) -> ImportanceMatrix:
    with closing(GgufFile(path)) as file:
        return _matrix_of(file, path)


def _matrix_of(file: GgufFile, path: Path) -> ImportanceMatrix:
    metadata = file.metadata
    for key in ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"):
        if key not in metadata:
            raise GgufError(f"{path}: key '{key}' is missing, this is not an imatrix file")
    tensors = {info.name: info for info in file.tensors}

    def values(name: str) -> NDArray[np.float32]:
        info = tensors.get(name)
        if info is None or info.type_name != "f32":
            raise GgufError(f"{path}: '{name}' is {'missing' if info is None else info.type_name}, expected f32")
        return np.frombuffer(file.tensor_bytes(name), "<f4").astype(np.float32)

    names = dict.fromkeys(
        name.removesuffix(suffix) for name in tensors for suffix in (_IN_SUM2, _COUNTS) if name.endswith(suffix)
    )
    entries: dict[str, Importance] = {}
    for name in names:
        sums, counts = values(name + _IN_SUM2), values(name + _COUNTS)
        if not counts.size or not sums.size or sums.size % counts.size:
            raise GgufError(f"{path}: entry '{name}' has {sums.size} values for {counts.size} matrices")
        entries[name] = Importance(sums.reshape(counts.size, -1), counts)
    return ImportanceMatrix(
        entries,
        [str(text) for text in metadata["imatrix.datasets"]],
        int(metadata["imatrix.chunk_count"]),
        int(metadata["imatrix.chunk_size"]),
    )


def _read_legacy(path: Path) -> ImportanceMatrix:
    """The older binary form: int32 counts, names, and f32 values that cover all matrices of a tensor."""
    data = memoryview(path.read_bytes())
    position = 0

    def take(size: int, what: str) -> memoryview:
        nonlocal position
        if not 0 <= size <= len(data) - position:
            raise GgufError(f"{path}: not an imatrix file ({what} of {size} bytes at byte {position} of {len(data)})")
        position += size
        return data[position - size : position]

    def integer(what: str, minimum: int) -> int:
        (value,) = struct.unpack("<i", take(4, what))
        if value < minimum:
            raise GgufError(f"{path}: not an imatrix file ({what} is {value})")
        return int(value)

    entries: dict[str, Importance] = {}
    for _ in range(integer("number of entries", 1)):
        name = bytes(take(integer("length of a name", 0), "name")).decode("utf-8", "surrogateescape")
        n_calls = integer("number of calls", -(2**31))
        values = np.frombuffer(take(4 * integer("number of values", 1), "values"), "<f4").astype(np.float32)
        # Without a call count the values are means already.
        entries[name] = Importance(values[None, :], np.asarray([n_calls if n_calls > 0 else 1], np.float32))
    if position == len(data):
        return ImportanceMatrix(entries)
    chunk_count = integer("number of chunks", 0)
    dataset = bytes(take(integer("length of the dataset's name", 0), "dataset")).decode("utf-8", "surrogateescape")
    return ImportanceMatrix(entries, [dataset] if dataset else [], chunk_count)
