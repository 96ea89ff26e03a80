"""Byte-level builder of GGUF files: every count, length, type and offset can be made to lie.

The functions return bytes of one part; `gguf_file` joins them. What is not overridden is consistent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
"""Ids of metadata value types."""

TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_Q4_K, TYPE_I8, TYPE_I64, TYPE_F64 = 0, 1, 2, 8, 12, 24, 27, 28
"""Ids of tensor types."""

_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def pack(value_type: int, *values: float) -> bytes:
    """Values of a fixed-size type, little-endian, back to back."""
    return struct.pack(f"<{len(values)}{_FORMATS[value_type]}", *values)


def string(text: bytes, *, length: int | None = None) -> bytes:
    """A length and the text; `length` replaces the true one."""
    return struct.pack("<Q", len(text) if length is None else length) + text


def key_value(key: bytes, value_type: int, value: bytes, *, key_length: int | None = None) -> bytes:
    """A metadata entry with the encoded `value`."""
    return string(key, length=key_length) + struct.pack("<i", value_type) + value


def scalar(key: bytes, value_type: int, value: float) -> bytes:
    return key_value(key, value_type, pack(value_type, value))


def string_value(key: bytes, text: bytes, *, length: int | None = None) -> bytes:
    return key_value(key, STRING, string(text, length=length))


def array_value(key: bytes, element_type: int, elements: bytes, count: int) -> bytes:
    """An array that claims `count` elements; `elements` are their encoded bytes."""
    return key_value(key, ARRAY, struct.pack("<iQ", element_type, count) + elements)


def tensor_info(
    name: bytes,
    dims: Sequence[int],
    type_id: int = TYPE_F32,
    *,
    offset: int = 0,
    n_dims: int | None = None,
    name_length: int | None = None,
) -> bytes:
    """A tensor record. Dims (i64) are in file order: the first is contiguous. `n_dims` replaces their number."""
    return (
        string(name, length=name_length)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + struct.pack(f"<{len(dims)}q", *dims)
        + struct.pack("<iQ", type_id, offset)
    )


def gguf_file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    padded: bool = True,
) -> bytes:
    """A whole file. `alignment` only pads the header (its key must be in `keys`); `padded=False` leaves that out."""
    header = magic + struct.pack(
        "<Iqq", version, len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    )
    content = header + b"".join(keys) + b"".join(tensors)
    if padded and tensors:
        content += bytes(-len(content) % alignment)
    return content + data


def pad(data: bytes, alignment: int = 32) -> bytes:
    """`data` with zero bytes up to the alignment, as every tensor but the last must have."""
    return data + bytes(-len(data) % alignment)
