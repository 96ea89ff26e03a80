"""Writes a GGUF v3 file: metadata and tensor list first, then the tensors' data as it comes, renamed when complete."""

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama._engine import KeyValue, TensorInfo, type_traits
from pyllama.errors import InvalidArgument
from pyllama.replaced_file import make_public, open_partial

DEFAULT_ALIGNMENT = 32

# Value type -> (id, struct format of one element).
_VALUE_TYPES: dict[str, tuple[int, str]] = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "string": (8, ""), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
_ARRAY_ID = 9
_COUNTS = struct.Struct("<4sIqq")  # magic, version, numbers of tensors and of keys

# Limits of the format; readers refuse files beyond them.
_MAX_NAME_BYTES = 63
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 30


class TensorSpec(NamedTuple):
    name: str
    type_name: str
    shape: tuple[int, ...]  # ggml order: shape[0] is contiguous

    @classmethod
    def of(cls, tensor: TensorInfo) -> "TensorSpec":
        return cls(tensor.name, tensor.type_name, tensor.shape)

    @property
    def n_bytes(self) -> int:
        """Raises `InvalidArgument` for an unknown type or a row that is not whole blocks."""
        if self.type_name not in type_traits:
            raise InvalidArgument(f"tensor '{self.name}': '{self.type_name}' is not a tensor type")
        traits = type_traits[self.type_name]
        columns = self.shape[0] if self.shape else 1
        if columns % traits.block_values:
            raise InvalidArgument(
                f"tensor '{self.name}': rows of {columns} values are not a multiple of the "
                f"{traits.block_values} values of a {self.type_name} block"
            )
        n_bytes = columns // traits.block_values * traits.block_bytes
        for size in self.shape[1:]:
            n_bytes *= size
        return n_bytes


def with_key(key_values: Iterable[KeyValue], key: str, type_name: str, value: Any) -> list[KeyValue]:
    """The list with `key` set, at its end; an older value is dropped."""
    return [*(entry for entry in key_values if entry.key != key), KeyValue(key, type_name, value)]


def encoded_header(key_values: Sequence[KeyValue], tensors: Sequence[TensorSpec]) -> bytes:
    """Magic, counts, metadata and tensor list, without the padding before the data section."""
    return _header(key_values, tensors, _alignment(key_values))


def file_bytes(key_values: Sequence[KeyValue], tensors: Sequence[TensorSpec]) -> int:
    """Size of the file that a `GgufWriter` with these arguments writes."""
    alignment = _alignment(key_values)
    header = len(encoded_header(key_values, tensors))
    return (_padded(header, alignment) if tensors else header) + sum(_padded(t.n_bytes, alignment) for t in tensors)


def entry_offsets(key_values: Sequence[KeyValue]) -> list[tuple[int, int]]:
    """Where each key's record and where its value begin, in bytes from the start of a file with these keys."""
    offsets, position = [], _COUNTS.size
    for entry in key_values:
        key, value = _string(entry.key), _typed_value(entry)
        offsets.append((position, position + len(key) + 4))  # 4: the value type
        position += len(key) + len(value)
    return offsets


def encoded_scalar(type_name: str, value: Any) -> bytes:
    """The bytes of a value that is no array, as they lie in a file. Raises `InvalidArgument`."""
    return _typed_value(KeyValue("value", type_name, value))[4:]


class GgufWriter:
    """Streams one file. `write` is called until every tensor has its bytes, in the order of `tensors`; leaving the
    context normally puts the file in place, leaving it by an exception removes what was written.

    `general.alignment` among the keys is honoured. Raises `InvalidArgument` for a value that does not fit its type, a
    row that is not whole blocks, too many or too few bytes, and what readers refuse (repeated or overlong names);
    `OSError` as the file system does.
    """

    def __init__(self, path: Path | str, key_values: Sequence[KeyValue], tensors: Sequence[TensorSpec]) -> None:
        self.path = Path(path)
        self._alignment = _alignment(key_values)
        _check_names(key_values, tensors)
        header = _header(key_values, tensors, self._alignment)
        header += bytes(-len(header) % self._alignment if tensors else 0)
        self._sizes = iter([(spec.name, spec.n_bytes) for spec in tensors])
        self._current = ""
        self._missing = self._padding = 0
        self._file, self._partial = open_partial(self.path)
        try:
            self._file.write(header)
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes | bytearray | memoryview | NDArray[Any]) -> None:
        """The next bytes of the data section; a call may end inside a tensor but may not run into the next one."""
        view = memoryview(data).cast("B")
        if not view.nbytes:
            return
        while not self._missing:
            self._next_tensor()
        if view.nbytes > self._missing:
            raise InvalidArgument(
                f"{view.nbytes} bytes for tensor '{self._current}', which has room for {self._missing} more"
            )
        self._file.write(view)
        self._missing -= view.nbytes
        if not self._missing:
            self._file.write(bytes(self._padding))

    def commit(self) -> None:
        """Put the complete file in place, replacing an older one."""
        self.finish()
        self._partial.replace(self.path)

    def finish(self) -> None:
        """Complete the file under its temporary name: what is left for `commit` is the renaming. Idempotent."""
        if self._file.closed:
            return
        if self._missing or (left := [name for name, n_bytes in self._sizes if n_bytes]):
            name = self._current if self._missing else left[0]
            raise InvalidArgument(f"{self.path}: the data of tensor '{name}' is not complete")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        make_public(self._partial)

    def discard(self) -> None:
        """Close and remove the unfinished file."""
        try:
            self._file.close()  # may flush, which fails on a full disk
        finally:
            self._partial.unlink(missing_ok=True)

    def _next_tensor(self) -> None:
        try:
            self._current, self._missing = next(self._sizes)
        except StopIteration:
            raise InvalidArgument(f"{self.path}: data after the last tensor") from None
        self._padding = -self._missing % self._alignment

    def __enter__(self) -> "GgufWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.commit()
            except BaseException:
                self.discard()
                raise
        else:
            self.discard()


def _alignment(key_values: Iterable[KeyValue]) -> int:
    entry = next((entry for entry in key_values if entry.key == "general.alignment"), None)
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.type != "u32":
        raise InvalidArgument(f"general.alignment has type {entry.type}, expected u32")
    alignment = int(entry.value)
    if not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise InvalidArgument(f"general.alignment is {alignment}, expected a power of two, at most {_MAX_ALIGNMENT}")
    return alignment


def _check_names(key_values: Sequence[KeyValue], tensors: Sequence[TensorSpec]) -> None:
    for what, names in (("key", [entry.key for entry in key_values]), ("tensor", [spec.name for spec in tensors])):
        if len(set(names)) < len(names):
            raise InvalidArgument(f"{what} '{next(name for name in names if names.count(name) > 1)}' is there twice")
    for entry in key_values:
        if not entry.key or "\0" in entry.key:
            raise InvalidArgument(f"metadata key {entry.key!r} is empty or contains a NUL byte")
    for spec in tensors:
        if len(_encoded(spec.name)) > _MAX_NAME_BYTES:
            raise InvalidArgument(f"tensor '{spec.name}': the name is longer than {_MAX_NAME_BYTES} bytes")
        if len(spec.shape) > _MAX_DIMS or min(spec.shape, default=0) < 0:
            raise InvalidArgument(f"tensor '{spec.name}': shape {list(spec.shape)} is not one of 0..{_MAX_DIMS} sizes")


def _padded(n_bytes: int, alignment: int) -> int:
    return n_bytes + -n_bytes % alignment


def _header(key_values: Sequence[KeyValue], tensors: Sequence[TensorSpec], alignment: int) -> bytes:
    parts = [_COUNTS.pack(b"GGUF", 3, len(tensors), len(key_values))]
    for entry in key_values:
        parts += [_string(entry.key), _typed_value(entry)]
    offset = 0
    for spec in tensors:
        n_bytes = spec.n_bytes
        shape = struct.pack(f"<I{len(spec.shape)}q", len(spec.shape), *spec.shape)
        parts += [_string(spec.name), shape, struct.pack("<iQ", type_traits[spec.type_name].id, offset)]
        offset += _padded(n_bytes, alignment)
    return b"".join(parts)


def _encoded(text: str | bytes) -> bytes:
    # Token texts may be any bytes; the reader hands invalid UTF-8 out as lone surrogates.
    try:
        return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{text!r:.100} cannot be written as UTF-8: {error.reason}") from None


def _string(text: str | bytes) -> bytes:
    data = _encoded(text)
    return struct.pack("<Q", len(data)) + data


def _typed_value(entry: KeyValue) -> bytes:
    element = entry.type.removesuffix("[]")
    if element not in _VALUE_TYPES:
        raise InvalidArgument(f"{entry.key}: '{entry.type}' is not a type of a metadata value")
    number, code = _VALUE_TYPES[element]
    try:
        if element == entry.type:
            return struct.pack("<i", number) + (
                _string(entry.value) if not code else struct.pack("<" + code, entry.value)
            )
        head = struct.pack("<iiQ", _ARRAY_ID, number, len(entry.value))
        if not code:
            return head + b"".join(map(_string, entry.value))
        if isinstance(entry.value, np.ndarray):
            return head + np.ascontiguousarray(entry.value, dtype="<" + np.dtype(code).str[1:]).tobytes()
        return head + struct.pack(f"<{len(entry.value)}{code}", *entry.value)
    except (struct.error, TypeError, AttributeError, OverflowError) as error:
        raise InvalidArgument(
            f"{entry.key}: {entry.value!r:.100} is not a value of type {entry.type}: {error}"
        ) from None
