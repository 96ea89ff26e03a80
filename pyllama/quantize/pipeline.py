"""The pass over a file: rows are read, converted and written in slabs, so that memory does not grow with the model."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyllama._engine import convert_rows, count_non_finite, encoding_needs_importance
from pyllama.errors import GgufError, InvalidArgument
from pyllama.gguf import GgufWriter, TensorReader, type_traits

from .file_types import FileType, find_file_type
from .plan import Plan, PlannedTensor, QuantizeOptions, importance_of, make_plan

# A thread's share of a slab. Small slabs stay in the caches from reading to writing, and their memory is used again
# instead of being given back: 32 MiB slabs took twice the system time of 4 MiB ones with two threads.
_SLAB_BYTES_PER_THREAD = 2 << 20
_MAX_SLAB_BYTES = 64 << 20
_T = TypeVar("_T")


class Progress(NamedTuple):
    plan: Plan
    tensor_index: int  # in `plan.tensors`
    done_bytes: int  # of its bytes in the source; 0 before the first


def quantize_file(
    source: Path | str,
    target: Path | str,
    file_type: FileType | str,
    *,
    n_threads: int = 0,
    options: QuantizeOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
    dry_run: bool = False,
    max_slab_bytes: int = _MAX_SLAB_BYTES,
) -> Plan:
    """Write `target` with the tensors of `source` (and its parts) in the types that `file_type` asks for.

    n_threads: 0 is one per core; the bytes do not depend on it. With `options.keep_split` the target's name without
    `.gguf` is the prefix of the parts. The target appears when it is complete. dry_run: only the plan; what would stop
    the run is in `Plan.unmet`. Raises `InvalidArgument`, `GgufError` (also for values that are not finite), `OSError`.
    """
    known = find_file_type(file_type) if isinstance(file_type, str) else file_type
    if known is None:
        raise InvalidArgument(f"'{file_type}' is not a file type")
    options = options or QuantizeOptions()
    with TensorReader(source) as reader:
        plan = make_plan(reader, Path(target), known, options)
        if dry_run:
            return plan
        if plan.unmet:
            raise InvalidArgument(plan.unmet[0] + (f" (and {len(plan.unmet) - 1} more)" if plan.unmet[1:] else ""))
        _refuse_to_overwrite(reader, plan)
        _carry_out(reader, plan, options, n_threads, progress, max_slab_bytes)
    return plan


def _refuse_to_overwrite(reader: TensorReader, plan: Plan) -> None:
    n_sources = 1 + max((info.shard for info in reader.tensors), default=0)
    for file in plan.files:
        for shard in range(n_sources):
            source = reader.shard(shard)
            if file.path.exists() and file.path.samefile(source):
                raise InvalidArgument(f"input and output files are the same: '{source}'")


def _carry_out(
    reader: TensorReader,
    plan: Plan,
    options: QuantizeOptions,
    n_threads: int,
    progress: Callable[[Progress], None] | None,
    max_slab_bytes: int,
) -> None:
    n_threads = n_threads if n_threads > 0 else os.cpu_count() or 1
    slab_bytes = min(n_threads * _SLAB_BYTES_PER_THREAD, _MAX_SLAB_BYTES, max_slab_bytes)
    tensors = plan.tensors
    slabs = _checked_slabs(reader, tensors, slab_bytes)
    with ExitStack() as stack:
        # Left in reverse: the first part, which readers open, appears last.
        writers = [
            stack.enter_context(GgufWriter(file.path, file.key_values, [tensor.target for tensor in file.tensors]))
            for file in plan.files
        ]
        writer_of = [writer for writer, file in zip(writers, plan.files, strict=True) for _ in file.tensors]
        pool = stack.enter_context(ThreadPoolExecutor(2, "quantize-io"))
        written: Future[None] | None = None
        for index, group in groupby(_ahead(slabs, pool), key=lambda slab: slab[0]):
            tensor, done_bytes = tensors[index], 0
            importance = importance_of(tensor, options.imatrix) if tensor.is_converted else None
            if progress:
                progress(Progress(plan, index, 0))
            for _, first_row, data in group:
                blocks = _converted(tensor, first_row, data, importance, n_threads)
                if written:
                    written.result()
                written = pool.submit(writer_of[index].write, blocks)
                done_bytes += len(data)
                if progress:
                    progress(Progress(plan, index, done_bytes))
        if written:
            written.result()
        for writer in writers:
            writer.finish()


def _checked_slabs(
    reader: TensorReader, tensors: list[PlannedTensor], slab_bytes: int
) -> Iterator[tuple[int, int, bytearray]]:
    """(index of the tensor, first row, bytes). Raises `GgufError` for values or scales that are not finite."""
    for index, (source, _, _) in enumerate(tensors):
        traits = type_traits[source.type_name]
        for first_row, data in reader.row_slabs(source, slab_bytes):
            n_values = len(data) // traits.block_bytes * traits.block_values
            if n_bad := count_non_finite(source.type_name, data, n_values):
                raise GgufError(f"tensor '{source.name}': {n_bad} {source.type_name} values or scales are not finite")
            yield index, first_row, data


def _ahead(items: Iterator[_T], pool: ThreadPoolExecutor) -> Iterator[_T]:
    """The same items, each made in the pool while the caller works on the one before."""
    pending = pool.submit(next, items, None)
    while (item := pending.result()) is not None:
        pending = pool.submit(next, items, None)
        yield item


def _converted(
    tensor: PlannedTensor,
    first_row: int,
    data: bytearray,
    importance: NDArray[np.float32] | None,
    n_threads: int,
) -> bytearray | NDArray[np.uint8]:
    """The slab's rows in the target type."""
    source_type, target_type = tensor.source.type_name, tensor.target.type_name
    if not tensor.is_converted:
        return data
    traits = type_traits[source_type]
    columns, rows_per_matrix = tensor.source.shape[:2]
    parts: list[NDArray[np.uint8]] = []
    view, row, row_bytes = memoryview(data), first_row, columns // traits.block_values * traits.block_bytes
    while view:
        n_rows = len(view) // row_bytes
        weights = None
        if importance is not None:
            matrix, row_in_matrix = divmod(row, rows_per_matrix)
            n_rows = min(n_rows, rows_per_matrix - row_in_matrix)
            weights = _useful(importance[matrix], target_type)
        part, view, row = view[: n_rows * row_bytes], view[n_rows * row_bytes :], row + n_rows
        parts.append(convert_rows(source_type, part, target_type, columns, importance=weights, n_threads=n_threads))
    blocks = parts[0] if len(parts) == 1 else np.concatenate(parts)
    n_values = len(data) // traits.block_bytes * traits.block_values
    if n_bad := count_non_finite(target_type, blocks.data, n_values):
        raise GgufError(
            f"tensor '{tensor.source.name}': {n_bad} values or scales overflow in {target_type}; "
            "take bf16 or f32 for this tensor (--tensor-type), or another file type"
        )
    return blocks


def _useful(weights: NDArray[np.float32], type_name: str) -> NDArray[np.float32]:
    """Weights that are all zero count as none; equal ones take their place where the type cannot do without."""
    return weights if weights.any() or not encoding_needs_importance(type_name) else np.ones_like(weights)
