"""Reads the tensors of a checkpoint folder: safetensors files, one or several, with every header checked.

A file is: header length (u64), header (JSON: name -> dtype, shape, [begin, end] within the data), data.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import ModelError

from .json_files import read_json

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

# dtype -> bytes per element. Only the floating-point types of at least 16 bits can be converted.
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

FLOATS = ("F32", "F16", "BF16")
STORAGE: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "I64": np.dtype("<i8"),
}  # fmt: skip
"""Element type in which the values of a dtype are handed out. NumPy has no bf16: its bits come as u16."""


class StoredTensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous
    path: Path
    offset: int  # of the first byte in the file
    n_bytes: int


class Checkpoint:
    """All tensors of a folder, by name. A context manager; raises `ModelError` naming the file and its fault.

    rename: from the name in the file to the key in `tensors`.
    """

    def __init__(self, folder: Path, rename: Callable[[str], str] = str) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._descriptors: dict[Path, int] = {}
        for path in _weight_files(folder):
            for tensor in read_header(path):
                name = rename(tensor.name)
                if name in self.tensors:
                    other = self.tensors[name].path.name
                    raise ModelError(f"{path}: tensor '{tensor.name}' is also in {other}")
                self.tensors[name] = tensor

    def rows(
        self, tensor: StoredTensor, slab_bytes: int, order: NDArray[np.int64] | None = None
    ) -> Iterator[NDArray[Any]]:
        """The tensor as `[rows, columns]` in pieces of whole rows, about `slab_bytes` at most; see `STORAGE`.

        order: the rows that are wanted, one after the other (default: all). Rows that follow each other in the file are
        read at once.
        """
        columns = tensor.shape[-1] if tensor.shape else 1
        row_bytes = columns * _DTYPE_BYTES[tensor.dtype]
        n_rows = (tensor.n_bytes // row_bytes if row_bytes else 0) if order is None else len(order)
        per_slab = max(1, slab_bytes // max(1, row_bytes))
        for begin in range(0, n_rows, per_slab):
            end = min(begin + per_slab, n_rows)
            if order is None:
                runs = [(begin, end - begin)]
            else:
                wanted = order[begin:end]
                starts = np.concatenate([[0], 1 + np.flatnonzero(np.diff(wanted) != 1), [len(wanted)]])
                runs = [(int(wanted[start]), int(stop - start)) for start, stop in pairwise(starts)]
            data = bytearray((end - begin) * row_bytes)
            view, done = memoryview(data), 0
            for first, count in runs:
                self._read(tensor, first * row_bytes, view[done : done + count * row_bytes])
                done += count * row_bytes
            yield np.frombuffer(data, STORAGE[tensor.dtype]).reshape(-1, columns)

    def whole(self, tensor: StoredTensor) -> NDArray[Any]:
        """All values in the tensor's own shape; see `STORAGE`."""
        data = bytearray(tensor.n_bytes)
        self._read(tensor, 0, memoryview(data))
        return np.frombuffer(data, STORAGE[tensor.dtype]).reshape(tensor.shape)

    def _read(self, tensor: StoredTensor, begin: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the tensor from `begin` on."""
        descriptor = self._descriptors.get(tensor.path)
        if descriptor is None:
            descriptor = self._descriptors[tensor.path] = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], tensor.offset + begin + done)
            if count == 0:
                raise ModelError(f"{tensor.path}: ends inside tensor '{tensor.name}'")
            done += count

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    # Some folders hold the same weights a second time under the names of another library.
    found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickled = [*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")]
    if pickled:
        raise ModelError(
            f"{folder}: only {pickled[0].name} was found. Pickled checkpoints can run code when they are read and are "
            "not supported: use the safetensors version of the model, or save it again with save_pretrained()"
        )
    raise ModelError(f"{folder}: no *.safetensors file")


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: no weight_map from tensor names to files")
    files = []
    for name in sorted(set(weight_map.values())):
        path = index.parent / name
        if Path(name).name != name:
            raise ModelError(f"{index}: file {name!r} is not a name within the folder")
        if not path.is_file():
            raise ModelError(f"{index}: {name} is missing")
        files.append(path)
    return files


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file in the order of their data. Ranges lie within the file and do not overlap."""
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ModelError(f"{path}: {file_bytes} bytes are no safetensors file")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise ModelError(f"{path}: the header claims {header_bytes} bytes of a file of {file_bytes}")
        header = _parse_header(path, file.read(header_bytes))
    data_start = 8 + header_bytes
    header.pop("__metadata__", None)
    tensors = sorted(
        (_entry(path, name, entry, data_start, file_bytes) for name, entry in header.items()),
        key=lambda tensor: (tensor.offset, tensor.n_bytes),
    )
    for before, after in pairwise(tensors):
        if before.offset + before.n_bytes > after.offset:
            raise ModelError(f"{path}: the data of tensors '{before.name}' and '{after.name}' overlap")
    return tensors


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, value in pairs:
            if name in entries:
                raise ModelError(f"{path}: '{name}' occurs twice in the header")
            entries[name] = value
        return entries

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any, data_start: int, file_bytes: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{path}: tensor '{name}': expected dtype, shape and data_offsets of two positions")
    if dtype not in _DTYPE_BYTES:
        raise ModelError(f"{path}: tensor '{name}': unknown dtype {dtype!r}")
    begin, end = offsets
    if begin > end or end > file_bytes - data_start:
        raise ModelError(
            f"{path}: tensor '{name}': bytes {begin} to {end} of a data section of {file_bytes - data_start} bytes"
        )
    expected = _DTYPE_BYTES[dtype]
    for size in shape:
        expected *= size
    if end - begin != expected:
        raise ModelError(f"{path}: tensor '{name}': {end - begin} bytes for {dtype} of shape {shape}")
    return StoredTensor(name, dtype, tuple(shape), path, data_start + begin, expected)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
