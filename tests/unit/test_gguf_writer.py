"""Writer and reader of GGUF files are inverse to each other, and the `gguf` package reads what we write (oracle).

The reader alone: test_gguf.py. The tools built on both: tests/python/test_gguf_tools_*.py.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama.errors import InvalidArgument
from pyllama.gguf import (
    GgufFile,
    GgufWriter,
    KeyValue,
    TensorReader,
    TensorSpec,
    encoded_scalar,
    entry_offsets,
    file_bytes,
    type_traits,
)

INTEGER_BITS = {"u8": 8, "i8": 8, "u16": 16, "i16": 16, "u32": 32, "i32": 32, "u64": 64, "i64": 64}

# Any bytes, not only UTF-8: the reader hands them out as lone surrogates.
texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.binary(max_size=20).map(lambda data: data.decode("utf-8", "surrogateescape")),
)


def integers(name: str) -> st.SearchStrategy[int]:
    bits = INTEGER_BITS[name]
    return st.integers(0, 2**bits - 1) if name[0] == "u" else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


scalars: dict[str, st.SearchStrategy[Any]] = {name: integers(name) for name in INTEGER_BITS} | {
    "f32": st.floats(width=32, allow_nan=False),
    "f64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": texts,
}
typed_values = st.sampled_from(sorted(scalars)).flatmap(
    lambda name: st.one_of(
        st.tuples(st.just(name), scalars[name]), st.tuples(st.just(name + "[]"), st.lists(scalars[name], max_size=5))
    )
)
keys = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)
key_lists = st.dictionaries(keys, typed_values, max_size=8).map(
    lambda entries: [KeyValue(key, *entry) for key, entry in entries.items() if key != "general.alignment"]
)


@st.composite
def tensor_specs(draw: st.DrawFn) -> TensorSpec:
    type_name = draw(st.sampled_from(sorted(type_traits)))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    if shape:
        shape[0] *= type_traits[type_name].block_values
    elif type_traits[type_name].block_values > 1:
        shape = [type_traits[type_name].block_values]
    name = draw(st.text(st.characters(codec="utf-8"), max_size=15))
    return TensorSpec(name, type_name, tuple(shape))


tensor_lists = st.lists(tensor_specs(), max_size=6, unique_by=lambda spec: spec.name)


@contextmanager
def temporary_file() -> Iterator[Path]:
    """Not the fixture: one folder per example."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "model.gguf"


def plain(entry: KeyValue) -> tuple[str, str, Any]:
    value = entry.value.tolist() if isinstance(entry.value, np.ndarray) else entry.value
    return entry.key, entry.type, value


def write(path: Path, entries: list[KeyValue], tensors: list[TensorSpec]) -> list[bytes]:
    """Returns the data of the tensors."""
    rng = np.random.default_rng(1)
    blobs = [rng.bytes(spec.n_bytes) for spec in tensors]
    with GgufWriter(path, entries, tensors) as writer:
        for blob in blobs:
            writer.write(blob[:5])
            writer.write(blob[5:])
    return blobs


@settings(max_examples=40, deadline=None)
@given(entries=key_lists, tensors=tensor_lists, alignment=st.sampled_from([None, 1, 8, 64, 1024]))
def test_what_is_written_is_read_back(
    entries: list[KeyValue], tensors: list[TensorSpec], alignment: int | None
) -> None:
    if alignment is not None:
        entries = [*entries, KeyValue("general.alignment", "u32", alignment)]
    with temporary_file() as path:
        blobs = write(path, entries, tensors)
        assert path.stat().st_size == file_bytes(entries, tensors)
        content = path.read_bytes()
        with TensorReader(path) as reader:
            assert [plain(entry) for entry in reader.file.key_values] == [plain(entry) for entry in entries]
            assert [TensorSpec.of(tensor) for tensor in reader.tensors] == tensors
            assert reader.file.alignment == (alignment or 32)
            for tensor, blob in zip(reader.tensors, blobs, strict=True):
                assert tensor.offset % reader.file.alignment == 0
                assert b"".join(reader.pieces(tensor, 100)) == blob
                assert b"".join(bytes(slab) for _, slab in reader.row_slabs(tensor, 100)) == blob
        end = reader.tensors[-1].offset + reader.tensors[-1].n_bytes if tensors else len(content)
        assert not any(content[end:])
        assert list(path.parent.iterdir()) == [path]


@settings(max_examples=25, deadline=None)
@given(entries=key_lists)
def test_offsets_of_entries_point_at_their_bytes(entries: list[KeyValue]) -> None:
    with temporary_file() as path:
        write(path, entries, [])
        content = path.read_bytes()
    for entry, (start, value_start) in zip(entries, entry_offsets(entries), strict=True):
        key = entry.key.encode()
        assert content[start : start + 8 + len(key)] == len(key).to_bytes(8, "little") + key
        assert value_start == start + 8 + len(key) + 4
        if not entry.type.endswith("[]"):
            data = encoded_scalar(entry.type, entry.value)
            assert content[value_start : value_start + len(data)] == data


def test_package_reads_our_files(tmp_path: Path) -> None:
    entries = [
        KeyValue("general.architecture", "string", "llama"),
        KeyValue("general.alignment", "u32", 128),
        *(KeyValue(f"x.{name}", name, 100) for name in INTEGER_BITS),
        KeyValue("x.f32", "f32", 0.5),
        KeyValue("x.f64", "f64", 0.1),
        KeyValue("x.bool", "bool", True),
        KeyValue("x.strings", "string[]", ["a", "", "ü"]),
        KeyValue("x.i16s", "i16[]", np.array([-1, 2], np.int16)),
        KeyValue("x.bools", "bool[]", np.array([True, False])),
        KeyValue("x.f64s", "f64[]", [0.25, math.inf]),
    ]
    tensors = [
        TensorSpec("odd", "i8", (5,)),
        TensorSpec("matrix", "q4_K", (256, 3)),
        TensorSpec("cube", "f16", (2, 3, 4)),
        TensorSpec("last", "f32", (7,)),
    ]
    path = tmp_path / "ours.gguf"
    blobs = write(path, entries, tensors)
    reader = gguf.GGUFReader(path)
    for entry in entries:
        assert reader.fields[entry.key].contents() == plain(entry)[2], entry.key
    assert reader.alignment == 128
    assert [(tensor.name, tuple(tensor.shape), tensor.tensor_type.name.lower()) for tensor in reader.tensors] == [
        (spec.name, spec.shape, spec.type_name.lower()) for spec in tensors
    ]
    assert [tensor.data.tobytes() for tensor in reader.tensors] == blobs


BAD = {
    "repeated key": ([KeyValue("a", "u8", 1), KeyValue("a", "u8", 2)], [], "key 'a' is there twice"),
    "repeated tensor": ([], [TensorSpec("t", "f32", (1,))] * 2, "tensor 't' is there twice"),
    "empty key": ([KeyValue("", "u8", 1)], [], "empty"),
    "NUL in a key": ([KeyValue("a\0b", "u8", 1)], [], "NUL"),
    "value too large": ([KeyValue("a", "u8", 256)], [], "a: 256 is not a value of type u8"),
    "text for a number": ([KeyValue("a", "u8", "1")], [], "is not a value of type u8"),
    "number for a text": ([KeyValue("a", "string", 1)], [], "is not a value of type string"),
    "surrogate": ([KeyValue("a", "string", "\ud800")], [], "cannot be written as UTF-8"),
    "unknown type": ([KeyValue("a", "u128", 1)], [], "'u128' is not a type"),
    "array of arrays": ([KeyValue("a", "u8[][]", [])], [], "is not a type"),
    "alignment 3": ([KeyValue("general.alignment", "u32", 3)], [], "power of two"),
    "alignment 2^31": ([KeyValue("general.alignment", "u32", 2**31)], [], "power of two"),
    "alignment as u64": ([KeyValue("general.alignment", "u64", 32)], [], "type u64"),
    "long name": ([], [TensorSpec("ü" * 32, "f32", (1,))], "longer than 63 bytes"),
    "five sizes": ([], [TensorSpec("t", "f32", (1, 1, 1, 1, 1))], "0..4 sizes"),
    "negative size": ([], [TensorSpec("t", "f32", (4, -1))], "0..4 sizes"),
    "unknown tensor type": ([], [TensorSpec("t", "q4_k", (256,))], "'q4_k' is not a tensor type"),
    "part of a block": ([], [TensorSpec("t", "q4_0", (48,))], "not a multiple of the 32 values"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_readers_would_refuse_is_not_written(tmp_path: Path, case: str) -> None:
    entries, tensors, fault = BAD[case]
    with pytest.raises(InvalidArgument) as caught:
        GgufWriter(tmp_path / "bad.gguf", entries, tensors)
    assert fault in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_wrong_amounts_of_data_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = [TensorSpec("a", "f32", (2,)), TensorSpec("b", "f32", (2,))]
    with pytest.raises(InvalidArgument, match="room for 8 more"), GgufWriter(path, [], tensors) as writer:
        writer.write(bytes(16))
    with pytest.raises(InvalidArgument, match="tensor 'b' is not complete"), GgufWriter(path, [], tensors) as writer:
        writer.write(bytes(8))
    with pytest.raises(InvalidArgument, match="after the last tensor"), GgufWriter(path, [], []) as writer:
        writer.write(bytes(1))
    assert list(tmp_path.iterdir()) == []


def test_older_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    writer = GgufWriter(path, [], [TensorSpec("a", "f32", (2,))])
    writer.write(bytes(8))
    writer.finish()
    assert path.read_bytes() == b"old"
    writer.commit()
    GgufFile(path).close()
    assert list(tmp_path.iterdir()) == [path]
