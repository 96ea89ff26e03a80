"""Reads tensor data in pieces of any size, so that a tool's memory does not grow with the model."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from pyllama._engine import GgufFile, TensorInfo, type_traits
from pyllama.errors import GgufError

from .splits import shard_path, split_name

PIECE_BYTES = 8 << 20


class TensorReader:
    """Random access to the tensors of a model file and its sibling parts. A context manager.

    single_file: of a split model this part alone, any of them.
    The mapping of `GgufFile` is not used for data: its pages would count as the program's memory.
    """

    def __init__(self, path: Path | str, *, single_file: bool = False) -> None:
        """Opens and validates; raises `GgufError`."""
        self.path = Path(path)
        self.file = GgufFile(self.path, single_file=single_file)
        self.tensors: list[TensorInfo] = self.file.tensors
        self._shards: dict[int, int] = {}  # file descriptors

    def shard(self, index: int) -> Path:
        """Path of part `index`; the file itself where it is not split."""
        name = split_name(self.path)
        if index == 0 or name is None:
            return self.path
        return shard_path(self.path.with_name(name.prefix), index, name.count)

    def read(self, tensor: TensorInfo, offset: int, size: int) -> bytearray:
        """`size` bytes of the tensor from `offset` on. Raises `GgufError` when the file has become shorter."""
        descriptor = self._shards.get(tensor.shard)
        if descriptor is None:
            descriptor = self._shards[tensor.shard] = os.open(self.shard(tensor.shard), os.O_RDONLY | os.O_CLOEXEC)
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = os.preadv(descriptor, [view[done:]], tensor.offset + offset + done)
            if count == 0:
                raise GgufError(f"{self.shard(tensor.shard)}: ends inside tensor '{tensor.name}'")
            done += count
        return data

    def row_slabs(self, tensor: TensorInfo, slab_bytes: int) -> Iterator[tuple[int, bytearray]]:
        """(first row, bytes of whole rows) in order; a slab has at least one row and about `slab_bytes` at most."""
        traits = type_traits[tensor.type_name]
        row_bytes = tensor.shape[0] // traits.block_values * traits.block_bytes if tensor.shape else traits.block_bytes
        n_rows = tensor.n_bytes // row_bytes if row_bytes else 0
        rows_per_slab = max(1, slab_bytes // row_bytes) if row_bytes else 1
        for first in range(0, n_rows, rows_per_slab):
            count = min(rows_per_slab, n_rows - first)
            yield first, self.read(tensor, first * row_bytes, count * row_bytes)

    def pieces(self, tensor: TensorInfo, piece_bytes: int = PIECE_BYTES) -> Iterator[bytearray]:
        """All bytes of the tensor in order; a piece is whole blocks, `piece_bytes` at most unless a block is larger."""
        block_bytes = type_traits[tensor.type_name].block_bytes
        step = max(1, piece_bytes // block_bytes) * block_bytes
        for offset in range(0, tensor.n_bytes, step):
            yield self.read(tensor, offset, min(step, tensor.n_bytes - offset))

    def close(self) -> None:
        for descriptor in self._shards.values():
            os.close(descriptor)
        self._shards.clear()
        self.file.close()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
