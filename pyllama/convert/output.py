"""Splits the tensors of a conversion over files and writes them, all of them or none."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama._engine import convert_rows, count_non_finite
from pyllama.errors import ModelError
from pyllama.gguf import SET_ID, GgufWriter, KeyValue, TensorSpec, file_bytes, shard_path, split_id, type_traits

from .safetensors import STORAGE, Checkpoint, StoredTensor
from .tensor import Tensor

SLAB_BYTES = 16 << 20


class OutputFile(NamedTuple):
    path: Path
    key_values: list[KeyValue]
    tensors: list[tuple[Tensor, TensorSpec]]

    @property
    def n_bytes(self) -> int:
        return file_bytes(self.key_values, [spec for _, spec in self.tensors])


def split(
    path: Path,
    key_values: list[KeyValue],
    tensors: Sequence[tuple[Tensor, TensorSpec]],
    *,
    max_bytes: int = 0,
    max_tensors: int = 0,
    tensors_first_file: bool = True,
) -> list[OutputFile]:
    """One file, or several when a limit (0: none) makes a second one necessary. A tensor is never divided.

    Without `tensors_first_file` the first of several holds the metadata alone.
    """
    groups: list[list[tuple[Tensor, TensorSpec]]] = [[]]
    group_bytes = 0
    for tensor, spec in tensors:
        full = (max_tensors and len(groups[-1]) >= max_tensors) or (
            max_bytes and groups[-1] and group_bytes + spec.n_bytes > max_bytes
        )
        if full:
            groups.append([])
            group_bytes = 0
        groups[-1].append((tensor, spec))
        group_bytes += spec.n_bytes
    if len(groups) == 1:
        return [OutputFile(path, key_values, groups[0])]
    if not tensors_first_file:
        groups.insert(0, [])
    prefix = path.with_name(path.name.removesuffix(".gguf"))
    identity = split_id(key_values, [spec for _, spec in tensors])
    files = []
    for index, group in enumerate(groups):
        keys = [
            *(key_values if index == 0 else []),
            KeyValue("split.no", "u16", index),
            KeyValue("split.count", "u16", len(groups)),
            KeyValue("split.tensors.count", "i32", len(tensors)),
            KeyValue(SET_ID, "string", identity),
        ]
        files.append(OutputFile(shard_path(prefix, index, len(groups)), keys, group))
    return files


def write(files: Sequence[OutputFile], checkpoint: Checkpoint | None, advance: Callable[[int], None]) -> None:
    """Write under temporary names, then rename all. `advance` is told the bytes of each piece that is written.

    checkpoint: None only when no tensor is read from one. Raises `ModelError` for values that the type cannot hold.
    """
    with ExitStack() as stack:
        for file in files:
            writer = stack.enter_context(GgufWriter(file.path, file.key_values, [spec for _, spec in file.tensors]))
            for tensor, spec in file.tensors:
                _write_tensor(writer, tensor, spec, checkpoint, advance)
            writer.finish()


def _write_tensor(
    writer: GgufWriter, tensor: Tensor, spec: TensorSpec, checkpoint: Checkpoint | None, advance: Callable[[int], None]
) -> None:
    columns = tensor.shape[-1]
    non_finite: Counter[str] = Counter()
    for source, source_type, slab in _slabs(tensor, checkpoint):
        data = np.ascontiguousarray(slab).reshape(-1).view(np.uint8)
        if spec.type_name != source_type:
            data = convert_rows(source_type, data.data, spec.type_name, columns)
            non_finite[source] += count_non_finite(spec.type_name, data.data, slab.size)
        if tensor.compute is not None:
            data = tensor.compute(data.view(STORAGE[spec.type_name.upper()])).view(np.uint8)
        writer.write(data)
        advance(data.nbytes)
    for source, count in non_finite.items():
        if count:
            what = "blocks" if type_traits[spec.type_name].is_quantized else "values"
            raise ModelError(
                f"tensor '{source}': {count} {what} are beyond the range of {spec.type_name} or not finite"
                + ("; bf16 has the range of f32" if spec.type_name == "f16" else "")
            )


def _slabs(tensor: Tensor, checkpoint: Checkpoint | None) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Source, type and values `[rows, columns]` of the pieces that make the tensor one after the other."""
    if isinstance(tensor.source, np.ndarray):
        yield tensor.name, "f32", tensor.source
        return
    assert checkpoint is not None
    stored = [checkpoint.tensors[name] for name in tensor.sources]
    rows = None if tensor.rows is None else tensor.rows()
    columns = None if tensor.columns is None else tensor.columns()
    if tensor.side_by_side:
        types = {source.dtype for source in stored}
        type_name = types.pop().lower() if len(types) == 1 else "f32"
        # Equal numbers of rows in each piece, whatever the types.
        slab_bytes = [SLAB_BYTES * STORAGE[source.dtype].itemsize // 4 for source in stored]
        pieces = [checkpoint.rows(source, size) for source, size in zip(stored, slab_bytes, strict=True)]
        for parts in zip(*pieces, strict=True):
            same = [_as_type(part, source, type_name) for part, source in zip(parts, stored, strict=True)]
            yield stored[0].name, type_name, np.concatenate(same, axis=1)
        return
    for source in stored:
        is_vector = len(source.shape) == 1
        for slab in checkpoint.rows(source, SLAB_BYTES, None if is_vector else rows):
            if is_vector and rows is not None:
                slab = slab[:, rows]
            yield source.name, source.dtype.lower(), slab if columns is None else slab[:, columns]


def _as_type(slab: NDArray[Any], stored: StoredTensor, type_name: str) -> NDArray[Any]:
    if stored.dtype.lower() == type_name:
        return slab
    data = convert_rows(stored.dtype.lower(), slab.reshape(-1).view(np.uint8).data, "f32", slab.shape[1])
    return data.view(np.float32).reshape(slab.shape)
